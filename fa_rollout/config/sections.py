"""What a configuration holds: each table and key, its type, its default and what it means.

Sizes are written as `"8GiB"` or a number of bytes, times as `"30s"`, `"5m"` or a number of seconds.
"""

from typing import Annotated, Any, Literal

import msgspec

from fa_rollout.config.paths import FilePath
from fa_rollout.config.quantities import Bytes, Seconds, SomeBytes, SomeSeconds
from trainer_hook.record import ExtraColumn

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
NotNegativeNumber = Annotated[float, msgspec.Meta(ge=0.0)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Data(_Section):
    """Where prompts come from."""

    path: FilePath
    """A `.jsonl` or `.parquet` file, or several by a glob pattern."""
    prompt_key: str = "prompt"
    """Text, or a list of chat messages (then the chat template is applied)."""
    label_key: str | None = "label"
    metadata_keys: list[str] | None = None
    """Not set: every other column."""
    tools_key: str | None = None
    chat_template: bool | None = None
    """Apply the tokenizer's chat template to text prompts too; not set: only to message lists."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template, such as `{ enable_thinking = false }`."""
    chat_template_kwargs_key: str | None = None
    """Column with such variables for one row (an object, or JSON text of one); they override
    `chat_template_kwargs`."""
    shuffle: bool = True
    seed: int = 0
    epochs: Positive | None = None
    """Not set: wrap around for as long as the run needs."""
    shard: NotNegative = 0
    num_shards: Positive = 1
    """Of several nodes, each with a run of its own, this one takes every `num_shards`-th prompt, from `shard`
    on: no prompt is taken by two."""
    max_prompt_tokens: Positive | None = None
    """Longer prompts are recorded as failed, never cut."""
    on_bad_row: Literal["error", "skip"] = "error"

    @property
    def column_keys(self) -> set[str]:
        """Columns that have a use of their own; all others can only be metadata."""
        keys = (self.prompt_key, self.label_key, self.tools_key, self.chat_template_kwargs_key)
        return {key for key in keys if key is not None}


class Sampling(_Section):
    """How completions are sampled."""

    max_new_tokens: Positive = 512
    temperature: NotNegativeNumber = 1.0
    top_p: PositiveShare = 1.0
    top_k: int = -1
    min_p: Share = 0.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    """Sampling seed; each sample gets its own, made from this, its group, member and attempt."""


class Rollout(_Section):
    """How much is generated, how far ahead, and how stale it may become."""

    num_steps: Positive
    groups_per_step: Positive
    samples_per_group: Positive
    update_interval: Positive = 1
    """Steps trained per published weight version."""
    staleness: NotNegative = 4
    """Bound η: version that trains a batch minus the oldest version among its tokens."""
    staleness_policy: Literal["wait", "drop", "retry", "mask", "keep"] = "wait"
    partial: Literal["resume", "restart"] = "resume"
    """What becomes of a sample that an engine aborted."""
    surplus_groups: NotNegative = 0
    """Over-sampling: groups in flight beyond what the staleness bound needs. Those that no step can train in
    time once a version's last step is closed are cancelled then under `drop`, and given back under `retry`;
    `wait` finishes them all and drops what no step took in time; `mask` and `keep` train them all."""
    max_attempts: Positive = 3
    max_rejections: Positive | None = None
    """Filtered groups in a row before the run stops; not set: one epoch, but from 64 to 1,000."""
    group_timeout_s: SomeSeconds | None = None
    """Longest time from a group's dispatch to its rewards, pauses for weight updates aside; not set: no limit
    but those of requests, rewards and `idle_timeout_s`."""
    idle_timeout_s: SomeSeconds | None = None
    """Longest time that your generate function may go without an answer from an engine. Time in which an
    engine works on a request of the sample, or is paused or updated, does not count. Not set: half of
    `trainer.stall_s`."""
    max_failure_rate: Share = 0.2
    """Share of failed groups (of the last 64 or more) that stops the run."""
    generate: str | None = None
    """Dotted path of a custom `async def generate(context, sample, sampling_params)`."""
    filter: str | None = None
    """Dotted path of `def keep(samples) -> bool`, or `"zero_variance"`."""


class Reward(_Section):
    """How completions are scored."""

    function: str
    """Dotted path `package.module.function` or `package.module:function`, plain or async, or a URL."""
    group: bool = False
    """The function takes the list of a group's samples and returns a list."""
    key: str | None = None
    """The function returns a dict, and this entry is the reward."""
    timeout_s: SomeSeconds = 60.0
    num_workers: Positive = 2
    in_loop: bool = False
    """Call a plain function in the event loop: only for ones that take microseconds."""


class Engine(_Section):
    """What samples."""

    urls: list[str] = []
    """Addresses of SGLang engines that run already; empty: engines are started, as `[launch]` says."""
    router: bool = False
    """`urls` holds one router, whose workers are asked for; or one is started in front of the engines."""
    model: FilePath | None = None
    """Local folder of the model for engines that the run starts, and of the tokenizer if that is not set."""
    tokenizer: FilePath | None = None
    num_threads: Positive = 1
    """CPU threads of an embedded engine."""
    max_concurrent_samples: Positive = 256
    """Per engine."""
    balance: Literal["least_loaded", "round_robin", "group", "sample"] = "least_loaded"
    """Which engine gets a request. `"group"`, `"sample"`: all requests of one group or sample go to the same
    engine and share its prefix cache. A router that the run starts does the same; one of your own must be
    started with `--policy manual`."""
    shared: bool = False
    """The runs of several nodes use the same `urls`: that of `data.shard` 0 leads weight updates, and the
    others hear of them from the trainer's ranks (`attach(nodes=)`). `max_concurrent_samples` is each
    run's."""
    cache_per_version: bool = False
    """Engines keep a prefix cache of its own for each weight version, and reuse nothing across an update."""
    start_limit_s: SomeSeconds = 300.0
    """Longest wait at the start for all of `urls` to answer; the trainer is not started before."""
    request_timeout_s: SomeSeconds = 600.0
    pause_mode: Literal["auto", "abort", "retract", "in_place"] = "auto"
    """How engines stand still for an update; auto: retract where engines tell version spans, else abort."""


class Launch(_Section):
    """Engines that the run starts by itself where `engine.urls` is empty, and again when they die or hang."""

    number: Positive = 1
    server: Literal["embedded", "sglang"] = "embedded"
    """`"sglang"`: `python -m sglang.launch_server`, or what `command` says."""
    python: FilePath | None = None
    """Interpreter of the environment that SGLang is installed in; not set: this one."""
    command: list[str] | None = None
    """Command line of an engine, in place of the usual one. In every word `{python}`, `{model}`, `{host}`,
    `{port}`, `{place}` (0 for the first engine) and `{with_key}` are filled in; `{python} {with_key} MODULE`
    runs a server's module with the run's key as its `--api-key`."""
    arguments: list[str] = []
    """Further words of every engine's command line, filled in like `command`."""
    gpus_per_engine: NotNegative = 0
    """GPUs per engine (sets CUDA_VISIBLE_DEVICES); 0: every engine sees all that the run sees."""
    gpus: list[str] | None = None
    """Devices that are shared out, in order; not set: those of CUDA_VISIBLE_DEVICES, or 0, 1, 2 and so on."""
    environment: dict[str, str] = {}
    """Further variables of every engine, filled in like `command`."""
    router_command: list[str] | None = None
    """Command line of the router where `engine.router` is set, filled in like `command`; the word `{urls}`
    becomes all engines' addresses. Not set: `python -m sglang_router.launch_router`."""
    max_restarts: NotNegative = 3
    """Of one engine within an hour. One that dies more often leaves the run; without any, the run ends."""
    start_limit_s: SomeSeconds = 600.0
    """For an engine to answer its health check."""
    silence_limit_s: SomeSeconds = 120.0
    """An SGLang that answers nothing for so long is taken for hung and started again."""


class Evaluation(_Section):
    """What `hook.evaluate` does where its call does not say; never part of training."""

    path: FilePath | None = None
    """Prompts of an evaluation that names none; read by the keys of `[data]`."""
    datasets: dict[str, FilePath] = {}
    """Further such files by name, for `hook.evaluate("name")`."""
    samples_per_prompt: Positive = 1
    max_concurrent_samples: Positive = 32
    """Over all engines, beside training's own."""
    sampling: dict[str, Any] = {}
    """Keys of `[sampling]` that differ, such as `temperature`."""


class Record(_Section):
    """What records hold beyond tokens, log-probabilities, masks, versions and rewards."""

    columns: list[ExtraColumn] = []
    """Each a table of `name`, `dtype` (`"float32"`), `per` and the `shape` of one row. `per` is `"token"`,
    `"response_token"`, `"input_token"` (all but a sample's last), `"sample"` or `"item"` (any number).
    `token_rewards` is filled by the reward function, `routed_experts` by the engines, any other by
    `sample.extras` in a custom generate function."""


class Ring(_Section):
    """The shared memory between generator and trainer."""

    bytes: SomeBytes = 64 << 20
    poison: bool = False
    """Overwrite returned records, so that a stale use shows; for tests."""
    checksum_payload: bool = False
    """Checksum whole records, not only their headers; for debugging."""
    lease_warning_s: SomeSeconds = 120.0
    """A rank that holds views of a batch for this long after it left the step is named in a warning."""
    lease_deadline_s: SomeSeconds = 1800.0
    """After this long the run ends: such views keep the ring from being used again."""


class Trainer(_Section):
    """How a step's batch is cut for the ranks."""

    num_ranks: Positive | None = None
    """Data-parallel ranks; not set: what the first attaching rank says."""
    max_tokens_per_micro_batch: Positive | None = None
    """Not set: one micro-batch a rank and step."""
    remainder: Literal["fill", "carry"] = "fill"
    """Where a step has fewer samples than its ranks need micro-batches, `fill`: fillers without loss stand
    in; `carry`: its youngest groups go to the next step, so that none is needed, if they may still be
    trained then. A run's last step is filled."""
    stall_s: SomeSeconds = 600.0
    """Longest wait for a batch, and for one of the engines to come back when all are lost."""
    progress_s: Seconds = 10.0
    """Shortest time between two lines on the run's progress, which `run` prints and rank 0's hook logs as
    INFO; 0: none."""
    pause_lease_s: SomeSeconds = 600.0
    """Engines paused for an update go on by themselves after this."""
    publish: Literal["disk", "tensor", "distributed"] = "disk"
    """How `update.push(model)` hands weights over: `"disk"` by files that the engines load, `"tensor"` inside
    of HTTP requests, `"distributed"` by broadcasts in a group with the engines (NCCL; gloo on a CPU)."""
    bucket_bytes: SomeBytes = 128 << 20
    """Weights are gathered and handed over in pieces of about this size; a larger tensor is one by itself."""
    weights_dir: FilePath | None = None
    """Folder for weight files, which all engines must be able to read; the run makes a private one in it. Two
    versions must fit. Not set: in the run's own folder, which is often in memory."""
    checkpoint_bytes: Bytes = 256 << 20
    """Most that `hook.state_dict` keeps of unfinished groups: tokens of running samples, and with
    `payload=True` finished groups whole. Groups beyond it start anew where the checkpoint is loaded."""


class Run(_Section):
    """Where a run keeps its books and how it ends."""

    output_dir: FilePath | None = None
    """Folder for the run's records: events, metrics, samples. It is made if it does not exist, and one run at
    a time may use it; a later run in it is one more launch. Not set: no records are kept."""
    samples: Bytes | Literal["off"] = 1 << 30
    """Bound of the log of samples in that folder: the oldest go when it is reached; `"off"`: none is kept."""
    grace_s: Seconds = 10.0
    generator_restarts: NotNegative = 5
    """Lives of the generator that may end by accident within ten minutes."""
    spare_generator: bool = True
    """A second process stands ready to take over from a generator that dies: it has the data, the tokenizer
    and your code loaded, and takes their memory once more."""
    replay: FilePath | None = None
    """The `events.jsonl` of a run with the same data: its steps are given out again, the same groups to the
    same ranks in the same order."""
    heartbeat_s: SomeSeconds = 10.0
    """Replace a generator, or end the run for a hub, that has sent nothing for this long."""


class Metrics(_Section):
    """Where a run's figures go, beside `fa-rollout-proc top`. Secrets are read from the environment
    (`WANDB_API_KEY`)."""

    interval_s: Seconds = 10.0
    """Time between two snapshots, 0.1 at least."""
    jsonl: bool = True
    """Add each to `metrics.jsonl` in `run.output_dir`, where there is one."""
    prometheus_port: Port | None = None
    """Serve them to Prometheus on this port (needs the extra `metrics`)."""
    prometheus_host: str = "127.0.0.1"
    """Address that it listens on; who reaches it reads the figures."""
    tensorboard_dir: FilePath | None = None
    """Folder for TensorBoard's files (needs the extra `tensorboard`)."""
    wandb_project: str | None = None
    """Project on Weights & Biases (needs the extra `wandb`)."""
    wandb_name: str | None = None
    """Of the run there; not set: the name of `run.output_dir`."""


class Config(_Section):
    """A whole run."""

    data: Data
    rollout: Rollout
    reward: Reward
    sampling: Sampling = Sampling()
    engine: Engine = Engine()
    launch: Launch = Launch()
    evaluation: Evaluation = Evaluation()
    record: Record = Record()
    ring: Ring = Ring()
    trainer: Trainer = Trainer()
    metrics: Metrics = Metrics()
    run: Run = Run()

    @property
    def idle_timeout_s(self) -> float:
        """Of user code, which must be over well before the trainer's patience is."""
        limit_s = self.rollout.idle_timeout_s
        return self.trainer.stall_s / 2 if limit_s is None else limit_s

"""The configuration: each table and key with its type, default and meaning.

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
    """A `.jsonl` or `.parquet` file, or a glob pattern that matches several."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages, to which the chat template is applied."""
    label_key: str | None = "label"
    """Column with the label that the reward function gets."""
    metadata_keys: list[str] | None = None
    """Columns that become a sample's metadata. Not set: every other column."""
    tools_key: str | None = None
    """Column with the tools for the chat template."""
    chat_template: bool | None = None
    """Apply the tokenizer's chat template to text prompts too. Not set: only to lists of messages."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template, such as `{ enable_thinking = false }`."""
    chat_template_kwargs_key: str | None = None
    """Column with a row's own template variables, which override `chat_template_kwargs`."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch."""
    seed: int = 0
    """Seed of the shuffle."""
    epochs: Positive | None = None
    """Number of passes over the data. Not set: as many as the run needs."""
    shard: NotNegative = 0
    """Number of this node, from 0, where several nodes with a run each share the data."""
    num_shards: Positive = 1
    """Number of nodes that share the data. Each reads every `num_shards`-th prompt, starting at `shard`."""
    max_prompt_tokens: Positive | None = None
    """Longer prompts are recorded as failed, never truncated."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be read: stop the run before it starts, or skip the row."""

    @property
    def column_keys(self) -> set[str]:
        """Columns with a use of their own; all others can only be metadata."""
        keys = (self.prompt_key, self.label_key, self.tools_key, self.chat_template_kwargs_key)
        return {key for key in keys if key is not None}


class Sampling(_Section):
    """How completions are sampled."""

    max_new_tokens: Positive = 512
    """Longest answer, in tokens."""
    temperature: NotNegativeNumber = 1.0
    """0: greedy."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling; 1: off."""
    top_k: int = -1
    """Sample from the k most likely tokens; -1: from all."""
    min_p: Share = 0.0
    """Least probability, relative to the most likely token; 0: off."""
    stop: list[str] = []
    """Strings that end an answer."""
    stop_token_ids: list[int] = []
    """Tokens that end an answer."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    seed: int | None = None
    """Sampling seed. Each sample's own seed is derived from it, the group, the member and the attempt."""


class Rollout(_Section):
    """How much to generate, how far ahead, and how stale samples may become."""

    num_steps: Positive
    """Training steps of the run."""
    groups_per_step: Positive
    """Groups (prompts) that a step trains."""
    samples_per_group: Positive
    """Answers sampled for each prompt."""
    update_interval: Positive = 1
    """Training steps per published weight version."""
    staleness: NotNegative = 4
    """Staleness limit, in weight versions: the version that trains a batch minus the oldest among its
    tokens."""
    staleness_policy: Literal["wait", "drop", "retry", "mask", "keep"] = "wait"
    """What to do with groups that would exceed the limit: `wait` holds the batch until they are in it, `drop`
    discards them, `retry` starts them again, `mask` trains them without their stale tokens, `keep` trains
    them whole."""
    partial: Literal["resume", "restart"] = "resume"
    """Whether a sample that an engine aborted continues from its tokens or starts again."""
    surplus_groups: NotNegative = 0
    """Over-sampling: groups in flight beyond what the staleness limit needs. When a version's last step
    closes, `drop` cancels the groups that no step can train in time and `retry` returns them to the data;
    `wait` finishes all groups and drops those that no step used in time; `mask` and `keep` train them all."""
    max_attempts: Positive = 3
    """Times that a group that becomes too stale is started under `retry` before it is dropped."""
    max_rejections: Positive | None = None
    """Groups rejected in a row by the filter before the run stops. Not set: one epoch, 64 to 1,000."""
    group_timeout_s: SomeSeconds | None = None
    """Longest time from a group's dispatch to its rewards, not counting pauses for weight updates. Not set:
    the limits of requests, rewards and `idle_timeout_s` apply, and a generate function that takes turn after
    turn is ended before a rank has waited for `trainer.stall_s`."""
    idle_timeout_s: SomeSeconds | None = None
    """Longest time that your generate function may run without an answer from an engine. Time during which an
    engine works on a request of the sample, or is paused or updated, does not count. Not set: half of
    `trainer.stall_s`."""
    max_failure_rate: Share = 0.2
    """Stop the run when more than this share of the last 64 or more groups failed."""
    generate: str | None = None
    """Dotted path of a custom `async def generate(context, sample, sampling_params)`."""
    agent: str | None = None
    """Dotted path of an agent, `async def agent(session)` or a plain function, in place of `generate`. It
    talks to the run's gateway with an OpenAI or Anthropic client."""
    agent_command: list[str] | None = None
    """A program in place of `agent`: it finds the gateway in `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL`, and
    the row as JSON on its standard input."""
    agent_workers: Positive = 2
    """Processes that run agents, many sessions each."""
    agent_sessions: Positive | None = None
    """Sessions open at once; one between two calls occupies no engine. Not set: twice the samples that the
    engines take at once."""
    agent_address: str = "127.0.0.1"
    """Address that the gateway listens on; for agents in sandboxes on other machines, this machine's address
    in their network."""
    agent_port: Port | None = None
    """Not set: any free port."""
    agent_parser: str | None = None
    """How tool calls are read from an answer: `"hermes"`, `"xml"`, `"mistral"`, `"llama"`, or the dotted path
    of `def parse(text) -> Parsed`. Not set: what the chat template uses."""
    filter: str | None = None
    """Dotted path of `def keep(samples) -> bool`, or `"zero_variance"`, which rejects groups of equal
    rewards."""

    @property
    def has_agent(self) -> bool:
        return self.agent is not None or self.agent_command is not None

    @property
    def is_custom(self) -> bool:
        """Samples are made by user code, which may make several of one execution."""
        return self.generate is not None or self.has_agent


class Reward(_Section):
    """How completions are scored."""

    function: str
    """Dotted path `package.module.function` or `package.module:function`, plain or async, or a URL."""
    group: bool = False
    """The function takes the list of a group's samples and returns a list of rewards."""
    key: str | None = None
    """Entry of the returned dict that is the reward."""
    timeout_s: SomeSeconds = 60.0
    """Longest time for one call."""
    num_workers: Positive = 2
    """Worker processes for a plain (not async) function."""
    in_loop: bool = False
    """Call a plain function in the event loop. Only for functions that take microseconds."""


class Engine(_Section):
    """The engines that sample."""

    urls: list[str] = []
    """Addresses of running SGLang engines. Empty: the run starts its own engines (see `[launch]`)."""
    router: bool = False
    """`urls` is one router, whose workers are the engines. Without `urls`, the run starts a router."""
    model: FilePath | None = None
    """Local model folder for engines that the run starts."""
    tokenizer: FilePath | None = None
    """Local folder of the tokenizer. Not set: `model`."""
    num_threads: Positive = 1
    """CPU threads of an embedded engine."""
    max_concurrent_samples: Positive = 256
    """Requests that one engine runs at the same time."""
    balance: Literal["least_loaded", "round_robin", "group", "sample"] = "least_loaded"
    """How requests are assigned to engines. `"group"`, `"sample"`: all requests of a group or sample go to
    the same engine and share its prefix cache. A router that the run starts follows this setting; start your
    own router with `--policy manual`."""
    shared: bool = False
    """Runs on several nodes use the same `urls`. The run with `data.shard` 0 leads weight updates, and the
    others learn of them from the trainer's ranks (`attach(nodes=)`). `max_concurrent_samples` applies to each
    run."""
    cache_per_version: bool = False
    """Keep a separate prefix cache for each weight version, so that nothing is reused across an update."""
    start_limit_s: SomeSeconds = 300.0
    """Longest wait at the start for all `urls` to answer. The trainer starts after that."""
    request_timeout_s: SomeSeconds = 600.0
    """Longest time for one request to an engine."""
    pause_mode: Literal["auto", "abort", "retract", "in_place"] = "auto"
    """How engines pause for an update. `"auto"`: retract if they report version spans, otherwise abort."""


class Launch(_Section):
    """Engines that the run starts when `engine.urls` is empty, and restarts when they die or hang."""

    number: Positive = 1
    """Engines to start."""
    server: Literal["embedded", "sglang"] = "embedded"
    """`"embedded"`: on the CPU. `"sglang"`: `python -m sglang.launch_server`, or `command`."""
    python: FilePath | None = None
    """Python interpreter of the environment where SGLang is installed. Not set: this one."""
    command: list[str] | None = None
    """Command line of an engine, instead of the default. `{python}`, `{model}`, `{host}`, `{port}`, `{place}`
    (the engine's number, from 0) and `{with_key}` are filled in. `{python} {with_key} MODULE` runs a server's
    module with the run's key as its `--api-key`."""
    arguments: list[str] = []
    """Arguments added to every engine's command line, filled in like `command`."""
    gpus_per_engine: NotNegative = 0
    """GPUs per engine (sets CUDA_VISIBLE_DEVICES). 0: every engine sees all GPUs that the run sees."""
    gpus: list[str] | None = None
    """GPUs to assign to the engines, in order. Not set: CUDA_VISIBLE_DEVICES, or 0, 1, 2 and so on."""
    environment: dict[str, str] = {}
    """Environment variables added for every engine, filled in like `command`."""
    router_command: list[str] | None = None
    """Command line of the router if `engine.router` is set, filled in like `command`; the word `{urls}` is
    replaced by the engines' addresses. Not set: `python -m sglang_router.launch_router`."""
    max_restarts: NotNegative = 3
    """Restarts of one engine within an hour. It then leaves the run; with no engine left, the run ends."""
    start_limit_s: SomeSeconds = 600.0
    """Longest time for an engine to start and pass its health check."""
    silence_limit_s: SomeSeconds = 120.0
    """Restart an SGLang engine that has answered nothing for this long."""


class Evaluation(_Section):
    """Defaults of `hook.evaluate`. Evaluation samples are never trained."""

    path: FilePath | None = None
    """Prompts for `hook.evaluate()` without a name, in the format of `[data]`."""
    datasets: dict[str, FilePath] = {}
    """More prompt files by name, for `hook.evaluate("name")`."""
    samples_per_prompt: Positive = 1
    """Answers sampled for each prompt."""
    max_concurrent_samples: Positive = 32
    """Evaluation requests over all engines at the same time, in addition to training's."""
    sampling: dict[str, Any] = {}
    """Keys of `[sampling]` to override, such as `temperature`."""


class Record(_Section):
    """Columns of the records in addition to tokens, log-probabilities, masks, versions and rewards."""

    columns: list[ExtraColumn] = []
    """Each is a table of `name`, `dtype` (`"float32"`), `per` and the `shape` of one row. `per` is `"token"`,
    `"response_token"`, `"input_token"` (all but a sample's last), `"sample"` or `"item"` (any number of
    rows). The reward function fills `token_rewards`, the engines fill `routed_experts`, and `sample.extras`
    in a custom generate function fills any other column."""


class Ring(_Section):
    """The shared memory between generator and trainer."""

    bytes: SomeBytes = 64 << 20
    """Size. It is reserved at the start and should hold the groups of a few steps."""
    poison: bool = False
    """Overwrite returned records to expose the use of a batch after its step. For tests."""
    checksum_payload: bool = False
    """Checksum whole records instead of headers only. For debugging."""
    lease_warning_s: SomeSeconds = 120.0
    """Warn about a rank that still holds views of a batch this long after it left the step."""
    lease_deadline_s: SomeSeconds = 1800.0
    """End the run if a rank still holds such views after this long, because their memory cannot be reused."""


class Trainer(_Section):
    """The trainer's ranks, their micro-batches and their weight updates."""

    num_ranks: Positive | None = None
    """Data-parallel ranks. Not set: the number that the first rank reports when it attaches."""
    max_tokens_per_micro_batch: Positive | None = None
    """Largest micro-batch, in tokens. Not set: one micro-batch per rank and step."""
    stall_s: SomeSeconds = 600.0
    """Longest wait for a batch, and for an engine to come back when all are lost."""
    progress_s: Seconds = 10.0
    """Shortest time between two progress lines, which `run` prints and rank 0's hook logs as INFO. 0:
    none."""
    pause_lease_s: SomeSeconds = 600.0
    """Resume engines that have been paused for an update for this long."""
    publish: Literal["disk", "tensor", "distributed"] = "disk"
    """How `update.push(model)` transfers weights: `"disk"` as files that the engines load, `"tensor"` in HTTP
    requests, `"distributed"` by broadcast in a process group with the engines (NCCL, or gloo on a CPU)."""
    bucket_bytes: SomeBytes = 128 << 20
    """Weights are transferred in buckets of about this size; a larger tensor is its own bucket."""
    weights_dir: FilePath | None = None
    """Folder for weight files. All engines must be able to read it, and two versions must fit; the run
    creates a private folder in it. Not set: the run's own folder, which is often in memory."""
    checkpoint_bytes: Bytes = 256 << 20
    """Most bytes of unfinished groups in `hook.state_dict`: tokens of running samples and, with
    `payload=True`, complete finished groups. Groups that do not fit start again after loading."""


class Run(_Section):
    """What a run writes, what it restarts, and how it ends."""

    output_dir: FilePath | None = None
    """Folder for the run's records: events, metrics and samples. It is created if it does not exist. One run
    can use it at a time; a later run adds another launch to it. Not set: no records are kept."""
    samples: Bytes | Literal["off"] = 1 << 30
    """Largest size of the sample log in that folder. The oldest samples are deleted when it is reached.
    `"off"`: no sample log."""
    grace_s: Seconds = 10.0
    """Time for the run's processes to end by themselves before they are killed."""
    generator_restarts: NotNegative = 5
    """Restarts of a crashed generator within ten minutes; one more crash ends the run."""
    spare_generator: bool = True
    """Keep a second generator process ready that takes over from one that dies. It has the data, the
    tokenizer and your code loaded, and needs their memory a second time."""
    replay: FilePath | None = None
    """The `events.jsonl` of a run on the same data. Its steps are repeated: the same groups on the same ranks
    in the same order."""
    heartbeat_s: SomeSeconds = 10.0
    """Replace a generator, or end the run for a hub, that has sent nothing for this long. While engines take
    a part of a weight stream, a generator has six times as long."""


class Metrics(_Section):
    """Where a run's metrics go, in addition to `fa-rollout-proc top`. Secrets are read from the environment
    (`WANDB_API_KEY`)."""

    interval_s: Seconds = 10.0
    """Time between two snapshots, at least 0.1 s."""
    jsonl: bool = True
    """Append each snapshot to `metrics.jsonl` in `run.output_dir`, if that is set."""
    prometheus_port: Port | None = None
    """Serve metrics to Prometheus on this port (needs the extra `metrics`)."""
    prometheus_host: str = "127.0.0.1"
    """Address to listen on. Everyone who can reach it can read the metrics."""
    tensorboard_dir: FilePath | None = None
    """Folder for TensorBoard's files (needs the extra `tensorboard`)."""
    wandb_project: str | None = None
    """Project on Weights & Biases (needs the extra `wandb`)."""
    wandb_name: str | None = None
    """Name of the run on Weights & Biases. Not set: the name of `run.output_dir`."""


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
        """Limit for user code, well below the trainer's own limit."""
        limit_s = self.rollout.idle_timeout_s
        return self.trainer.stall_s / 2 if limit_s is None else limit_s

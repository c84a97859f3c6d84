"""Where snapshots go: Prometheus, TensorBoard, Weights & Biases. These libraries are imported here alone.

In: snapshots. Invariant: a sink takes each snapshot as it is and keeps none but the last.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from fa_rollout.account.figures import StepFigures
from fa_rollout.account.snapshot import Snapshot
from fa_rollout.config import Config, to_shown_dict
from fa_rollout.observe.metrics import METRICS, PREFIX


class Sink(Protocol):
    """Takes snapshots."""

    def write(self, now: Snapshot) -> None:
        """One more."""

    def close(self) -> None:
        """No more follow."""


def open_sinks(config: Config, run: str) -> list[Sink]:
    """All that the configuration asks for.

    Raises:
        OSError: the port is taken, or the folder cannot be made.
        ImportError: an extra is not installed.
    """
    wanted, sinks = config.metrics, list[Sink]()
    if wanted.prometheus_port is not None:
        sinks.append(Prometheus(wanted.prometheus_host, wanted.prometheus_port))
    if wanted.tensorboard_dir is not None:
        sinks.append(TensorBoard(Path(wanted.tensorboard_dir)))
    if wanted.wandb_project is not None:
        folder = config.run.output_dir
        name = wanted.wandb_name or (Path(folder).absolute().name if folder else run)
        sinks.append(WeightsAndBiases(wanted.wandb_project, name, config))
    return sinks


class Prometheus:
    """An HTTP endpoint, `/metrics`, in the text that the scraper asks for (Prometheus or OpenMetrics)."""

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._lock = Lock()
        self._now: Snapshot | None = None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)

    def write(self, now: Snapshot) -> None:
        with self._lock:
            self._now = now

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Called for each scrape, in the server's thread."""
        from prometheus_client.core import Metric

        with self._lock:
            now = self._now
        if now is None:
            return
        for metric in METRICS:
            unit = metric.unit if metric.unit in ("seconds", "bytes", "ratio") else ""
            family = Metric(f"{PREFIX}_{metric.name}", metric.help, metric.kind, unit)
            for values, value in metric.read(now):
                family.add_sample(metric.full_name, dict(zip(metric.labels, values, strict=True)), value)
            yield family
        yield self._about(now)

    def _about(self, now: Snapshot) -> Any:
        from prometheus_client.core import InfoMetricFamily

        about = InfoMetricFamily(f"{PREFIX}_run", "What is configured.", labels=())
        run = now.run
        about.add_metric((), {"run": run.name, "staleness_policy": run.staleness_policy})
        return about


class TensorBoard:
    """Event files: each step's figures at its number, all others at the last step's."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(logdir=str(folder))

    def write(self, now: Snapshot) -> None:
        for step in now.steps:
            for name, value in step_scalars(step):
                self._writer.add_scalar(name, value, step.step, walltime=step.time_s)
        for name, value in scalars(now):
            self._writer.add_scalar(name, value, now.run.num_trained, walltime=now.time_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project there; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, project: str, name: str, config: Config) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, config=to_shown_dict(config), job_type="rollout")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, now: Snapshot) -> None:
        for step in now.steps:
            self._run.log({"step": step.step, **dict(step_scalars(step))})
        self._run.log({"step": now.run.num_trained, **dict(scalars(now))})

    def close(self) -> None:
        self._run.finish()


def scalars(now: Snapshot) -> Iterable[tuple[str, float]]:
    """All metrics as name and value; labels become parts of the name."""
    for metric in METRICS:
        for labels, value in metric.read(now):
            yield "/".join((PREFIX, metric.name, *(label.replace("/", "_") for label in labels))), value


def step_scalars(step: StepFigures) -> Iterable[tuple[str, float]]:
    """The figures of one step."""
    values = {
        "reward_mean": step.reward_mean,
        "staleness": step.staleness_max,
        "staleness_mean": step.staleness_mean,
        "samples": step.num_samples,
        "loss_tokens": step.num_tokens,
        "response_tokens": step.response_tokens,
        "answer_tokens_mean": step.response_tokens / max(1, step.num_samples),
        "duration_seconds": step.spent.total_s,
        "wait_seconds": step.spent.waiting,
        "train_seconds": step.spent.training,
        "update_seconds": step.spent.updating,
    }
    return [(f"step/{name}", float(value)) for name, value in values.items() if value is not None]

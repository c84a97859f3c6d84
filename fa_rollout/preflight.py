"""Checks before a run starts: what would fail in an hour is found in a second.

In: a configuration and facts about this machine. Out: findings, each with a way to repair it. Invariant:
every check is a function of its arguments and starts nothing; user code is looked for and never executed.
"""

import importlib.util
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from glob import glob
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urlsplit

from fa_rollout.config import Config, ConfigError, Evaluation, Metrics
from fa_rollout.data.chat import ChatTemplates
from fa_rollout.data.row import listed
from fa_rollout.launcher.output import WAY_OUT, holder_of, in_use
from fa_rollout.model_name import download, name_of
from fa_rollout.process.masking import masked_text
from fa_rollout.user_code.dotted import is_url
from shm.ring.headroom import RESERVE_BYTES, Headroom, available_bytes
from trainer_hook.printable import printable

_FDS_BESIDE_REQUESTS = 128
"""Logs, libraries, reward workers, channel."""
_BYTES_PER_TOKEN = 9
"""Of a record: id, log-probability, mask."""
_LEAST_TOKENS = 2
"""Of a sample: one of the prompt and one of the answer."""
_PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """The run would not work: it is not started."""
    WARNING = "warning"
    """The run may work; somebody should look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it must be."""

    severity: Severity
    check: str
    text: str
    """What must hold and what was found."""
    fix: str

    def __str__(self) -> str:
        return f"{self.severity} ({self.check}): {self.text}\n    fix: {self.fix}"


def _error(check: str, text: str, fix: str) -> Finding:
    return Finding(severity=Severity.ERROR, check=check, text=text, fix=fix)


def _warning(check: str, text: str, fix: str) -> Finding:
    return Finding(severity=Severity.WARNING, check=check, text=text, fix=fix)


def preflight(config: Config, command: Sequence[str] = ()) -> list[Finding]:
    """All checks for a run on this machine, errors first."""
    findings = [
        *check_memory(config.ring.bytes, available_bytes()),
        *check_lengths(config),
        *check_descriptors(num_requests(config)),
        *check_proxies(config.engine.urls, os.environ),
        *check_reward(config.reward.function, [str(Path.cwd()), *sys.path]),
        *check_data(config.data.path),
        *_check_evaluation(config.evaluation),
        *check_model(config.engine.model, config.engine.tokenizer, embedded=_starts_embedded(config)),
        *check_template(config.data.chat_template_kwargs, config.engine.tokenizer or config.engine.model),
        *check_launch(config),
        *check_metrics(config.metrics),
        *check_output(config.run.output_dir),
        *check_command(command),
    ]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def is_fit(config: Config, command: Sequence[str]) -> bool:
    """Print what the checks find; False when the run must not start."""
    findings = preflight(config, command)
    for finding in findings:
        print(f"fa-rollout-proc: {printable(masked_text(str(finding)), lines=True)}", file=sys.stderr)
    return all(finding.severity is not Severity.ERROR for finding in findings)


def check_memory(ring_bytes: int, headroom: Headroom) -> list[Finding]:
    """The ring is reserved whole at start: it must fit in what the machine and every cgroup leave free."""
    needed, free = ring_bytes + RESERVE_BYTES, headroom.available_bytes
    if needed <= free // 2:
        return []
    is_too_much = needed > free
    must = "must fit in free memory" if is_too_much else "takes more than half of what is free"
    return [
        Finding(
            severity=Severity.ERROR if is_too_much else Severity.WARNING,
            check="memory",
            text=f"ring.bytes = {ring_bytes:,} {must}: {free:,} bytes, by {headroom.limiter}",
            fix="lower ring.bytes (a few steps' groups are enough), or raise that limit",
        )
    ]


def check_lengths(config: Config) -> list[Finding]:
    """Samples that no micro-batch holds, and steps that the ring cannot hold."""
    findings = []
    longest = config.sampling.max_new_tokens + (config.data.max_prompt_tokens or 1)
    limit = config.trainer.max_tokens_per_micro_batch
    if limit is not None and longest > limit:
        text = (
            f"a sample may reach {longest:,} tokens (sampling.max_new_tokens and its prompt), and "
            f"trainer.max_tokens_per_micro_batch = {limit:,}: a group with a longer sample fails"
        )
        findings.append(_warning("lengths", text, "raise that limit, or lower sampling.max_new_tokens"))
    num_samples = config.rollout.groups_per_step * config.rollout.samples_per_group
    least = num_samples * _LEAST_TOKENS * _BYTES_PER_TOKEN
    if least > config.ring.bytes:
        text = f"ring.bytes = {config.ring.bytes:,} must hold the {num_samples:,} samples of a step at once"
        findings.append(_error("lengths", text, f"set ring.bytes to {2 * least:,} at the very least"))
    elif (most := num_samples * longest * _BYTES_PER_TOKEN) > config.ring.bytes:
        text = (
            f"a step of {num_samples:,} samples, each as long as sampling.max_new_tokens allows, takes "
            f"{most:,} bytes, and ring.bytes = {config.ring.bytes:,}: a run whose steps do not fit ends"
        )
        findings.append(_warning("lengths", text, f"set ring.bytes to {most:,}, if answers may all be long"))
    return findings


def check_descriptors(num_concurrent: int, limit: int | None = None) -> list[Finding]:
    """Each running request holds a connection."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = num_concurrent + _FDS_BESIDE_REQUESTS
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return []
    text = f"{num_concurrent} concurrent samples need {needed} open files, and the limit is {limit}"
    return [_error("descriptors", text, f"ulimit -n {needed}, or lower engine.max_concurrent_samples")]


def check_proxies(urls: Sequence[str], environment: Mapping[str, str]) -> list[Finding]:
    """Requests go to the engines directly: a proxy that is set for them is not used."""
    proxy = next((name for name in _PROXY_VARIABLES if environment.get(name)), None)
    hosts = [urlsplit(url).hostname or url for url in urls]
    beyond = [host for host in hosts if not _is_local(host) and not _is_bypassed(host, environment)]
    if proxy is None or not beyond:
        return []
    return [
        Finding(
            severity=Severity.WARNING,
            check="proxies",
            text=f"{proxy}={environment[proxy]} is set, but engines ({beyond[0]}) are asked directly",
            fix="name their hosts in no_proxy; engines behind a proxy need a router on this side of it",
        )
    ]


def check_reward(path: str, search_path: Sequence[str]) -> list[Finding]:
    """The module of the reward function must be found; it is not imported here. A server is not asked."""
    if is_url(path):
        return []
    forms = "package.module.function or package.module:function"
    module, separator, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module) or not attribute:
        return [_error("reward", f"reward.function must be {forms}, found {path!r}", "write it in that form")]
    missing = _missing_module(module, search_path)
    if missing is None:
        return []
    text = f"reward.function = {path!r}: no module {missing!r} in the current folder or in what is installed"
    return [_error("reward", text, "start in the folder that holds it, set PYTHONPATH, or install it")]


def _missing_module(module: str, search_path: Sequence[str]) -> str | None:
    """The first name on the way to `module` that cannot be found; parents are not executed."""
    locations: Sequence[str] | None = search_path
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        # By the last name alone: a folder without __init__.py would be looked up in its parent, which is not
        # imported.
        spec = None if locations is None else PathFinder.find_spec(parts[depth - 1], locations)
        if spec is None and depth == 1:
            # Editable installs have finders of their own; looking for a top-level name executes nothing.
            spec = importlib.util.find_spec(name)
        if spec is None:
            return None if name in sys.builtin_module_names else name
        found = spec.submodule_search_locations
        locations = None if found is None else list(found)
    return None


def num_requests(config: Config) -> int:
    """Samples that may run at once, those of evaluations included."""
    training = config.engine.max_concurrent_samples * max(1, len(config.engine.urls))
    return training + config.evaluation.max_concurrent_samples


def _check_evaluation(evaluation: Evaluation) -> list[Finding]:
    """The data sets of evaluations, which nobody opens before the first one."""
    named = {"evaluation.path": evaluation.path} if evaluation.path else {}
    named |= {f"evaluation.datasets.{name}": path for name, path in evaluation.datasets.items()}
    return [finding for key, path in named.items() for finding in check_data(path, key=key)]


def check_data(pattern: str, *, key: str = "data.path") -> list[Finding]:
    """At least one file with something in it."""
    files = [Path(name) for name in glob(pattern, recursive=True)] or [Path(pattern)]
    found = [file for file in files if file.is_file()]
    if not found:
        text, fix = f"{key} = {pattern!r} must name a file, and there is none", "mend the path"
    elif unreadable := [file for file in found if not os.access(file, os.R_OK)]:
        text, fix = f"{key}: {unreadable[0]} cannot be read", "change its permissions"
    elif not any(file.stat().st_size for file in found):
        text, fix = f"{key} = {pattern!r}: {len(found)} files, all empty", "put prompts in"
    else:
        return []
    return [_error("data", text, fix)]


def check_model(model: str | None, tokenizer: str | None, *, embedded: bool) -> list[Finding]:
    """Folders that are named must hold the files that are read from them."""
    folder, key = (tokenizer, "engine.tokenizer") if tokenizer is not None else (model, "engine.model")
    wanted = [("engine.model", model, "config.json")] if embedded else []
    missing = [
        (key, folder, file)
        for key, folder, file in [*wanted, (key, folder, "tokenizer.json")]
        if folder is not None and not (Path(folder) / file).is_file()
    ]
    return list(dict.fromkeys(_model_error(*one) for one in missing))


def check_template(kwargs: Iterable[str], folder: str | None) -> list[Finding]:
    """Variables for the chat template should be ones that it uses."""
    if not kwargs or folder is None:
        return []
    try:
        templates = ChatTemplates.in_folder(Path(folder).expanduser())
    except ConfigError as error:
        return [_error("template", str(error), "repair the tokenizer's files, or give another folder")]
    unused = templates.unused(kwargs)
    if not unused:
        return []
    return [
        Finding(
            severity=Severity.WARNING,
            check="template",
            text=f"the chat template in {folder} does not use {listed(unused)} of data.chat_template_kwargs",
            fix="check the spelling against the template, or remove the key",
        )
    ]


def check_metrics(metrics: Metrics) -> list[Finding]:
    """What figures are sent by must be installed, and the port be free."""
    wanted = (
        ("prometheus_port", metrics.prometheus_port, "prometheus_client", "metrics"),
        ("tensorboard_dir", metrics.tensorboard_dir, "tensorboardX", "tensorboard"),
        ("wandb_project", metrics.wandb_project, "wandb", "wandb"),
    )
    findings = [
        _error(
            "metrics",
            f"metrics.{key} needs the package {module}, and it is not installed",
            f"pip install 'fa-rollout[{extra}]', or remove the key",
        )
        for key, value, module, extra in wanted
        if value is not None and importlib.util.find_spec(module) is None
    ]
    if metrics.prometheus_port is not None:
        findings += _check_port(metrics.prometheus_host, metrics.prometheus_port)
    return findings


def _check_port(host: str, port: int) -> list[Finding]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            text = f"metrics.prometheus_port must be free on {host}, found {port}: {error.strerror or error}"
            return [_error("metrics", text, "choose another; each run on a machine needs one of its own")]
    return []


def check_output(folder: str | None) -> list[Finding]:
    """The folder of the logs, or the nearest one above it that is there, must take files."""
    if folder is None:
        return []
    path = Path(folder).absolute()
    above = next(path for path in (path, *path.parents) if os.path.lexists(path))
    if not above.is_dir():
        text = f"run.output_dir = {folder!r} must be a folder, and {above} is none"
        return [_error("output", text, "name another folder, or remove that file")]
    if (holder := holder_of(folder)) is not None:
        return [_error("output", in_use(folder, holder), WAY_OUT)]
    try:
        with tempfile.TemporaryFile(dir=above):
            return []
    except OSError as error:
        text = f"run.output_dir = {folder!r} must take files, and {above} does not ({error.strerror})"
        return [_error("output", text, "name a folder that is yours, or change its permissions")]


def check_launch(config: Config) -> list[Finding]:
    """The program of engines that the run starts must exist."""
    launch = config.launch
    if config.engine.urls or launch.server == "embedded":
        return []
    python = launch.python or sys.executable
    program = python if launch.command is None else launch.command[0].replace("{python}", python)
    if shutil.which(program):
        return []
    text = f"engines are started by {program!r}, and there is no such program"
    return [
        _error("launch", text, "name the interpreter of the environment that holds SGLang in launch.python")
    ]


def _starts_embedded(config: Config) -> bool:
    return not config.engine.urls and config.launch.server == "embedded"


def check_command(command: Sequence[str]) -> list[Finding]:
    """The trainer's program must exist."""
    if not command or shutil.which(command[0]):
        return []
    text = f"the trainer's command starts with {command[0]!r}, and no such program is on PATH"
    return [_error("command", text, "mend the name, or activate the environment that has it")]


def _model_error(key: str, folder: str, file: str) -> Finding:
    name = name_of(folder)
    if name is not None:
        text = f"{key} must be a local folder that holds a model; {folder!r} looks like a Hub name"
        return _error("model", text, f"{download(name)}, then give that folder")
    text = f"{key} = {folder!r} must be a folder that holds {file}, and it does not"
    return _error("model", text, "give the folder that the model was saved to")


def _is_bypassed(host: str, environment: Mapping[str, str]) -> bool:
    """By the common reading of no_proxy: names and their subdomains, `*` for all."""
    names = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    suffixes = [name.strip().lstrip("*.") for name in names if name.strip()]
    return "*" in names or any(host == name or host.endswith(f".{name}") for name in suffixes)


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")

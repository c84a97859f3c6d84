"""Checks before a run starts: find in a second what would fail in an hour.

In: a configuration and facts about this machine. Out: findings, each with a fix. Invariant: every check is a
function of its arguments and starts nothing; user code is located but never executed.
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
from fa_rollout.config.sections import Rollout
from fa_rollout.data.chat import ChatTemplates
from fa_rollout.data.row import listed
from fa_rollout.launcher.output import WAY_OUT, holder_of, in_use
from fa_rollout.model_name import download, name_of
from fa_rollout.process.masking import masked_text
from fa_rollout.user_code.dotted import is_url
from shm.ring.headroom import RESERVE_BYTES, Headroom, available_bytes
from trainer_hook.printable import printable

_FDS_BESIDE_REQUESTS = 128
"""Open files of logs, libraries, reward workers and the channel."""
_BYTES_PER_TOKEN = 9
"""Bytes of a record per token: id, log-probability, mask."""
_LEAST_TOKENS = 2
"""Tokens of the shortest sample: one of the prompt and one of the answer."""
_PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """The run cannot work and is not started."""
    WARNING = "warning"
    """The run may work, but should be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem."""

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
        *check_agent(config.rollout, [str(Path.cwd()), *sys.path]),
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
    """Print the findings; False if the run must not start."""
    findings = preflight(config, command)
    for finding in findings:
        print(f"fa-rollout-proc: {printable(masked_text(str(finding)), lines=True)}", file=sys.stderr)
    return all(finding.severity is not Severity.ERROR for finding in findings)


def check_memory(ring_bytes: int, headroom: Headroom) -> list[Finding]:
    """The whole ring is reserved at the start: it must fit in the machine's and all cgroups' free memory."""
    needed, free = ring_bytes + RESERVE_BYTES, headroom.available_bytes
    if needed <= free // 2:
        return []
    is_too_much = needed > free
    must = "must fit in free memory" if is_too_much else "uses more than half of the free memory"
    return [
        Finding(
            severity=Severity.ERROR if is_too_much else Severity.WARNING,
            check="memory",
            text=f"ring.bytes = {ring_bytes:,} {must}; {free:,} bytes are free ({headroom.limiter})",
            fix="lower ring.bytes (room for the groups of a few steps is enough), or raise that limit",
        )
    ]


def check_lengths(config: Config) -> list[Finding]:
    """Samples longer than a micro-batch, and steps larger than the ring."""
    findings = []
    longest = config.sampling.max_new_tokens + (config.data.max_prompt_tokens or 1)
    limit = config.trainer.max_tokens_per_micro_batch
    if limit is not None and longest > limit:
        text = (
            f"samples may have up to {longest:,} tokens (prompt and sampling.max_new_tokens), but "
            f"trainer.max_tokens_per_micro_batch = {limit:,}; groups with longer samples fail"
        )
        findings.append(_warning("lengths", text, "raise that limit, or lower sampling.max_new_tokens"))
    num_samples = config.rollout.groups_per_step * config.rollout.samples_per_group
    least = num_samples * _LEAST_TOKENS * _BYTES_PER_TOKEN
    if least > config.ring.bytes:
        text = f"ring.bytes = {config.ring.bytes:,} must hold the {num_samples:,} samples of a whole step"
        findings.append(_error("lengths", text, f"set ring.bytes to at least {2 * least:,}"))
    elif (most := num_samples * longest * _BYTES_PER_TOKEN) > config.ring.bytes:
        text = (
            f"a step of {num_samples:,} samples, all as long as sampling.max_new_tokens allows, needs "
            f"{most:,} bytes, but ring.bytes = {config.ring.bytes:,}; a run whose steps do not fit stops"
        )
        findings.append(_warning("lengths", text, f"set ring.bytes to {most:,} if all answers may be long"))
    return findings


def check_descriptors(num_concurrent: int, limit: int | None = None) -> list[Finding]:
    """Each running request holds a connection."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = num_concurrent + _FDS_BESIDE_REQUESTS
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return []
    text = f"{num_concurrent} concurrent samples need {needed} open files, but the limit is {limit}"
    return [_error("descriptors", text, f"run ulimit -n {needed}, or lower engine.max_concurrent_samples")]


def check_proxies(urls: Sequence[str], environment: Mapping[str, str]) -> list[Finding]:
    """Requests go directly to the engines, even if the environment sets a proxy."""
    proxy = next((name for name in _PROXY_VARIABLES if environment.get(name)), None)
    hosts = [urlsplit(url).hostname or url for url in urls]
    beyond = [host for host in hosts if not _is_local(host) and not _is_bypassed(host, environment)]
    if proxy is None or not beyond:
        return []
    return [
        Finding(
            severity=Severity.WARNING,
            check="proxies",
            text=f"{proxy}={environment[proxy]} is set, but requests to engines ({beyond[0]}) bypass it",
            fix="add their hosts to no_proxy; for engines behind a proxy, run a router on this side of it",
        )
    ]


def check_reward(path: str, search_path: Sequence[str]) -> list[Finding]:
    """The reward function's module must exist. It is not imported, and a reward server is not called."""
    if is_url(path):
        return []
    forms = "package.module.function or package.module:function"
    module, separator, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module) or not attribute:
        return [
            _error(
                "reward",
                f"reward.function must be {forms}, found {path!r}",
                "change it to one of these forms",
            )
        ]
    missing = _missing_module(module, search_path)
    if missing is None:
        return []
    text = f"reward.function = {path!r}: no module {missing!r} in the current folder or installed"
    return [_error("reward", text, "start in the folder that contains it, set PYTHONPATH, or install it")]


def check_agent(rollout: Rollout, search_path: Sequence[str]) -> list[Finding]:
    """The agent's module or program must exist; neither is executed here."""
    if rollout.agent_command and not shutil.which(rollout.agent_command[0]):
        text = f"rollout.agent_command: there is no program {rollout.agent_command[0]!r}"
        return [_error("agent", text, "install it, or give its path")]
    if rollout.agent is None:
        return []
    module = rollout.agent.partition(":")[0] if ":" in rollout.agent else rollout.agent.rpartition(".")[0]
    missing = _missing_module(module, search_path) if module else module
    if missing is None:
        return []
    text = f"rollout.agent = {rollout.agent!r}: no module {missing!r} in the current folder or installed"
    return [_error("agent", text, "start in the folder that contains it, set PYTHONPATH, or install it")]


def _missing_module(module: str, search_path: Sequence[str]) -> str | None:
    """The first part of `module` that cannot be found; parent packages are not executed."""
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
    """Samples that may run at the same time, including those of evaluations."""
    training = config.engine.max_concurrent_samples * max(1, len(config.engine.urls))
    return training + config.evaluation.max_concurrent_samples


def _check_evaluation(evaluation: Evaluation) -> list[Finding]:
    """The data sets of evaluations, which are not opened before the first evaluation."""
    named = {"evaluation.path": evaluation.path} if evaluation.path else {}
    named |= {f"evaluation.datasets.{name}": path for name, path in evaluation.datasets.items()}
    return [finding for key, path in named.items() for finding in check_data(path, key=key)]


def check_data(pattern: str, *, key: str = "data.path") -> list[Finding]:
    """At least one file that is not empty."""
    files = [Path(name) for name in glob(pattern, recursive=True)] or [Path(pattern)]
    found = [file for file in files if file.is_file()]
    if not found:
        text, fix = f"{key} = {pattern!r} matches no file", "fix the path"
    elif unreadable := [file for file in found if not os.access(file, os.R_OK)]:
        text, fix = f"{key}: {unreadable[0]} cannot be read", "change its permissions"
    elif not any(file.stat().st_size for file in found):
        text, fix = f"{key} = {pattern!r} matches only empty files", "add prompts"
    else:
        return []
    return [_error("data", text, fix)]


def check_model(model: str | None, tokenizer: str | None, *, embedded: bool) -> list[Finding]:
    """The configured folders must contain the files that are read from them."""
    folder, key = (tokenizer, "engine.tokenizer") if tokenizer is not None else (model, "engine.model")
    wanted = [("engine.model", model, "config.json")] if embedded else []
    missing = [
        (key, folder, file)
        for key, folder, file in [*wanted, (key, folder, "tokenizer.json")]
        if folder is not None and not (Path(folder) / file).is_file()
    ]
    return list(dict.fromkeys(_model_error(*one) for one in missing))


def check_template(kwargs: Iterable[str], folder: str | None) -> list[Finding]:
    """The chat template should use the variables that are set for it."""
    if not kwargs or folder is None:
        return []
    try:
        templates = ChatTemplates.in_folder(Path(folder).expanduser())
    except ConfigError as error:
        return [_error("template", str(error), "fix the tokenizer's files, or set another folder")]
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
    """The packages that metrics need must be installed, and the port must be free."""
    wanted = (
        ("prometheus_port", metrics.prometheus_port, "prometheus_client", "metrics"),
        ("tensorboard_dir", metrics.tensorboard_dir, "tensorboardX", "tensorboard"),
        ("wandb_project", metrics.wandb_project, "wandb", "wandb"),
    )
    findings = [
        _error(
            "metrics",
            f"metrics.{key} needs the package {module}, which is not installed",
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
            return [_error("metrics", text, "choose another port; each run on a machine needs its own")]
    return []


def check_output(folder: str | None) -> list[Finding]:
    """The output folder, or its nearest existing parent, must be writable."""
    if folder is None:
        return []
    path = Path(folder).absolute()
    above = next(path for path in (path, *path.parents) if os.path.lexists(path))
    if not above.is_dir():
        text = f"run.output_dir = {folder!r} must be a folder, but {above} is not one"
        return [_error("output", text, "choose another folder, or remove that file")]
    if (holder := holder_of(folder)) is not None:
        return [_error("output", in_use(folder, holder), WAY_OUT)]
    try:
        with tempfile.TemporaryFile(dir=above):
            return []
    except OSError as error:
        text = f"run.output_dir = {folder!r} must be writable, but {above} is not ({error.strerror})"
        return [_error("output", text, "choose a folder that you can write to, or change its permissions")]


def check_launch(config: Config) -> list[Finding]:
    """The program that starts the engines must exist."""
    launch = config.launch
    if config.engine.urls or launch.server == "embedded":
        return []
    python = launch.python or sys.executable
    program = python if launch.command is None else launch.command[0].replace("{python}", python)
    if shutil.which(program):
        return []
    text = f"the engines are started with {program!r}, but there is no such program"
    return [
        _error(
            "launch",
            text,
            "set launch.python to the interpreter of the environment where SGLang is installed",
        )
    ]


def _starts_embedded(config: Config) -> bool:
    return not config.engine.urls and config.launch.server == "embedded"


def check_command(command: Sequence[str]) -> list[Finding]:
    """The trainer's program must exist."""
    if not command or shutil.which(command[0]):
        return []
    text = f"the trainer's command starts with {command[0]!r}, but no such program is on PATH"
    return [_error("command", text, "fix the name, or activate the environment that has it")]


def _model_error(key: str, folder: str, file: str) -> Finding:
    name = name_of(folder)
    if name is not None:
        text = f"{key} must be a local folder with a model; {folder!r} looks like a Hub name"
        return _error("model", text, f"{download(name)}, then use that folder")
    text = f"{key} = {folder!r} must be a folder with a {file}"
    return _error("model", text, "use the folder that the model was saved to")


def _is_bypassed(host: str, environment: Mapping[str, str]) -> bool:
    """By the usual meaning of no_proxy: names and their subdomains, `*` for all."""
    names = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    suffixes = [name.strip().lstrip("*.") for name in names if name.strip()]
    return "*" in names or any(host == name or host.endswith(f".{name}") for name in suffixes)


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")

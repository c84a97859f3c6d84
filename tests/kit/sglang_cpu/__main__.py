"""The command line behind `scripts/sglang_cpu`: serve and route in the foreground, start and stop beside.

`start` and `stop` keep a note of each server under the user's cache folder; `stop` ends only a process whose
number and start time are those of a note.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from fa_rollout.demo.sglang import SGLangError
from fa_rollout.engines.service import ServiceError, free_port
from fa_rollout.engines.supervisor import Supervisor
from tests.kit.sglang_cpu import commands
from tests.kit.sglang_cpu.launch import START_TIMEOUT_S, last_lines

_STOP_S = 20.0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="sglang_cpu", description="Real SGLang on a machine without a GPU.")
    verbs = top.add_subparsers(dest="verb", required=True)
    for verb, text in {"start": "start a server in the background", "serve": "serve until SIGTERM"}.items():
        serve = verbs.add_parser(verb, help=text, epilog="what follows -- goes to sglang.launch_server")
        serve.add_argument("model", metavar="MODEL_DIR", type=Path)
        serve.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
        serve.add_argument("--router", action="store_true", help="start SGLang's router in front of it")
        _add_common(serve)
    route = verbs.add_parser("route", help="a router over running workers, until SIGTERM")
    route.add_argument("worker_urls", metavar="URL", nargs="+")
    _add_common(route)
    stop = verbs.add_parser("stop", help="end what `start` started")
    stop.add_argument("--port", type=int, help="of one server (default: all)")
    return top


def _add_common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--port", type=int, default=0, help="default: any free one")
    verb.add_argument("--log", type=Path, help="file for what the server writes (default: stderr)")
    verb.add_argument("--timeout", type=float, default=START_TIMEOUT_S, metavar="S", help="for the start")
    verb.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    verb.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)


def supervise(arguments: argparse.Namespace, options: list[str]) -> int:
    port = arguments.port or free_port()
    if arguments.verb == "route":
        services = [commands.router(arguments.worker_urls, port=port, options=options)]
    else:
        services = [commands.server(arguments.model, port=port, threads=arguments.threads, options=options)]
        if arguments.router:
            services.append(commands.router([services[0].url], port=free_port()))
    with (
        (arguments.log or Path("/dev/stderr")).open("ab", buffering=0) as log,
        Supervisor(services, log=log, parent_pid=arguments.parent_pid) as supervisor,
    ):
        return supervisor.run(arguments.ready_fd, arguments.timeout)


def start(arguments: argparse.Namespace, options: list[str]) -> int:
    """Start a supervisor that outlives this command, wait until the server works, and note it down."""
    port = arguments.port or free_port()
    notes().mkdir(parents=True, exist_ok=True)
    log = arguments.log or notes() / f"{port}.log"
    log.write_bytes(b"")
    words = ["serve", str(arguments.model), "--port", str(port), "--threads", str(arguments.threads)]
    words += [
        "--log",
        str(log),
        "--timeout",
        str(arguments.timeout),
        *(["--router"] if arguments.router else []),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.sglang_cpu", *words, "--", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log.open("ab"),
        start_new_session=True,
    )
    assert process.stdout is not None, "stdout is a pipe"
    line = process.stdout.readline()
    if not line:
        raise SGLangError(f"SGLang must come up; status {process.wait()}, its last lines:\n{last_lines(log)}")
    note = {"pid": process.pid, "started": psutil.Process(process.pid).create_time(), **json.loads(line)}
    (notes() / f"{port}.json").write_text(json.dumps(note))
    for name, url in zip(("server", "router"), note["urls"], strict=False):
        print(f"{name}: {url}")
    print(f"log: {log}\nstop it with: scripts/sglang_cpu stop --port {port}")
    return 0


def stop(port: int | None) -> int:
    """End the servers that are noted down and still the same processes."""
    found = sorted(notes().glob("*.json" if port is None else f"{port}.json"))
    for file in found:
        note = json.loads(file.read_text())
        _end(note["pid"], note["started"])
        file.unlink()
        print(f"stopped: {note['urls'][0]}")
    if not found:
        print("nothing to stop")
    return 0


def _end(pid: int, started: float) -> None:
    try:
        process = psutil.Process(pid)
        if process.create_time() != started:
            return
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_S)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        process.kill()


def notes() -> Path:
    """Where servers in the background are noted down."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fa_rollout" / "sglang-servers"


def main(words: list[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    arguments, options = parser().parse_args(words[:cut]), words[cut + 1 :]
    try:
        if arguments.verb == "stop":
            return stop(arguments.port)
        return start(arguments, options) if arguments.verb == "start" else supervise(arguments, options)
    except ServiceError as error:
        print(f"sglang_cpu: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`fa-rollout-proc engines`: lists, adds and removes the engines of an active run."""

import argparse
from collections.abc import Sequence
from contextlib import closing

import msgspec

from fa_rollout.account.snapshot import Snapshot
from fa_rollout.config import ConfigError
from fa_rollout.launcher.running import find, observe
from trainer_hook.messages import ChangeEngines, EnginesNow, QuerySnapshot, SnapshotTaken
from trainer_hook.printable import printable
from trainer_hook.session.connection import Connection

_ANSWER_S = 10.0
_JOIN_S = 1200.0
"""Longest time for an engine to start, load the current weights and join."""


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `engines`."""
    parser = verbs.add_parser(
        "engines",
        help="list, add or remove engines of an active run",
        description=(
            "list            show a run's engines and their state\n"
            "add URL ...     add engines: each loads the current weights, then gets requests\n"
            "remove URL ...  remove engines: each gets no new requests; requests that do not finish within\n"
            "                --drain continue on other engines with the tokens sampled so far"
        ),
    )
    parser.add_argument("action", choices=("list", "add", "remove"))
    parser.add_argument("urls", metavar="URL", nargs="*", help="host:port or http://host:port")
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="run name, output folder or launcher PID; needed if several runs are active",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time for running requests to finish (default: 60)",
    )
    parser.set_defaults(call=call)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Send the request to the hub, and return the exit code."""
    if (options.action == "list") == bool(options.urls):
        raise ConfigError("engines: add and remove need URLs, list takes none")
    with closing(observe(find(options.run))) as connection:
        if options.action == "list":
            _list(connection)
        for url in options.urls:
            _change(connection, url, joins=options.action == "add", drain_s=options.drain)
    return 0


def _change(connection: Connection, url: str, *, joins: bool, drain_s: float) -> None:
    number = connection.next_number()
    message = ChangeEngines(request=number, url=url, joins=joins, drain_s=drain_s)
    waits_for = f"{url} {'joins' if joins else 'leaves'}"
    answer = connection.ask(message, timeout_s=_JOIN_S + drain_s, waits_for=waits_for)
    assert isinstance(answer, EnginesNow)
    print(f"{url} {'joined' if joins else 'left'}; engines: {', '.join(answer.engines)}", flush=True)


def _list(connection: Connection) -> None:
    query = QuerySnapshot(request=connection.next_number())
    answer = connection.ask(query, timeout_s=_ANSWER_S, waits_for="its figures are asked")
    assert isinstance(answer, SnapshotTaken)
    for engine in msgspec.msgpack.decode(answer.snapshot, type=Snapshot).engines:
        now = engine.now
        words = [engine.url, engine.health, f"{now.in_flight}/{now.capacity} requests"]
        words += [f"version {now.version}"]
        if engine.health != "ok":
            words.append(now.last_error)
        print(printable("  ".join(words).rstrip()))

"""The timeline as a trace file, for ui.perfetto.dev and chrome://tracing.

In: a history. Out: JSON in Chrome's trace event format: one process for each part, a thread for each lane,
groups as asynchronous slices, counters. Invariant: times are whole microseconds since the launch, none
negative, and a slice begins where the one before ends, or later: viewers drop those that overlap at all.
"""

from pathlib import Path
from typing import Any

import msgspec

from fa_rollout.process.private_files import write_private
from fa_rollout.records.history import History
from fa_rollout.records.story import Group
from fa_rollout.report.figures import series
from fa_rollout.report.timeline import Span, lanes, spans

_PROCESSES = {"trainer": 1, "weights": 2, "engines": 3, "generator": 4, "evaluation": 5, "groups": 6}
_FIRST_THREAD = 10
"""Thread 0 is the idle one to viewers, and a thread with its process's number the main one."""
_NUM_COUNTED = 2000


def write(history: History, path: Path) -> None:
    """Write the trace file."""
    tree = {"traceEvents": events(history), "displayTimeUnit": "ms", "otherData": {"run": history.run}}
    write_private(path, msgspec.json.encode(tree).decode())


def events(history: History) -> list[dict[str, Any]]:
    """All trace events, metadata first."""
    start_s = history.began_s
    found = [_named("process_name", pid, 0, name) for name, pid in _PROCESSES.items()]
    for number, (lane, members) in enumerate(lanes(spans(history)).items(), _FIRST_THREAD):
        process = _PROCESSES["trainer" if lane.startswith("rank") else lane.split()[0]]
        found.append(_named("thread_name", process, number, lane))
        found += [_slice(span, process, number, start_s) for span in members]
    for group in history.groups.values():
        found += _group(group, history)
    found += [_instant(time_s, text, start_s) for time_s, text in [*history.warnings, *history.marks]]
    return found + _counters(history)


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice(span: Span, pid: int, tid: int, start_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": _us(span.start_s - start_s),
        "dur": max(0, _us(span.end_s - start_s) - _us(span.start_s - start_s)),
        "args": span.facts,
    }


def _group(group: Group, history: History) -> list[dict[str, Any]]:
    """From its first request to its record, and from there to the step that took it."""
    if group.dispatched_s is None:
        return []
    made_s = group.committed_s or group.ended_s or history.last_s
    facts = {"place": group.place, "tokens": sum(group.response_lens), "reason": group.reason}
    found = _pair(group, "rollout", group.dispatched_s, made_s, history.began_s, facts)
    step = history.steps.get(-1 if group.step is None else group.step)
    if group.committed_s is not None and step is not None:
        facts = {"step": step.step, "staleness": group.staleness}
        found += _pair(group, "ready", group.committed_s, step.composed_s, history.began_s, facts)
    return found


def _pair(
    group: Group, name: str, from_s: float, to_s: float, start_s: float, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    common = {
        "name": name,
        "cat": "group",
        "id2": {"local": str(group.group)},
        "pid": _PROCESSES["groups"],
        "tid": 0,
    }
    begin = {"ph": "b", **common, "ts": _us(from_s - start_s), "args": {"group": group.group, **facts}}
    return [begin, {"ph": "e", **common, "ts": _us(max(from_s, to_s) - start_s)}]


def _instant(time_s: float, text: str, start_s: float) -> dict[str, Any]:
    return {
        "ph": "i",
        "name": text,
        "s": "g",
        "pid": _PROCESSES["generator"],
        "tid": 0,
        "ts": _us(time_s - start_s),
    }


def _counters(history: History) -> list[dict[str, Any]]:
    over = series(history, _NUM_COUNTED)
    named = {
        "samples at engines": over.running,
        "groups ready": over.ready,
        "ring bytes": over.ring_bytes,
        "tokens per second": over.tokens_per_s,
    }
    return [
        {
            "ph": "C",
            "name": name,
            "pid": _PROCESSES["groups"],
            "tid": 0,
            "ts": _us(index * over.width_s),
            "args": {"value": round(value, 3)},
        }
        for name, values in named.items()
        for index, value in enumerate(values)
        if index == 0 or value != values[index - 1]
    ]


def _us(seconds: float) -> int:
    return round(max(0.0, seconds) * 1e6)

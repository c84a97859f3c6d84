"""A rollout function in slime's hands, without Ray: called in the order of `train_async`, against engines.

    python behaviour.py PLAN -- OPTIONS OF SLIME'S

PLAN is JSON. Each call is a line of JSON on standard output, behind the word CALL; the last one of a life
that an exception ended tells it.
"""

import json
import sys
import time
import urllib.request
from typing import Any

import msgspec
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.arguments import parse_args
from slime.utils.http_utils import init_http_client
from slime.utils.misc import load_function


class Plan(msgspec.Struct, kw_only=True):
    """What is called, and when."""

    router: str
    engines: list[str]
    first: int = 0
    stop: int = 6
    train_s: float = 0.0
    updates: bool = True
    evaluate_after: list[int] = []
    save_after: int | None = None


class Life:
    """One life of a rollout manager."""

    def __init__(self, plan: Plan, args: Any) -> None:
        self._plan, self._args = plan, args
        self._train = load_function(args.rollout_function_path)
        self._evaluate = load_function(args.eval_function_path)
        self._source = load_function(args.data_source_path)(args)
        if plan.first:
            self._source.load(plan.first - 1)

    def run(self) -> None:
        """slime's order: the call for the next step has ended before this one is saved and updated."""
        plan, version = self._plan, 1
        self._update(version)
        self._call(plan.first)
        for step in range(plan.first, plan.stop):
            if step + 1 < plan.stop:
                self._call(step + 1)
            time.sleep(plan.train_s)
            if step == plan.save_after:
                self._source.save(step)
            version += 1
            self._update(version)
            if step in plan.evaluate_after:
                self._look(step)

    def _call(self, step: int) -> None:
        set_current_rollout_id(step)
        output = call_rollout_fn(self._train, self._args, step, self._source, evaluation=False)
        groups = [[told(member) for member in group] for group in output.samples]
        tell(step=step, groups=groups, metrics=output.metrics or {})

    def _look(self, step: int) -> None:
        set_current_rollout_id(step)
        output = call_rollout_fn(self._evaluate, self._args, step, self._source, evaluation=True)
        tell(step=step, rewards={name: data["rewards"] for name, data in output.data.items()})

    def _update(self, version: int) -> None:
        if not self._plan.updates:
            return
        for engine in self._plan.engines:
            post(engine, "/pause_generation", {})
            body = {"model_path": "none", "weight_version": str(version)}
            post(engine, "/update_weights_from_disk", body)
            post(engine, "/continue_generation", {})


def told(member: Any) -> Any:
    """What the tests look at."""
    if isinstance(member, list):
        return [told(sample) for sample in member]
    return {
        "group": member.group_index,
        "index": member.index,
        "versions": member.weight_versions,
        "length": member.response_length,
        "num_masked": (member.loss_mask or []).count(0),
        "reward": member.reward,
    }


def tell(**what: Any) -> None:
    print("CALL", json.dumps(what), flush=True)


def post(engine: str, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        engine + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
        response.read()


def main() -> None:
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    sys.argv = ["train_async.py", *sys.argv[3:]]
    args = parse_args()
    host, port = plan.router.removeprefix("http://").split(":")
    args.sglang_router_ip, args.sglang_router_port = host, int(port)
    init_http_client(args)
    try:
        Life(plan, args).run()
    except Exception as error:
        tell(error=type(error).__name__, text=str(error), at_s=time.time())


if __name__ == "__main__":
    main()

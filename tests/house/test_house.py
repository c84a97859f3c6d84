"""Rules of the house that no linter knows. What breaks one is listed; the lists only get shorter."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("fa_rollout", "trainer_hook", "shm")
MAX_FILES = 12
"""In a folder, without `__init__` and `__main__`."""
MAX_LINES = 350

FULL_FOLDERS: set[str] = {
    "fa_rollout/report",
}
LONG_FILES: set[str] = {
    "fa_rollout/config/sections.py",
    "fa_rollout/launcher/launch.py",
    "fa_rollout/preflight.py",
    "trainer_hook/hook.py",
}
SHARED_NAMES: set[str] = {
    "Batch",
    "Body",
    "Call",
    "Ended",
    "Engine",
    "Evaluation",
    "FinishReason",
    "GeneratorLife",
    "Group",
    "History",
    "KeptSample",
    "Opening",
    "Piece",
    "Record",
    "Refused",
    "Rollout",
    "Sample",
    "Scored",
    "Session",
    "Span",
    "Step",
    "Turn",
    "Verdict",
}
"""Names of more than one public class."""
PUBLIC = {"trainer_hook/losses/"}
"""Beside what `trainer_hook` exports: path and name of functions and classes that users call."""
UNPASSED: set[str] = {
    "fa_rollout/__init__.py:entry:evaluation",
    "fa_rollout/client/base/clock.py:ActiveClock.__init__:now",
    "fa_rollout/client/base/pacing.py:Pacing.__init__:turn_s",
    "fa_rollout/client/wire/address.py:engine_url:default_port",
    "fa_rollout/config/paths.py:expanded:environment",
    "fa_rollout/data/chat.py:_tojson:ensure_ascii",
    "fa_rollout/data/chat.py:_tojson:indent",
    "fa_rollout/data/chat.py:_tojson:separators",
    "fa_rollout/data/chat.py:_tojson:sort_keys",
    "fa_rollout/data/prompts.py:PromptSource.__init__:num_skipped_rows",
    "fa_rollout/demo/curve.py:smooth:over",
    "fa_rollout/demo/curve.py:sparkline:high",
    "fa_rollout/demo/curve.py:sparkline:low",
    "fa_rollout/doctor/machine.py:shared_memory:folder",
    "fa_rollout/engines/embedded/model/kv_cache.py:KVCache.get_seq_length:layer_idx",
    "fa_rollout/engines/embedded/model/runner.py:_grouped_attention:dropout",
    "fa_rollout/engines/embedded/model/runner.py:_grouped_attention:scaling",
    "fa_rollout/engines/tiny_model.py:write_tiny_model:context",
    "fa_rollout/engines/tiny_model.py:write_tiny_model:heads",
    "fa_rollout/engines/tiny_model.py:write_tiny_model:hidden",
    "fa_rollout/engines/tiny_model.py:write_tiny_model:key_value_heads",
    "fa_rollout/engines/tiny_model.py:write_tiny_model:layers",
    "fa_rollout/engines/tiny_model.py:write_tiny_model:std",
    "fa_rollout/generator/rollouts/dispatcher.py:Dispatcher.oldest:count",
    "fa_rollout/generator/serving.py:ServingGenerator.__init__:on_ended",
    "fa_rollout/launcher/engines/engine_key.py:engine_key:environment",
    "fa_rollout/launcher/rundir.py:run_folders:base",
    "fa_rollout/process/child.py:ChildProcess.__init__:own_session",
    "fa_rollout/report/chart.py:columns:high",
    "fa_rollout/report/chart.py:columns:limit",
    "fa_rollout/report/ticks.py:time_ticks:wanted",
    "fa_rollout/rewards/runner.py:RewardRunner.__init__:function",
    "fa_rollout/simulation/engines.py:SimulatedEngines._decode:event",
    "fa_rollout/simulation/table.py:show:console",
    "fa_rollout/slime/options.py:read_options:environment",
    "fa_rollout/user_code/call.py:run:deadline",
    "fa_rollout/user_code/call.py:run:function",
    "fa_rollout/user_code/call.py:run:passes",
    "shm/channels/channel.py:Channel.__init__:max_message_bytes",
    "shm/channels/channel.py:Channel.__init__:peer_pid",
    "shm/channels/channel.py:Channel.send:fds",
    "shm/channels/endpoint.py:connect:max_fds",
    "shm/ring/headroom.py:available_bytes:root",
    "shm/ring/segment.py:Segment.attach:prefault",
    "shm/ring/segment.py:Segment.create:prefault",
    "trainer_hook/session/attach.py:attach:environment",
    "trainer_hook/weights/update_group.py:serve_store:timeout_s",
}
"""Defaulted parameters that no call in the product passes: `path:function:parameter`."""


@functools.cache
def sources() -> dict[str, str]:
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


def test_a_folder_holds_at_most_twelve_files() -> None:
    folders: dict[str, int] = defaultdict(int)
    for path in sources():
        if not path.endswith(("/__init__.py", "/__main__.py")):
            folders[str(Path(path).parent)] += 1
    assert {folder for folder, number in folders.items() if number > MAX_FILES} == FULL_FOLDERS


def test_a_file_has_at_most_350_lines() -> None:
    assert {path for path, text in sources().items() if text.count("\n") > MAX_LINES} == LONG_FILES


def test_a_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name for name, found in places.items() if len(found) > 1} == SHARED_NAMES


def test_a_defaulted_parameter_is_passed_by_some_call() -> None:
    passed = Passed()
    for tree in trees().values():
        passed.visit(tree)
    public = exported()
    found = {
        f"{path}:{parameter.function}:{parameter.name}"
        for path, tree in trees().items()
        for parameter in defaulted(tree)
        if not passed.has(parameter)
        and not any(path.startswith(prefix) for prefix in PUBLIC)
        and parameter.function.split(".")[0] not in public
    }
    assert found == UNPASSED


def exported() -> set[str]:
    """Names in `trainer_hook.__all__`."""
    for node in trees()["trainer_hook/__init__.py"].body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("trainer_hook must have an __all__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    function: str
    called: str
    """What calls name: the function, or the class of an `__init__`."""
    name: str
    position: int | None
    """Among a call's arguments; None: by keyword alone."""


def defaulted(tree: ast.Module) -> Iterator[Parameter]:
    owners = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        owner = owners[node]
        is_method = isinstance(owner, ast.ClassDef)
        called = owner.name if isinstance(owner, ast.ClassDef) and node.name == "__init__" else node.name
        name = f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name
        if node.name.startswith("__") and node.name != "__init__":
            continue
        arguments = [*node.args.posonlyargs, *node.args.args]
        is_static = any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)
        shift = 1 if is_method and not is_static else 0
        for index in range(len(arguments) - len(node.args.defaults), len(arguments)):
            yield Parameter(function=name, called=called, name=arguments[index].arg, position=index - shift)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if default is not None:
                yield Parameter(function=name, called=called, name=argument.arg, position=None)


class Passed(ast.NodeVisitor):
    """What calls pass, by the called name: keywords and numbers of arguments."""

    def __init__(self) -> None:
        self._keywords: dict[str, set[str | None]] = defaultdict(set)
        self._most: dict[str, float] = defaultdict(int)

    def has(self, parameter: Parameter) -> bool:
        keywords = self._keywords[parameter.called]
        is_positional = parameter.position is not None and self._most[parameter.called] > parameter.position
        return parameter.name in keywords or None in keywords or is_positional

    def visit_Call(self, node: ast.Call) -> None:
        self._note(node.func, node)
        if getattr(node.func, "id", getattr(node.func, "attr", "")) == "partial" and node.args:
            self._note(node.args[0], node, shift=1)
        self.generic_visit(node)

    def _note(self, function: ast.expr, node: ast.Call, *, shift: int = 0) -> None:
        name = getattr(function, "attr", getattr(function, "id", ""))
        self._keywords[name].update(keyword.arg for keyword in node.keywords)
        is_open = any(isinstance(argument, ast.Starred) for argument in node.args)
        number = float("inf") if is_open else len(node.args) - shift
        self._most[name] = max(self._most[name], number)


def test_every_test_file_has_a_name_of_its_own() -> None:
    """Test folders are no packages: pytest imports two files of one name as one module."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        found[path.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}

"""How many files and functions an ordinary step runs through: a measure of how hard the code is to follow.


    python -m benchmarks.step_files [--list]

A real run of one rank on a scripted engine: launcher, hub, generator and trainer are profiled with
`sys.setprofile` over two steps and their weight updates; start-up and end are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from fa_rollout.config import to_toml
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.kit.scripted import Lengths, Script, ScriptedEngine

ROOT = Path(__file__).parents[1]
PACKAGES = ("fa_rollout", "trainer_hook", "shm")
CHARACTERS = "".join(chr(code) for code in range(32, 127))

PROFILER = """
import atexit, json, os, sys, threading
folder = os.environ["STEP_FILES"]
seen = set()
def note(frame, event, _):
    if event == "call" and os.path.exists(folder + "/on"):
        code = frame.f_code
        seen.add((code.co_filename, code.co_qualname))
def dump():
    sys.setprofile(None)
    with open(f"{folder}/{os.getpid()}.json", "w") as file:
        json.dump(sorted(seen), file)
atexit.register(dump)
threading.setprofile(note)
sys.setprofile(note)
"""

TRAINER = """
import os, pathlib
from trainer_hook import TrainerHook
flag = pathlib.Path(os.environ["STEP_FILES"], "on")
with TrainerHook.attach() as hook:
    for step in range(8):
        with hook.next_batch() as batch:
            for micro_batch in batch.micro_batches():
                micro_batch.tokens, micro_batch.logprobs, micro_batch.advantages()
            if step == 4:
                flag.touch()
            if step == 6:
                flag.unlink()
        with hook.update_weights():
            pass
"""


def profile(folder: Path) -> dict[str, set[str]]:
    """Functions by file of this project, of all processes of one run."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(PROFILER)
    (folder / "train.py").write_text(TRAINER)
    write_tiny_model(folder / "model", characters=CHARACTERS)
    rows = [json.dumps({"prompt": f"prompt {i}", "label": str(i)}) for i in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    script = Script(vocab_size=len(CHARACTERS) + 3, lengths=Lengths(tokens=8))
    with ScriptedEngine.start(script) as engine:
        config = {
            "data": {"path": str(folder / "prompts.jsonl")},
            "rollout": {"num_steps": 8, "groups_per_step": 4, "samples_per_group": 2, "staleness": 1},
            "sampling": {"max_new_tokens": 16},
            "reward": {"function": "tests.hub.user_code.length_reward", "in_loop": True},
            "engine": {"urls": [engine.url], "model": str(folder / "model")},
            "ring": {"bytes": "8MiB"},
            "run": {"output_dir": str(folder / "out"), "spare_generator": False},
        }
        (folder / "run.toml").write_text(to_toml(config))
        path = os.pathsep.join([str(folder / "site"), str(ROOT)])
        command = [sys.executable, "-m", "fa_rollout.cli", "run", str(folder / "run.toml")]
        subprocess.run(
            [*command, "--", sys.executable, str(folder / "train.py")],
            env=os.environ | {"STEP_FILES": str(folder), "PYTHONPATH": path},
            check=True,
        )
    found = defaultdict(set)
    for dump in folder.glob("*.json"):
        for file, function in json.loads(dump.read_text()):
            path_ = Path(file)
            if path_.is_relative_to(ROOT) and path_.relative_to(ROOT).parts[0] in PACKAGES:
                found[str(path_.relative_to(ROOT))].add(function)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="files and functions that an ordinary step runs through")
    parser.add_argument("--list", action="store_true", help="name the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = profile(Path(folder))
    if options.list:
        print("\n".join(f"{len(functions):4} {file}" for file, functions in sorted(found.items())))
    print(f"{len(found)} files, {sum(map(len, found.values()))} functions")


if __name__ == "__main__":
    main()

"""Frameworks from the registry, unchanged, each in an environment of its own; see `scripts/check_agents`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FA_ROLLOUT_AGENT_VENVS", "/nonexistent"))
ADDS = "\n".join(
    [
        *(
            f'I add.<tool_call>{{"name": "add", "arguments": {{"a":  {a}, "b": {b}}}}}</tool_call><eos>'
            for a, b in ((1, 2), (3, 4))
        ),
        "It is 7.<eos>",
    ]
)
FRAMEWORKS = {
    "openai_agents": (f"{ADDS}\n{ADDS}", 2),
    "langgraph": (ADDS, 1),
    "autogen_agentchat": (ADDS, 1),
    "litellm": (ADDS, 1),
    "instructor": ('nonsense<eos>\n{"value": "x"}<eos>\n{"value": 7}<eos>', 1),
    "smolagents": ("\n".join([ADDS, "It is 7.<eos>", "It is 7.<eos>"]), 0),
    "dspy": ("\n".join(["It is 7.<eos>"] * 9), 0),
}
"""What the policy answers, and the number of samples; 0: as many as the framework's rewriting makes."""

pytestmark = pytest.mark.agents


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_trains_what_was_sampled(name: str) -> None:
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{name} is not installed: scripts/check_agents does it")
    answers, num_samples = FRAMEWORKS[name]
    script = Path(__file__).parent / "frameworks" / f"with_{name}.py"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.agents.scripted_gateway", str(python), str(script)],
        env=os.environ | {"ANSWERS": answers},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if num_samples:
        assert f"samples={num_samples} " in ended.stdout

"""A gateway with a scripted policy, for programs in environments of their own.

    ANSWERS=... python -m tests.agents.scripted_gateway PROGRAM...

Runs the program with a session's address in its environment. The policy gives the lines of ANSWERS in turn.
Fails unless the program succeeds and each sampled token is trained once; prints the number of samples.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.generator.test_agents import CHARACTERS, CHATML, Engines, check_truth, session_of


async def main(command: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder: Path = write_tiny_model(Path(name) / "model", characters=CHARACTERS)
        (folder / "chat_template.jinja").write_text(CHATML)
        tokenizer = Tokenizer.load(folder)
    engines = Engines(tokenizer, *os.environ["ANSWERS"].splitlines())
    async with session_of(tokenizer, engines) as (session, address):
        environment = os.environ | {
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_BASE": f"{address}/v1",
            "OPENAI_API_KEY": session.secret,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": session.secret,
        }
        process = await asyncio.create_subprocess_exec(*command, env=environment)
        code = await process.wait()
        samples = await session.close()
    check_truth(samples, engines)
    print(f"calls={len(engines.prompts)} samples={len(samples)} exit={code}")
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))

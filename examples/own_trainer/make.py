"""Write a small model with random weights and its prompts into work/."""

import json
from pathlib import Path

from fa_rollout.engines.tiny_model import write_tiny_model

work = Path(__file__).parent / "work"
write_tiny_model(work / "model", characters="0123456789=")
rows = [{"prompt": f"{digit}=", "label": "7"} for digit in range(10)]
(work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

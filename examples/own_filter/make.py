"""Write a small model with random weights and its prompts into work/: half of them can be learnt."""

import json
from pathlib import Path

from fa_rollout.engines.tiny_model import write_tiny_model

work = Path(__file__).parent / "work"
write_tiny_model(work / "model", characters="0123456789=x")
labels = {"=": "7", "x": "impossible"}
rows = [{"prompt": f"{digit}{sign}", "label": label} for digit in range(10) for sign, label in labels.items()]
(work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

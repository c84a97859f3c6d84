"""Write a small model with random weights, its prompts and what the tool knows into work/."""

import json
import random
from pathlib import Path

from fa_rollout.engines.tiny_model import write_tiny_model

work = Path(__file__).parent / "work"
write_tiny_model(work / "model", characters="abcdefABCDEF0123456789")
randomness = random.Random(0)
prices = {article: str(randomness.randint(0, 9)) for article in "abcdef"}
(work / "prices.json").write_text(json.dumps({article.upper(): price for article, price in prices.items()}))
rows = [{"prompt": article, "label": price} for article, price in prices.items()]
(work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

"""Write a small model with random weights, its prompts and what the tool knows into work/."""

import json
import random
from pathlib import Path

from fa_rollout.engines.tiny_model import write_tiny_model

work = Path(__file__).parent / "work"
write_tiny_model(work / "model", characters="abcdefABCDEF0123456789")
# This model writes a tool call as one capital letter; yours has its own template and a known format.
(work / "model" / "chat_template.jinja").write_text(
    "{{ bos_token }}{% for m in messages %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.article | upper }}{% endfor %}"
    "{% endfor %}"
)
randomness = random.Random(0)
prices = {article: str(randomness.randint(0, 9)) for article in "abcdef"}
(work / "prices.json").write_text(json.dumps(prices))
rows = [{"prompt": article, "label": price} for article, price in prices.items()]
(work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

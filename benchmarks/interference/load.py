"""How much is generated while the trainer works."""

from dataclasses import dataclass

SAMPLES_PER_GROUP = 4
STEP_S = 1.0
"""About what a batch of samples takes to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is generated."""

    tokens: int
    num_slots: int
    tokens_per_s: float
    """Of one request."""

    @property
    def samples_per_s(self) -> float:
        """As the engine gives them when it always has enough to do."""
        return self.num_slots * self.tokens_per_s / self.tokens

    @property
    def groups_per_step(self) -> int:
        """So that a step's batch takes about `STEP_S`."""
        return max(1, round(self.samples_per_s * STEP_S / SAMPLES_PER_GROUP))

    def __str__(self) -> str:
        return f"{self.num_slots * self.tokens_per_s:,.0f} tokens/s in answers of {self.tokens:,}"


def loads(*, quick: bool) -> list[Load]:
    """A node's worth of generation, and several nodes' worth."""
    many = Load(tokens=512, num_slots=256, tokens_per_s=160.0)
    if quick:
        return [many]
    return [
        Load(tokens=512, num_slots=64, tokens_per_s=160.0),
        many,
        Load(tokens=4096, num_slots=256, tokens_per_s=320.0),
    ]

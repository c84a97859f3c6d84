"""Which rule meets a request: the only place that counts matches."""

from collections.abc import Sequence

from tests.kit.scripted.script import Rule


class Faults:
    """The rules of an engine and how often each has matched."""

    def __init__(self, rules: list[Rule]) -> None:
        self._rules = [_Counted(rule) for rule in rules]

    def meet(self, path: str, rid: str | None, input_ids: Sequence[int] = ()) -> Rule | None:
        """The first rule that meets this request; every rule that matches it counts it."""
        met = None
        for counted in self._rules:
            if _matches(counted.rule, path, rid, input_ids) and counted.take() and met is None:
                met = counted.rule
        return met


class _Counted:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._matched = 0
        self._met = 0

    def take(self) -> bool:
        position = self._matched - self.rule.skip
        self._matched += 1
        if position < 0 or position % self.rule.every or self._met == self.rule.times:
            return False
        self._met += 1
        return True


def _matches(rule: Rule, path: str, rid: str | None, input_ids: Sequence[int]) -> bool:
    if rule.path != path or (rule.rid is not None and rule.rid not in (rid or "")):
        return False
    start = rule.prompt_start
    return start is None or list(input_ids[: len(start)]) == start

"""A chat template as the gateway uses it: the first prompt whole, and after that only what is added.

A history is never rendered again. What a template adds behind an answer (the turn's end, new messages, the
next turn's head) does not depend on what came before, for templates that pass the test of `Extension`; others
are found out at start, and their histories become branches.

    render([user, answer]) + ADDED == render([user, answer, *new], add_generation_prompt=True)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa_rollout.data.chat import PromptError
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.generator.agents.messages import ChatMessage, Json, ToolCall
from fa_rollout.sample import IntArray

_MARK = "\u2603seam\u2603"
_NUM_ENDS = 64
_MAX_END = 8
"""Most tokens of a turn's end."""
_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string"}},
                "required": ["what"],
            },
        },
    }
]
_SYSTEM = ChatMessage(role="system", text="Only facts.")
_USER = ChatMessage(role="user", text="Which one?")
_ANSWER = ChatMessage(role="assistant", text="The second.")
_CALL = ChatMessage(
    role="assistant", text="I look.", calls=(ToolCall(id="call_1", name="look", arguments='{"what": "it"}'),)
)
_RESULT = ChatMessage(role="tool", text="Found.", tool_call_id="call_1", name="look")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What a template allows to be added to a history without a change of what stands there."""

    by_user: bool
    """A user's message behind an answer."""
    by_user_after_tools: bool
    """A user's message behind an answer that used tools before."""
    by_tools: bool
    """Results of tools behind the calls."""
    reason: str = ""
    """What the template does otherwise, for people."""

    def allows(self, new: Sequence[ChatMessage], *, used_tools: bool) -> bool:
        """Whether these messages may be added to a history."""
        if not new:
            return False
        if any(message.role in ("user", "system", "developer") for message in new):
            return self.by_user_after_tools if used_tools else self.by_user
        return self.by_tools


class Rendering:
    """Prompt ids of sessions."""

    def __init__(self, tokenizer: Tokenizer, kwargs: dict[str, Any]) -> None:
        """`kwargs`: further variables of the template."""
        self._tokenizer = tokenizer
        self._kwargs = kwargs
        self._ends: dict[int, tuple[list[Json] | None, str]] = {}
        self._takes_late_system = self._renders([_SYSTEM, _USER, _ANSWER, _SYSTEM, _USER])
        self.extension = self._examine()
        self.opens_thinking = self._opens_thinking()
        """Prompts end with `<think>`: an answer starts with its reasoning."""

    def first(self, messages: Sequence[ChatMessage], tools: list[Json] | None) -> IntArray:
        """Ids of a whole history, up to where the answer begins.

        Raises:
            PromptError: the template refuses it.
        """
        return self._tokenizer.encode(
            self._render(self._placed(messages, is_start=True), tools, generation=True)
        )

    def added(
        self, answer: ChatMessage, new: Sequence[ChatMessage], tools: list[Json] | None, sampled: IntArray
    ) -> IntArray:
        """Ids behind an answer's sampled ids: its end as far as it was not sampled, and the new messages.

        Raises:
            PromptError: the template refuses the messages.
        """
        # Text and reasoning of the answer do not show in what follows it, so short ones do.
        short = ChatMessage(role="assistant", text="x", calls=answer.calls)
        before = self._render([_USER, short], tools, generation=False)
        after = self._render([_USER, short, *self._placed(new, is_start=False)], tools, generation=True)
        end = self._end(tools)
        if not after.startswith(before):
            before, end = before.rstrip("\n"), end.rstrip("\n")
        if not (after.startswith(before) and before.endswith(end)):
            raise PromptError("the chat template renders an answer differently once messages follow it")
        added = self._tokenizer.encode(end + after[len(before) :])
        return _behind(sampled, added, self._tokenizer.eos_ids)

    def _end(self, tools: list[Json] | None) -> str:
        """What the template writes behind an answer's text; remembered for the tool lists used last."""
        known = self._ends.get(id(tools))
        if known is not None and known[0] is tools:
            return known[1]
        marked = ChatMessage(role="assistant", text=_MARK)
        end = self._render([_USER, marked], tools, generation=False).rpartition(_MARK)[2]
        if len(self._ends) >= _NUM_ENDS:
            self._ends.clear()
        self._ends[id(tools)] = (tools, end)
        return end

    def _placed(self, messages: Sequence[ChatMessage], *, is_start: bool) -> list[ChatMessage]:
        """System messages where the template accepts them: the leading ones as one, later ones as the user's.

        Agents send several, also in the middle of a conversation; many templates accept one, at the start.
        """
        if self._takes_late_system:
            return list(messages)
        num = (
            next((i for i, m in enumerate(messages) if m.role != "system"), len(messages)) if is_start else 0
        )
        leading = "\n\n".join(message.text for message in messages[:num])
        first = [ChatMessage(role="system", text=leading)] if num else []
        later = [replace(m, role="user") if m.role == "system" else m for m in messages[num:]]
        return [*first, *later]

    def _opens_thinking(self) -> bool:
        try:
            return self._render([_USER], None, generation=True).rstrip().endswith("<think>")
        except PromptError:
            return False

    def _renders(self, messages: list[ChatMessage]) -> bool:
        try:
            text = self._render(messages, None, generation=True)
        except PromptError:
            return False
        return text.count(_SYSTEM.text) == sum(message is _SYSTEM for message in messages)

    def _render(self, messages: Sequence[ChatMessage], tools: list[Json] | None, *, generation: bool) -> str:
        shown = [message.for_template() for message in messages]
        return self._tokenizer.render(shown, tools, self._kwargs, add_generation_prompt=generation)

    def _examine(self) -> Extension:
        """Property tests on the template itself."""
        by_user = self._extends([_USER], [_ANSWER], [_USER], None)
        by_tools = self._extends([_USER], [_CALL], [_RESULT], _TOOLS)
        after_tools = by_tools and self._extends([_USER, _CALL, _RESULT], [_ANSWER], [_USER], _TOOLS)
        thought = ChatMessage(role="assistant", text="So.", reasoning="First this, then that.")
        with_reasoning = self._extends([_USER], [thought], [_USER], None)
        called = ChatMessage(role="assistant", text="", calls=_CALL.calls, reasoning="A look is needed.")
        tools_with_reasoning = self._extends([_USER], [called], [_RESULT], _TOOLS)
        reasons = []
        if not (by_user and with_reasoning):
            reasons.append("a new user message changes how earlier turns are rendered")
        if not (by_tools and tools_with_reasoning):
            reasons.append("results of tools change how earlier turns are rendered, or tools are refused")
        return Extension(
            by_user=by_user and with_reasoning,
            by_user_after_tools=after_tools and with_reasoning,
            by_tools=by_tools and tools_with_reasoning,
            reason="; ".join(reasons),
        )

    def _extends(
        self,
        history: list[ChatMessage],
        answer: list[ChatMessage],
        new: list[ChatMessage],
        tools: list[Json] | None,
    ) -> bool:
        try:
            prompt = self._render(history, tools, generation=True)
            turn = self._render([*history, *answer], tools, generation=False)
            whole = self._render([*history, *answer, *new], tools, generation=True)
        except PromptError:
            return False
        return whole.startswith(prompt) and whole.startswith(turn.rstrip("\n"))


def _behind(sampled: IntArray, added: IntArray, eos_ids: tuple[int, ...]) -> IntArray:
    """`added` without the part of it that the model sampled: the end of its turn must not appear twice."""
    if not len(sampled) or int(sampled[-1]) not in eos_ids:
        return added
    for length in range(min(len(sampled), len(added), _MAX_END), 0, -1):
        if np.array_equal(sampled[-length:], added[:length]):
            return added[length:]
    return added

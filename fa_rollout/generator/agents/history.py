"""The tree of one session: which request extends which answer, and which begins a branch.

In: requests' messages, answers. Out: the ids to sample from, and the samples to train on.

A node is an answer with all that came before it. A request that repeats a node's messages and answer, and adds
some, extends it: the node's ids stay, those that are added are encoded. Where the node has been extended
already, or the template cannot be extended, another sample begins.

Invariant: each sampled token is in the loss of exactly one sample; no sampled token is ever encoded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fa_rollout.data.chat import PromptError
from fa_rollout.generator.agents.messages import ChatMessage, Json, same_length
from fa_rollout.generator.agents.rendering import Rendering
from fa_rollout.generator.rollouts.custom import append_turn, sample_ids
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.sample import IntArray, Sample


@dataclass(slots=True, eq=False)
class Node:
    """An answer, and the history that it ends."""

    messages: list[ChatMessage]
    """All of them, the answer last."""
    tools: bytes
    """As JSON."""
    sample: Sample
    num_ids: int
    """Of the sample, up to the end of the answer."""
    is_tip: bool = True
    """Nothing of its sample comes behind it."""
    is_delivered: bool = False
    """A client has got the answer."""
    num_sampled: int = 0
    """Ids of the answer."""

    @property
    def used_tools(self) -> bool:
        """A tool's result is in the history."""
        return any(message.role == "tool" for message in self.messages)

    @property
    def ids(self) -> IntArray:
        """Prompt and response up to the end of the answer."""
        return sample_ids(self.sample)[: self.num_ids]


@dataclass(slots=True, kw_only=True)
class Opening:
    """Where an answer is to begin."""

    ids: IntArray
    messages: list[ChatMessage]
    tools: bytes
    extends: Node | None = None
    """Its sample grows; None: another begins."""


@dataclass(slots=True)
class History:
    """One session's."""

    rendering: Rendering
    fresh: "NewSample"
    nodes: list[Node] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """Branches in the order of their beginnings."""

    def open(self, messages: Sequence[ChatMessage], tools: list[Json] | None) -> Opening:
        """Where to sample the answer to these messages.

        Raises:
            PromptError: the template refuses them.
        """
        encoded = msgspec.json.encode(tools)
        node = self._longest(messages, encoded)
        if node is not None:
            new = list(messages[len(node.messages) :])
            history = [*node.messages, *new]  # as it was told, not as it was sent back
            if self.rendering.extension.allows(new, used_tools=node.used_tools):
                try:
                    added = self.rendering.added(node.messages[-1], new, tools, node.ids)
                except PromptError:
                    added = None
                if added is not None:
                    ids = np.concatenate([node.ids, added])
                    extends = node if node.is_tip else None
                    return Opening(ids=ids, messages=history, tools=encoded, extends=extends)
            messages = history
        return Opening(ids=self.rendering.first(messages, tools), messages=list(messages), tools=encoded)

    def close(self, opening: Opening, turn: Turn, answer: ChatMessage) -> Node:
        """The answer has come: it joins the sample that it extends, or begins one."""
        node = opening.extends
        if node is not None and node.is_tip:
            sample, node.is_tip = node.sample, False
        else:  # another answer to the same node came first
            sample = self.fresh(opening.ids)
            self.samples.append(sample)
        append_turn(sample, turn)
        found = Node([*opening.messages, answer], opening.tools, sample, len(sample_ids(sample)))
        found.num_sampled = len(turn.output_ids)
        self.nodes.append(found)
        return found

    def trained(self) -> list[Sample]:
        """The samples, without the answers that no client got: they had no part in what the agent did."""
        for node in self.nodes:
            if not node.is_delivered:
                end = node.num_ids - len(node.sample.prompt_ids)
                node.sample.loss_mask[end - node.num_sampled : end] = 0
        return [sample for sample in self.samples if sample.loss_mask.any()]

    def _longest(self, messages: Sequence[ChatMessage], tools: bytes) -> Node | None:
        """The node with most messages that these repeat and go beyond."""
        best: Node | None = None
        for node in reversed(self.nodes):
            num = len(node.messages)
            if node.tools != tools or num >= len(messages) or (best and num <= len(best.messages)):
                continue
            if same_length(node.messages, messages) == num:
                best = node
        return best


class NewSample:
    """Makes the samples of a session: copies of the rollout's own, each with a prompt."""

    def __init__(self, template: Sample) -> None:
        self._template = template

    def __call__(self, prompt_ids: IntArray) -> Sample:
        one = self._template
        return Sample(
            group=one.group,
            member=one.member,
            attempt=one.attempt,
            epoch=one.epoch,
            prompt_index=one.prompt_index,
            prompt=one.prompt,
            label=one.label,
            metadata=dict(one.metadata),
            prompt_ids=prompt_ids,
        )

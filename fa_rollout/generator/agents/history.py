"""The tree of one session: which request extends which answer, and which starts a branch.

In: the messages of requests, and answers. Out: the ids to sample from, and the samples to train on.

A node is an answer together with the messages that led to it from the node above. A request that repeats a
node's messages and answer and adds some extends it: the node keeps its ids, and only the new messages are
encoded. If the node was extended before, or the template cannot be extended, a new sample starts.

Invariant: each sampled token is in the loss of at most one sample, and no sampled token is encoded again.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fa_rollout.data.chat import PromptError
from fa_rollout.generator.agents.messages import ChatMessage, Json, same_length
from fa_rollout.generator.agents.rendering import Rendering
from fa_rollout.generator.rollouts.custom import append_turn, sample_ids
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.sample import IntArray, Sample

Tools = list[Json] | None


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """An answer."""

    parent: "Node | None"
    added: list[ChatMessage]
    """Messages since the parent; the answer is the last."""
    tools: Tools
    sample: Sample
    num_ids: int
    """Length of the sample up to the end of this answer."""
    num_sampled: int
    """Length of this answer."""
    used_tools: bool
    """The history contains the result of a tool."""
    is_tip: bool = True
    """The sample ends here."""
    is_delivered: bool = False
    """A client received the answer."""
    children: list["Node"] = field(default_factory=list)

    @property
    def answer(self) -> ChatMessage:
        return self.added[-1]

    @property
    def messages(self) -> list[ChatMessage]:
        """The whole history; the answer is the last."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return [message for node in reversed(path) for message in node.added]

    @property
    def ids(self) -> IntArray:
        """Prompt and response up to the end of the answer."""
        return sample_ids(self.sample)[: self.num_ids]


@dataclass(slots=True, kw_only=True)
class Opening:
    """Where an answer starts."""

    ids: IntArray
    parent: Node | None
    new: list[ChatMessage]
    """Messages since the parent."""
    tools: Tools
    extends: bool
    """The parent's sample continues, unless another answer continues it first."""


@dataclass(slots=True)
class History:
    """The answers of one session."""

    rendering: Rendering
    template: Sample
    """The rollout's sample: every branch is a copy of it with a prompt of its own."""
    roots: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """Branches in the order in which they started."""

    def open(self, messages: Sequence[ChatMessage], tools: Tools) -> Opening:
        """Where to sample the answer to these messages.

        Raises:
            PromptError: the template refuses them.
        """
        node, num_known = self.longest(messages, tools)
        new = list(messages[num_known:])
        if node is None:
            return Opening(
                ids=self.rendering.first(messages, tools), parent=None, new=new, tools=tools, extends=False
            )
        added = self._added(node, new, tools)
        if added is not None:
            ids = np.concatenate([node.ids, added])
            return Opening(ids=ids, parent=node, new=new, tools=tools, extends=True)
        ids = self.rendering.first([*node.messages, *new], tools)  # as we answered, not as it was sent back
        return Opening(ids=ids, parent=node, new=new, tools=tools, extends=False)

    def close(self, opening: Opening, turn: Turn, answer: ChatMessage) -> Node:
        """Record an answer: it continues the sample that it extends, or starts one."""
        parent = opening.parent
        if opening.extends and parent is not None and parent.is_tip:
            sample, parent.is_tip = parent.sample, False
        else:  # a branch, or another answer to the same node came first
            sample = self._branch(opening.ids)
        append_turn(sample, turn)
        node = Node(
            parent=parent,
            added=[*opening.new, answer],
            tools=opening.tools,
            sample=sample,
            num_ids=len(sample.prompt_ids) + len(sample.response_ids),
            num_sampled=len(turn.output_ids),
            used_tools=(parent is not None and parent.used_tools)
            or any(message.role == "tool" for message in opening.new),
        )
        (self.roots if parent is None else parent.children).append(node)
        self.nodes.append(node)
        return node

    def trained(self) -> list[Sample]:
        """The samples with a loss. Answers that no client received are masked: no agent acted on them."""
        for node in self.nodes:
            if not node.is_delivered:
                end = node.num_ids - len(node.sample.prompt_ids)
                node.sample.loss_mask[end - node.num_sampled : end] = 0
        return [sample for sample in self.samples if sample.loss_mask.any()]

    def branches(self) -> list[list[Json]]:
        """Messages of every branch: each last delivered answer with all that came before it."""
        return [
            [message.for_template() for message in node.messages]
            for node in self.nodes
            if node.is_delivered and not any(child.is_delivered for child in node.children)
        ]

    def _added(self, node: Node, new: list[ChatMessage], tools: Tools) -> IntArray | None:
        """Ids between an answer and the next one; None if the template cannot be extended by them."""
        if not self.rendering.extension.allows(new, used_tools=node.used_tools):
            return None
        try:
            return self.rendering.added(node.answer, new, tools, node.sample.response_ids[: self._end(node)])
        except PromptError:
            return None

    @staticmethod
    def _end(node: Node) -> int:
        return node.num_ids - len(node.sample.prompt_ids)

    def _branch(self, prompt_ids: IntArray) -> Sample:
        """A copy of the rollout's sample with this prompt."""
        sample = copy.copy(self.template)
        sample.metadata = copy.deepcopy(self.template.metadata)
        sample.prompt_ids = prompt_ids
        sample.version_spans, sample.sampling_spans, sample.extras = [], [], {}
        self.samples.append(sample)
        return sample

    def longest(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[Node | None, int]:
        """The node that shares most messages with these, of those that they go beyond; and that number.

        Of nodes with equal histories, one that can be extended is preferred, and one that was delivered.
        """
        best: tuple[int, bool, bool] | None = None
        found: Node | None = None
        waiting = [(node, 0) for node in self.roots]
        while waiting:
            node, start = waiting.pop()
            end = start + len(node.added)
            if end >= len(messages) or node.tools != tools:
                continue
            if same_length(node.added, messages[start:end]) < len(node.added):
                continue
            rank = (end, node.is_delivered, node.is_tip)
            if best is None or rank > best:
                best, found = rank, node
            waiting += [(child, end) for child in node.children]
        return found, 0 if best is None else best[0]

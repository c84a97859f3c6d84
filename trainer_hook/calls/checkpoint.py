"""The run's part of a trainer's checkpoint, on one rank.

Save: hub state, ring records, and the file with the tokens of running samples become plain numbers, text and
lists, saved with the model. Load: the reverse.

Invariant: all leases for copying end with the call, also if it fails.
"""

import base64
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from shm.ring.reader import RingReader
from shm.ring.words import Descriptor
from trainer_hook import messages as m
from trainer_hook.calls.kept import KeptArray, KeptGroup, KeptRecord, index_of, pack, unpack
from trainer_hook.errors import HookStateError
from trainer_hook.record import schema_fingerprint
from trainer_hook.session.session import Session

log = logging.getLogger("trainer_hook")

KEPT = "kept"
"""Key of the unfinished groups in a state: a block of `trainer_hook.calls.kept`, in base64 because every
checkpoint format can store text."""


class Checkpoints:
    """Saves and loads states."""

    def __init__(
        self,
        session: Session,
        *,
        spool_dir: str,
        limit_bytes: int,
        leads: bool,
        attach: int,
        node: tuple[int, int],
    ) -> None:
        """
        Args:
            spool_dir: folder for files to the hub; empty: the hub accepts no files.
            leads: this rank's checkpoint is used.
            attach: number of this attachment, for file names.
            node: (index of this node, number of nodes); each node has its own state.
        """
        self._session = session
        self._spool_dir = spool_dir
        self._limit_bytes = limit_bytes
        self._leads = leads
        self._node, self._num_nodes = node
        self._names = (f"kept-{attach}-{number}" for number in itertools.count())

    def take(self, *, step: int, payload: bool, interrupt: bool) -> dict[str, Any]:
        """The state before `step`."""
        session = self._session
        with session.call():
            taken = session.ask(
                lambda number: m.TakeState(request=number, step=step, payload=payload, interrupt=interrupt),
                m.StateTaken,
                waits_for="the run's state",
                timeout_s=session.wait_timeout_s,
            )
            try:
                kept = self._keep(taken)
            finally:
                sequences = [commit.sequence for commit in taken.records]
                session.connection.post(m.StateCopied(snapshot=taken.snapshot, sequences=sequences))
        state: dict[str, Any] = msgspec.to_builtins(taken.state)
        state |= {KEPT: kept}
        return state if self._num_nodes == 1 else {_key(self._node, self._num_nodes): state}

    def load(self, state: dict[str, Any] | None) -> m.StateLoaded:
        """Load a state into the run; returns the resulting position."""
        if state is not None:
            state = _part_of(state, self._node, self._num_nodes)
        kept, path, entries = "", "", list[m.KeptEntry]()
        if isinstance(state, dict):
            kept = state.get(KEPT, "")
            state = {name: value for name, value in state.items() if name != KEPT}
        run_state = None if state is None else _run_state(state)
        if kept and self._leads and self._spool_dir:
            path, entries = self._hand_over(kept)
        return self._session.ask_alone(
            lambda number: m.LoadState(request=number, state=run_state, kept_path=path, kept=entries),
            m.StateLoaded,
            timeout_s=self._session.wait_timeout_s,
        )

    # --- saving -----------------------------------------------------------------------------------

    def _keep(self, taken: m.StateTaken) -> str:
        """The block of untrained groups: finished groups first, then partial ones."""
        groups = itertools.chain(self._records(taken), _partials(taken.partials_path))
        block = pack(groups, limit_bytes=self._limit_bytes)
        num_left_out = block.num_left_out + taken.num_left_out
        if num_left_out:
            log.warning(
                "checkpoint_bounded num_kept=%d num_left_out=%d bytes=%d: groups left out restart after a "
                "load; trainer.checkpoint_bytes is the limit",
                block.num_groups,
                num_left_out,
                len(block.data),
            )
        return base64.b64encode(block.data).decode() if block.num_groups else ""

    def _records(self, taken: m.StateTaken) -> Iterator[KeptGroup]:
        schema = schema_fingerprint(self._session.columns)
        for commit in taken.records:
            arrays, head = _copy(self._session.reader, commit)
            kept = KeptRecord(schema=schema, head=head, arrays=arrays, commit=commit)
            yield KeptGroup.of(commit.group, kept)

    # --- loading ----------------------------------------------------------------------------------

    def _hand_over(self, kept: Any) -> tuple[str, list[m.KeptEntry]]:
        """Write the block to a file for the generator; returns the path and the entries."""
        try:
            block = base64.b64decode(kept, validate=True)
        except (TypeError, ValueError) as error:
            raise HookStateError(
                f'"{KEPT}" of a state must be the text that hook.state_dict() returned, found {kept!r:.40}: '
                f'remove "{KEPT}" from the state and load it again'
            ) from error
        entries = index_of(block)
        path = Path(self._spool_dir, next(self._names))
        try:
            path.write_bytes(block)
        except OSError as error:
            log.warning("kept_groups_start_anew num=%d error=%s", len(entries), error)
            path.unlink(missing_ok=True)
            return "", []
        return str(path), entries


def _key(node: int, num_nodes: int) -> str:
    """Key of a node's part of a state, in a job of several nodes."""
    return f"node{node}of{num_nodes}"


def _part_of(state: dict[str, Any], node: int, num_nodes: int) -> dict[str, Any]:
    """A node's part of a state, for the prompts of that node's shard.

    Raises:
        HookStateError: the state was saved with another number of nodes, or by another node.
    """
    parts = [match for key in state if (match := re.fullmatch(r"node(\d+)of(\d+)", key))]
    sizes = sorted({int(match[2]) for match in parts}) or [1]
    if num_nodes not in sizes:
        nodes = "1 node" if sizes == [1] else f"{sizes[0]} nodes"
        raise HookStateError(
            "a checkpoint must be loaded with the number of nodes it was saved with, because each node has "
            f"its own prompts; it was saved with {nodes}, this job has {num_nodes}: start {nodes}"
        )
    if num_nodes == 1:
        return state
    if _key(node, num_nodes) not in state:
        found = ", ".join(sorted(match[1] for match in parts))
        raise HookStateError(
            f"each node must load its own part of a checkpoint; this is node {node} of {num_nodes}, the "
            f"state is from node {found}: load the file that this node saved"
        )
    part: dict[str, Any] = state[_key(node, num_nodes)]
    return part


def _copy(reader: RingReader, commit: m.Commit) -> tuple[list[KeptArray], bytes]:
    descriptor = Descriptor(commit.incarnation, commit.sequence, commit.position, commit.length)
    with reader.open(descriptor) as record:
        return [KeptArray.of(array) for array in record.arrays], record.head


def _partials(path: str) -> Iterator[KeptGroup]:
    """Partial groups written by the generator; none if it could not write them."""
    if not path:
        return
    try:
        block = Path(path).read_bytes()
    except OSError as error:
        log.info("no_partials error=%s", error)
        return
    yield from unpack(block)


def _run_state(state: dict[str, Any]) -> m.RunState:
    try:
        return msgspec.convert(state, m.RunState)
    except msgspec.ValidationError:
        raise HookStateError(_not_a_state(state)) from None


def _not_a_state(found: object) -> str:
    """Error text for an object that is not a run state."""
    rule = "the state must come from hook.state_dict() of this release"
    if not isinstance(found, dict):
        return f"{rule}, found {type(found).__name__}"
    fields = {field.name: field.required for field in msgspec.structs.fields(m.RunState)}
    missing = [name for name, is_required in fields.items() if is_required and name not in found]
    more = [str(name) for name in found if name not in fields]
    names = [f"missing keys {', '.join(missing)}"] * bool(missing)
    names += [f"unknown keys {', '.join(more)}"] * bool(more)
    return f"{rule}, found {' and '.join(names) or 'values of wrong types'}"

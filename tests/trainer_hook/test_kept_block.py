"""A block of kept groups is read back bit for bit, or not at all."""

from pathlib import Path

import numpy as np
import pytest

from trainer_hook.calls.kept import KeptArray, KeptGroup, KeptPartial, KeptSample, index_of, pack, read
from trainer_hook.errors import HookStateError


def _partial(group: int) -> tuple[KeptPartial, KeptGroup]:
    sample = KeptSample(
        member=group % 2,
        ids=KeptArray.of(np.arange(group, group + 5, dtype=np.int32)),
        logprobs=KeptArray.of(np.linspace(-1, 0, 5, dtype=np.float32)),
        spans=[(3, 5)],
        finish=None,
    )
    kept = KeptPartial(conditions="c", samples=[sample])
    return kept, KeptGroup.of(group, kept)


def test_what_is_read_is_what_was_kept_and_a_flipped_bit_costs_its_own_group_alone(tmp_path: Path) -> None:
    first, second = _partial(7), _partial(8)
    block = bytearray(pack([first[1], second[1]], limit_bytes=1 << 20).data)
    entries = index_of(bytes(block))
    path = tmp_path / "block"
    path.write_bytes(block)
    assert [read(str(path), entry) for entry in entries] == [first[0], second[0]]

    place = block.find(first[0].samples[0].logprobs.data) + 2
    block[place] ^= 1
    path.write_bytes(block)
    with pytest.raises(ValueError, match="group 7 must match its checksum"):
        read(str(path), entries[0])
    assert read(str(path), entries[1]) == second[0]


def test_a_block_of_another_release_is_refused() -> None:
    block = pack([_partial(1)[1]], limit_bytes=1 << 20).data
    with pytest.raises(HookStateError, match='remove "kept" from the state'):
        index_of(b"FaK1" + block[4:])

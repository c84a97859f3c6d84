"""Whether what a trainer would push are the weights of the engines' model: names, shapes, types, all of them.

An engine says `success` whatever it is given: names that it does not know are skipped, and what it is not
given stays as it was. So nothing is sent before it fits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer_hook.errors import WeightsMismatch
from trainer_hook.model.index import ModelIndex, TensorKind, is_computed, is_head
from trainer_hook.model.listing import some
from trainer_hook.model.parts import ModelPart, is_sharded
from trainer_hook.model.pieces import Piece, ignored_names, pieces_of

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ROUNDED = {"F64", "F32", "F16", "BF16"}
"""Engines round one of these to another; any other type is not a number by itself."""
_FUSED_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def fitting(source: Any, index: ModelIndex | None, *, partial: bool) -> list[Piece]:
    """The pieces of `source` that go to the engines. Without an index little can be seen.

    Raises:
        TypeError: `source` has no tensors.
        WeightsMismatch: they are not the weights of the engines' model.
    """
    plain, converted = pieces_of(source)
    if index is None:
        pieces = converted or plain
        _check_experts([name for piece in pieces for name in piece.outputs])
        return pieces
    candidates = [plain] if converted is None else [converted, plain]
    pieces = min(candidates, key=lambda pieces: _num_strange(pieces, index))
    return _fitted(pieces, index.without(ignored_names(source)), partial=partial)


def check_kinds(kinds: Mapping[str, TensorKind], index: ModelIndex) -> None:
    """The same for files that somebody else has written, which must hold all weights.

    Raises:
        WeightsMismatch: they do not fit.
    """
    unknown = [name for name in kinds if name not in index.kinds and not index.may_be_left_out(name)]
    _check(unknown, kinds, index, partial=False)


def _fitted(pieces: Sequence[Piece], index: ModelIndex, *, partial: bool) -> list[Piece]:
    fitted, unknown, heads = [], [], []
    kinds: dict[str, TensorKind] = {}
    for piece in pieces:
        names = {name: _known_names(piece, name, index) for name in piece.outputs}
        strange = [name for name, known in names.items() if not known]
        if index.ties_head and any(map(is_head, strange)):
            heads.append(piece)
        elif strange and not _is_computed(piece):
            unknown += strange
        elif not strange:
            fitted.append(replace(piece, sent_as=names))
            kinds |= {k: _kind(piece.outputs[name]) for name, known in names.items() for k in known}
    _check(unknown, kinds, index, partial=partial)
    _check_tied(heads, fitted)
    return fitted


def _known_names(piece: Piece, name: str, index: ModelIndex) -> tuple[str, ...]:
    """Names of the files that a weight is sent under: its own and those of weights tied to it."""
    aliases = piece.parts[0].aliases if len(piece.outputs) == 1 else ()
    known = tuple(alias for alias in (name, *aliases) if alias in index.kinds)
    needed = tuple(alias for alias in known if not (index.ties_head and is_head(alias)))
    return needed or known[:1]


def _is_computed(piece: Piece) -> bool:
    return all(part.is_buffer or is_computed(part.name) for part in piece.parts)


def _kind(tensor: "torch.Tensor") -> TensorKind:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorKind(_DTYPES.get(dtype, dtype), tuple(tensor.shape))


def _num_strange(pieces: Sequence[Piece], index: ModelIndex) -> int:
    return sum(not _known_names(piece, name, index) for piece in pieces for name in piece.outputs)


def _check(
    unknown: Sequence[str], kinds: Mapping[str, TensorKind], index: ModelIndex, *, partial: bool
) -> None:
    missing = [name for name in index.kinds if name not in kinds and not index.may_be_left_out(name)]
    both = {name: (kind, index.kinds[name]) for name, kind in kinds.items() if name in index.kinds}
    shapes = [
        f"{name} {list(kind.shape)}, there {list(there.shape)}"
        for name, (kind, there) in both.items()
        if kind.shape != there.shape
    ]
    types = [
        f"{name} {kind.dtype}, there {there.dtype}"
        for name, (kind, there) in both.items()
        if not _rounds(kind, there)
    ]
    found = [
        f"{len(unknown)} unknown to it ({some(unknown)})" if unknown else "",
        f"{len(missing)} of its own missing ({some(missing)})" if missing and not partial else "",
        f"{len(shapes)} of another shape ({some(shapes)})" if shapes else "",
        f"{len(types)} of another type ({some(types)})" if types else "",
    ]
    if any(found):
        text = "; ".join(filter(None, found))
        way_out = _way_out(unknown, missing, index, is_short=not (unknown or shapes or types))
        raise WeightsMismatch(
            f"weights must be those of the engines' model, {index.folder}; found {text}. {way_out}. Nothing "
            "was sent."
        )
    if not kinds:
        raise WeightsMismatch(f"a push must hold weights of {index.folder}, found none of them")


def _rounds(kind: TensorKind, there: TensorKind) -> bool:
    return kind.dtype == there.dtype or {kind.dtype, there.dtype} <= _ROUNDED


def _way_out(unknown: Sequence[str], missing: Sequence[str], index: ModelIndex, *, is_short: bool) -> str:
    prefix = _common_prefix(unknown, index)
    if prefix:
        return f"These names begin with {prefix!r}, those of the files do not: push that part of your model"
    if any(name.endswith(_FUSED_EXPERTS) for name in unknown):
        return _NOT_A_MODEL
    if is_short:
        return "Push the whole model; or update.push(..., partial=True), where the others are to stay"
    return "engine.model must be the folder of the model that is trained, and the push must hold all of it"


_NOT_A_MODEL = (
    "transformers 5 keeps experts in one tensor and its files, as engines, in many: push the model itself, "
    "not its state dict, so that its names can be converted"
)


def _common_prefix(names: Sequence[str], index: ModelIndex) -> str:
    """What must be taken off in front of all names so that the files have them."""
    if not names:
        return ""
    first, length = names[0], 0
    while (length := first.find(".", length) + 1) > 0:
        if all(name.startswith(first[:length]) and name[length:] in index.kinds for name in names):
            return first[:length]
    return ""


def _check_experts(names: Sequence[str]) -> None:
    fused = [name for name in names if name.endswith(_FUSED_EXPERTS) and f"{name}_bias" not in names]
    if fused:
        raise WeightsMismatch(
            f"engines do not know the names {some(fused)}. {_NOT_A_MODEL}. Nothing was sent."
        )


def _check_tied(heads: Sequence[Piece], sent: Sequence[Piece]) -> None:
    """A head that the engines' model ties to its embedding is not sent, and so must be the same."""
    for head in heads:
        (part,) = head.parts
        tables = [piece.parts[0] for piece in sent if _is_embedding(piece)]
        if not any(_is_same(part, table) for table in tables):
            raise WeightsMismatch(
                f"the engines' model uses its embedding as {part.name}, and the trainer's "
                "is another one (tie_word_embeddings): tie them in the trainer, or sample from a model that "
                "does not. Nothing was sent."
            )


def _is_embedding(piece: Piece) -> bool:
    return "embed" in piece.parts[0].name or piece.parts[0].name.endswith("wte.weight")


def _is_same(one: ModelPart, other: ModelPart) -> bool:
    """Whether two parts hold the same numbers, as far as this rank holds them."""
    if one.combine is not None or other.combine is not None or one.meta.shape != other.meta.shape:
        return False
    mine, its = (_local(part.sources[0]) for part in (one, other))
    return mine.shape != its.shape or bool((mine == its.to(mine.device)).all())


def _local(tensor: "torch.Tensor") -> "torch.Tensor":
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]

"""Model and tokenizer: they load, and the engine and this side agree on them."""

from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.fleet.examine import text_of
from fa_rollout.client.wire.completion import Completion
from fa_rollout.config import Config, ConfigError
from fa_rollout.data.tokenizer import Tokenizer, eos_ids_in
from fa_rollout.doctor.outcome import CheckOutcome, error, ok, skipped, warning

_SHOWN = 60


def folder_of(config: Config, info: EngineInfo | None) -> str | None:
    """The tokenizer's folder, as a run finds it; None if it is not known."""
    return config.engine.tokenizer or config.engine.model or (info.model_path if info else None)


def tokenizer(folder: str | None) -> tuple[list[CheckOutcome], Tokenizer | None]:
    """Load it."""
    if folder is None:
        text = (
            "no tokenizer folder: engine.tokenizer and engine.model are not set, and no engine reported one"
        )
        return [error("tokenizer", text, "set engine.tokenizer, or start the engines")], None
    try:
        loaded = Tokenizer.load(folder)
    except ConfigError as found:
        return [error("tokenizer", str(found), "use the folder that the model was saved to")], None
    ends = ", ".join(
        f"{ident} {loaded.decode([ident], skip_special_tokens=False)!r}" for ident in loaded.eos_ids
    )
    ending = f"answers end with {ends}" if ends else "no end-of-sequence token"
    text = f"{folder}: {loaded.vocab_size:,} tokens; {ending}"
    if not loaded.eos_ids:
        fix = "set eos_token_id in generation_config.json, or every answer runs to sampling.max_new_tokens"
        return [warning("tokenizer", text, fix)], loaded
    return [ok("tokenizer", text)], loaded


def agreement(info: EngineInfo, loaded: Tokenizer) -> list[CheckOutcome]:
    """Vocabulary and end-of-sequence tokens, if the engine's model can be read here."""
    if info.vocab_size is None:
        text = (
            f"{info.model_path} cannot be read here: vocabulary and end-of-sequence tokens are not compared"
        )
        return [skipped("agreement", text)]
    if loaded.vocab_size > info.vocab_size:
        text = (
            f"the tokenizer has {loaded.vocab_size:,} tokens, but the engine's model only "
            f"{info.vocab_size:,}; larger ids can crash an engine"
        )
        return [error("agreement", text, "set engine.tokenizer to the tokenizer of the engine's model")]
    ends = eos_ids_in(str(info.model_path))
    if ends and not ends <= set(loaded.eos_ids):
        text = (
            f"the engine's model ends answers with {sorted(ends)}, the tokenizer with {list(loaded.eos_ids)}"
        )
        return [warning("agreement", text, "set engine.tokenizer to the folder of the engine's model")]
    return [
        ok(
            "agreement",
            f"the model has {info.vocab_size:,} tokens and the tokenizer's end-of-sequence tokens",
        )
    ]


def spelling(completion: Completion, loaded: Tokenizer) -> list[CheckOutcome]:
    """An engine's tokens, decoded by both."""
    theirs = text_of(completion)
    if theirs is None:
        return [skipped("spelling", "the engine has no tokenizer to compare with")]
    ours = loaded.decode(completion.output_ids)
    if ours.strip() != theirs.strip():
        text = f"the engine decodes its answer as {_shown(theirs)}, the tokenizer as {_shown(ours)}"
        return [error("spelling", text, "set engine.tokenizer to the tokenizer of the engine's model")]
    text = f"{len(completion.output_ids)} tokens decode to the same text on both sides: {_shown(ours)}"
    return [ok("spelling", text)]


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")

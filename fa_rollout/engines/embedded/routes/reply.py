"""From a request to SGLang's reply: text, token ids, log-probs, finish reason, version spans.

A reply covers the first `num_output` tokens, so that a stream's chunks and the last answer are the same code.
"""

import time
from typing import Any

from tokenizers import Tokenizer

from fa_rollout.engines.embedded.model.incremental_text import IncrementalText
from fa_rollout.engines.embedded.model.request import FinishKind, FinishReason, GenerationRequest, TopEntries


class StreamText:
    """Cumulative text of a stream."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._incremental = IncrementalText(tokenizer, skip_special_tokens=skip_special_tokens)
        self._num_seen = 0
        self._text = ""

    def upto(self, request: GenerationRequest, num_output: int) -> str:
        for token_id in request.output_ids[self._num_seen : num_output]:
            self._text += self._incremental.push(token_id)
        self._num_seen = num_output
        return self._text


class Replies:
    """Builds the replies of one server."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def build(
        self,
        request: GenerationRequest,
        num_output: int,
        *,
        is_last: bool,
        weight_version: str,
        text: StreamText | None = None,
        with_prompt_ids: bool = False,
    ) -> dict[str, Any]:
        """One completion, final or so far. `weight_version`: the label to tell if it has no token yet."""
        finish = request.finish if is_last else None
        reply: dict[str, Any] = {}
        if self.tokenizer is not None:
            if text is not None and not is_last:
                reply["text"] = text.upto(request, num_output)
            else:
                reply["text"] = self._text(request, num_output, finish)
        reply["output_ids"] = request.output_ids[:num_output]
        if with_prompt_ids:
            reply["prompt_token_ids"] = request.prompt_ids
        reply["meta_info"] = self._meta(request, num_output, finish, weight_version)
        return reply

    def _text(self, request: GenerationRequest, num_output: int, finish: FinishReason | None) -> str:
        assert self.tokenizer is not None
        ids = request.output_ids[:num_output]
        trims = finish is not None and finish.kind is FinishKind.STOP and not request.params.no_stop_trim
        matched = finish.matched if finish is not None and trims else None
        if isinstance(matched, int):
            ids = ids[:-1]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=request.params.skip_special_tokens)
        if isinstance(matched, str) and matched in text:
            text = text[: text.index(matched)]
        return text

    def _meta(
        self, request: GenerationRequest, num_output: int, finish: FinishReason | None, weight_version: str
    ) -> dict[str, Any]:
        spans = request.version_spans(num_output)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": finish_reason(finish, num_output),
            "weight_version": spans[-1]["version"] if spans else weight_version,
            "weight_versions": spans,
            "completion_tokens": num_output,
        }
        if finish is None or not finish.was_waiting:
            meta |= {
                "prompt_tokens": len(request.prompt_ids),
                "num_retractions": request.num_retractions,
                "reasoning_tokens": 0,
                "cached_tokens": request.num_cached_tokens,
                "cached_tokens_details": None,
                "dp_rank": None,
                "response_sent_to_client_ts": time.time(),
            }
        if finish is not None:
            meta["e2e_latency"] = request.finished_s - request.arrived_s
        if request.return_logprob:
            meta |= self._logprobs(request, num_output)
        return meta

    def _logprobs(self, request: GenerationRequest, num_output: int) -> dict[str, Any]:
        names = self._names if request.return_text_in_logprobs and self.tokenizer else None
        ids, logprobs = request.output_ids[:num_output], request.output_logprobs[:num_output]
        output = _items(logprobs, ids, names(ids) if names else None)
        first_input: list[Any] = []
        input_items: list[Any] = []
        if request.logprob_start is not None:
            ids = request.prompt_ids[request.logprob_start :]
            texts = names(ids) if names else None
            input_items = _items([None, *(request.input_logprobs or [])], ids, texts)
            first_input = [None]
        meta: dict[str, Any] = {
            "input_token_logprobs": input_items,
            "output_token_logprobs": output,
            "output_token_logprobs_length": num_output,
        }
        if request.num_top:
            meta["input_top_logprobs"] = first_input + self._top(request.input_top, names is not None)
            meta["output_top_logprobs"] = self._top(request.output_top[:num_output], names is not None)
        return meta

    def _top(self, top: list[TopEntries], with_text: bool) -> list[Any]:
        items = []
        for entries in top:
            ids = [token_id for _, token_id in entries]
            items.append(
                _items([value for value, _ in entries], ids, self._names(ids) if with_text else None)
            )
        return items

    def _names(self, ids: list[int]) -> list[str]:
        assert self.tokenizer is not None
        texts: list[str] = self.tokenizer.decode_batch(
            [[token_id] for token_id in ids], skip_special_tokens=False
        )
        return texts


def _items(logprobs: list[Any], ids: list[int], texts: list[str] | None) -> list[list[Any]]:
    """SGLang's items: [log-prob or null, token id, text or null]."""
    # An aborted request may not have been prefilled: then there are fewer log-probs than ids
    if texts is None:
        return [[logprob, token_id, None] for logprob, token_id in zip(logprobs, ids, strict=False)]
    return [list(item) for item in zip(logprobs, ids, texts, strict=False)]


def finish_reason(finish: FinishReason | None, num_output: int) -> dict[str, Any] | None:
    """SGLang's `finish_reason`; None while a stream goes on."""
    if finish is None:
        return None
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": num_output}
    if finish.kind is FinishKind.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.was_waiting:
        return {"type": "abort", "message": finish.message}
    return {
        "type": "abort",
        "message": finish.message,
        "status_code": finish.status_code,
        "err_type": "InternalServerError" if finish.status_code == 500 else None,
    }

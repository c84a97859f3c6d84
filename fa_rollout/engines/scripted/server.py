"""The scripted engine's HTTP endpoints: SGLang's protocol, with the script's faults.

Answers are sent from callbacks; a request that hangs costs one object, so 8,000 in flight fit one core.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from fa_rollout.engines.scripted import render
from fa_rollout.engines.scripted.core import Core
from fa_rollout.engines.scripted.decoder import Job
from fa_rollout.engines.scripted.faults import Faults
from fa_rollout.engines.scripted.generate import Request, Streams, check, jobs_of, meta_of
from fa_rollout.engines.scripted.lengths import length_source
from fa_rollout.engines.scripted.script import Recorded, Rule, Script
from fa_rollout.engines.scripted.wire import Exchange

_RECORDED = 200_000
_DECODE_GENERATE = msgspec.json.Decoder(Request).decode


class EngineServer:
    """One scripted engine."""

    def __init__(self, script: Script) -> None:
        self.recorded: deque[Recorded] = deque(maxlen=_RECORDED)
        self._is_healthy = True
        self.core = Core(script, self._deliver)
        self._streams = Streams(self.core)
        self._is_bracketed = False
        self.configure(script)
        render.warm(script.vocab_size, script.weight_version)
        self._routes: dict[tuple[str, str], Callable[[Exchange, dict[str, Any]], None]] = {
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health,
            ("GET", "/ping"): lambda e, b: e.send(200 if self._is_healthy else 503, b""),
            ("GET", "/model_info"): self._model_info,
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_server_info"): self._server_info,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/update_weights_from_tensor"): self._update_pushed,
            ("POST", "/update_weights_from_distributed"): self._update_pushed,
            ("POST", "/update_weight_version"): self._set_version,
            ("GET", "/flush_cache"): self._flush,
            ("POST", "/flush_cache"): self._flush,
        }
        if script.protocol == "0.5.23":
            self._routes |= {
                ("GET", "/ready"): lambda e, b: e.send(200 if self._is_ready() else 503, b""),
                ("POST", "/begin_weight_update"): lambda e, b: self._bracket(e, begins=True),
                ("POST", "/end_weight_update"): lambda e, b: self._bracket(e, begins=False),
            }

    async def start(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        """Nothing is left behind."""

    def configure(self, script: Script) -> None:
        """Another script from now on; requests in flight and the version label stay."""
        self.script = script
        self.faults = Faults(script.rules)
        self._next_length = length_source(script.lengths)
        self.core.configure(script)

    def state(self) -> dict[str, Any]:
        """For the handle."""
        core = self.core
        return {
            "num_running": len(core.running),
            "num_waiting": len(core.waiting),
            "num_at_door": len(core.door),
            "pause_mode": core.pause_mode,
            "weight_version": core.label,
        }

    def handle(self, exchange: Exchange) -> None:
        """Every request but the handle's own."""
        if exchange.path == "/generate":
            self._generate(exchange)
            return
        try:
            body = msgspec.json.decode(exchange.body) if exchange.body else {}
        except msgspec.DecodeError as error:
            exchange.send_json({"object": "error", "message": str(error)}, 400)
            return
        self._record(exchange, body.get("rid"), body)
        rule = self.faults.meet(exchange.path, body.get("rid"))
        route = self._routes.get((exchange.method, exchange.path))
        if route is None:
            exchange.send_json({"detail": "Not Found"}, 404)
            return
        self._obey(rule, exchange, lambda: route(exchange, body))

    def _record(
        self, exchange: Exchange, rid: str | None, body: dict[str, Any], ids: list[int] | None = None
    ) -> None:
        ids = ids or []
        self.recorded.append(
            Recorded(
                time_s=time.monotonic(),
                method=exchange.method,
                path=exchange.path,
                rid=rid,
                num_input_ids=len(ids),
                input_ids_start=ids[:16],
                routing_key=exchange.headers.get("x-smg-routing-key"),
                body=body,
            )
        )

    def _obey(self, rule: Rule | None, exchange: Exchange, work: Callable[[], None]) -> None:
        """Do what a rule says in place of, or before, the work."""
        if rule is None:
            work()
        elif rule.delay_s > 0:
            later = msgspec.structs.replace(rule, delay_s=0.0)
            asyncio.get_running_loop().call_later(rule.delay_s, self._obey, later, exchange, work)
        elif rule.exit_code is not None:
            os._exit(rule.exit_code)
        elif rule.drop == "before":
            exchange.drop()
        elif rule.status is not None or rule.body is not None:
            text = rule.body or ""
            kind = "application/json" if text.startswith(("{", "[")) else "text/plain"
            exchange.send(rule.status or 200, text.encode(), kind)
        elif not rule.silent:
            work()

    # Generation.

    def _generate(self, exchange: Exchange) -> None:
        try:
            request = _DECODE_GENERATE(exchange.body)
        except msgspec.DecodeError as error:
            exchange.send_json({"object": "error", "message": str(error)}, 400)
            return
        self._record(exchange, request.rid, request.summary(), request.input_ids)
        rule = self.faults.meet("/generate", request.rid, request.input_ids)
        self._obey(rule, exchange, lambda: self._admit(exchange, request, rule))

    def _admit(self, exchange: Exchange, request: Request, rule: Rule | None) -> None:
        complaint = check(request, self.script, self.core.known)
        if complaint is not None:
            exchange.send_json(complaint, 400)
            return
        if any(not 0 <= i < self.script.vocab_size for i in request.input_ids):
            if self.script.die_on_bad_ids:
                os._exit(1)
            exchange.send_json({"error": {"message": "input_ids out of the vocabulary"}}, 400)
            return
        if self.core.is_queue_full:
            exchange.send_json(_QUEUE_FULL, 503)
            return
        for job in jobs_of(request, rule, exchange, self._next_length):
            job.started_s = time.monotonic()
            if request.stream:
                self._streams.begin(job, request)
            exchange.on_lost = lambda job=job: self.core.disconnect(job)
            self.core.submit(job)

    def _deliver(self, job: Job, finish: dict[str, Any], num_tokens: int, in_queue: bool) -> None:
        body = self._body(job, finish, num_tokens, in_queue=in_queue)
        exchange: Exchange = job.exchange
        if job.group is not None:
            job.group.add(job, body)
        elif job.is_streamed:
            self._streams.end(job, body)
        elif job.drops_in_middle:
            exchange.send_part_and_drop(body)
        else:
            exchange.send(200, body)

    def _body(self, job: Job, finish: dict[str, Any], num_tokens: int, *, in_queue: bool) -> bytes:
        spans = self.core.spans(job, num_tokens)
        meta = meta_of(job, spans, self.script, self.core.label, num_tokens, in_queue=in_queue)
        body = render.answer(job, finish, spans, num_tokens, meta, self.script.vocab_size)
        return render.damage(body, job.corrupt) if job.corrupt else body

    # Control.

    def _health(self, exchange: Exchange, _body: dict[str, Any]) -> None:
        if self.core.pause_mode is None:
            self._is_healthy = True
            exchange.send(200, b"")
        else:
            asyncio.get_running_loop().call_later(
                self.script.health_timeout_s, self._end_health_check, exchange
            )

    def _end_health_check(self, exchange: Exchange) -> None:
        """A health check generates a token: in a pause it waits, and gives up."""
        self._is_healthy = self.core.pause_mode is None
        exchange.send(200 if self._is_healthy else 503, b"")

    def _is_ready(self) -> bool:
        return self._is_healthy and self.core.pause_mode is None

    def _model_info(self, exchange: Exchange, _body: dict[str, Any]) -> None:
        exchange.send_json(
            {
                "model_path": self.script.model_path,
                "tokenizer_path": self.script.model_path,
                "is_generation": True,
                "weight_version": self.core.label,
                "model_type": "llama",
            }
        )

    def _server_info(self, exchange: Exchange, _body: dict[str, Any]) -> None:
        exchange.send_json(
            {
                "version": self.script.protocol,
                "model_path": self.script.model_path,
                "context_length": self.script.context_length,
            }
        )

    def _abort(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if body.get("abort_all"):
            self.core.abort_all()
        elif body.get("rid"):
            self.core.abort(body["rid"])
        exchange.send(200, b"")

    def _pause(self, exchange: Exchange, body: dict[str, Any]) -> None:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            exchange.send_json({"object": "error", "message": f"unknown mode {mode!r}"}, 400)
            return
        self.core.pause(mode)
        exchange.send_json({"message": "Generation paused successfully.", "status": "ok"})

    def _continue(self, exchange: Exchange, _body: dict[str, Any]) -> None:
        self.core.go_on()
        exchange.send_json({"message": "Generation continued successfully.", "status": "ok"})

    def _bracket(self, exchange: Exchange, *, begins: bool) -> None:
        self._is_bracketed = begins
        exchange.send_json({"success": True, "message": "ok"})

    def _update_pushed(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Tensors that come over the wire; newer engines want them announced."""
        if self.script.protocol == "0.5.23" and not self._is_bracketed:
            text = "must run between /begin_weight_update and /end_weight_update."
            exchange.send_json({"success": False, "message": text}, 400)
            return
        if body.get("weight_version") is not None:
            self.core.set_label(str(body["weight_version"]))
        exchange.send_json({"success": True, "message": "Success"})

    def _update(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if body.get("abort_all_requests"):
            self.core.abort_all()
        self.core.when_free(lambda: self._load_later(exchange, body))

    def _load_later(self, exchange: Exchange, body: dict[str, Any]) -> None:
        asyncio.get_running_loop().call_later(self.script.update_s, self._load, exchange, body)

    def _load(self, exchange: Exchange, body: dict[str, Any]) -> None:
        is_paused = self.core.pause_mode is not None
        holds_cache = is_paused and body.get("flush_cache", True) and not self._can_flush()
        if holds_cache and self.script.protocol == "0.5.15":
            os._exit(1)  # a failed assertion of its scheduler
        self.script = self.core.script = msgspec.structs.replace(self.script, model_path=body["model_path"])
        if body.get("weight_version") is not None:
            self.core.set_label(str(body["weight_version"]))
        if holds_cache:
            answer = {"success": False, "message": "Cache flush failed after updating weights."}
            exchange.send_json({**answer, "num_paused_requests": 0}, 400)
        else:
            exchange.send_json(
                {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            )

    def _can_flush(self) -> bool:
        """Newer engines empty their cache in a pause although requests wait."""
        waits = self.core.waiting and (self.script.protocol == "0.5.15" or self.core.pause_mode is None)
        return not (self.core.running or waits)

    def _flush(self, exchange: Exchange, _body: dict[str, Any]) -> None:
        if self._can_flush():
            exchange.send(200, b"Cache flushed.\n", "text/plain")
        else:
            exchange.send(400, b"Flush cache failed.\n", "text/plain")

    def _set_version(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if body.get("abort_all_requests", True):
            self.core.abort_all()
        label = str(body["new_version"])
        self.core.set_label(label)
        exchange.send_json(
            {"success": True, "message": f"Weight version updated to {label}", "new_version": label}
        )


_QUEUE_FULL = {
    "object": "error",
    "message": "The request queue is full.",
    "type": "503",
    "param": None,
    "code": 503,
}

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

from tests.kit.scripted import render
from tests.kit.scripted.core import Core
from tests.kit.scripted.faults import Faults
from tests.kit.scripted.generate import Request, Streams, check, jobs_of, meta_of
from tests.kit.scripted.job import Job
from tests.kit.scripted.journal import Journal
from tests.kit.scripted.lengths import length_source
from tests.kit.scripted.oracle import ids_of_text
from tests.kit.scripted.script import Recorded, Rule, Script
from tests.kit.scripted.weights import Weights
from tests.kit.scripted.wire import Exchange

_RECORDED = 200_000
_DECODE_GENERATE = msgspec.json.Decoder(Request).decode


_PLAIN_SERVER = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "disaggregation_mode": "null",
    "enable_memory_saver": False,
}
"""What a server without any option tells of itself; slime looks at it before it takes an engine in."""


class EngineServer:
    """One scripted engine."""

    def __init__(self, script: Script) -> None:
        self.recorded: deque[Recorded] = deque(maxlen=_RECORDED)
        self._is_healthy = True
        self.core = Core(script, self._deliver)
        self._first_path = script.model_path
        self._journal = None if script.journal is None else Journal(script.journal)
        self._streams = Streams(self.core)
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
            **Weights(self.core).routes(),
        }
        if script.protocol == "0.5.23":
            self._routes |= {
                ("GET", "/ready"): lambda e, b: e.send(200 if self._is_ready() else 503, b""),
            }

    @property
    def script(self) -> Script:
        """What it is told to do now."""
        return self.core.script

    async def start(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        """Nothing is left behind."""
        if self._journal is not None:
            self._journal.close()

    def configure(self, script: Script) -> None:
        """Another script from now on; requests in flight and the version label stay."""
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
            is_known = any(path == exchange.path for _, path in self._routes)
            detail, status = ("Method Not Allowed", 405) if is_known else ("Not Found", 404)
            exchange.send_json({"detail": detail}, status)
            return
        if rule is not None and rule.is_done:
            route(exchange.unanswered(), body)
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
        elif rule.endless:
            exchange.send_endless()
        elif rule.status is not None or rule.body is not None or rule.gzip_bytes is not None:
            render.send_said(exchange, rule)
        elif not rule.silent:
            work()

    # Generation.

    def _generate(self, exchange: Exchange) -> None:
        try:
            request = _DECODE_GENERATE(exchange.body)
        except msgspec.DecodeError as error:
            exchange.send_json({"object": "error", "message": str(error)}, 400)
            return
        if request.text and not request.input_ids:
            request.input_ids = ids_of_text(request.text, self.script.vocab_size)
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
        if self._journal is not None:
            self._journal.write(job, render.cut_spans(spans, num_tokens), body)
        return render.retold(body, job.rule) if job.rule is not None else body

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
                "tokenizer_path": self.script.tokenizer_path or self._first_path,
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
                "enable_return_routed_experts": self.script.experts is not None,
                **_PLAIN_SERVER,
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


_QUEUE_FULL = {
    "object": "error",
    "message": "The request queue is full.",
    "type": "503",
    "param": None,
    "code": 503,
}

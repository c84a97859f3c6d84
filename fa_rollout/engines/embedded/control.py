"""The HTTP routes that change the engine: pause and continue, weights and their version, the cache."""

import asyncio
import base64
import binascii
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from fa_rollout.engines.embedded.about import Served
from fa_rollout.engines.embedded.engine import PauseMode
from fa_rollout.engines.embedded.errors import RequestRefused, WeightsRefused
from fa_rollout.engines.embedded.frontend import Frontend
from fa_rollout.engines.embedded.http import json_response, read_body
from fa_rollout.engines.embedded.weights import WeightUpdate, read_bytes, read_checkpoint


class PauseBody(msgspec.Struct, frozen=True):
    mode: PauseMode = PauseMode.ABORT


class DiskBody(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class TensorBody(msgspec.Struct, frozen=True, kw_only=True):
    serialized_named_tensors: list[str]
    """Base64 of safetensors bytes, one entry."""
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


class Control:
    """Handlers over a frontend."""

    def __init__(self, frontend: Frontend, served: Served) -> None:
        self._frontend = frontend
        self._engine = frontend.engine
        self._served = served

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/update_weights_from_disk", self.update_from_disk),
            web.post("/update_weights_from_tensor", self.update_from_tensor),
            web.post("/begin_weight_update", self.accept),
            web.post("/end_weight_update", self.accept),
            web.post("/update_weight_version", self.update_version),
            web.post("/flush_cache", self.flush_cache),
            web.get("/flush_cache", self.flush_cache),
        ]

    async def pause(self, request: web.Request) -> web.Response:
        body = await read_body(request, PauseBody)
        await self._frontend.call(lambda: self._engine.pause(body.mode))
        return json_response({"message": f"Generation paused ({body.mode}).", "status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        await self._frontend.call(self._engine.resume)
        return json_response({"message": "Generation continued.", "status": "ok"})

    async def update_from_disk(self, request: web.Request) -> web.Response:
        body = await read_body(request, DiskBody)
        try:
            _check_format(body.load_format)
            # Read beside the running engine; only the copy into the model stops it
            tensors = await asyncio.to_thread(read_checkpoint, Path(body.model_path))
            update = WeightUpdate(tensors=tensors, version=body.weight_version)
            await asyncio.to_thread(self._engine.check_weights, update, allow_partial=False)
            num_paused = await self._apply(update, body)
        except (WeightsRefused, RequestRefused) as error:
            failure = {"success": False, "message": str(error), "num_paused_requests": 0}
            return json_response(failure, status=400)
        self._served.model_path = body.model_path
        return json_response(
            {
                "success": True,
                "message": "Succeeded to update model weights.",
                "num_paused_requests": num_paused,
            }
        )

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """As SGLang's, but the tensors are safetensors bytes, since theirs are a pickle."""
        body = await read_body(request, TensorBody)
        try:
            _check_format(body.load_format)
            tensors = await asyncio.to_thread(_decode_tensors, body.serialized_named_tensors)
            update = WeightUpdate(tensors=tensors, version=body.weight_version)
            await asyncio.to_thread(self._engine.check_weights, update, allow_partial=True)
            await self._apply(update, body)
        except (WeightsRefused, RequestRefused) as error:
            return json_response({"success": False, "message": str(error)}, status=400)
        return json_response({"success": True, "message": "Success"})

    async def _apply(self, update: WeightUpdate, body: DiskBody | TensorBody) -> int:
        if body.abort_all_requests:
            self._frontend.abort_all()
        done = await self._frontend.call(
            lambda: self._engine.update_weights(update, flush_cache=body.flush_cache)
        )
        return await asyncio.wrap_future(done)

    async def accept(self, _: web.Request) -> web.Response:
        """SGLang from 0.5.21 on brackets tensor updates; here each is whole by itself."""
        return json_response({"success": True, "message": "Success"})

    async def update_version(self, request: web.Request) -> web.Response:
        body = await read_body(request, VersionBody)
        if body.abort_all_requests:
            self._frontend.abort_all()
        await self._frontend.call(lambda: self._engine.set_weight_version(body.new_version))
        return json_response(
            {
                "success": True,
                "message": f"Weight version updated to {body.new_version}",
                "new_version": body.new_version,
            }
        )

    async def flush_cache(self, _: web.Request) -> web.Response:
        if await self._frontend.call(self._engine.flush_cache):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed: requests are running.\n", status=400)


def _check_format(load_format: str | None) -> None:
    if load_format not in (None, "auto", "safetensors"):
        raise WeightsRefused(f"load_format must be auto or safetensors, got {load_format}.")


def _decode_tensors(serialized: list[str]) -> dict[str, Any]:
    if len(serialized) != 1:
        raise WeightsRefused(
            f"serialized_named_tensors must have one entry, as this engine has no tensor parallelism; got "
            f"{len(serialized)}."
        )
    try:
        return read_bytes(base64.b64decode(serialized[0], validate=True))
    except binascii.Error as error:
        raise WeightsRefused(f"serialized_named_tensors must be base64: {error}.") from error

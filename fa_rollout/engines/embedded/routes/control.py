"""The HTTP routes that change the engine: pause and continue, weights and their version, the cache."""

import asyncio
import os
from pathlib import Path

import msgspec
from aiohttp import web

from fa_rollout.engines.embedded.engine.applying import Applying
from fa_rollout.engines.embedded.engine.engine import PauseMode
from fa_rollout.engines.embedded.engine.frontend import Frontend
from fa_rollout.engines.embedded.errors import RefusedRequest, WeightsRefused
from fa_rollout.engines.embedded.model.weights import read_checkpoint
from fa_rollout.engines.embedded.routes.about import Served
from fa_rollout.engines.embedded.routes.http import json_response, read_body
from fa_rollout.engines.embedded.routes.pieces import Pieces


class PauseBody(msgspec.Struct, frozen=True):
    mode: PauseMode = PauseMode.ABORT


class DiskBody(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


class NameBody(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    truncate_size: int = 100


class Control:
    """Handlers over a frontend."""

    def __init__(self, frontend: Frontend, served: Served) -> None:
        self._frontend = frontend
        self._applying = Applying(frontend)
        self._pieces = Pieces(self._applying, frontend.engine.check_shapes)
        self._engine = frontend.engine
        self._served = served
        self._owners = {os.geteuid(), os.stat(served.model_path).st_uid}
        """Whose files may be loaded."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/update_weights_from_disk", self.update_from_disk),
            *self._pieces.routes(),
            web.post("/update_weight_version", self.update_version),
            web.post("/flush_cache", self.flush_cache),
            web.get("/flush_cache", self.flush_cache),
            web.post("/get_weights_by_name", self.get_weights),
            web.get("/get_weights_by_name", self.get_weights),
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
            tensors = await asyncio.to_thread(read_checkpoint, Path(body.model_path), self._owners)
            num_paused = await self._applying.apply(
                tensors,
                version=body.weight_version,
                flush_cache=body.flush_cache,
                abort_all=body.abort_all_requests,
            )
        except (WeightsRefused, RefusedRequest) as error:
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

    async def get_weights(self, request: web.Request) -> web.Response:
        """The first rows of a parameter, as numbers."""
        body = await read_body(request, NameBody)
        tensor = self._engine.weight(body.name)
        if tensor is None:
            return json_response({"error": {"message": "Get parameter by name failed"}}, status=400)
        rows = await self._frontend.call(lambda: tensor[: body.truncate_size].float().tolist())
        return json_response(rows)

    async def flush_cache(self, _: web.Request) -> web.Response:
        if await self._frontend.call(self._engine.flush_cache):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed: requests are running.\n", status=400)


def _check_format(load_format: str | None) -> None:
    if load_format not in (None, "auto", "safetensors"):
        raise WeightsRefused(f"load_format must be auto or safetensors, got {load_format}.")

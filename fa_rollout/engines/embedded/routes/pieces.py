"""The HTTP routes by which weights come piece by piece, in requests or by broadcasts.

As SGLang from 0.5.21 on: pieces come between `/begin_weight_update` and `/end_weight_update`, one session at
a time, and each is copied into the model as it comes.
"""

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping

import msgspec
import torch
from aiohttp import web

from fa_rollout.engines.embedded.engine.applying import Applying
from fa_rollout.engines.embedded.errors import RefusedRequest, WeightsRefused
from fa_rollout.engines.embedded.routes.groups import GroupBody, Groups
from fa_rollout.engines.embedded.routes.http import json_response, read_body
from fa_rollout.engines.embedded.routes.tensor_pickle import read_tensors

_OUTSIDE = "must run between begin_weight_update() and end_weight_update()"


class TensorsBody(msgspec.Struct, frozen=True, kw_only=True):
    serialized_named_tensors: list[str]
    """Base64 of a pickled list of (name, tensor), one entry."""
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class BroadcastBody(msgspec.Struct, frozen=True, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class GroupName(msgspec.Struct, frozen=True):
    group_name: str = "weight_update_group"


class Pieces:
    """Handlers over what applies weights."""

    def __init__(self, applying: Applying, check_shapes: Callable[[Mapping[str, list[int]]], None]) -> None:
        self._applying = applying
        self._check_shapes = check_shapes
        self._groups = Groups()
        self._is_open = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/begin_weight_update", self.begin),
            web.post("/end_weight_update", self.end),
            web.post("/update_weights_from_tensor", self.update_from_tensor),
            web.post("/init_weights_update_group", self.init_group),
            web.post("/update_weights_from_distributed", self.update_from_distributed),
            web.post("/destroy_weights_update_group", self.destroy_group),
        ]

    async def begin(self, _: web.Request) -> web.Response:
        if self._is_open:
            return _failed("a weight-update session is already open; call end_weight_update() first")
        self._is_open = True
        return _succeeded("Success")

    async def end(self, _: web.Request) -> web.Response:
        if not self._is_open:
            return _failed("no weight-update session is open; call begin_weight_update() first")
        self._is_open = False
        return _succeeded("Success")

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        body = await read_body(request, TensorsBody)
        if not self._is_open:
            return _failed(f"update_weights_from_tensor {_OUTSIDE}")
        try:
            _check_format(body.load_format)
            await self._apply(await asyncio.to_thread(_decode, body.serialized_named_tensors), body)
        except (WeightsRefused, RefusedRequest) as error:
            return _failed(str(error))
        return _succeeded("Success")

    async def update_from_distributed(self, request: web.Request) -> web.Response:
        body = await read_body(request, BroadcastBody)
        if not self._is_open:
            return _failed(f"update_weights_from_distributed {_OUTSIDE}")
        try:
            _check_format(body.load_format)
            if not len(body.names) == len(body.dtypes) == len(body.shapes):
                raise WeightsRefused("names, dtypes and shapes must be of one length.")
            self._check_shapes(
                dict(zip(body.names, body.shapes, strict=True))
            )  # before there is room for them
            tensors = await self._groups.receive(body.group_name, body.names, body.dtypes, body.shapes)
            await self._apply(tensors, body)
        except (WeightsRefused, RefusedRequest) as error:
            return _failed(str(error))
        return _succeeded("Succeeded to update parameter online.")

    async def init_group(self, request: web.Request) -> web.Response:
        body = await read_body(request, GroupBody)
        try:
            await self._groups.join(body)
        except WeightsRefused as error:
            return _failed(str(error))
        return _succeeded("Succeeded to initialize custom process group.")

    async def destroy_group(self, request: web.Request) -> web.Response:
        body = await read_body(request, GroupName)
        if await self._groups.leave(body.group_name):
            return _succeeded("Succeeded to destroy custom process group.")
        return _failed("The group to be destroyed does not exist.")

    async def _apply(self, tensors: dict[str, torch.Tensor], body: TensorsBody | BroadcastBody) -> None:
        await self._applying.apply(
            tensors,
            version=body.weight_version,
            flush_cache=body.flush_cache,
            abort_all=body.abort_all_requests,
        )


def _check_format(load_format: str | None) -> None:
    if load_format is not None:
        raise WeightsRefused(f"load_format must be left out here, got {load_format}.")


def _decode(serialized: list[str]) -> dict[str, torch.Tensor]:
    if len(serialized) != 1:
        raise WeightsRefused(
            f"serialized_named_tensors must have one entry, as this engine has no tensor parallelism; got "
            f"{len(serialized)}."
        )
    try:
        return read_tensors(base64.b64decode(serialized[0], validate=True))
    except binascii.Error as error:
        raise WeightsRefused(f"serialized_named_tensors must be base64: {error}.") from error


def _succeeded(message: str) -> web.Response:
    return json_response({"success": True, "message": message})


def _failed(message: str) -> web.Response:
    return json_response({"success": False, "message": message}, status=400)

"""The HTTP routes that tell how things are: health, model, server, load.

None of them waits for the engine, except `/health_generate`, which asks for a token.
"""

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from fa_rollout.engines.embedded.engine.frontend import Frontend
from fa_rollout.engines.embedded.engine.scheduler import Limits
from fa_rollout.engines.embedded.routes.http import json_response
from fa_rollout.engines.embedded.routes.protocol import ModelLimits, parse_generate
from fa_rollout.version import __version__

HEALTH_TIMEOUT_S = 20.0


@dataclass(slots=True, kw_only=True)
class Served:
    """What a server tells of its model; weight updates change the path."""

    model_path: str
    model: ModelLimits
    limits: Limits
    arguments: dict[str, Any]
    started_s: float = field(default_factory=time.monotonic)
    created_at: int = field(default_factory=lambda: int(time.time()))


class About:
    """Handlers over a frontend."""

    def __init__(self, frontend: Frontend, served: Served) -> None:
        self._frontend = frontend
        self._served = served

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.get("/ping", self.health),
            web.get("/ready", self.ready),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/v1/loads", self.loads),
            web.get("/get_load", self.load),
            web.get("/v1/models", self.models),
        ]

    async def health(self, _: web.Request) -> web.Response:
        """200 while the engine's thread lives; asks nothing of it, also when paused."""
        return web.Response(status=200 if self._frontend.is_alive else 503)

    async def ready(self, _: web.Request) -> web.Response:
        is_ready = self._frontend.is_alive and self._frontend.engine.pause_mode is None
        return web.Response(status=200 if is_ready else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """Generate one token; 503 at once while paused, and after 20 s."""
        if not self._frontend.is_alive or self._frontend.engine.pause_mode is not None:
            return web.Response(status=503)
        body = msgspec.json.encode(
            {
                "rid": f"HEALTH_CHECK_{time.monotonic_ns()}",
                "input_ids": [0],
                "sampling_params": {"max_new_tokens": 1},
            }
        )
        tickets = self._frontend.submit(parse_generate(body, self._served.model, None).requests)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await tickets[0].progress()
        except TimeoutError:
            return web.Response(status=503)
        finally:
            self._frontend.abort(tickets)
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        return json_response(
            {
                "model_path": self._served.model_path,
                "tokenizer_path": self._served.arguments["model"],
                "is_generation": True,
                "weight_version": self._frontend.engine.weight_version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._served.arguments["model_type"],
                "architectures": self._served.arguments["architectures"],
                "vocab_size": self._served.model.vocab_size,
                "context_length": self._served.model.context_length,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        return json_response(
            {
                **self._served.arguments,
                "dtype": "float32",
                "engine": "fa_rollout.embedded",
                "version": __version__,
                "model_path": self._served.model_path,
                "served_model_name": self._served.model_path,
                "weight_version": self._frontend.engine.weight_version,
                "context_length": self._served.model.context_length,
                "max_total_num_tokens": self._served.limits.max_total_tokens,
                "max_running_requests": self._served.limits.max_running_requests,
                "uptime_s": time.monotonic() - self._served.started_s,
                "internal_states": [msgspec.to_builtins(self._frontend.engine.statistics())],
            }
        )

    async def loads(self, _: web.Request) -> web.Response:
        statistics, limits = self._frontend.engine.statistics(), self._served.limits
        used = statistics.num_used_tokens
        load = {
            "dp_rank": 0,
            "num_running_reqs": statistics.num_running,
            "num_waiting_reqs": statistics.num_waiting,
            "num_waiting_uncached_tokens": statistics.num_waiting_tokens,
            "num_used_tokens": used,
            "num_total_tokens": used + statistics.num_waiting_tokens,
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running_requests,
            "token_usage": round(used / limits.max_total_tokens, 4),
            "gen_throughput": round(statistics.tokens_per_s, 2),
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
        }
        now = datetime.now(UTC).isoformat()
        return json_response({"timestamp": now, "version": __version__, "loads": [load]})

    async def load(self, _: web.Request) -> web.Response:
        statistics = self._frontend.engine.statistics()
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": statistics.num_running + statistics.num_waiting,
                    "num_waiting_reqs": statistics.num_waiting,
                    "num_tokens": statistics.num_used_tokens + statistics.num_waiting_tokens,
                }
            ]
        )

    async def models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._served.model_path,
            "object": "model",
            "created": self._served.created_at,
            "owned_by": "fa_rollout",
            "root": self._served.model_path,
            "parent": None,
            "max_model_len": self._served.model.context_length,
        }
        return json_response({"object": "list", "data": [model]})

"""The scripted engine's weights: updates, their announcement, their label, and the cache they make stale.

Weights are a label; what an update under held requests does is what SGLang of each age does.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.kit.scripted.core import Core
from tests.kit.scripted.float_rows import first_rows
from tests.kit.scripted.wire import Exchange

Route = Callable[[Exchange, dict[str, Any]], None]


class Weights:
    """Handlers over a core."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._is_bracketed = False

    def routes(self) -> dict[tuple[str, str], Route]:
        """By method and path."""
        routes: dict[tuple[str, str], Route] = {
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/update_weights_from_tensor"): self._update_pushed,
            ("POST", "/update_weights_from_distributed"): self._update_pushed,
            ("POST", "/init_weights_update_group"): self._join_or_leave,
            ("POST", "/destroy_weights_update_group"): self._join_or_leave,
            ("POST", "/update_weight_version"): self._set_version,
            ("POST", "/get_weights_by_name"): self._read,
            ("GET", "/flush_cache"): self._flush,
            ("POST", "/flush_cache"): self._flush,
        }
        if self._is_new:
            routes[("POST", "/begin_weight_update")] = lambda e, b: self._bracket(e, begins=True)
            routes[("POST", "/end_weight_update")] = lambda e, b: self._bracket(e, begins=False)
        return routes

    @property
    def _is_new(self) -> bool:
        return self.core.script.protocol == "0.5.23"

    def _bracket(self, exchange: Exchange, *, begins: bool) -> None:
        if self._is_bracketed is begins:
            text = "a weight-update session is already open" if begins else "no weight-update session is open"
            exchange.send_json({"success": False, "message": text}, 400)
            return
        self._is_bracketed = begins
        exchange.send_json({"success": True, "message": "ok"})

    def _join_or_leave(self, exchange: Exchange, _body: dict[str, Any]) -> None:
        """There is nobody to meet: weights are a label."""
        exchange.send_json({"success": True, "message": "Success"})

    def _update_pushed(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Tensors that come over the wire; newer engines want them announced."""
        if self._is_new and not self._is_bracketed:
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
        asyncio.get_running_loop().call_later(self.core.script.update_s, self._load, exchange, body)

    def _load(self, exchange: Exchange, body: dict[str, Any]) -> None:
        is_paused = self.core.pause_mode is not None
        holds_cache = is_paused and body.get("flush_cache", True) and not self._can_flush()
        if holds_cache and not self._is_new:
            os._exit(1)  # a failed assertion of its scheduler
        self.core.script = msgspec.structs.replace(self.core.script, model_path=body["model_path"])
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
        waits = self.core.waiting and (not self._is_new or self.core.pause_mode is None)
        return not (self.core.running or waits)

    def _flush(self, exchange: Exchange, _body: dict[str, Any]) -> None:
        if self._can_flush():
            exchange.send(200, b"Cache flushed.\n", "text/plain")
        else:
            exchange.send(400, b"Flush cache failed.\n", "text/plain")

    def _read(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """The first rows of a weight as the folder that was loaded last has it."""
        rows = first_rows(
            Path(self.core.script.model_path), str(body["name"]), body.get("truncate_size", 100)
        )
        if rows is None:
            exchange.send_json({"error": {"message": "Get parameter by name failed"}}, 400)
        else:
            exchange.send_json(rows)

    def _set_version(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if body.get("abort_all_requests", True):
            self.core.abort_all()
        label = str(body["new_version"])
        self.core.set_label(label)
        exchange.send_json(
            {"success": True, "message": f"Weight version updated to {label}", "new_version": label}
        )

"""The scripted router: SGLang's router as clients see it.

It passes /generate on, unless told otherwise without the keys that it does not know, tries again under the
same id if told to, answers 503 while no worker is healthy, and has no control endpoints. Workers come and
go by /workers.
"""

import asyncio
import time
from collections import deque
from itertools import count
from typing import Any

import aiohttp
import msgspec

from tests.kit.scripted.faults import Faults
from tests.kit.scripted.script import Recorded, Script
from tests.kit.scripted.wire import Exchange

_KEPT = frozenset(
    {
        "rid",
        "text",
        "input_ids",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "stream",
        "return_hidden_states",
        "session_params",
        "extra_key",
        "priority",
        "custom_logit_processor",
        "custom_labels",
        "lora_path",
    }
)
_RETRIED = (408, 429, 500)
_UNAVAILABLE = {
    "error": {
        "type": "Service Unavailable",
        "code": "no_available_workers",
        "message": "No available workers (all circuits open or unhealthy)",
    }
}


class RouterServer:
    """A round-robin router over workers."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.faults = Faults(script.rules)
        self.recorded: deque[Recorded] = deque(maxlen=200_000)
        self._workers = {f"worker-{place}": url for place, url in enumerate(script.workers)}
        self._ids = count(len(self._workers))
        self._healthy = set(script.workers)
        self._turn = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Connections to the workers, and the health checks."""
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        if self.script.router_health_s > 0:
            self._spawn(self._watch_health())

    async def aclose(self) -> None:
        """End what runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def configure(self, script: Script) -> None:
        """Another script from now on."""
        if script.workers != self.script.workers:
            self._workers = {f"worker-{next(self._ids)}": url for url in script.workers}
        self.script = script
        self.faults = Faults(script.rules)
        urls = set(self._workers.values())
        self._healthy &= urls
        self._healthy |= set() if script.router_health_s > 0 else urls

    def state(self) -> dict[str, Any]:
        """For the handle."""
        return {"healthy": sorted(self._healthy)}

    def handle(self, exchange: Exchange) -> None:
        """Every request but the handle's own."""
        body = msgspec.json.decode(exchange.body) if exchange.body else {}
        self._record(exchange, body)
        rule = self.faults.meet(exchange.path, body.get("rid"), body.get("input_ids") or ())
        if rule is not None and rule.status is not None:
            exchange.send(rule.status, (rule.body or "").encode())
        elif (exchange.method, exchange.path) == ("POST", "/generate"):
            self._spawn(self._forward(exchange, body))
        elif (exchange.method, exchange.path) == ("GET", "/workers"):
            exchange.send_json(self._list())
        elif (exchange.method, exchange.path) == ("POST", "/workers"):
            self._add(exchange, body["url"])
        elif exchange.method == "DELETE" and exchange.path.startswith("/workers/"):
            self._remove(exchange, exchange.path.removeprefix("/workers/"))
        elif exchange.path in ("/health", "/readiness"):
            exchange.send_json({"status": "ready"}, 200 if self._healthy else 503)
        else:
            exchange.send(404, b"")

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _record(self, exchange: Exchange, body: dict[str, Any]) -> None:
        ids = body.get("input_ids") or []
        self.recorded.append(
            Recorded(
                time_s=time.monotonic(),
                method=exchange.method,
                path=exchange.path,
                rid=body.get("rid"),
                num_input_ids=len(ids),
                input_ids_start=ids[:16],
                routing_key=exchange.headers.get("x-smg-routing-key"),
                body={key: value for key, value in body.items() if key != "input_ids"},
            )
        )

    def _add(self, exchange: Exchange, url: str) -> None:
        """Accepted at once, and listed when the worker has answered, as SGLang's router does."""
        name = f"worker-{next(self._ids)}"
        self._spawn(self._let_in(name, url))
        exchange.send_json({"status": "accepted", "worker_id": name, "url": url}, 202)

    async def _let_in(self, name: str, url: str) -> None:
        while url not in self._healthy:
            await self._look_at(url)
            await asyncio.sleep(0.05)
        self._workers[name] = url

    def _remove(self, exchange: Exchange, name: str) -> None:
        url = self._workers.pop(name, None)
        self._healthy.discard(url or "")
        exchange.send_json({"status": "accepted", "worker_id": name}, 202 if url else 404)

    def _list(self) -> dict[str, Any]:
        workers = [
            {
                "id": name,
                "url": url,
                "model_id": "unknown",
                "worker_type": "regular",
                "is_healthy": url in self._healthy,
                "load": 0,
                "connection_mode": "HTTP",
            }
            for name, url in self._workers.items()
        ]
        return {"workers": workers, "total": len(workers)}

    async def _forward(self, exchange: Exchange, body: dict[str, Any]) -> None:
        drops = self.script.router_drops
        kept = {key: value for key, value in body.items() if not drops or key in _KEPT}
        payload = msgspec.json.encode({**kept, "model": None, "log_metrics": True})
        status, answer = 503, msgspec.json.encode(_UNAVAILABLE)
        for _ in range(1 + self.script.router_retries):
            healthy = [url for url in self._workers.values() if url in self._healthy]
            if not healthy:
                break
            worker = healthy[next(self._turn) % len(healthy)]
            status, answer = await self._ask(worker, payload, exchange.headers)
            if status not in _RETRIED:
                break
        exchange.send(status, answer)

    async def _ask(self, worker: str, payload: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        assert self._session is not None, "start comes first"
        sent = {"Content-Type": "application/json"}
        if "x-smg-routing-key" in headers:
            sent["X-SMG-Routing-Key"] = headers["x-smg-routing-key"]
        try:
            async with self._session.post(f"{worker}/generate", data=payload, headers=sent) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            return 502, msgspec.json.encode({"error": {"message": str(error)}})

    async def _watch_health(self) -> None:
        while True:
            await asyncio.gather(*(self._look_at(url) for url in self._workers.values()))
            await asyncio.sleep(self.script.router_health_s)

    async def _look_at(self, url: str) -> None:
        assert self._session is not None, "start comes first"
        timeout = aiohttp.ClientTimeout(total=max(0.5, self.script.router_health_s))
        try:
            async with self._session.get(f"{url}/health", timeout=timeout) as response:
                is_healthy = response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            is_healthy = False
        (self._healthy.add if is_healthy else self._healthy.discard)(url)

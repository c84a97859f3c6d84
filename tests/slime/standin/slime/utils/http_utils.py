"""`post` looks its worker up when it is called, so that it can be replaced."""

from typing import Any


def init_http_client(args: Any) -> None:
    if args.use_distributed_post:
        raise RuntimeError("distributed posts need Ray")


def get_rollout_num_engines(args: Any) -> int:
    return int(args.rollout_num_engines)


async def _post(client: Any, url: str, payload: Any, max_retries: int = 60, headers: Any = None) -> Any:
    raise RuntimeError("the stand-in has no client of its own")


async def post(url: str, payload: Any, max_retries: int = 60, headers: Any = None) -> Any:
    return await _post(None, url, payload, max_retries, headers=headers)

"""Process groups with trainers, from which broadcast weights come.

In: where a group meets, and what it sends. Out: tensors. Invariant: a wait of torch's, which nothing can
interrupt, holds up neither the event loop nor the end of the process.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import torch

from fa_rollout.engines.embedded.errors import WeightsRefused
from trainer_hook.weights.update_group import UpdateGroup, find_store

T = TypeVar("T")


class GroupBody(msgspec.Struct, frozen=True, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class Groups:
    """The groups that this engine is a member of, by their names."""

    def __init__(self) -> None:
        self._groups: dict[str, UpdateGroup] = {}

    async def join(self, body: GroupBody) -> None:
        """Raises WeightsRefused when the others do not come."""
        if body.backend != "gloo":
            raise WeightsRefused(f"backend must be gloo, since this engine is on a CPU; got {body.backend}.")
        if body.group_name in self._groups:
            raise WeightsRefused(f"a group {body.group_name} exists already: destroy it first.")

        def meet() -> UpdateGroup:
            place = {"rank": body.rank_offset, "world_size": body.world_size}
            store = find_store(body.master_address, body.master_port, **place)
            return UpdateGroup.join(
                store, address=body.master_address, name=body.group_name, backend=body.backend, **place
            )

        self._groups[body.group_name] = await _apart(meet, "Failed to initialize custom process group")

    async def receive(
        self, name: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> dict[str, torch.Tensor]:
        """The tensors that rank 0 of the group broadcasts now, in this order.

        Raises:
            WeightsRefused: there is no such group, or it broke.
        """
        group = self._groups.get(name)
        if group is None:
            raise WeightsRefused(
                f"Group {name} not in {sorted(self._groups)}. Please call init_weights_update_group first."
            )
        tensors = {
            tensor_name: torch.empty(shape, dtype=_dtype(dtype))
            for tensor_name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        }

        def receive() -> None:
            for work in [group.broadcast(tensor) for tensor in tensors.values()]:
                work.wait()

        await _apart(receive, "Failed to receive weights")
        return {tensor_name: tensor.to(torch.float32) for tensor_name, tensor in tensors.items()}

    async def leave(self, name: str) -> bool:
        """False when there is no such group."""
        group = self._groups.pop(name, None)
        if group is not None:
            await _apart(group.leave, "Failed to destroy custom process group")
        return group is not None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsRefused(f"dtypes must be torch's, got {name}.")
    return dtype


async def _apart(work: Callable[[], T], failure: str) -> T:
    """Do it in a thread that the process does not wait for at its end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # handed to who waits
            done.set_exception(error)

    done.set_running_or_notify_cancel()  # so that a waiter who is cancelled leaves it as it is
    threading.Thread(target=run, name="group", daemon=True).start()
    waiter: asyncio.Future[Any] = asyncio.wrap_future(done)
    try:
        result: T = await waiter
    except RuntimeError as error:
        raise WeightsRefused(f"{failure}: {error}") from error
    return result

"""The ring as pinned memory, with a GPU and without."""

import os

import pytest
import torch

from shm.ring.segment import Segment
from trainer_hook.batches.pinned import PORTABLE, READ_ONLY, pin, register


class Driver:
    """A CUDA runtime that writes down what it is asked, and answers with a given code."""

    def __init__(self, code: int = 0) -> None:
        self._code = code
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, num_bytes, flags))
        return self._code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self._code


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")
def test_without_a_gpu_nothing_is_pinned_and_nothing_fails() -> None:
    with Segment.create(1 << 16) as segment:
        assert pin(segment) is None


@pytest.mark.parametrize(("writable", "flags"), [(True, PORTABLE), (False, PORTABLE | READ_ONLY)])
def test_a_map_is_registered_whole_and_unregistered_once_after_its_copies(writable: bool, flags: int) -> None:
    driver = Driver()
    with Segment.create(1 << 16) as made:
        segment = Segment.attach(os.dup(made.fd), writable=writable)
        address = segment.address
        pinned = register(driver, segment, lambda: driver.calls.append(("synchronize",)))
        assert pinned is not None
        with pinned:
            assert driver.calls == [("register", address, 1 << 16, flags)]
        pinned.close()
        assert driver.calls[1:] == [("synchronize",), ("unregister", address)]
        segment.close()


def test_a_driver_that_refuses_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    with Segment.create(1 << 16) as segment:
        assert register(Driver(code=801), segment, torch.cuda.synchronize) is None
    assert "ring_not_pinned cuda_error=801" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pinned_ring_is_copied_from_without_staging() -> None:
    with Segment.create(1 << 20) as segment:
        segment.array[:] = 7
        pinned = pin(segment)
        assert pinned is not None
        with pinned:
            tensor = torch.from_numpy(segment.array)
            assert tensor.is_pinned()
            assert int(tensor.to("cuda", non_blocking=True).sum()) == 7 << 20

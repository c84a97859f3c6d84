"""Addresses, ids, event streams, policy, circuits, windows: the client's pure parts."""

import pickle
import resource
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from fa_rollout.client.base import errors
from fa_rollout.client.base.circuit import Circuit, Window
from fa_rollout.client.base.descriptors import RESERVE
from fa_rollout.client.base.errors import FailureClass
from fa_rollout.client.base.policy import FailurePolicy, backoff_s, classify_status
from fa_rollout.client.wire.address import AddressError, engine_url
from fa_rollout.client.wire.request import WireIds, generate_body


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("::1", "http://[::1]:30000"),
        ("[::1]", "http://[::1]:30000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[2001:db8::7]:8000/", "http://[2001:db8::7]:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost:30000"),
        ("10.0.0.3:8000", "http://10.0.0.3:8000"),
        ("https://engines.example:443/a", "https://engines.example:443/a"),
    ],
)
def test_every_way_to_write_an_address_is_understood(address: str, url: str) -> None:
    assert engine_url(address) == url


@pytest.mark.parametrize(
    "address", ["", "http://", ":8000", "host:port", "host:99999", "ftp://host", "http://a@b:1", "host:1?q=2"]
)
def test_an_address_without_sense_is_refused_and_shown(address: str) -> None:
    with pytest.raises(AddressError, match="must be host:port"):
        engine_url(address)


def test_ids_on_the_wire_are_unique_of_one_length_and_no_prefix_of_another() -> None:
    first, second = WireIds(), WireIds()
    rids = ["r1", "r10", "r1", "", "x" * 100, "g12-m3"]
    ids = [maker.make(rid) for maker in (first, second) for rid in rids * 3]
    assert len({len(i) for i in ids}) == 1
    assert len(set(ids)) == len(ids)
    assert "g12-m3" in ids[5]


def test_a_request_asks_for_one_sample_with_log_probabilities() -> None:
    sampling = {"max_new_tokens": 3}
    raw = generate_body("w", np.array([1, 2], np.int32), sampling, options={"extra_key": "v1"})
    assert msgspec.json.decode(raw) == {
        "rid": "w",
        "input_ids": [1, 2],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
        "extra_key": "v1",
    }


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        *[(400, "permanent"), (404, "permanent"), (422, "permanent"), (429, "overload"), (503, "overload")],
        *[(500, "transient"), (502, "transient"), (504, "transient"), (408, "transient")],
    ],
)
def test_a_status_alone_decides_the_class(status: int, failure: str) -> None:
    assert classify_status(status) == failure


def test_the_back_off_doubles_to_its_cap_and_its_jitter_is_full() -> None:
    policy = FailurePolicy(backoff_base_s=1.0, backoff_cap_s=5.0, overload_base_s=3.0)
    longest = [backoff_s(policy, FailureClass.TRANSIENT, attempt, 1.0) for attempt in range(1, 6)]
    assert longest == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff_s(policy, FailureClass.TRANSIENT, 3, 0.0) == 0.0
    assert backoff_s(policy, FailureClass.OVERLOAD, 1, 0.5) == 1.5


def test_a_circuit_opens_once_after_failures_in_a_row_and_closes_by_a_probe() -> None:
    circuit = Circuit(3)
    assert not any([circuit.fail("a"), circuit.fail("b")])
    circuit.succeed()
    assert [circuit.fail("c") for _ in range(4)] == [False, False, True, False]
    assert circuit.last_error == "c"
    assert circuit.state == "open"
    circuit.close()
    assert circuit.state == "closed"
    assert not circuit.fail("d")


def test_an_overload_halves_the_window_once_per_period_and_success_widens_it() -> None:
    window = Window(64)
    for _ in range(50):  # a storm of refusals is one event
        window.cut(64, now=10.0, base_s=2.0, cap_s=30.0, share=0.5)
    assert window.allowed == 32
    assert 10.0 < window.not_before < 12.0
    window.cut(32, now=12.5, base_s=2.0, cap_s=30.0, share=0.0)
    assert window.allowed == 16
    for _ in range(100):
        window.grow()
    assert window.allowed == 64


def test_a_window_never_closes() -> None:
    window = Window(4)
    for step in range(20):
        window.cut(1, now=100.0 * step, base_s=1.0, cap_s=1.0, share=0.0)
    assert window.allowed == 1


@pytest.mark.parametrize("name", [n for n in dir(errors) if n[0].isupper()])
def test_errors_travel_between_processes(name: str) -> None:
    kind = getattr(errors, name)
    if isinstance(kind, type) and issubclass(kind, errors.ClientError):
        error = pickle.loads(pickle.dumps(kind("what was found")))
        assert type(error) is kind
        assert str(error) == "what was found"


_DESCRIPTORS = """
import logging, resource, sys
from fa_rollout.client.base.descriptors import allowed_connections
logging.basicConfig(stream=sys.stdout, format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(allowed_connections(512), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def _descriptors(soft: int, hard: int) -> list[str]:
    command = [sys.executable, "-c", _DESCRIPTORS, str(soft), str(hard)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_soft_limit_of_open_files_is_raised_to_what_is_needed() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert _descriptors(256, hard) == [f"512 {512 + RESERVE}"]


def test_where_the_hard_limit_forbids_it_concurrency_is_lowered_with_one_warning() -> None:
    warning, result = _descriptors(200, 400)
    assert "concurrency_lowered wanted=512 allowed=200 hard_limit=400" in warning
    assert result == "200 400"

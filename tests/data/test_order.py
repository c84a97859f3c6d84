"""The order of an epoch depends on seed, epoch and size alone."""

import subprocess
import sys

import numpy as np

from fa_rollout.data.order import epoch_order

FIRST = [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
SECOND = [8, 7, 1, 9, 4, 5, 0, 2, 6, 3]


def test_every_epoch_is_a_permutation_and_unlike_the_others() -> None:
    orders = [tuple(epoch_order(97, epoch, seed=5, shuffle=True)) for epoch in range(50)]
    assert all(sorted(order) == list(range(97)) for order in orders)
    assert len(set(orders)) == 50


def test_seeds_give_different_orders_and_no_seed_is_too_odd() -> None:
    orders = {tuple(epoch_order(97, 0, seed=seed, shuffle=True)) for seed in (0, 1, -1, 2**40, 2**64 - 2)}
    assert len(orders) == 5


def test_without_shuffling_rows_keep_the_order_of_the_files() -> None:
    assert epoch_order(5, 3, seed=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_an_order_never_changes_between_releases() -> None:
    """A run resumed after an upgrade must find its place again: these figures are for ever."""
    assert epoch_order(10, 0, seed=0, shuffle=True).tolist() == FIRST
    assert epoch_order(10, 7, seed=42, shuffle=True).tolist() == SECOND


def test_eight_groups_from_three_prompts_wrap_as_often_as_needed() -> None:
    stream = [int(epoch_order(3, g // 3, seed=1, shuffle=True)[g % 3]) for g in range(24)]
    assert [stream.count(prompt) for prompt in range(3)] == [8, 8, 8]


def test_positions_are_uniform() -> None:
    firsts = np.bincount(
        [epoch_order(4, epoch, seed=0, shuffle=True)[0] for epoch in range(4000)], minlength=4
    )
    assert np.all(np.abs(firsts - 1000) < 150)


def test_the_order_needs_numpy_alone() -> None:
    heavy = {"tokenizers", "pyarrow", "msgspec", "jinja2"}
    code = f"import sys, fa_rollout.data.order; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

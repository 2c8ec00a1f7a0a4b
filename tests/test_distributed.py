"""The helper that runs a function on several ranks."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

import accel
from tests.distributed import outcomes, run


def compare_with_zero() -> None:
    accel.init()
    number = accel.rank()
    assert number == 0


def test_failed_asserts_show_their_values() -> None:
    with pytest.raises(AssertionError, match="rank 1:(?s:.*)assert 1 == 0"):
        run(2, compare_with_zero)


def end_the_groups() -> None:
    accel.init()
    if accel.rank() == 1:
        dist.destroy_process_group()
    raise ValueError("no groups")


def test_workers_survive_errors() -> None:
    before = run(2, os.getpid)
    assert {outcome.error[0] for outcome in outcomes(2, compare_with_zero) if outcome.error} == {"AssertionError"}
    assert run(2, os.getpid) == before
    outcomes(2, end_the_groups)
    assert run(2, os.getpid) != before

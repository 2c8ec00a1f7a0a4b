"""fsdp with ``tensor_parallel``, and ``tensor_parallel`` by itself: parts of layers on neighbouring ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel
from tests.checkpoint.helpers import differences
from tests.checkpoint.test_roundtrip import resume, train_and_save
from tests.distributed import run
from tests.engines.fsdp.test_life import REFUSED
from tests.engines.fsdp.test_replicas import patterns
from tests.engines.matrix import cells_of, check_cells, in_pairs
from tests.engines.test_contract import check_state

#: Of the models of the contract's matrix.
PLAN = {"0": ColwiseParallel(output_layouts=Replicate()), "3": ColwiseParallel(), "5": RowwiseParallel()}
FSDP, TP = accel.FSDP(tensor_parallel=2, plan=PLAN), accel.TensorParallel(plan=PLAN)


@pytest.mark.parametrize(
    ("world", "backend"), [(2, FSDP), (4, FSDP), (4, TP), (4, accel.TensorParallel(size=2, plan=PLAN))], ids=str
)
def test_parity(world: int, backend: Any) -> None:
    """N steps give the weights and optimizer state of one process on the whole batch."""
    for rank, failures in enumerate(run(world, check_cells, in_pairs(cells_of(backend)), timeout=240)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


#: Of models with layers of the same names: the contract's with odd parts, that of the loops, that of checkpoints.
WHOLE_OUT, WHOLE_IN = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
ODD = {"0": WHOLE_OUT, "1.first": WHOLE_OUT, "1.second": WHOLE_OUT, "3.first": WHOLE_IN, "3.second": WHOLE_IN}
LOOP = {"backbone.0": WHOLE_OUT, "backbone.2": WHOLE_IN, "head": WHOLE_IN}
SAVED = {"first": WHOLE_IN}


@pytest.mark.parametrize(
    "backend", [accel.FSDP(tensor_parallel=2, plan=ODD), accel.TensorParallel(size=2, plan=ODD)], ids=["fsdp", "alone"]
)
def test_whole_state(backend: Any) -> None:
    # Rounding that a BatchNorm and Adam enlarge: the sums of the parts of a row come in another order.
    run(4, check_state, backend, 1e-4, timeout=240)


def test_the_unchanged_loop() -> None:
    # new_zeros() of a part is a part: torch's own layers refuse it beside whole tensors.
    refused = {*REFUSED, "hidden_state"}
    for found in run(4, patterns, accel.FSDP(tensor_parallel=2, plan=LOOP), refused, timeout=240):
        assert not {name: apart for name, apart in found.items() if not apart <= 1e-5}


def test_checkpoints_go_anywhere_and_come_from_anywhere(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    mixed = accel.FSDP(tensor_parallel=2, plan=SAVED)
    alone = accel.TensorParallel(size=2, plan=SAVED)
    expected = run(4, train_and_save, mixed, one, timeout=240)[0]
    for world, backend in (
        (4, mixed),
        (4, alone),
        (2, alone),
        (4, accel.FSDP(replicas=2)),
        (2, "ddp"),
        (3, "fsdp"),
        (2, "deepspeed"),
    ):
        for found in run(world, resume, backend, one, "first", timeout=240):
            assert not differences(expected, found, tolerance=1e-5), (world, backend)
    expected = run(2, train_and_save, "sharded", other, timeout=240)[0]
    for backend in (mixed, alone):
        assert not differences(expected, run(4, resume, backend, other, "stream", timeout=240)[0], tolerance=1e-5)

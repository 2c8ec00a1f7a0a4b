"""fsdp on meshes: ``replicas`` are copies of the model, ``tensor_parallel`` divides its layers."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel
from tests.checkpoint.helpers import Run, differences
from tests.distributed import refusals, run
from tests.engines import llama
from tests.engines.matrix import cells_of, check_cells, in_pairs
from tests.engines.state import check_state
from tests.models import adamw, distance, mlp

#: Of the models of the contract's matrix.
PLAN = {"0": ColwiseParallel(output_layouts=Replicate()), "3": ColwiseParallel(), "5": RowwiseParallel()}
TWO = accel.FSDP(replicas=2)
PARTS = accel.FSDP(tensor_parallel=2, plan=PLAN)


@pytest.mark.parametrize(("world", "backend"), [(4, TWO), (2, PARTS), (4, PARTS)], ids=["copies", "parts", "both"])
def test_parity(world: int, backend: Any) -> None:
    """N steps give the weights and optimizer state of one process on the whole batch."""
    for rank, failures in enumerate(run(world, check_cells, in_pairs(cells_of(backend)), timeout=240)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


#: Of models with layers of the same names: the contract's with odd parts, that of the loops, that of checkpoints.
WHOLE_OUT, WHOLE_IN = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
ODD = {"0": WHOLE_OUT, "1.first": WHOLE_OUT, "1.second": WHOLE_OUT, "3.first": WHOLE_IN, "3.second": WHOLE_IN}
SAVED = {"first": WHOLE_IN}


def test_whole_state() -> None:
    run(4, check_state, TWO, timeout=240)
    # Rounding that a BatchNorm and Adam enlarge: the sums of the parts of a row come in another order.
    run(4, check_state, accel.FSDP(tensor_parallel=2, plan=ODD), 1e-4, timeout=240)


def drift(wrong: int) -> None:
    raw = mlp(8, 8, 4)
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=accel.FSDP(replicas=2, drift_check=2))
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 2 and accel.rank() == wrong:
            raw[0].weight._local_tensor.data[0, 0] += 1  # type: ignore[index]


@pytest.mark.parametrize(("wrong", "ranks"), [(3, (1, 3)), (0, (0, 2))])
def test_copies_that_drift_apart(wrong: int, ranks: tuple[int, int]) -> None:
    named = rf"0\.weight \(shard {wrong % 2}\) is \w+ on rank {ranks[0]}; \w+ on rank {ranks[1]}"
    for message in refusals(4, drift, wrong, error="RankMismatchError", breaks=True):
        assert re.search(named, message), message


def train_and_save(backend: Any, directory: str) -> dict[str, Any]:
    training = Run(backend, 1, "auto")
    training.steps(4)
    accel.save(training.state, directory)
    training.steps(5)
    return training.result()


def resume(backend: Any, directory: str) -> dict[str, Any]:
    training = Run(backend, 2, "auto")
    training.steps(2)  # a state that must be replaced
    accel.load(directory, training.state)
    training.batches = iter(())
    training.steps(5)
    return training.result()


def test_checkpoints_go_anywhere(tmp_path: Path) -> None:
    directory, other = str(tmp_path / "one"), str(tmp_path / "other")
    mixed = accel.FSDP(tensor_parallel=2, plan=SAVED)
    copies = accel.FSDP(tensor_parallel=2, replicas=2, plan=SAVED)
    expected = run(4, train_and_save, mixed, directory, timeout=240)[0]
    for world, backend in ((4, copies), (2, "ddp"), (3, "fsdp")):
        for found in run(world, resume, backend, directory, timeout=240):
            assert not differences(expected, found, tolerance=1e-5), (world, backend)
    expected = run(2, train_and_save, "sharded", other, timeout=240)[0]
    found = run(4, resume, mixed, other, timeout=240)[0]
    assert not differences(expected, found, tolerance=1e-5)


COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate_proj")
ROWS = ("mlp.down_proj", "self_attn.o_proj")
LLAMA = {
    **{f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS},
    **{f"model.layers.*.{name}": RowwiseParallel() for name in ROWS},
    "model.embed_tokens": WHOLE_IN,
    "lm_head": WHOLE_OUT,
}


def train_llama(model: Any, optimizer: Any, place: int, places: int) -> Any:
    ids = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        optimizer.zero_grad()
        mine = ids.chunk(places)[place]
        model(input_ids=mine, labels=mine).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    with torch.no_grad():
        return model.generate(ids[:1, :4], max_new_tokens=6, do_sample=False)


def llama_on_a_mesh(tied: bool) -> None:
    plain, raw = (llama.build(tie_word_embeddings=tied) for _ in range(2))
    said = train_llama(plain, adamw(plain), 0, 1)
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=accel.FSDP(tensor_parallel=2, plan=LLAMA))
    place = accel.data_parallel_place(model)
    assert place == (accel.rank() // 2, 2)
    assert accel.mesh(model).shape == (2, 2)  # type: ignore[union-attr]
    assert raw.model.layers[0].mlp.down_proj.weight.to_local().shape == (16, 24)
    assert torch.equal(train_llama(model, optimizer, *place), said)
    assert distance(accel.full_state_dict(model), dict(plain.state_dict())) < 1e-5
    accel.teardown(model)
    assert type(raw.model.layers[0].mlp.down_proj.weight) is nn.Parameter
    assert all(not child._forward_hooks and not child._forward_pre_hooks for child in raw.modules())
    assert (raw.lm_head.weight is raw.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("tied", [False, True])
def test_llama_of_transformers(tied: bool) -> None:
    pytest.importorskip("transformers")
    run(4, llama_on_a_mesh, tied, timeout=240)


MLP = {"0": ColwiseParallel(output_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())}
COPIES_OF_MLP = accel.FSDP(tensor_parallel=2, replicas=2, plan=MLP)


def other_batches() -> None:
    model = accel.setup(mlp(8, 8, 4), backend=COPIES_OF_MLP).model
    model(torch.full((2, 8), float(accel.rank())))


def test_different_batches_raise() -> None:
    for message in refusals(4, other_batches, error="RankMismatchError", breaks=True):
        assert re.search("tensor 0 has different values on rank (1 than on rank 0|3 than on rank 2)", message)
        assert "accel.data_parallel_place(model)" in message


def dropout() -> torch.Tensor:
    """Each rank has a seed of its own before setup."""
    accel.seed(0, per_rank=True)
    raw = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    model = accel.setup(raw, backend=COPIES_OF_MLP).model
    accel.seed(0)
    return model(torch.ones(2, 8)).detach()


def test_dropout_is_the_same() -> None:
    outs = run(4, dropout)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[2], outs[3])


#: The number of ranks for each layer, a plan, and words of the error.
REFUSALS: list[tuple[int, Any, str]] = [
    (2, {"7": ColwiseParallel()}, "The plan's '7' names no module of this Sequential"),
    (2, {"0": ColwiseParallel()}, r"weight of shape \(7, 8\) in a planned Linear can't be split evenly over 2"),
    (3, MLP, r"tensor_parallel=3\) can't use 2 processes. Start a multiple of 3 processes"),
    (2, None, "is invalid. Use a dict of styles"),
]


def refuse() -> None:
    for number, plan, message in REFUSALS:
        raw = mlp(8, 7, 4)
        before = copy.deepcopy(raw)
        with pytest.raises(accel.BackendError, match=message):
            accel.setup(raw, backend=accel.FSDP(tensor_parallel=number, plan=plan))
        assert all(type(p) is nn.Parameter for p in raw.parameters())
        assert distance(raw, before) == 0.0


def test_plans_that_raise() -> None:
    run(2, refuse)


def run_a_cell_twice() -> None:
    """Its styles are new objects each time."""
    raw = mlp(8, 8, 4)
    plans = [{"0": ColwiseParallel(output_layouts=Replicate())} for _ in range(2)]
    first, second = (accel.setup(raw, backend=accel.FSDP(tensor_parallel=2, plan=plan)).model for plan in plans)
    assert first is second


def test_a_cell_that_runs_twice() -> None:
    run(2, run_a_cell_twice)

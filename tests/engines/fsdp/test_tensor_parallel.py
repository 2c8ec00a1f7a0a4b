"""fsdp with ``tensor_parallel``, alone and with shards and copies: parts of layers on neighbouring ranks."""

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
from tests.checkpoint.helpers import differences, resume, train_and_save
from tests.distributed import refusals, run
from tests.engines.matrix import cells_of, check_cells, in_pairs
from tests.engines.test_contract import check_state
from tests.models import distance, mlp

#: Of the models of the contract's matrix.
PLAN = {"0": ColwiseParallel(output_layouts=Replicate()), "3": ColwiseParallel(), "5": RowwiseParallel()}
BACKEND = accel.FSDP(tensor_parallel=2, plan=PLAN)


@pytest.mark.parametrize("world", [2, 4])
def test_parity(world: int) -> None:
    """N steps give the weights and optimizer state of one process on the whole batch."""
    for rank, failures in enumerate(run(world, check_cells, in_pairs(cells_of(BACKEND)), timeout=240)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


#: Of models with layers of the same names: the contract's with odd parts, that of the loops, that of checkpoints.
WHOLE_OUT, WHOLE_IN = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
ODD = {"0": WHOLE_OUT, "1.first": WHOLE_OUT, "1.second": WHOLE_OUT, "3.first": WHOLE_IN, "3.second": WHOLE_IN}
SAVED = {"first": WHOLE_IN}


def test_whole_state() -> None:
    # Rounding that a BatchNorm and Adam enlarge: the sums of the parts of a row come in another order.
    run(4, check_state, accel.FSDP(tensor_parallel=2, plan=ODD), 1e-4, timeout=240)


def test_checkpoints_go_anywhere(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    mixed = accel.FSDP(tensor_parallel=2, plan=SAVED)
    copies = accel.FSDP(tensor_parallel=2, replicas=2, plan=SAVED)
    expected = run(4, train_and_save, mixed, one, timeout=240)[0]
    for world, backend in ((4, copies), (2, mixed), (2, "ddp"), (3, "fsdp")):
        for (found,) in run(world, resume, backend, [one], timeout=240):
            assert not differences(expected, found, tolerance=1e-5), (world, backend)
    expected = run(2, train_and_save, "sharded", other, timeout=240)[0]
    (found,) = run(4, resume, mixed, [other], timeout=240)[0]
    assert not differences(expected, found, tolerance=1e-5)


# -- a model of transformers -------------------------------------------------------------------------------------------

COLUMNS, ROWS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"), ("mlp.down_proj",)
LLAMA = {
    **{f"model.layers.*.{name}": ColwiseParallel() for name in (*COLUMNS, "mlp.gate_proj")},
    **{f"model.layers.*.{name}": RowwiseParallel() for name in (*ROWS, "self_attn.o_proj")},
    "model.embed_tokens": WHOLE_IN,
    "lm_head": WHOLE_OUT,
}


def llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


def train_llama(model: Any, optimizer: Any, place: int, places: int) -> Any:
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        optimizer.zero_grad()
        mine = ids.chunk(places)[place]
        model(input_ids=mine, labels=mine).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    with torch.no_grad():
        return model.generate(ids[:1, :4], max_new_tokens=6, do_sample=False)


def llama_on_a_mesh(tied: bool) -> None:
    plain, raw = llama(tied), llama(tied)
    said = train_llama(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), 0, 1)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
    model, optimizer, _ = accel.setup(raw, optimizer, backend=accel.FSDP(tensor_parallel=2, plan=LLAMA))
    place = accel.data_parallel_place(model)
    assert place == (accel.rank() // 2, 2)
    mesh: Any = accel.mesh(model)
    assert mesh.shape == (2, 2)
    weight: Any = raw.model.layers[0].mlp.down_proj.weight
    assert weight.to_local().shape == (16, 24)
    assert torch.equal(train_llama(model, optimizer, *place), said)
    full = accel.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.allclose(full[name], value, atol=1e-5), name
    accel.teardown(model)
    assert type(raw.model.layers[0].mlp.down_proj.weight) is nn.Parameter
    assert all(not child._forward_hooks and not child._forward_pre_hooks for child in raw.modules())
    assert (raw.lm_head.weight is raw.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("tied", [False, True])
def test_llama_of_transformers(tied: bool) -> None:
    run(4, llama_on_a_mesh, tied, timeout=240)


# -- what differs between ranks that compute together ------------------------------------------------------------------

MLP = {"0": ColwiseParallel(output_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())}
COPIES_OF_MLP = accel.FSDP(tensor_parallel=2, replicas=2, plan=MLP)


def other_batches() -> None:
    model = accel.setup(mlp(8, 8, 4), backend=COPIES_OF_MLP).model
    model(torch.full((2, 8), float(accel.rank())))


def test_different_batches_raise() -> None:
    for message in refusals(4, other_batches, error="RankMismatchError", breaks=True):
        assert re.search("tensor 0 has other values on rank (1 than on rank 0|3 than on rank 2)", message)
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


# -- refusals ------------------------------------------------------------------------------------------------------------


#: The number of ranks for each layer, a plan, and words of the error.
REFUSALS: list[tuple[int, Any, str]] = [
    (2, {"7": ColwiseParallel()}, "The plan's '7' names no module of this Sequential"),
    (2, {"0": ColwiseParallel()}, r"weight of shape \(7, 8\) in a planned Linear doesn't divide by 2"),
    (2, {"1": ColwiseParallel()}, "ColwiseParallel currently only support nn.Linear"),
    (3, MLP, r"tensor_parallel=3\) needs a multiple of 3 processes, and there are 2"),
]


def refuse() -> None:
    for number, plan, message in REFUSALS:
        raw = mlp(8, 7, 4)
        before = copy.deepcopy(raw)
        with pytest.raises((accel.BackendError, NotImplementedError), match=message):
            accel.setup(raw, backend=accel.FSDP(tensor_parallel=number, plan=plan))
        assert all(type(p) is nn.Parameter for p in raw.parameters())
        assert distance(raw, before) == 0.0


def test_plans_that_raise() -> None:
    """On every rank, and the model is as before."""
    run(2, refuse)
    for wrong, message in (
        ({"tensor_parallel": 0}, "expected a whole number of at least 1"),
        ({"tensor_parallel": 2}, "expected a dict of styles"),
        ({"plan": MLP}, "expected a dict of styles by module names, if tensor_parallel > 1"),
        ({"tensor_parallel": 2, "plan": MLP, "sequence_parallel": 2}, "tensor_parallel divides the heads too"),
    ):
        with pytest.raises(accel.BackendError, match=message):
            accel.FSDP(**wrong)


def a_notebook_cell_run_twice() -> None:
    """Its styles are new objects each time."""
    raw = mlp(8, 8, 4)
    plans = [{"0": ColwiseParallel(output_layouts=Replicate())} for _ in range(2)]
    first, second = (accel.setup(raw, backend=accel.FSDP(tensor_parallel=2, plan=plan)).model for plan in plans)
    assert first is second


def test_a_cell_that_runs_twice() -> None:
    run(2, a_notebook_cell_run_twice)

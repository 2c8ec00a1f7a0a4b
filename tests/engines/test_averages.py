"""Averages of weights (EMA, SWA) beside a model, full on every rank; and full values assigned to shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils import vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

import accel
from tests.distributed import refusals, run
from tests.models import adamw, distance, mlp, rows

TP = accel.FSDP(
    tensor_parallel=2,
    plan={"0": ColwiseParallel(output_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())},
)
#: Of a copy of the model and its parameters: one update of the average.
UPDATES: dict[str, Callable[[Any, Any], None]] = {
    "lerp": lambda e, p: e.lerp_(p, 0.3),
    "mul add": lambda e, p: e.mul_(0.7).add_(p, alpha=0.3),
    "data": lambda e, p: e.data.mul_(0.7).add_(p.data, alpha=0.3),
    "replaced": lambda e, p: setattr(e, "data", 0.7 * e.data + 0.3 * p.data),
    "copied": lambda e, p: e.copy_(0.7 * e + 0.3 * p),
    "sub": lambda e, p: e.sub_(0.3 * (e - p)),
}
TOGETHER: dict[str, Callable[[Any, Any], None]] = {
    "foreach lerp": lambda es, ps: torch._foreach_lerp_(es, ps, 0.3),
    "foreach add": lambda es, ps: (torch._foreach_mul_(es, 0.7), torch._foreach_add_(es, ps, alpha=0.3)),  # type: ignore[func-returns-value]
}
SWA: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.7)},
    "ema one by one": {"avg_fn": get_ema_avg_fn(0.7)},
    "buffers": {"use_buffers": True},
}


def averaging(how: str, model: Any) -> tuple[nn.Module, Callable[[Any], None]]:
    if how in SWA:
        swa = AveragedModel(model, **SWA[how])
        return swa, swa.update_parameters
    average: nn.Module = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(model: nn.Module) -> None:
        pairs = list(average.parameters()), list(model.parameters())
        if how in TOGETHER:
            TOGETHER[how](*pairs)
        else:
            for e, p in zip(*pairs, strict=True):
                UPDATES[how](e, p)

    return average, update


def train(model: Any, optimizer: Any, average: Callable[[Any], None], place: int, places: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step, 8, 4).chunk(places)[place]).square().mean().backward()
        optimizer.step()
        average(model)


def averages(backend: Any, *widths: int) -> dict[str, float]:
    """Of each way the distance to the average of one process: of a handle's copy, and of one from before ``setup``."""
    found = {}
    for number, how in enumerate([*SWA, *UPDATES, *TOGETHER]):
        reference = mlp(*widths)
        raw = copy.deepcopy(reference)
        expected, update = averaging(how, reference)
        train(reference, adamw(reference), update, 0, 1)
        early = averaging(how, raw) if number % 2 else None
        model, optimizer, _ = accel.setup(raw, adamw(raw), backend=backend)
        average, update = early or averaging(how, model)
        train(model, optimizer, update, *accel.data_parallel_place(model))
        assert all(type(p) is nn.Parameter for p in average.parameters())
        found[how] = distance(average, expected)
        accel.teardown(model)
    return found


@pytest.mark.parametrize(
    ("backend", "world", "widths"),
    [("sharded", 2, (4, 9, 2)), ("fsdp", 2, (4, 9, 7, 2)), (accel.FSDP(replicas=2), 2, (4, 9, 2)), (TP, 4, (4, 10, 6))],
    ids=["sharded", "fsdp", "copies", "parts of layers"],
)
def test_an_average_is_that_of_one_process(backend: Any, world: int, widths: tuple[int, ...]) -> None:
    for found in run(world, averages, backend, *widths):
        assert not {how: apart for how, apart in found.items() if not apart < 2e-5}


def statistics() -> None:
    """``update_bn`` reads a rank's part of the batches; the mean of what the ranks found is that of all."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    raw = copy.deepcopy(reference)
    model, _, _ = accel.setup(raw, adamw(raw), backend="fsdp")
    batches = [rows(step, 8, 4) for step in range(4)]
    swa, expected = AveragedModel(model), AveragedModel(reference)
    swa.update_parameters(model)
    expected.update_parameters(reference)
    update_bn(batches, expected)
    update_bn(batches[accel.rank() :: 2], swa)
    for buffer in swa.module.buffers():
        buffer.copy_(accel.all_reduce(buffer, "mean") if buffer.is_floating_point() else buffer)
    assert distance(swa.module[1].running_var, expected.module[1].running_var) < 1e-6
    assert distance(swa.module[1].running_mean, expected.module[1].running_mean) < 1e-6


def test_statistics_of_an_average() -> None:
    run(2, statistics)


def written() -> None:
    reference, raw = mlp(4, 9, 2), mlp(4, 9, 2, seed=1)
    model = accel.setup(raw, backend="fsdp").model
    vector = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    vector_to_parameters(vector, model.parameters())
    assert distance(accel.teardown(model), reference) == 0


def test_full_values_are_assigned_to_shards() -> None:
    run(2, written)


def swapped() -> None:
    """Evaluate with averaged weights that are assigned, then go on with the trained ones."""
    raw, x = mlp(4, 9, 2), torch.ones(3, 4)
    model = accel.setup(raw, backend="fsdp").model
    trained = {name: p.data.clone() for name, p in model.named_parameters()}
    before = model(x).detach()
    for p in model.parameters():
        p.data = p.data * 0
    assert not model(x).any()
    for name, p in model.named_parameters():
        p.data = trained[name]
    assert torch.equal(model(x), before)
    assert "data" not in vars(torch.Tensor)


def test_averaged_weights_are_swapped_in_and_out() -> None:
    run(2, swapped)


def mixed() -> None:
    """What is no average of weights raises torch's own error."""
    model = accel.setup(mlp(4, 9, 2), backend="fsdp").model
    weight, mask = model[0].weight, torch.ones(9, 4)
    for use in (lambda: (weight * mask).sum(), lambda: weight.data.copy_(mask), lambda: weight - weight.full_tensor()):
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            use()


def test_full_tensors_and_shards_do_not_mix() -> None:
    run(2, mixed)


def average_of_one_rank() -> None:
    accel.init(timeout=10)
    raw = mlp(4, 9, 2)
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend="fsdp")
    average, update = averaging("ema", model)
    for step in range(3):
        train(model, optimizer, update if accel.is_main() or step == 0 else lambda _: None, 0, 1)


def test_an_average_on_one_rank_alone_ends_with_an_error_on_every_rank() -> None:
    for message in refusals(2, average_of_one_rank, error="RankMismatchError", breaks=True):
        assert "a shard of (9, 4)" in message

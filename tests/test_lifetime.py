"""How long engines, models and memory live, and how engines end if ranks drop models at different moments."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import accel
from accel.handles import ModelHandle
from accel.registry import registry
from tests.backends import need
from tests.distributed import outcomes, run
from tests.models import adamw, mlp, normalised, one_step
from tests.programs import by_hand, free_port, scripts


def different_seeds(backend: str) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(accel.rank())
    raw = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    raw[1].running_mean.fill_(accel.rank())  # type: ignore[operator, union-attr]
    before = [t.tolist() for t in raw.state_dict().values()]
    model = accel.setup(raw, backend=backend).model
    return before, [t.tolist() for t in accel.full_state_dict(model).values()]


@pytest.mark.parametrize(("backend", "world"), [("ddp", 4), ("fsdp", 2)])
def test_all_ranks_start_from_rank_0(backend: str, world: int) -> None:
    results = run(world, different_seeds, backend)
    assert results[0][0] != results[1][0]
    assert all(after == results[0][0] for _, after in results)


# -- memory -----------------------------------------------------------------------------------------------------------


def count_reducers() -> int:
    gc.collect()
    return sum(type(o) is DistributedDataParallel for o in gc.get_objects())


def rounds(n: int) -> tuple[int, int, int]:
    import psutil

    raw = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.01)
    sizes = []
    for i in range(n):
        model: Any = accel.setup(raw, optimizer).model
        optimizer.zero_grad()
        model(torch.randn(4, 256)).mean().backward()
        optimizer.step()
        assert i % 10 or count_reducers() == (1 if accel.world_size() > 1 else 0)
        accel.teardown(model)
        model = None
        assert i % 10 or count_reducers() == 0
        sizes.append(psutil.Process().memory_info().rss)
    return sizes[4], sizes[-1], sum(p.numel() * 4 for p in raw.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_fifty_rounds_leave_memory_flat(world: int) -> None:
    for early, late, model_bytes in run(world, rounds, 50):
        # One leaked copy per round would be 45 times the model. The allocator alone takes a few.
        assert late - early < 10 * model_bytes


def unreferenced(backend: Any = "auto") -> list[bool]:
    raw = normalised()
    optimizer = adamw(raw)
    model = accel.setup(raw, optimizer, backend=backend).model
    one_step(model, optimizer)
    model(torch.randn(4, 4)).mean().backward()
    alive = [weakref.ref(raw), weakref.ref(registry.engine(raw)), weakref.ref(raw[0].weight)]
    del raw, model, optimizer
    gc.collect()
    return [r() is not None for r in alive]


def test_a_dropped_model_is_collected() -> None:
    assert not any(unreferenced())
    for backend in ("ddp", accel.DDP(comm_hook="bf16"), accel.DDP(find_unused_parameters=True)):
        assert not any(map(any, run(2, unreferenced, backend)))
    assert not registry.engines
    for _ in range(12):  # a reused id never matches
        raw = normalised()
        assert accel.unwrap(accel.setup(raw).model) is raw
        del raw
        gc.collect()


def switch_backends() -> None:
    raw = normalised()
    optimizer = adamw(raw)
    reference = copy.deepcopy(raw).eval()
    plain = adamw(reference)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for backend in ("ddp", accel.DDP(gradient_as_bucket_view=True), "ddp"):
        model = accel.setup(raw, optimizer, backend=backend).model.eval()
        for m, o in ((model, optimizer), (reference, plain)):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
        assert accel.teardown(model) is raw
        assert not optimizer._optimizer_step_pre_hooks
        assert not any(p._post_accumulate_grad_hooks for p in raw.parameters())
    for p, q in zip(raw.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    assert float(optimizer.state[raw[0].weight]["step"]) == 3.0


def test_setup_after_teardown() -> None:
    switch_backends()
    run(2, switch_backends)


def test_torch_is_as_before() -> None:
    def function() -> object:
        return inspect.getclosurevars(nn.utils.clip_grad_norm_).nonlocals["func"]

    original, hooks, raw = function(), len(_global_optimizer_pre_hooks), normalised()
    model = accel.setup(raw, adamw(raw), precision="16-mixed").model
    assert type(model) is ModelHandle
    assert function() is not original
    accel.teardown()
    assert function() is original
    assert len(_global_optimizer_pre_hooks) == hooks


def several_models() -> None:
    torch.manual_seed(accel.rank())
    raws = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 4).requires_grad_(False)
    models: list[Any] = [accel.setup(raw).model for raw in raws]
    assert len(registry.engines) == 3
    references: Any = copy.deepcopy(raws)

    def play(nets: Any, z: torch.Tensor, real: torch.Tensor) -> None:
        g, c, f = nets
        g_opt, c_opt = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(c.parameters(), lr=0.1)
        if nets is models:
            accel.setup(g, g_opt)
            accel.setup(c, c_opt)
        for _ in range(4):
            c_opt.zero_grad()
            fake = g(z)
            (F.softplus(-c(real)).mean() + F.softplus(c(f(fake.detach()))).mean()).backward()
            c_opt.step()
            g_opt.zero_grad()
            F.softplus(-c(f(fake))).mean().backward()
            g_opt.step()

    generator = torch.Generator().manual_seed(5)
    z, real = torch.randn(8, 3, generator=generator), torch.randn(8, 4, generator=generator)
    world, rank = accel.world_size(), accel.rank()
    play(references, z, real)
    play(models, z.chunk(world)[rank], real.chunk(world)[rank])
    for model, reference in zip(raws, references, strict=True):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_gan_beside_a_frozen_model(world: int) -> None:
    run(world, several_models)


# -- engines that live on some ranks only ------------------------------------------------------------------------------


def train(backend: Any, lr: float, seed: int) -> Any:
    """Return a model after two steps on the same data."""
    raw = mlp(5, 7, 6, 3, seed=seed)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=lr)
    model = accel.setup(raw, optimizer, backend=backend).model
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(torch.ones(4, 5)), torch.ones(4, 3)).backward()
        optimizer.step()
    return model


@contextlib.contextmanager
def collecting_on_rank_1_only() -> Iterator[None]:
    gc.collect()
    if accel.rank() == 0:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect() -> None:
    if accel.rank() == 1:
        gc.collect()


def search(backend: Any) -> tuple[bool, list[Any]]:
    """A search of learning rates: if the best model is right after ``teardown()``, and its weights."""
    with collecting_on_rank_1_only():
        for trial in range(6):
            model = train(backend, 10 ** -(trial % 5 + 1), trial)
            if trial == 4:
                best = model
            collect()
        del model
        collect()
        full = [v.tolist() for v in accel.full_state_dict(best).values()]
        raw = accel.unwrap(best)
        accel.teardown()
        return [v.tolist() for v in raw.state_dict().values()] == full, full


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", accel.DeepSpeed(stage=3)], ids=str)
def test_the_best_of_many_models(backend: Any) -> None:
    need(backend, 2)
    (right, first), (also, second) = run(2, search, backend)
    assert right
    assert also
    assert first == second


def run_a_cell_twice() -> int:
    backbone = nn.Linear(4, 4)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            model: Any = nn.Sequential(backbone, nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model = accel.setup(model, optimizer).model
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return len(registry.engines)
    finally:
        gc.enable()


@pytest.mark.parametrize("world", [1, 2])
def test_a_cell_runs_twice(world: int) -> None:
    assert run(world, run_a_cell_twice) == [1] * world


def drop_on_one_rank() -> list[str]:
    model: Any = train("fsdp", 0.1, 0)
    raw = accel.unwrap(model)
    if accel.rank() == 0:
        del model, raw
    with pytest.raises(accel.AccelError) as caught:
        accel.teardown()
    assert accel.rank() == 0 or bool(raw[0].weight.isnan().all())
    return [str(caught.value)]


def test_a_sharded_model_that_one_rank_dropped() -> None:
    for messages in run(2, drop_on_one_rank):
        assert "dropped on rank 0" in messages[0]


def alone_in_an_error() -> str:
    """Rank 1 comes to ``teardown()`` with an error, and rank 0 is in another call."""
    model = train("fsdp", 0.1, 0)
    if accel.rank() == 0:
        accel.full_state_dict(model)
        return ""
    try:
        raise ValueError("rank 1 has had enough")
    finally:
        accel.teardown()


def test_teardown_after_an_error_frees_the_others() -> None:
    first, second = outcomes(2, alone_in_an_error, breaks=True)
    assert "RankMismatchError" in first.error
    assert "rank 1 is in 'accel.teardown'" in first.message
    assert "rank 1 has had enough" in second.trace


def added_groups(backend: Any) -> None:
    """New groups count at once, with the objects that were the parameters before setup."""
    raw = mlp(4, 8, 3)
    parameters = list(raw.parameters())
    optimizer = torch.optim.Adam(parameters[:2], lr=0.1)
    model = accel.setup(raw, optimizer, backend=backend).model
    optimizer.add_param_group({"params": parameters[2:]})
    assert [len(group["params"]) for group in accel.full_state_dict(optimizer)["param_groups"]] == [2, 2]
    accel.teardown(model)
    assert [p for group in optimizer.param_groups for p in map(id, group["params"])] == list(map(id, parameters))


@pytest.mark.parametrize("backend", ["sharded", "fsdp", "pipeline", accel.DeepSpeed(stage=2), accel.DeepSpeed(stage=3)])
def test_groups_added_since_the_last_step(backend: Any) -> None:
    need(backend, 2)
    run(2, added_groups, backend)


# -- the end of the process --------------------------------------------------------------------------------------------

PROGRAM = """
import atexit, gc, os
import torch
from torch import nn

def threads():
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print("left:", sum("gloo" in name for name in names))

atexit.register(threads)
import accel
kept = []
for trial in range(9):
    raw = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    backend = ("sharded", accel.DeepSpeed(stage=2), accel.DeepSpeed(stage=3))[trial % 3]
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters()), backend=backend)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if trial < 3:
        kept.append(model)
gc.disable()
ring = [torch.distributed.group.WORLD]
ring.append(ring)
del ring
"""


def test_no_thread_of_gloo_is_left() -> None:
    """A thread that frees the last tensor while the interpreter ends aborts the process."""
    for name in ("fairscale", "deepspeed"):
        pytest.importorskip(name)
    port = free_port()
    environs = [by_hand(rank, 2, port) | {"LOCAL_RANK": str(rank)} for rank in range(2)]
    for result in scripts(PROGRAM, *environs):
        assert "left: 0" in result.stdout, result.stdout + result.stderr

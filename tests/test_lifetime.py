"""How long engines, models and memory live."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
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
from tests.distributed import run
from tests.models import adamw, normalised, one_step


def different_seeds(backend: str) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(accel.rank())
    raw = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    raw[1].running_mean.fill_(accel.rank())  # type: ignore[operator, union-attr]
    before = [t.tolist() for t in raw.state_dict().values()]
    model, _, _ = accel.setup(raw, backend=backend)
    return before, [t.tolist() for t in accel.full_state_dict(model).values()]


@pytest.mark.parametrize(("backend", "world"), [("ddp", 4), ("fsdp", 2)])
def test_all_ranks_start_from_rank_0(backend: str, world: int) -> None:
    results = run(world, different_seeds, backend)
    assert results[0][0] != results[1][0]
    assert all(after == results[0][0] for _, after in results)


def count_reducers() -> int:
    gc.collect()
    return sum(type(o) is DistributedDataParallel for o in gc.get_objects())


def rounds(n: int) -> tuple[int, int, int]:
    import psutil

    raw = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.01)
    sizes = []
    for i in range(n):
        model, handle, _ = accel.setup(raw, optimizer)
        handle.zero_grad()
        model(torch.randn(4, 256)).mean().backward()
        handle.step()
        assert i % 10 or count_reducers() == (1 if accel.world_size() > 1 else 0)
        accel.teardown(model)
        handle = model = None
        assert i % 10 or count_reducers() == 0
        sizes.append(psutil.Process().memory_info().rss)
    return sizes[4], sizes[-1], sum(p.numel() * 4 for p in raw.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_fifty_rounds_of_setup_and_teardown_leave_memory_flat(world: int) -> None:
    for early, late, model_bytes in run(world, rounds, 50):
        # One leaked copy a round would be 45 times the model; the allocator alone is good for a few.
        assert late - early < 10 * model_bytes


def unreferenced(steps: int, backend: Any = "auto") -> list[bool]:
    raw = normalised()
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=backend)
    for _ in range(steps):
        one_step(model, optimizer)
    model(torch.randn(4, 4)).mean().backward()
    alive = [weakref.ref(raw), weakref.ref(registry.engine(raw)), weakref.ref(raw[0].weight)]
    del raw, model, optimizer
    gc.collect()
    return [r() is not None for r in alive]


def test_an_unreferenced_model_is_collected() -> None:
    assert unreferenced(2) == [False, False, False]
    for backend in ("ddp", accel.DDP(comm_hook="bf16"), accel.DDP(find_unused_parameters=True)):
        for found in run(2, unreferenced, 2, backend):
            assert found == [False, False, False]
    assert not registry.engines


def test_a_reused_id_never_matches() -> None:
    for _ in range(12):
        raw = normalised()
        handle = accel.setup(raw).model
        assert accel.unwrap(handle) is raw
        del raw, handle
        gc.collect()


def switch_backends() -> None:
    raw = normalised()
    optimizer = adamw(raw)
    reference = copy.deepcopy(raw)
    plain = adamw(reference)
    accel.teardown()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for backend in ("ddp", accel.DDP(gradient_as_bucket_view=True), "ddp"):
        model, handle, _ = accel.setup(raw, optimizer, backend=backend)
        model.eval()
        for m, o in ((model, handle), (reference.eval(), plain)):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
        assert accel.teardown(model) is raw
        assert not optimizer._optimizer_step_pre_hooks
        assert not any(p._post_accumulate_grad_hooks for p in raw.parameters())
    for p, q in zip(raw.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    assert float(optimizer.state[raw[0].weight]["step"]) == 3.0


def test_teardown_gives_everything_back_and_setup_works_again() -> None:
    switch_backends()
    run(2, switch_backends)


def test_torch_is_as_before_when_all_engines_are_gone() -> None:
    def function() -> object:
        return inspect.getclosurevars(nn.utils.clip_grad_norm_).nonlocals["func"]

    original = function()
    hooks = len(_global_optimizer_pre_hooks)
    raw = normalised()
    accel.setup(raw, adamw(raw), precision="16-mixed")
    assert function() is not original
    accel.teardown()
    assert function() is original
    assert len(_global_optimizer_pre_hooks) == hooks


def several_models() -> None:
    torch.manual_seed(accel.rank())
    generator, critic, frozen = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 4).requires_grad_(False)
    g, g_opt, _ = accel.setup(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    c, c_opt, _ = accel.setup(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    f = accel.setup(frozen).model
    assert len(registry.engines) == 3
    ref_g, ref_c, ref_f = copy.deepcopy((generator, critic, frozen))
    ref_g_opt, ref_c_opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref_g, ref_c))
    world, rank = accel.world_size(), accel.rank()

    def play(g: Any, c: Any, f: Any, g_opt: Any, c_opt: Any, z: torch.Tensor, real: torch.Tensor) -> None:
        for _ in range(4):
            c_opt.zero_grad()
            fake = g(z)
            (F.softplus(-c(real)).mean() + F.softplus(c(f(fake.detach()))).mean()).backward()
            c_opt.step()
            g_opt.zero_grad()
            F.softplus(-c(f(fake))).mean().backward()
            g_opt.step()

    generator_ = torch.Generator().manual_seed(5)
    z, real = torch.randn(8, 3, generator=generator_), torch.randn(8, 4, generator=generator_)
    play(ref_g, ref_c, ref_f, ref_g_opt, ref_c_opt, z, real)
    play(g, c, f, g_opt, c_opt, z.chunk(world)[rank], real.chunk(world)[rank])
    for m, r in ((generator, ref_g), (critic, ref_c), (frozen, ref_f)):
        for p, q in zip(m.parameters(), r.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-5)


def test_a_gan_and_a_frozen_model_side_by_side() -> None:
    several_models()
    run(2, several_models)
    run(4, several_models)


def test_handle_of_a_model_is_its_type() -> None:
    assert type(accel.setup(normalised()).model) is ModelHandle

"""What accel changes in other libraries: it goes when the last engine that needs it goes, and others may change the same."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

import accel
from accel.engines import ENGINES
from accel.errors import BackendError
from tests.distributed import close_all, run

CLIPPING = ("_get_total_norm", "_clip_grads_with_norm_", "_group_tensors_by_device_and_dtype")
ALL = [(torch.autograd, "backward"), *((clip_grad, name) for name in CLIPPING)]


def counting(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """As other libraries patch: a wrapper that calls what it has found."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return counted


def train(module: nn.Module, *, inputs: bool = False) -> None:
    """A step with all that is patched."""
    loss = module(torch.ones(2, 3)).square().mean()
    loss.backward(inputs=list(module.parameters())) if inputs else loss.backward()
    assert nn.utils.clip_grad_norm_(module.parameters(), 1e-3) > 1e-3


def patched_by_others_later() -> None:
    """Another library patches while an engine lives; after the engine's end its patch is there, and accel's does nothing."""
    originals = {(module, name): getattr(module, name) for module, name in ALL}
    net, calls = nn.Linear(3, 3), list[str]()
    model, _, _ = accel.setup(net, torch.optim.SGD(net.parameters(), 0.1), backend="fsdp")
    for (module, name), original in originals.items():
        found = getattr(module, name)
        assert found is not original
        assert inspect.signature(found) == inspect.signature(original)
        setattr(module, name, counting(found, calls))
    theirs = {(module, name): getattr(module, name) for module, name in ALL}
    train(model, inputs=True)
    assert set(calls) == {"backward", *CLIPPING}
    raw = accel.teardown(model)
    assert {(module, name): getattr(module, name) for module, name in ALL} == theirs
    calls.clear()
    assert raw is not None
    train(raw)
    assert set(calls) == {"backward", *CLIPPING}

    again, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), 0.1), backend="fsdp")  # around theirs
    raw.zero_grad()
    calls.clear()
    train(again, inputs=True)
    assert set(calls) == {"backward", *CLIPPING}
    assert all(p.grad is not None for p in again.parameters())
    accel.teardown(again)
    assert {(module, name): getattr(module, name) for module, name in ALL} == theirs
    for (module, name), original in originals.items():
        setattr(module, name, original)


def test_a_later_patch_of_another_library_stays() -> None:
    run(2, patched_by_others_later)


def which_are_patched(backend: str) -> tuple[set[str], set[str]]:
    originals = {(module, name): getattr(module, name) for module, name in ALL}

    def changed() -> set[str]:
        return {name for (module, name), original in originals.items() if getattr(module, name) is not original}

    net = nn.Linear(3, 3)
    model, _, _ = accel.setup(net, torch.optim.SGD(net.parameters(), 0.1), backend=backend)
    while_it_lives = changed()
    accel.teardown(model)
    return while_it_lives, changed()


@pytest.mark.parametrize(("backend", "world"), [("single", 1), ("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_only_what_an_engine_needs_is_patched_while_it_lives(backend: str, world: int) -> None:
    patched = {"backward", *CLIPPING} if world > 1 else set()
    assert run(world, which_are_patched, backend) == [(patched, set())] * world


def foreign_handler() -> list[Any]:
    """Another library answers for one number of a DTensor; accel's guard stands before it, and goes."""
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    number = torch.ops.aten._local_scalar_dense.default
    before = handlers.get(number)

    def theirs(op: Any, args: Any, kwargs: Any) -> Any:
        return op(args[0].to_local(), *args[1:], **kwargs)

    found: list[Any] = []
    handlers[number] = theirs
    model, _, _ = accel.setup(nn.Linear(3, 3), backend="fsdp")
    with pytest.raises(BackendError, match="one number"):
        float(model.weight.norm())
    accel.teardown(model)
    found.append(handlers.get(number) is theirs)
    handlers.pop(number)
    model, _, _ = accel.setup(nn.Linear(3, 3), backend="fsdp")
    with pytest.raises(
        BackendError, match="one number"
    ):  # though the ranks, and all shapes, are those of the one before
        float(model.weight.norm())
    handlers[number] = theirs
    accel.teardown(model)
    found.append(handlers.pop(number) is theirs)
    if before is not None:
        handlers[number] = before
    return found


def test_a_handler_of_another_library_stays() -> None:
    close_all()  # new workers: an engine of a test before may have left its own there
    assert run(2, foreign_handler) == [[True, True]] * 2


def imported_meanwhile(name: str, source: str) -> Any:
    """A module of that name."""
    module = types.ModuleType(name)
    exec(source, vars(module))
    return module


SOURCE = """
import torch, warnings
@torch.compile
def plain(x): return x
@torch.compile(dynamic=True)
def told(x): return x
warnings.filterwarnings("error", message="of mine")
"""


def test_who_is_imported_while_deepspeed_is_keeps_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from accel.engines.deepspeed.library import _undisturbed

    def compiling(model: Any = None, **options: Any) -> Any:
        return (lambda function: ("compiled", options)) if model is None else ("compiled", options)

    monkeypatch.setattr(torch, "compile", compiling)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with warnings.catch_warnings():
        before = list(warnings.filters)
        with _undisturbed(torch.device("cpu")):
            warnings.warn("a word of the library's", stacklevel=1)
            mine, library = imported_meanwhile("mine", SOURCE), imported_meanwhile("deepspeed.some", SOURCE)
            assert os.environ["DS_ACCELERATOR"] == "cpu"
            later = torch.compile = counting(torch.compile, [])
        assert torch.compile is later
        assert mine.plain == ("compiled", {})
        assert mine.told == ("compiled", {"dynamic": True})
        assert library.plain(3) == library.told(3) == 3
        assert torch.compile(dynamic=False)(abs) == ("compiled", {"dynamic": False})
        assert "DS_ACCELERATOR" not in os.environ
        added = [one for one in warnings.filters if one not in before]
        assert [one[0] for one in added] == ["error"]
        with pytest.raises(UserWarning, match="of mine"):
            warnings.warn("of mine", stacklevel=1)


def after_the_end() -> tuple[bool, list[Any]]:
    before = list(warnings.filters)
    net = nn.Linear(3, 3)
    model, _, _ = accel.setup(net, torch.optim.SGD(net.parameters(), 0.1), backend=accel.DeepSpeed(stage=2))
    accel.teardown(model)
    del model
    import gc

    gc.collect()
    return "__compatible_ops__" in vars(sys.modules["deepspeed.ops"]), [f for f in warnings.filters if f not in before]


def test_nothing_of_deepspeed_stays_changed() -> None:
    pytest.importorskip("deepspeed")
    assert run(2, after_the_end) == [(False, [])] * 2


@pytest.mark.parametrize("name", ENGINES)
def test_options_that_are_true_or_false_are_nothing_else(name: str) -> None:
    options = ENGINES[name].options_type
    for field in dataclasses.fields(options):
        if field.type in (bool, "bool"):
            with pytest.raises(BackendError, match=f"{field.name}='no'.: expected True or False"):
                options(**{field.name: "no"})

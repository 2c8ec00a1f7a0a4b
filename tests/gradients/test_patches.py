"""What accel changes in other libraries: it goes when the last engine that needs it goes, and others may change the same."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import os
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

import accel
from accel.engines import ENGINES
from accel.errors import BackendError
from accel.gradients import patches
from tests.distributed import close_all, run

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")
RUN = "_engine_run_backward"
ALL: list[tuple[Any, str]] = [(torch.autograd, RUN)]


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
    model, _, _ = accel.setup(net, torch.optim.SGD(net.parameters(), 0.1), backend="ddp")
    for (module, name), original in originals.items():
        found = getattr(module, name)
        assert found is not original
        assert inspect.signature(found) == inspect.signature(original)
        setattr(module, name, counting(found, calls))
    theirs = {(module, name): getattr(module, name) for module, name in ALL}
    train(model, inputs=True)
    assert set(calls) == {RUN}
    raw = accel.teardown(model)
    assert {(module, name): getattr(module, name) for module, name in ALL} == theirs
    calls.clear()
    assert raw is not None
    train(raw)
    assert set(calls) == {RUN}

    again, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), 0.1), backend="ddp")  # around theirs
    raw.zero_grad()
    calls.clear()
    train(again, inputs=True)
    assert set(calls) == {RUN}
    assert all(p.grad is not None for p in again.parameters())
    accel.teardown(again)
    assert {(module, name): getattr(module, name) for module, name in ALL} == theirs
    for (module, name), original in originals.items():
        setattr(module, name, original)


def test_a_later_patch_of_another_library_stays() -> None:
    run(2, patched_by_others_later)


def places() -> dict[str, Any]:
    """What stands where an engine may patch; the values of a table by their keys."""
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    muon: Any = torch.optim._muon  # type: ignore[attr-defined]
    found = {name: getattr(module, name) for module, name in ALL}
    found |= {name: inspect.getclosurevars(getattr(clip_grad, name)).nonlocals["func"] for name in CLIPPING}
    found |= {"data": vars(torch.Tensor).get("data"), "orthogonalise": muon._zeropower_via_newtonschulz}
    found |= {"compile": torch.compile, "environment": dict(os.environ), "filters": list(warnings.filters)}
    deepspeed = sys.modules.get("deepspeed.ops")
    return found | {"handlers": dict(handlers), "ops": vars(deepspeed).get("__compatible_ops__") if deepspeed else None}


def which_are_patched(backend: Any, torn_down: bool) -> tuple[set[str], set[str]]:
    """What is other while an engine lives, and after it was torn down, or nobody holds it any more."""
    before = places()

    def changed() -> set[str]:
        now = places()
        return {name for name, value in before.items() if now[name] is not value and now[name] != value}

    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    kind = torch.optim.Muon if backend == "fsdp" else torch.optim.SGD
    bias = torch.optim.SGD([p for p in net.parameters() if p.dim() < 2], 0.1)
    optimizers = [kind([p for p in net.parameters() if p.dim() == 2], 0.1), bias]
    model, held, _ = accel.setup(net, optimizers, backend=backend)
    while_it_lives = changed()
    if torn_down:
        accel.teardown(model)
    del net, model, held, optimizers, bias
    gc.collect()
    return while_it_lives, changed()


EVERY = {"compile"}
STEPS = {RUN, *CLIPPING, *EVERY}


@pytest.mark.parametrize("torn_down", [True, False], ids=["torn_down", "collected"])
@pytest.mark.parametrize(
    ("backend", "world", "patched"),
    [
        ("single", 1, EVERY),
        ("ddp", 1, EVERY),
        ("ddp", 2, STEPS),
        ("ddp2", 2, STEPS),
        ("sharded", 2, STEPS),
        ("fsdp", 2, {*STEPS, "filters", "handlers", "orthogonalise"}),
        ("pipeline", 2, STEPS),
        (accel.DeepSpeed(stage=1), 2, {*STEPS, "filters"}),
        (accel.DeepSpeed(stage=3), 2, {*STEPS, "filters"}),
    ],
    ids=lambda value: ",".join(sorted(value)) if isinstance(value, set) else str(value),  # the same in each worker
)
def test_only_what_an_engine_needs_is_patched_while_it_lives(
    backend: Any, world: int, patched: set[str], torn_down: bool
) -> None:
    pytest.importorskip("deepspeed" if isinstance(backend, accel.DeepSpeed) else "torch")
    assert run(world, which_are_patched, backend, torn_down) == [(patched, set())] * world


def test_every_listener_hears_of_a_backward_while_others_go() -> None:
    """A collection inside of a backward may take an engine, and with it a listener, from the list."""
    listeners: list[Any] = []
    heard = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, run: object, create_graph: bool) -> None:
            heard.append(f"begin {self.name}")
            listeners[:] = [one for one in listeners if one is not gone]

        def end(self, run: object) -> None:
            heard.append(f"end {self.name}")

    living = [Listener("a"), Listener("b")]
    gone = weakref.ref(Listener("gone"))  # which is gone at once
    listeners += [gone, *map(weakref.ref, living)]
    needed = patches.run_patches(listeners, lambda tensor: tensor)
    for patch in needed:
        patch.need(living[0])
    try:
        torch.ones((), requires_grad=True).backward()
    finally:
        for patch in needed:
            patch.drop(living[0])
    assert heard == ["begin a", "begin b", "end a", "end b"]


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


@pytest.mark.parametrize("name", ENGINES)
def test_options_that_are_true_or_false_are_nothing_else(name: str) -> None:
    options = ENGINES[name].options_type
    for field in dataclasses.fields(options):
        if field.type in (bool, "bool"):
            with pytest.raises(BackendError, match=f"{field.name}='no'.: expected True or False"):
                options(**{field.name: "no"})


def test_what_ends_in_another_thread_takes_no_patch_from_what_begins() -> None:
    """An engine is collected in whatever thread the collector comes to, while another one is set up."""

    class User:
        pass

    table: dict[str, Any] = {"name": "original"}
    patch = patches.replaced(table, "name", "ours")
    ended, done = threading.Event(), list[int]()

    def other() -> None:
        while not ended.is_set():
            user = User()
            patch.need(user)
            del user
        done.append(1)

    thread, interval = threading.Thread(target=other), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            user = User()
            patch.need(user)
            assert table["name"] == "ours"
            del user
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    assert done
    assert table["name"] == "original"

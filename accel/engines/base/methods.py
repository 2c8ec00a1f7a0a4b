"""Methods of an optimizer's own class that write tensors outside ``step``, as ScheduleFree's ``eval`` and ``train`` do.

Which they are is read from their code, so that every rank knows it without asking the others: a method that only tells
something (a learning rate) may be called on one rank alone, one that writes parameters where they are divided may not.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ...errors import OptimizerError

if TYPE_CHECKING:
    from .engine import Engine
    from .step import Stepper


def route_methods(engine: Engine, step: Stepper) -> list[str]:
    """Make these methods of a raw optimizer go through its engine; their names, under which ``vars`` has what stands in."""
    found = writing_methods(step.optimizer)
    for name, gradients in found.items():
        method = getattr(step.optimizer, name)
        vars(step.optimizer)[name] = _routed(weakref.ref(engine), step, method, gradients)
    return list(found)


def _routed(reference: weakref.ref[Engine], step: Stepper, method: Any, gradients: bool) -> Callable[..., Any]:
    optimizer: Optimizer = method.__self__

    @functools.wraps(method.__func__)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine, inside = reference(), _in_step(optimizer)
        if engine is None:
            return method(*args, **kwargs)
        if gradients and (not inside or step.awaits_closure) and engine.gradients.steps_part(optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__}.{method.__name__}() uses gradients, of which each rank has its part only under "
                f"backend {engine.name!r}, so that it may compute something else on each: use a backend that keeps gradients "
                "and state whole on every rank"
            )
        if inside:
            return method(*args, **kwargs)
        return step.call(engine, functools.partial(method, *args, **kwargs), gradients)

    return call


def _in_step(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own ``step`` calls, around which torch has put one function for all."""
    code = type(optimizer).step.__code__
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def only(optimizer: Optimizer, keep: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Inside, the optimizer's groups have the parameters only that ``keep`` is true of."""
    held = [(group, group["params"]) for group in optimizer.param_groups]
    for group, parameters in held:
        group["params"] = list(filter(keep, parameters))
    try:
        yield
    finally:
        for group, parameters in held:
            group["params"] = parameters


# -- what a method does -----------------------------------------------------------------------------------------------


def writing_methods(optimizer: Optimizer) -> dict[str, bool]:
    """The public methods, beyond those of ``torch.optim``, that may write tensors, and whether each uses gradients."""
    found = {}
    for name in dir(type(optimizer)):
        function = inspect.getattr_static(type(optimizer), name)
        if name.startswith("_") or hasattr(Optimizer, name) or not isinstance(function, FunctionType):
            continue
        codes = list(_codes(function, optimizer, set()))
        if any(map(_writes, codes)):
            found[name] = any({"grad", "step"}.intersection(code.co_names) for code in codes)
    return found


def _codes(function: Callable[..., Any], optimizer: Optimizer, seen: set[CodeType]) -> Iterator[CodeType]:
    """The code of a function, of the functions in it, and of those of its optimizers and module that it names."""
    function = inspect.unwrap(function)
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None or code in seen or function.__module__.startswith("torch."):
        return
    inner = [v for v in vars(optimizer).values() if isinstance(v, Optimizer)]
    waiting = [code]
    while waiting:
        code = waiting.pop()
        seen.add(code)
        yield code
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
        for name in code.co_names:
            named = [inspect.getattr_static(type(o), name, None) for o in (optimizer, *inner)]
            for other in (*named, getattr(function, "__globals__", {}).get(name)):
                if isinstance(other, FunctionType):
                    yield from _codes(other, optimizer, seen)


def _writes(code: CodeType) -> bool:
    """Whether code writes tensors: by a method in place, by ``data``, or by ``+=`` or ``[]`` where it has parameters."""
    if any(name.endswith("_") and not name.startswith("__") for name in code.co_names):
        return True
    parameters = "params" in code.co_consts
    for instruction in dis.get_instructions(code):
        kind = instruction.opname
        if kind == "STORE_ATTR" and instruction.argval == "data":
            return True
        in_place = kind.startswith("INPLACE_") or (kind == "BINARY_OP" and instruction.argrepr.endswith("="))
        if parameters and (in_place or kind == "STORE_SUBSCR"):
            return True
    return False

"""What the user's loop holds: thin proxies of the user's own objects that own nothing."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, ClassVar, Final, Generic, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import NamedTuple, TypeVar  # typing's own have no parameters and no defaults in Python 3.10

from .data import LoaderHandle as LoaderHandle
from .errors import AccelError, OptimizerError

#: The types that ``setup`` is given. What ``torch.compile`` returns is a callable to type checkers.
Model = TypeVar("Model", bound=Callable[..., Any] | None)
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer] | None, default=None)
_Loader = DataLoader[Any]
Dataloaders = TypeVar("Dataloaders", bound=_Loader | Sequence[_Loader] | Mapping[Any, _Loader] | None, default=None)


#: What to do with what ``setup`` returned.
UNPACK: Final = (
    "accel.setup gives all three: model, optimizer, loader = accel.setup(model, optimizer, loader), or .model of it"
)


class Handles(NamedTuple, Generic[Model, Optimizers, Dataloaders]):
    """What ``setup`` returns; each part has the form of the argument that it answers, and to a type checker its type."""

    model: Model
    optimizers: Optimizers
    dataloaders: Dataloaders


def _refuse_call(handles: object, *args: object, **kwargs: object) -> NoReturn:
    raise AccelError(f"a Handles is no model: {UNPACK}")


def _refuse_attribute(handles: object, name: str) -> NoReturn:
    raise AttributeError(f"'Handles' object has no attribute {name!r}: {UNPACK}")


# Where the whole is taken for the model. Set here, so that type checkers refuse both by themselves.
for _method, _refuse in (("__call__", _refuse_call), ("__getattr__", _refuse_attribute)):
    setattr(Handles, _method, _refuse)


_get = object.__getattribute__
_set = object.__setattr__
_TORCH_NAMES = frozenset(vars(nn.Module))
#: What loops ask of other wrappers that a handle has not, where the user's module has not either.
_OF_WRAPPERS: Final = {
    "module": "a handle has the model's own attributes, methods and names; the model itself is accel.unwrap(model)",
    "backward": "write loss.backward()",
    "step": "write optimizer.step()",
}


class ModelHandle(nn.Module):
    """The user's module as seen through its engine: every attribute and method is the raw module's.

    Calling it, or a method of the user's, goes through the engine. It has no attribute of its own.
    """

    def __init__(self, engine: Any) -> None:
        _set(self, "_accel_engine", engine)
        _set(self, "_accel_raw", engine.module)

    def __init_subclass__(cls) -> None:
        """Refuse (AccelError) what makes another class of a module, as torch's parametrizations do: it would be the handle's."""
        raise AccelError(
            f"{cls.__name__}: a model that accel.setup returned keeps its class: change the model before accel.setup, or "
            "raw = accel.teardown(model) first"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = _get(self, "_accel_engine") or _engine(self)
        return engine.call(engine.entry, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name[:2] == "__" or name[:7] == "_accel_":
            return _get(self, name)
        if name == "forward":
            return _with_signature(self)
        engine = _engine(self)
        value = getattr(engine.module, name)
        if isinstance(value, MethodType) and value.__self__ is engine.module:
            return MethodType(_through_engine(value), self)
        return value

    def __getattr__(self, name: str) -> Any:
        if name == "_torchdynamo_orig_callable":
            return _get(self, name)
        module = _engine(self).module
        if name == "_orig_mod" and module._compiled_call_impl is not None:  # as what torch.compile returns has it
            return module
        if name == "_ddp_params_and_buffers_to_ignore":  # which torch's wrapper asks its module for
            raise AccelError(
                "torch's wrapper for several processes around a model that accel.setup returned: two reducers would take the "
                "same gradients; leave it out, since the model trains on all processes already"
            )
        if name in _OF_WRAPPERS:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}: {_OF_WRAPPERS[name]}")
        # Reached only when the raw module lacks the attribute: this raises the error that it would raise.
        return getattr(module, name)

    @property
    def _torchdynamo_orig_callable(self) -> NoReturn:
        """Refuse (AccelError) to be compiled: it is what torch.compile asks for first, from torch 2.15 on of the object alone."""
        raise AccelError(
            "a torch.compile that was imported before accel.setup cannot wrap a handle: write torch.compile(model, ...), or "
            "model.compile(...), which compiles in place and has the same options"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_engine(self).module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_engine(self).module, name)

    def __dir__(self) -> list[str]:
        return dir(_get(self, "_accel_raw"))

    def __repr__(self) -> str:
        engine = _get(self, "_accel_engine")
        state = "ended" if engine is None else engine.name
        return f"ModelHandle[{state}]({_get(self, '_accel_raw')!r})"

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied: nn.Module = _engine(self).holdings.copy(memo)
        return copied

    def __copy__(self) -> nn.Module:
        raise AccelError("a ModelHandle cannot be copied shallowly: both would drive one engine; use copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy of the raw module, which loads without accel."""
        return operator.getitem, ((_engine(self).holdings.copy_to_pickle(),), 0)


def _with_signature(handle: ModelHandle) -> Callable[..., Any]:
    """A handle's ``forward``, with the signature of the module's, by which some loops choose what of a batch they give."""
    forward = _get(handle, "forward")
    functools.update_wrapper(call := functools.partial(forward), _get(handle, "_accel_raw").forward)
    return call


def _on_module(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(handle: ModelHandle, *args: Any) -> Any:
        return function(_engine(handle).module, *args)

    return call


# What Python looks up on the class: a handle is as much of a container as its module.
_OPERATORS: dict[str, Callable[..., Any]] = {"__len__": len, "__iter__": iter, "__contains__": operator.contains}
_OPERATORS |= {f"__{name}__": getattr(operator, name) for name in ("getitem", "setitem", "delitem")}
for _name, _function in _OPERATORS.items():
    setattr(ModelHandle, _name, _on_module(_function))


def _engine(handle: object) -> Any:
    engine: Any | None = _get(handle, "_accel_engine")
    if engine is None:
        raise AccelError(
            f"this {type(handle).__name__} is of an engine that was torn down; use the raw object, or call accel.setup again"
        )
    return engine


def _through_engine(bound: MethodType) -> Callable[..., Any]:
    """A method of the raw module as a function of the handle; torch's own, and overrides of them, stay outside the engine."""
    name = getattr(bound, "__name__", "")
    torchs = name in _TORCH_NAMES and _can_be_called_as(bound, name)

    @functools.wraps(bound)
    def call(handle: ModelHandle, *args: Any, **kwargs: Any) -> Any:
        engine = _engine(handle)
        if name == "load_state_dict":
            return engine.holdings.load_state_dict(None, args, kwargs)
        if name == "compile" and torchs:
            return engine.compile(*args, **kwargs)
        plain = torchs and not (name == "train" and any(isinstance(a, torch.Tensor) for a in args))
        out = bound(*args, **kwargs) if plain else engine.call(bound, args, kwargs)
        return handle if out is engine.module else out

    return call


def _can_be_called_as(bound: MethodType, name: str) -> bool:
    """Whether a method may be an override of torch's of that name, and not the user's own that happens to share it."""
    theirs = getattr(nn.Module, name)
    if bound.__func__ is theirs:
        return True
    needed = [
        p for p in inspect.signature(theirs).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    try:
        inspect.signature(bound).bind(*[None] * (len(needed) - 1))
    except TypeError:
        return False
    return True


class OptimizerHandle(Optimizer):
    """The user's optimizer as seen through the engine of its model; ``param_groups`` and state are the raw optimizer's."""

    _accel_engine: Any | None
    _accel_raw: Optimizer

    def __init__(self, engine: Any, optimizer: Optimizer) -> None:
        _set(self, "_accel_engine", engine)
        _set(self, "_accel_raw", optimizer)

    def __getattr__(self, name: str) -> Any:
        _engine(self)
        return getattr(self._accel_raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _engine(self)
        # A scheduler replaces `step` on the object that it was given: here it is this handle's own.
        if name in _OPTIMIZER_OWN:
            _set(self, name, value)
        else:
            setattr(self._accel_raw, name, value)

    def __delattr__(self, name: str) -> None:
        _engine(self)
        delattr(self._accel_raw, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Make the gradients final, then step the raw optimizer with the same arguments."""
        engine = self._accel_engine or _engine(self)
        try:
            return self._accel_raw.step(*args, **kwargs)
        except BaseException:
            engine.drift.broken = engine.drift.steps
            engine.gradients.break_step()
            raise

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because gradients of a scaled loss had overflowed (``16-mixed``)."""
        return bool(_engine(self).steppers[id(self._accel_raw)].skipped)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped since ``setup``."""
        return int(_engine(self).steppers[id(self._accel_raw)].skips)

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Drop (or zero) the gradients, wherever the engine keeps them; the arguments are the raw optimizer's own."""
        self._accel_engine or _engine(self)
        return self._accel_raw.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of this model's parameters."""
        _engine(self).steppers[id(self._accel_raw)].add_param_group(param_group)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The raw optimizer's; of a divided one copies of the whole, which every rank asks for together."""
        _engine(self)
        return self._accel_raw.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Take a full state, the same on every rank."""
        _engine(self).holdings.load_state_dict(self._accel_raw, args, kwargs)

    def __eq__(self, other: object) -> bool:
        """Equal to its raw optimizer: torch compares those of schedulers that are chained."""
        return _get(self, "_accel_raw") is (_get(other, "_accel_raw") if isinstance(other, OptimizerHandle) else other)

    def __hash__(self) -> int:
        return hash(_get(self, "_accel_raw"))

    def __repr__(self) -> str:
        return f"OptimizerHandle({_get(self, '_accel_raw')!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        _engine(self)
        raise AccelError(
            "an OptimizerHandle cannot be pickled: write torch.save(optimizer.state_dict(), path); or pickle what "
            "accel.full_state_dict(optimizer) returns, which every rank calls, or the raw optimizer that accel.teardown(model) "
            "gives back; accel.save writes a checkpoint"
        )

    def __copy__(self) -> Optimizer:
        raise AccelError("an OptimizerHandle cannot be copied: both would step the same parameters")

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        raise OptimizerError("an OptimizerHandle cannot be deep-copied: build a new optimizer on the copied model")


_OPTIMIZER_OWN = frozenset({"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"})


# What Optimizer itself defines is the raw optimizer's too. Not by __getattribute__, which every step would pay for.
for _name in vars(Optimizer).keys() - _OPTIMIZER_OWN:
    if not _name.startswith("__"):
        setattr(OptimizerHandle, _name, property(operator.methodcaller("__getattr__", _name)))


def end(handle: ModelHandle | OptimizerHandle) -> None:
    """Make every later use of the handle an error."""
    _set(handle, "_accel_engine", None)


def raw(handle: ModelHandle | OptimizerHandle) -> Any:
    """The user's object behind the handle, also after the handle's end."""
    return _get(handle, "_accel_raw")


def engine_behind(handle: ModelHandle | OptimizerHandle) -> Any:
    """The engine behind the handle; None after the handle's end."""
    return _get(handle, "_accel_engine")


# -- Where a user's own object remembers what accel made of it ---------------------------------------------------------


class HiddenAttribute:
    """Holds one value on a foreign object; a copy or a pickle of that object has none.

    The value lives as long as its owner, and the two may refer to each other: the cycle is
    on the owner, where the garbage collector sees it, not in a table that would keep both.
    """

    __slots__ = ("owner_id", "value")
    KEY: ClassVar = "_accel_attribute"

    def __init__(self, owner: object, value: object) -> None:
        self.owner_id = id(owner)
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    @staticmethod
    def get(owner: object) -> Any:
        """The value on ``owner``, or None. A shallow copy of the owner carries it but does not own it."""
        found = owner.__dict__.get(HiddenAttribute.KEY)
        return found.value if found is not None and found.owner_id == id(owner) else None

    @staticmethod
    def put(owner: object, value: object) -> None:
        owner.__dict__[HiddenAttribute.KEY] = HiddenAttribute(owner, value)

    @staticmethod
    def clear(owner: object) -> None:
        owner.__dict__.pop(HiddenAttribute.KEY, None)

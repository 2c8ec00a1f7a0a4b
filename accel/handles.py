"""The handles that ``setup`` returns: the user's own objects, driven by an engine."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, ClassVar, Final, Generic, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import (
    NamedTuple,
    TypeVar,
)  # typing's own have no parameters and no defaults in Python 3.10

from .data import LoaderHandle as LoaderHandle
from .errors import AccelError, OptimizerError

# The types of setup's arguments. To type checkers, torch.compile returns a callable.
Model = TypeVar("Model", bound=Callable[..., Any] | None)
Optimizers = TypeVar(
    "Optimizers",
    bound=Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer] | None,
    default=None,
)
_Loader = DataLoader[Any]
Dataloaders = TypeVar(
    "Dataloaders", bound=_Loader | Sequence[_Loader] | Mapping[Any, _Loader] | None, default=None
)


class Handles(NamedTuple, Generic[Model, Optimizers, Dataloaders]):
    """The result of ``setup``. Each part has the form of its argument, and its static type."""

    model: Model
    optimizers: Optimizers
    dataloaders: Dataloaders


_get = object.__getattribute__
_set = object.__setattr__


def _engine(handle: object) -> Any:
    engine: Any | None = _get(handle, "_accel_engine")
    if engine is None:
        kind = type(handle).__name__
        raise AccelError(
            f"The engine of this {kind} was torn down; use the raw object, or call accel.setup() again."
        )
    return engine


# -- the model -------------------------------------------------------------------------------------


class ModelHandle(nn.Module):
    """The user's module, driven by its engine.

    All attributes are those of the raw module. Calls and user-defined methods run through the
    engine.
    """

    def __init__(self, engine: Any) -> None:
        _set(self, "_accel_engine", engine)
        _set(self, "_accel_raw", engine.module)

    def __init_subclass__(cls) -> None:
        # torch.nn.utils.parametrize derives a class, and would give it to the raw module.
        raise AccelError(
            f"{cls.__name__} can't be derived from a handle. Change the model before accel.setup()."
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
            # Trainers choose the columns of a batch by the signature of model.forward.
            call = functools.partial(_get(self, "forward"))
            return functools.update_wrapper(call, _get(self, "_accel_raw").forward)
        module = _engine(self).module
        value = getattr(module, name)
        if isinstance(value, MethodType) and value.__self__ is module:
            return MethodType(_through_engine(value), self)
        return value

    def __getattr__(self, name: str) -> Any:
        # Called only if the raw module lacks the attribute.
        if name == "_torchdynamo_orig_callable":  # torch.compile asks for it first
            return _get(self, name)
        module = _engine(self).module
        if name == "_orig_mod" and module._compiled_call_impl is not None:
            return module  # as the result of torch.compile has it
        if name == "_ddp_params_and_buffers_to_ignore":
            raise AccelError(
                "accel.setup() has already distributed this model. Don't put torch's wrapper around its handle."
            )
        if name == "module":
            kind = type(module).__name__
            raise AttributeError(
                f"{kind!r} object has no attribute 'module'. Use model, or accel.unwrap(model)."
            )
        return getattr(module, name)

    @property
    def _torchdynamo_orig_callable(self) -> NoReturn:
        raise AccelError(
            "A torch.compile that was imported before accel.setup cannot wrap a handle. Use "
            "model.compile(...), which compiles in place."
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
        raise AccelError(
            "A handle can't be copied shallowly, because both would drive one engine. Use copy.deepcopy(model)."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickled, it is a raw module, and accel need not be installed.
        return operator.getitem, ((_engine(self).holdings.copy_to_pickle(),), 0)


def _on_module(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(handle: ModelHandle, *args: Any) -> Any:
        return function(_engine(handle).module, *args)

    return call


# Python looks up operators on the class. A module without them raises.
_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "__len__": len,
    "__iter__": iter,
    "__contains__": operator.contains,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
}
for _name, _function in _OPERATORS.items():
    setattr(ModelHandle, _name, _on_module(_function))

_TORCH_NAMES: Final = frozenset(vars(nn.Module))


def _through_engine(bound: MethodType) -> Callable[..., Any]:
    """Return a method of the raw module as a function of the handle, which runs through the engine.

    Torch's own methods and the user's overrides of them, such as ``train``, run directly.
    """
    name = getattr(bound, "__name__", "")
    is_torchs = name in _TORCH_NAMES

    @functools.wraps(bound)
    def call(handle: ModelHandle, *args: Any, **kwargs: Any) -> Any:
        engine = _engine(handle)
        if name == "load_state_dict":
            return engine.holdings.load_state_dict(None, args, kwargs)
        if name == "compile" and is_torchs:
            return engine.compile(*args, **kwargs)
        out = bound(*args, **kwargs) if is_torchs else engine.call(bound, args, kwargs)
        return handle if out is engine.module else out

    return call


# -- the optimizer ---------------------------------------------------------------------------------


class OptimizerHandle(Optimizer):
    """The user's optimizer, driven by the engine of its model. It has the raw ``param_groups``."""

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
        # A scheduler replaces `step` of the object that it is given.
        if name in _OWN_METHODS:
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
        """True if the last step was skipped because a scaled loss overflowed (``16-mixed``)."""
        return bool(_engine(self).steppers[id(self._accel_raw)].skipped)

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped since ``setup``."""
        return int(_engine(self).steppers[id(self._accel_raw)].skips)

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Call the raw optimizer's ``zero_grad`` with the same arguments."""
        self._accel_engine or _engine(self)
        return self._accel_raw.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of this model's parameters."""
        _engine(self).steppers[id(self._accel_raw)].add_param_group(param_group)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the raw optimizer's state, or the full state if it is sharded (collective)."""
        _engine(self)
        return self._accel_raw.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a full state, the same on every rank."""
        _engine(self).holdings.load_state_dict(self._accel_raw, args, kwargs)

    def __eq__(self, other: object) -> bool:
        """Equal to the raw optimizer, because chained schedulers may not have different ones."""
        return _get(self, "_accel_raw") is (
            _get(other, "_accel_raw") if isinstance(other, OptimizerHandle) else other
        )

    def __hash__(self) -> int:
        return hash(_get(self, "_accel_raw"))

    def __repr__(self) -> str:
        return f"OptimizerHandle({_get(self, '_accel_raw')!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        _engine(self)
        raise AccelError(
            "A handle of an optimizer can't be pickled. Call accel.full_state_dict(optimizer) on "
            "every rank and pickle the result, or use accel.save()."
        )

    def __copy__(self) -> Optimizer:
        raise AccelError(
            "A handle of an optimizer can't be copied, because both would step the same parameters."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        raise OptimizerError(
            "A handle of an optimizer can't be deep-copied. Build an optimizer of the copied model."
        )


_OWN_METHODS: Final = frozenset(
    {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"}
)
# Attributes that Optimizer itself defines are the raw optimizer's. __getattribute__ would cost time
# in every step.
for _name in vars(Optimizer).keys() - _OWN_METHODS:
    if not _name.startswith("__"):
        setattr(OptimizerHandle, _name, property(operator.methodcaller("__getattr__", _name)))


# -- handles and raw objects -----------------------------------------------------------------------


def end(handle: ModelHandle | OptimizerHandle) -> None:
    """Make every later use of a handle raise."""
    _set(handle, "_accel_engine", None)


def raw(handle: ModelHandle | OptimizerHandle) -> Any:
    """Return the user's object of a handle, even if its engine has ended."""
    return _get(handle, "_accel_raw")


def engine_behind(handle: ModelHandle | OptimizerHandle) -> Any:
    """Return the engine of a handle, or None if it has ended."""
    return _get(handle, "_accel_engine")


class HiddenAttribute:
    """A value that accel keeps on a user's object. Copies and pickles of the object don't have it.

    The value lives as long as its owner and may refer to it: the garbage collector sees the cycle,
    which it would not if a table held both.
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
        """Return the value on ``owner``, or None. A shallow copy of the owner doesn't own it."""
        attribute = owner.__dict__.get(HiddenAttribute.KEY)
        return (
            attribute.value if attribute is not None and attribute.owner_id == id(owner) else None
        )

    @staticmethod
    def put(owner: object, value: object) -> None:
        owner.__dict__[HiddenAttribute.KEY] = HiddenAttribute(owner, value)

    @staticmethod
    def clear(owner: object) -> None:
        owner.__dict__.pop(HiddenAttribute.KEY, None)

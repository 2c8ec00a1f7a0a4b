"""The handle of a model, and the result of ``setup``."""

from __future__ import annotations

import copyreg
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, ClassVar, Final, Generic

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

# In Python 3.10, typing.NamedTuple can't be generic and typing.TypeVar has no defaults.
from typing_extensions import NamedTuple, TypeVar

from .data import LoaderHandle as LoaderHandle
from .data.iteration import LoaderState
from .errors import AccelError

# The types of setup's arguments. Model may be any callable, as torch.compile returns one.
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
    """The result of ``setup``, with the structure and types of its arguments.

    Optimizers are the same objects. The model and the dataloaders are wrapped.
    """

    model: Model
    optimizers: Optimizers
    dataloaders: Dataloaders


_get = object.__getattribute__
_set = object.__setattr__


def _engine(handle: object) -> Any:
    engine: Any | None = _get(handle, "_accel_engine")
    if engine is None:
        kind = type(raw(handle)).__name__
        raise AccelError(f"This {kind} was torn down. Use the raw module, or call setup again.")
    return engine


class ModelHandle(nn.Module):
    """A wrapped model, run by its engine.

    Attributes are the raw module's. Calls and the user's methods use the engine.
    """

    def __init__(self, engine: Any) -> None:
        _set(self, "_accel_engine", engine)
        _set(self, "_accel_raw", engine.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = _get(self, "_accel_engine") or _engine(self)
        return engine.call(engine.entry, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name[:2] == "__" or name[:7] == "_accel_":
            return _get(self, name)
        if name == "forward":
            # transformers' Trainer reads the signature of forward to choose the columns of a batch.
            call = functools.partial(_get(self, "forward"))
            return functools.update_wrapper(call, raw(self).forward)
        module = _engine(self).module
        value = getattr(module, name)
        if isinstance(value, MethodType) and value.__self__ is module:
            return MethodType(_through_engine(value), self)
        return value

    def __getattr__(self, name: str) -> Any:
        # Called only if the raw module lacks the attribute.
        module = _engine(self).module
        # nanoGPT reads _orig_mod from the result of torch.compile.
        if name == "_orig_mod" and module._compiled_call_impl is not None:
            return module
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_engine(self).module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_engine(self).module, name)

    def __dir__(self) -> list[str]:
        return dir(raw(self))

    def __repr__(self) -> str:
        engine = engine_behind(self)
        state = "ended" if engine is None else engine.name
        return f"ModelHandle[{state}]({raw(self)!r})"

    def __bool__(self) -> bool:
        # Without this, `if model:` would call __len__ below, which raises for most modules.
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied: nn.Module = _engine(self).holdings.copy(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle contains the raw module, so you can load it without accel. pytorch/examples loads
        # one with torch.load(weights_only=True), so the reduction must be the raw module's own.
        copied = _engine(self).holdings.copy({})
        reduction = copied.__reduce_ex__(protocol)
        if reduction[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            _set(self, "_accel_pickled", type(copied))
        return reduction

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """The raw module's class, once, for pickle's check. Else ``ModelHandle``."""
        pickled: type[Any] = _get(self, "__dict__").pop("_accel_pickled", ModelHandle)
        return pickled


def _on_module(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(handle: ModelHandle, *args: Any) -> Any:
        return function(_engine(handle).module, *args)

    return call


# Python looks up operators on the class, so every handle needs them, even if its module has none.
_ITEMS: Any = operator.contains, operator.getitem, operator.setitem, operator.delitem
for _function in (len, iter, *_ITEMS):
    setattr(ModelHandle, f"__{_function.__name__}__", _on_module(_function))

_TORCH_NAMES: Final = frozenset(vars(nn.Module))


def _through_engine(bound: MethodType) -> Callable[..., Any]:
    """Return a function to run the raw module's method in the engine.

    Methods of ``nn.Module``, such as ``train``, and overrides run directly.
    """
    name = getattr(bound, "__name__", "")
    is_torchs = name in _TORCH_NAMES

    @functools.wraps(bound)
    def call(handle: ModelHandle, *args: Any, **kwargs: Any) -> Any:
        engine = _engine(handle)
        if name == "compile" and is_torchs:
            return engine.compile(*args, **kwargs)
        out = bound(*args, **kwargs) if is_torchs else engine.call(bound, args, kwargs)
        return handle if out is engine.module else out

    return call


# -- handles and raw objects -----------------------------------------------------------------------


def end(handle: ModelHandle) -> None:
    """Make every later use of a handle raise."""
    _set(handle, "_accel_engine", None)


def raw(handle: object) -> Any:
    """Return the module of a handle, even after teardown."""
    return _get(handle, "_accel_raw")


def engine_behind(handle: object) -> Any:
    """Return the engine of a handle, or None after teardown."""
    return _get(handle, "_accel_engine")


def loader_state(handle: LoaderHandle) -> LoaderState:
    """Return the state of a dataloader's handle."""
    return handle._accel


class HiddenAttribute:
    """A value on a user's object that copies and pickles don't get."""

    # Not a WeakKeyDictionary, which keeps an entry forever if the value refers to its key.

    __slots__ = ("owner_id", "value")
    KEY: ClassVar = "_accel_attribute"

    def __init__(self, owner: object, value: object) -> None:
        self.owner_id = id(owner)
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    @staticmethod
    def get(owner: object) -> Any:
        """Return the value on ``owner``, or None."""
        attribute = owner.__dict__.get(HiddenAttribute.KEY)
        # copy.copy(owner) copies the attribute too, and the value belongs to the original.
        if attribute is None or attribute.owner_id != id(owner):
            return None
        return attribute.value

    @staticmethod
    def put(owner: object, value: object) -> None:
        owner.__dict__[HiddenAttribute.KEY] = HiddenAttribute(owner, value)

    @staticmethod
    def clear(owner: object) -> None:
        owner.__dict__.pop(HiddenAttribute.KEY, None)

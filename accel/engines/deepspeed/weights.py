"""What the user's raw objects are while DeepSpeed works on them: weights of stage 3, and some methods.

A use of a weight, of which this rank may hold a part only, sees the whole of it, or raises at once. DeepSpeed keeps
an empty tensor in the place of a weight that is not gathered, and torch would compute with that. The library says by
``ds_status`` what it has done; here each status has a class of its own, so that a gathered weight costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError
from ...process import Process
from ...process.control import Waiting, announce
from ..base.absent import FOR_AUTOGRAD, Absent, name_of, plainly, recorded
from .library import library

if TYPE_CHECKING:
    from . import DeepSpeedEngine

_T: Any = torch.Tensor
_DATA: Any = _T.data
_SET_GRAD: Any = _T.grad.__set__


class _Status:
    """Switches the class of a weight. Without ``__get__`` it is read from the weight's own dict, at the usual cost."""

    def __set__(self, weight: Any, status: Any) -> None:
        own = weight.__dict__
        own["ds_status"] = status
        weight.__class__ = weight._states[not (status is weight._available and own["ds_persist"])]


class _Stage3Weight:
    """A weight of a divided module; by itself, one that is gathered for its user."""

    __slots__ = ()
    _weights: Stage3Weights
    _kind: type[Any]
    _available: Any
    #: While it stays gathered for its user, and else: it may still be there, but be gone in backward.
    _states: tuple[type[Any], ...]

    #: What the library has done with it.
    ds_status = _Status()

    @property
    def data(self) -> torch.Tensor:
        """The values; a change of them is seen, as one of the weight itself."""
        if torch._C._is_torch_function_enabled():
            return self.detach()  # type: ignore[attr-defined, no-any-return]
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Any) -> None:
        if not torch._C._is_torch_function_enabled():
            _DATA.__set__(self, value)
        elif value is not self:
            raise BackendError(
                f"{self._weights.name(self)}.data = ...: the optimizer steps this rank's part of it, so that other values would "
                "be lost: set weights by load_state_dict(full) of the model's handle, on every rank"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind = self._kind
        made: Any = kind.__deepcopy__(self, memo)
        made.__class__ = kind
        return made

    def __repr__(self) -> str:
        kind: Any = self._kind
        weight: Any = self
        return repr(kind(weight.detach(), weight.requires_grad)) if kind is nn.Parameter else str(kind.__repr__(self))


class _DividedWeight(_Stage3Weight, Absent):
    """A weight of which this rank has a part, as far as its user can rely on it."""

    __slots__ = ()
    plain = FOR_AUTOGRAD

    def __repr__(self) -> str:
        return f"Parameter of shape {tuple(self.full_shape())}, divided over {self._weights.ranks} ranks"

    def full_shape(self) -> torch.Size:
        return torch.Size(vars(self)["ds_shape"])

    def fetch(self, function: Any) -> None:
        self._weights.gather(self, function)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A gradient is of the whole shape."""
        if func == _SET_GRAD and args[1] is not None:
            return set_grad(*args)
        if func is torch.autograd.backward:  # accel's own, while models are set up
            return plainly(func)(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


@plainly
def set_grad(weight: Any, grad: torch.Tensor) -> None:
    """``weight.grad = grad``, of the whole weight's shape."""
    held, like = weight.data, torch.empty((), dtype=weight.dtype, device=weight.device)
    weight.data = like.expand(weight.ds_shape)
    try:
        weight.grad = grad
    finally:
        weight.data = held


@final
class Stage3Weights:
    """A module's weights, each of a class that says whether its values are here, until ``open``.

    ``reveal`` gathers one for the forward that runs, with all ranks, and gives False where none runs.
    """

    def __init__(self, module: nn.Module, reveal: Callable[[Any], bool], process: Process, title: str) -> None:
        weights: list[Any] = list(module.parameters())
        # Weakly: a weight's class knows this object.
        self._own = [(weakref.ref(weight), type(weight)) for weight in weights]
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._reveal = reveal
        states = {kind: self._derive(kind) for kind in {type(weight) for weight in weights}}
        self.ranks = weights[0].ds_zero_partition_world_size
        for weight in weights:
            # It gathers, which hangs where one rank asks for a number to print.
            vars(weight).pop("item", None)
            vars(weight).update({n: plainly(vars(weight)[n]) for n in ("all_gather_coalesced", "partition")})
            what = f"the gathering of {self.name(weight)} ({title})"
            vars(weight)["all_gather"] = _gathering(weight, vars(weight)["all_gather"], process, what)
            weight.__class__ = states[type(weight)][0]
            weight.ds_status = weight.ds_status  # its class says it now

    def _derive(self, kind: type[Any]) -> tuple[type[Any], ...]:
        available = library("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus.AVAILABLE
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        common = names | {"_weights": self, "_kind": kind, "_available": available}
        metaclass: Any = type(kind)
        both = (_Stage3Weight, _DividedWeight)
        states = tuple(metaclass(kind.__name__, (state, kind), dict(common)) for state in both)
        for state in states:
            state._states = states
        return states

    def name(self, weight: Any) -> str:
        return self._names[id(weight)]

    def open(self) -> None:
        """Give the weights their own classes, since all of them are whole."""
        for reference, kind in self._own:
            if (weight := reference()) is not None:
                weight.__class__ = kind

    def gather(self, weight: Any, function: Any) -> None:
        """Gather a weight for a use of it in a forward; BackendError where none runs."""
        if not self._reveal(weight):
            raise BackendError(
                f"{self.name(weight)} is divided over {self.ranks} ranks, and outside of a forward its values are not here for "
                f"{name_of(function)}: compute in the model's forward, or in a method of the model that its handle calls; read "
                "weights, on every rank, by accel.full_state_dict(model) or inside deepspeed.zero.GatheredParameters; set them "
                "by load_state_dict(full) of the handle; or use stage 2"
            )


def promise(weights: Iterable[Any]) -> None:
    """Let gathered weights be used, until ``take_back``."""
    for weight in weights:
        if isinstance(weight, _Stage3Weight) and weight.ds_status is weight._available:
            weight.__class__ = weight._states[0]


def take_back(weights: Iterable[Any]) -> None:
    """Take weights that no module uses any more for divided, even while they are still there."""
    for weight in weights:
        if not weight.ds_active_sub_modules and isinstance(weight, _Stage3Weight):
            weight.__class__ = weight._states[1]


def _gathering(weight: Any, gather: Callable[..., Any], process: Process, what: str) -> Callable[..., Any]:
    def all_gather(param_list: Any = None, **options: Any) -> Any:
        weights = [weight] if param_list is None else param_list
        announce(process, what, len(weights))
        with Waiting(process, what), torch._C.DisableTorchFunctionSubclass():
            out = recorded(gather)(weights, **options)
        promise(weights)
        return out

    return all_gather


# -- zero_grad of raw objects -----------------------------------------------------------------------------------------


@final
class Method:
    """A bound method whose repr is not its owner's: some modules (``EmbeddingBag``) show all of their attributes in theirs."""

    def __init__(self, function: Callable[..., Any], owner: Any) -> None:
        self._function = function
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._owner, *args, **kwargs)


def put_methods(raw: nn.Module | Optimizer, engine: DeepSpeedEngine) -> None:
    """Put them into an optimizer or a root module, whose submodules get ``zero_grad``. The engine is held weakly."""
    zero_grad = _zero_grad(weakref.ref(engine))
    for holder in raw.modules() if isinstance(raw, nn.Module) else [raw]:
        vars(holder)["zero_grad"] = Method(zero_grad, holder)


def remove_methods(raw: nn.Module | Optimizer) -> None:
    """Take them out again."""
    for holder in raw.modules() if isinstance(raw, nn.Module) else [raw]:
        if isinstance(vars(holder).get("zero_grad"), Method):
            del vars(holder)["zero_grad"]


def _zero_grad(reference: weakref.ref[DeepSpeedEngine]) -> Callable[..., Any]:
    """``zero_grad`` of a raw object, which drops the gradients of fragments too."""

    def zero_grad(raw: Any, *args: Any, **kwargs: Any) -> Any:
        engine = reference()
        if engine is None or engine.zero is None:
            return type(raw).zero_grad(raw, *args, **kwargs)
        if isinstance(raw, nn.Module):
            numbers = engine.zero.numbers
            indices = [numbers[id(p)] for p in raw.parameters() if id(p) in numbers]
        else:
            indices = engine.indices(raw)
        with torch._C.DisableTorchFunctionSubclass(), engine.gradients.parameters_in_groups():
            out = type(raw).zero_grad(raw, *args, **kwargs)
        engine.gradients.drop(indices, kwargs.get("set_to_none", args[0] if args else True))
        return out

    return zero_grad

"""What the user's raw objects are while DeepSpeed works on them: weights of stage 3, and ``zero_grad``.

DeepSpeed puts an empty tensor in the place of a weight that is not gathered, and torch would compute
with that: a weight penalty outside of the forward would be 0, for example. So each weight has a
class that reads DeepSpeed's ``ds_status`` at every use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError
from ...process import Process
from ...process.control import Waiting, announce
from ..base.absent import FOR_AUTOGRAD, Absent, name_of, plainly
from .library import library

if TYPE_CHECKING:
    from . import DeepSpeedEngine
    from .stage3 import Stage3

_T: Any = torch.Tensor
_DATA, _SET_GRAD = _T.data, _T.grad.__set__


class Stage3Weight(Absent):
    """A weight of a model at stage 3.

    A use of its values gathers them if a forward runs. Otherwise it raises BackendError.
    """

    __slots__ = ()
    plain = FOR_AUTOGRAD
    #: The class that its author gave it.
    _own_kind: type[Any]
    #: DeepSpeed's ``ZeroParamStatus.AVAILABLE``, and its mark inside of ``GatheredParameters``.
    _available: Any
    _by_user: str

    def is_here(self) -> bool:
        """True if its values are here, and stay until the code that uses them has ended.

        After a forward, values that no module needs may still be here. But a backward would find
        them gone.
        """
        own = self.__dict__
        if own["ds_status"] is not self._available:
            return False
        needed = own["ds_persist"] or own["ds_active_sub_modules"] or self._by_user in own
        return bool(needed) or torch._C._current_graph_task_id() != -1

    def full_shape(self) -> torch.Size:
        return torch.Size(vars(self)["ds_shape"])

    def fetch(self, function: Any) -> None:
        if not self.is_here():
            stage3: Stage3 | None = vars(self)["ds_owner"]()
            if stage3 is None or not stage3.gather_for_forward(self):
                raise BackendError(
                    f"{vars(self)['ds_name']} is sharded over ranks, so {name_of(function)}() can't use it "
                    "outside of a forward. Use accel.full_state_dict(model), or a method that you call on "
                    "the wrapped model."
                )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if all_here(args) and all_here(kwargs.values()):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _SET_GRAD and args[1] is not None:
            return set_grad(*args)
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def data(self) -> torch.Tensor:
        """The values. A change of them counts as a change of the weight, so that it is seen."""
        if torch._C._is_torch_function_enabled():
            return self.detach()  # type: ignore[attr-defined, no-any-return]
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Any) -> None:
        if not torch._C._is_torch_function_enabled():
            _DATA.__set__(self, value)
        elif value is not self:
            name = vars(self)["ds_name"]
            raise BackendError(
                f"{name}.data = ... would be lost, because the optimizer updates a shard of {name}. "
                "Call model.load_state_dict(full) on every rank."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = self._own_kind.__deepcopy__(self, memo)
        copied.__class__ = self._own_kind
        return copied

    def __repr__(self) -> str:
        if not self.is_here():
            return f"Parameter of shape {tuple(self.full_shape())}, sharded over ranks"
        weight: Any = self
        return repr(nn.Parameter(weight.detach(), weight.requires_grad))


def all_here(values: Iterable[Any]) -> bool:
    """True if the values of all weights among a function's arguments are here."""
    for value in values:
        if isinstance(value, Stage3Weight):
            if not value.is_here():
                return False
        elif type(value) in (list, tuple) and not all_here(value):
            return False
    return True


@plainly
def set_grad(weight: Any, grad: torch.Tensor) -> None:
    """Set ``weight.grad``, which torch allows only for a weight that has the full shape."""
    values, element = weight.data, torch.empty((), dtype=weight.dtype, device=weight.device)
    weight.data = element.expand(weight.ds_shape)
    try:
        weight.grad = grad
    finally:
        weight.data = values


@functools.cache
def class_of(kind: type[Any]) -> type[Any]:
    """Return the class of weights whose author gave them the class ``kind``."""
    home = library("deepspeed.runtime.zero.partition_parameters")
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_own_kind": kind,
        "_available": home.ZeroParamStatus.AVAILABLE,
        "_by_user": home.DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR,
    }
    metaclass: Any = type(kind)
    made: type[Any] = metaclass(kind.__name__, (Stage3Weight, kind), names)
    return made


def mark(weight: Any, name: str, stage3: Stage3) -> None:
    """Give a weight its class until ``unmark``, and announce each gathering of it."""
    own = vars(weight)
    own.update(ds_owner=weakref.ref(stage3), ds_name=name)
    own.pop("item", None)  # it gathers, which hangs if one rank asks for a number to print
    own["all_gather_coalesced"] = plainly(own["all_gather_coalesced"])
    what = f"the gathering of {name} ({stage3.label})"
    own["all_gather"] = _announced(own["all_gather"], weight, stage3.process, what)
    own["partition"] = _partitioning(own["partition"], weight)
    kind: Any = type(weight)
    weight.__class__ = class_of(kind)


def unmark(weight: Any) -> None:
    """Give a weight its own class back. ``Snapshot`` takes the attributes away."""
    if isinstance(weight, Stage3Weight):
        weight.__class__ = weight._own_kind


def _announced(
    gather: Callable[..., Any], weight: Any, process: Process, what: str
) -> Callable[..., Any]:
    def all_gather(param_list: Any = None, **options: Any) -> Any:
        weights = [weight] if param_list is None else param_list
        announce(process, what, len(weights))
        with Waiting(process, what), torch._C.DisableTorchFunctionSubclass():
            return recorded(gather)(weights, **options)

    return all_gather


def _partitioning(partition: Callable[..., Any], weight: Any) -> Callable[..., Any]:
    """Return DeepSpeed's ``partition``, which leaves small weights gathered, as DeepSpeed often does."""

    def call(param_list: Any = None, has_been_updated: bool = False, **options: Any) -> None:
        if has_been_updated:
            raise BackendError(
                "GatheredParameters(..., modifier_rank=...) would not change what the optimizer updates. "
                "Call model.load_state_dict(full) on every rank."
            )
        weights = [weight] if param_list is None else param_list
        with torch._C.DisableTorchFunctionSubclass():
            partition([w for w in weights if not w.ds_persist], **options)

    return call


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which makes tensors for autograd even if ``inference_mode`` is on."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


# -- zero_grad of raw objects, which drops the gradients of shards too ---------------------------


@final
class ZeroGrad:
    """The ``zero_grad`` of a module or optimizer, in its own attributes.

    Submodules have it too: a GAN in one ModuleDict calls ``model.critic.zero_grad()``. It is an
    object with a short repr, because EmbeddingBag shows all of its attributes in its own.
    """

    def __init__(self, engine: weakref.ref[DeepSpeedEngine], owner: Any) -> None:
        self._engine = engine
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raw, engine = self._owner, self._engine()
        if engine is None or engine.zero is None:
            return type(raw).zero_grad(raw, *args, **kwargs)
        if isinstance(raw, nn.Module):
            numbers = engine.zero.numbers
            indices = [numbers[id(p)] for p in raw.parameters() if id(p) in numbers]
        else:
            indices = engine.indices(raw)
        with torch._C.DisableTorchFunctionSubclass(), engine.gradients.placed.lifted():
            out = type(raw).zero_grad(raw, *args, **kwargs)
        engine.gradients.drop(indices, kwargs.get("set_to_none", args[0] if args else True))
        return out


def put_zero_grad(raw: nn.Module | Optimizer, engine: DeepSpeedEngine) -> None:
    """Replace the method of an optimizer, or of a module and its submodules."""
    for owner in raw.modules() if isinstance(raw, nn.Module) else [raw]:
        vars(owner)["zero_grad"] = ZeroGrad(weakref.ref(engine), owner)


def remove_zero_grad(raw: nn.Module | Optimizer) -> None:
    """Undo ``put_zero_grad``."""
    for owner in raw.modules() if isinstance(raw, nn.Module) else [raw]:
        if isinstance(vars(owner).get("zero_grad"), ZeroGrad):
            del vars(owner)["zero_grad"]

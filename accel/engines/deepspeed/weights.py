"""Weights of stage 3, of which this rank may hold a part only: a use of one sees the whole of it, or raises at once.

DeepSpeed keeps an empty tensor in the place of a weight that is not gathered, and torch would compute with that. The library
says by ``ds_status`` what it has done; here each status has a class of its own, so that a gathered weight costs nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

import torch
from torch import nn

from ...errors import BackendError
from ...process import Process
from ...process.control import Waiting, announce
from .library import library

_T: Any = torch.Tensor
_DATA: Any = _T.data
_SET_GRAD: Any = _T.grad.__set__


def _attributes(names: str, *ways: str) -> list[Any]:
    return [getattr(getattr(_T, name), way) for name in names.split() if hasattr(_T, name) for way in ways]


#: What does not look at values: the library's empty tensor answers it right.
_PLAIN: Final = frozenset(
    [
        *_attributes("dtype device layout is_leaf is_meta is_sparse is_cuda is_cpu is_xpu is_mps itemsize", "__get__"),
        *_attributes("grad_fn output_nr retains_grad names _version is_quantized is_mkldnn", "__get__"),
        *_attributes("requires_grad grad _grad grad_dtype", "__get__", "__set__"),
        *_attributes("_backward_hooks _post_accumulate_grad_hooks", "__get__", "__set__"),
        *(_T.grad.__delete__, _T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook),
        *(_T.retain_grad, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.is_inference, _T.is_shared),
        *(torch.is_floating_point, torch.is_complex, torch.is_signed, _T.get_device, _T.element_size, _T.__format__),
        *(_T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor),
        *(torch.autograd.grad, torch.autograd.backward, _T.backward, torch._has_compatible_shallow_copy_type),
    ]
)
#: Of the weight as a whole.
_SHAPE: Final = frozenset(
    [
        *_attributes("shape ndim nbytes", "__get__"),
        *(_T.size, _T.dim, _T.numel, _T.ndimension, _T.nelement, _T.__len__, _T.stride, _T.is_contiguous, torch.numel),
    ]
)
#: A new tensor of the whole shape.
_LIKE: Final = frozenset(
    [torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like]
)
#: Nothing where the weight is like that already: ``model.to(device)``.
_CONVERSIONS: Final = frozenset([_T.to, _T.cuda, _T.cpu, _T.float, _T.double, _T.half, _T.bfloat16, _T.type])


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which weights are plain tensors, as the library knows them."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return call


class _Status:
    """Switches the class of a weight. Without ``__get__`` it is read from the weight's own dict, at the usual cost."""

    def __set__(self, weight: Any, status: Any) -> None:
        own = weight.__dict__
        own["ds_status"] = status
        weight.__class__ = weight._states[not (status is weight._available and own["ds_persist"])]


class _Watched:
    """A weight of a watched module."""

    __slots__ = ()
    _watch: Watch
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
                f"{self._watch.name(self)}.data = ...: the optimizer steps this rank's part of it, so that other values would be "
                "lost: set weights by load_state_dict(full) of the model's handle, on every rank"
            )

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind = self._kind
        made: Any = kind.__deepcopy__(self, memo)
        made.__class__ = kind
        return made


class _Whole(_Watched):
    """A weight that is gathered for its user."""

    __slots__ = ()

    def __repr__(self) -> str:
        kind: Any = self._kind
        weight: Any = self
        return repr(kind(weight.detach(), weight.requires_grad)) if kind is nn.Parameter else str(kind.__repr__(self))


class _Divided(_Watched):
    """A weight of which this rank has a part, as far as its user can rely on it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Parameter of shape {tuple(vars(self)['ds_shape'])}, divided over {self._watch.ranks} ranks"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Shape, dtype and the like; what needs values gathers them in a forward, and raises elsewhere."""
        kwargs = kwargs or {}
        if func == _SET_GRAD and args[1] is not None:
            set_grad(*args)
            return None
        if func in _PLAIN or func is torch.autograd.backward:  # accel's own, while models are set up
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SHAPE:
            return func(_without_values(args[0]), *args[1:], **kwargs)
        if func in _LIKE and isinstance(args[0], _Divided):
            return func(_without_values(args[0]), *args[1:], **{"device": args[0].device, **kwargs})  # type: ignore[attr-defined]
        if func in _CONVERSIONS:
            made = plainly(func)(*args, **kwargs)
            if made is args[0] or isinstance(made, str):
                return made
        for weight in _divided((args, kwargs)):
            weight._watch.gather(weight, func)
        return func(*args, **kwargs)


def _divided(arguments: Any) -> Iterator[_Divided]:
    if isinstance(arguments, _Divided):
        yield arguments
    elif isinstance(arguments, Mapping):
        yield from _divided(list(arguments.values()))
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from _divided(argument)


@plainly
def set_grad(weight: Any, grad: torch.Tensor) -> None:
    """``weight.grad = grad``, of the whole weight's shape."""
    held, like = weight.data, torch.empty((), dtype=weight.dtype, device=weight.device)
    weight.data = like.expand(weight.ds_shape)
    try:
        weight.grad = grad
    finally:
        weight.data = held


def _without_values(weight: Any) -> torch.Tensor:
    return torch.empty(weight.ds_shape, dtype=weight.dtype, device="meta")


@final
class Watch:
    """Watches the uses of a module's weights, until ``open``.

    Args:
        module: divided by the library.
        reveal: gathers a weight for the forward that runs, with all ranks; False where none runs.
        process: of this rank.
        title: of the engine, for messages.
    """

    def __init__(self, module: nn.Module, reveal: Callable[[Any], bool], process: Process, title: str) -> None:
        weights: list[Any] = list(module.parameters())
        # Weakly: a weight's class knows this object.
        self._weights = [(weakref.ref(weight), type(weight)) for weight in weights]
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._reveal = reveal
        self._states = {kind: self._derive(kind) for kind in {type(weight) for weight in weights}}
        self.ranks = weights[0].ds_zero_partition_world_size
        for weight in weights:
            # It gathers, which hangs where one rank asks for a number to print.
            vars(weight).pop("item", None)
            vars(weight).update({n: plainly(vars(weight)[n]) for n in ("all_gather_coalesced", "partition")})
            what = f"the gathering of {self.name(weight)} ({title})"
            vars(weight)["all_gather"] = _gathering(weight, vars(weight)["all_gather"], process, what)
        self.close()

    def _derive(self, kind: type[Any]) -> tuple[type[Any], ...]:
        available = library("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus.AVAILABLE
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        common = names | {"_watch": self, "_kind": kind, "_available": available}
        metaclass: Any = type(kind)
        states = tuple(metaclass(kind.__name__, (state, kind), dict(common)) for state in (_Whole, _Divided))
        for state in states:
            state._states = states
        return states

    def name(self, weight: Any) -> str:
        """As in ``named_parameters()``."""
        return self._names[id(weight)]

    def open(self) -> None:
        """Give the weights their own classes, since all of them are whole."""
        for reference, kind in self._weights:
            if (weight := reference()) is not None:
                weight.__class__ = kind

    def close(self) -> None:
        """Watch them again, or for the first time."""
        for reference, kind in self._weights:
            if (weight := reference()) is not None:
                weight.__class__ = self._states[kind][0]
                weight.ds_status = weight.ds_status

    def gather(self, weight: Any, function: Any) -> None:
        """Gather a weight for a use of it, in a forward.

        Raises:
            BackendError: none runs.
        """
        if not self._reveal(weight):
            raise BackendError(
                f"{self.name(weight)} is divided over {self.ranks} ranks, and outside of a forward its values are not here for "
                f"{_called(function)}: compute in the model's forward, or in a method of the model that its handle calls; read "
                "weights, on every rank, by accel.full_state_dict(model) or inside deepspeed.zero.GatheredParameters; set them "
                "by load_state_dict(full) of the handle; or use stage 2"
            )


def _called(function: Any) -> str:
    name = getattr(function, "__name__", repr(function))
    return str(function.__self__.__name__ if name in ("__get__", "__set__") else name)


def promise(weights: Iterable[Any]) -> None:
    """Let gathered weights be used, until ``take_back``."""
    for weight in weights:
        if isinstance(weight, _Watched) and weight.ds_status is weight._available:
            weight.__class__ = weight._states[0]


def take_back(weights: Iterable[Any]) -> None:
    """Take weights that no module uses any more for divided, even while they are still there."""
    for weight in weights:
        if not weight.ds_active_sub_modules and isinstance(weight, _Watched):
            weight.__class__ = weight._states[1]


def _gathering(weight: Any, gather: Callable[..., Any], process: Process, what: str) -> Callable[..., Any]:
    def all_gather(param_list: Any = None, **options: Any) -> Any:
        weights = [weight] if param_list is None else param_list
        announce(process, what, len(weights))
        with Waiting(process, what), torch._C.DisableTorchFunctionSubclass():
            out = gather(weights, **options)
        promise(weights)
        return out

    return all_gather

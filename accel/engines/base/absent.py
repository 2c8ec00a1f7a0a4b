"""Parameters without values on this rank.

The metadata of such a parameter, for example its shape, is correct. Using
its values fetches them or raises an error. Otherwise torch would silently
compute with the placeholder tensor that replaces them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from ...errors import BackendError
from ...trees import all_tensors

_T: Any = Tensor
#: A context in which torch treats parameters of any class as plain tensors.
as_plain: Final = torch._C.DisableTorchFunctionSubclass


def attributes(names: str, *ways: str) -> list[Any]:
    """Return the functions of a tensor's methods and attributes."""
    functions = []
    for name in names.split():
        function = getattr(_T, name, None)
        if callable(function):
            functions.append(function)
        elif function is not None:
            functions += map(functools.partial(getattr, function), ways)
    return functions


_FACTS: Final = {
    *attributes("dtype device layout is_leaf is_meta is_sparse is_cuda is_cpu", "__get__"),
    *attributes("is_xpu is_mps is_quantized is_mkldnn itemsize", "__get__"),
    *attributes("is_floating_point is_complex is_signed is_shared"),
    *attributes("get_device element_size __hash__ __format__"),
    *attributes("new_empty new_zeros new_ones new_full new_tensor"),
    torch.is_floating_point,
    torch.is_complex,
    torch._has_compatible_shallow_copy_type,
}
_SHAPE: Final = {
    *attributes("shape ndim nbytes size dim numel __len__ stride is_contiguous", "__get__"),
    torch.numel,
}
#: ``model.to(device)`` calls these. They return the parameter itself if nothing changes.
_CONVERSIONS: Final = set(attributes("to cuda cpu float double half bfloat16"))
#: Autograd's functions. The placeholder tensor has the gradient and the hooks.
FOR_AUTOGRAD: Final = {
    *attributes("grad_fn output_nr retains_grad names _version", "__get__"),
    *attributes("requires_grad grad _grad grad_dtype", "__get__", "__set__"),
    *attributes("_backward_hooks _post_accumulate_grad_hooks", "__get__", "__set__"),
    *attributes("requires_grad_ retain_grad register_hook"),
    *attributes("register_post_accumulate_grad_hook"),
    _T.backward,
    _T.grad.__delete__,
    torch.autograd.grad,
    torch.autograd.backward,
}
#: The same, and functions that return an address, which the placeholder has too.
OF_ITSELF: Final = {*FOR_AUTOGRAD, _T.data_ptr, _T.untyped_storage}


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that treats parameters as plain tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with as_plain():
            return function(*args, **kwargs)

    return call


class Absent:
    """A mixin for parameters without values. List it first."""

    __slots__ = ()
    #: More functions that are correct for the placeholder tensor.
    plain: ClassVar[Any] = frozenset()

    def full_shape(self) -> torch.Size:
        """Return the shape of the values."""
        shape: torch.Size = plainly(_T.shape.__get__)(self)
        return shape

    def fetch(self, function: Any) -> None:
        """Fetch the values for a function, or raise BackendError."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = plainly(func)
        if func in _FACTS or func in cls.plain:
            return plain(*args, **kwargs)
        if func in _SHAPE:
            p, *rest = args
            meta = torch.empty(p.full_shape(), dtype=p.dtype, device="meta")
            return func(meta, *rest, **kwargs)
        if func in _CONVERSIONS:
            result = plain(*args, **kwargs)
            if result is args[0]:
                return result
        # model.to(device) sets p.data = p for a parameter that is already on the device.
        if func == _T.data.__set__ and args[1] is args[0]:
            return None
        for _, tensor in all_tensors((args, kwargs)):
            if isinstance(tensor, Absent):
                tensor.fetch(func)
        return plain(*args, **kwargs)


def take_away(parameter: nn.Parameter, kind: type[Absent], **extra: Any) -> None:
    """Free a parameter's values. Set its class and ``extra`` attributes."""
    parameter.data = blank(parameter)
    vars(parameter).update(extra, _before_absent=(type(parameter), *extra))
    parameter.__class__ = kind  # type: ignore[assignment]


def bring_back(parameter: nn.Parameter) -> None:
    """Restore the parameter's class. The caller sets its values."""
    parameter.__class__, *extra = vars(parameter).pop("_before_absent")
    for name in extra:
        del vars(parameter)[name]


def blank(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape that expands one NaN or 0."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    single = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    return single.expand(tensor.shape)


def name_of(function: Any) -> str:
    """Return the name of a function or attribute for an error."""
    name = getattr(function, "__name__", repr(function))
    if name in ("__get__", "__set__"):
        name = getattr(function.__self__, "__name__", "an attribute")
    return str(name)


def refuse_second_derivatives() -> None:
    """Raise BackendError for ``create_graph=True`` of a sharded model."""
    raise BackendError(
        "backward(create_graph=True) can't differentiate a sharded model. "
        'Use backend="ddp" for gradient penalties.'
    )

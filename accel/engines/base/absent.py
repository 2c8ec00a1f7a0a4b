"""Parameters whose values are not on this rank.

Facts about such a parameter, its shape for example, are right. A use of its values fetches them or
raises an error: torch would compute with whatever tensor is in the values' place, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch

from ...errors import BackendError
from ...trees import all_tensors

_T: Any = torch.Tensor


def attributes(names: str, *ways: str) -> list[Any]:
    """Return what torch calls a use of a tensor's attributes: ``__get__`` or ``__set__``."""
    found = [getattr(_T, name) for name in names.split() if hasattr(_T, name)]
    return [getattr(attribute, way) for attribute in found for way in ways]


def _methods(names: str) -> list[Any]:
    return [getattr(_T, name) for name in names.split()]


#: Functions that don't look at values.
_FACTS: Final = frozenset(
    [
        *attributes(
            "dtype device layout is_leaf is_meta is_sparse is_cuda is_cpu is_xpu is_mps", "__get__"
        ),
        *attributes("itemsize is_quantized is_mkldnn", "__get__"),
        *_methods(
            "is_floating_point is_complex is_signed is_inference is_shared get_device element_size"
        ),
        *_methods("__hash__ __format__ new_empty new_zeros new_ones new_full new_tensor"),
        *(
            torch.is_floating_point,
            torch.is_complex,
            torch.is_signed,
            torch._has_compatible_shallow_copy_type,
        ),
    ]
)
#: Functions of the shape.
_SHAPE: Final = frozenset(
    [
        *attributes("shape ndim nbytes", "__get__"),
        *_methods("size dim numel ndimension nelement __len__ stride is_contiguous"),
        torch.numel,
    ]
)
#: Functions that make a new tensor of this shape.
_LIKE: Final = frozenset(
    [
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
    ]
)
#: Functions that return the parameter itself if it has this dtype and device: ``model.to(device)``.
_CONVERSIONS: Final = frozenset(_methods("to cuda cpu float double half bfloat16 type"))

#: Functions of autograd: the tensor in the values' place has the gradient and the hooks.
FOR_AUTOGRAD: Final = frozenset(
    [
        *attributes("grad_fn output_nr retains_grad names _version", "__get__"),
        *attributes("requires_grad grad _grad grad_dtype", "__get__", "__set__"),
        *attributes("_backward_hooks _post_accumulate_grad_hooks", "__get__", "__set__"),
        *_methods(
            "requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad backward"
        ),
        *(_T.grad.__delete__, torch.autograd.grad, torch.autograd.backward),
    ]
)
#: The same and the place in memory.
OF_ITSELF: Final = FOR_AUTOGRAD | {_T.data_ptr, _T.untyped_storage}


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which then takes parameters for plain tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return call


class Absent:
    """Goes before the class of a parameter. Subclasses define ``fetch``."""

    __slots__ = ()
    #: More functions that the tensor in the values' place answers right.
    plain: ClassVar[frozenset[Any]] = frozenset()
    #: Attributes that ``take_away`` gives to a parameter.
    extra: ClassVar[tuple[str, ...]] = ()

    def full_shape(self) -> torch.Size:
        """Return the shape of the values."""
        shape: torch.Size = plainly(_T.shape.__get__)(self)
        return shape

    def fetch(self, function: Any) -> None:
        """Bring the values here for a function, or raise BackendError with the parameter's name."""
        raise NotImplementedError

    def converted(self, made: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter with the dtype and device of ``made``, or None if that needs values."""
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS or func in cls.plain:
            return plainly(func)(*args, **kwargs)
        if func in _SHAPE:
            return func(_without_values(args[0]), *args[1:], **kwargs)
        if func in _LIKE and isinstance(args[0], Absent):
            options = {"device": args[0].device, **kwargs}  # type: ignore[attr-defined]
            return func(_without_values(args[0]), *args[1:], **options)
        if func in _CONVERSIONS and "memory_format" not in kwargs:
            made = plainly(func)(*args, **kwargs)
            if made is args[0] or isinstance(made, str):
                return made
            if isinstance(args[0], Absent) and (converted := args[0].converted(made)) is not None:
                return converted
        for _, parameter in all_tensors((args, kwargs)):
            if isinstance(parameter, Absent):
                parameter.fetch(func)
        return plainly(func)(*args, **kwargs)


def take_away(parameter: torch.nn.Parameter, kind: type[Absent], **extra: Any) -> None:
    """Free a parameter's values. ``kind`` says what a use of them does, and reads ``extra``."""
    parameter.data = blank(parameter)
    vars(parameter).update(extra, _own_class=type(parameter))
    parameter.__class__ = kind  # type: ignore[assignment]


def bring_back(parameter: torch.nn.Parameter) -> None:
    """Make it a usual parameter again. The caller sets its values."""
    added = about(parameter)
    parameter.__class__ = vars(parameter)["_own_class"]
    for name in added:
        del vars(parameter)[name]


def about(parameter: Any) -> set[str]:
    """Return the names of the attributes that ``take_away`` has set."""
    return {"_own_class", *parameter.extra} if "_own_class" in vars(parameter) else set()


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape in the memory of one element: nan, or the least integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        value: Any = float("nan")
    else:
        value = False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _without_values(parameter: Any) -> torch.Tensor:
    return torch.empty(parameter.full_shape(), dtype=parameter.dtype, device="meta")


def name_of(function: Any) -> str:
    """Return the name of a function or attribute for an error."""
    name = getattr(function, "__name__", repr(function))
    if name not in ("__get__", "__set__"):
        return str(name)
    owner = function.__self__  # `data` may be a property of accel's own, which has no name
    return next((name for name, value in vars(_T).items() if value is owner), None) or str(
        owner.__name__
    )


def refuse_second_derivatives() -> None:
    """Raise BackendError for ``create_graph=True``: the graph lacks what other ranks computed."""
    raise BackendError(
        "backward(create_graph=True) can't differentiate a sharded model, because other ranks computed "
        'a part of it. Use backend="ddp" for gradient penalties.'
    )


def refuse_other_tensor(name: str, library: str) -> None:
    """Raise BackendError for a tensor in a parameter's place, because the library ignores it."""
    raise BackendError(
        f"{name!r} is a different tensor than in accel.setup, but {library} gathers the model's own "
        'parameters. Use backend="ddp" for torch.func.functional_call.'
    )

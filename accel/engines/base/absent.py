"""Parameter objects whose values are not here, or not all of them: what asks for values gets them at once, or raises by name.

torch would compute with whatever has the values' place, without a word. The class of such a parameter is one that derives
from ``Absent``, for as long as they are not here, and its own again once they are: a static class that read a status at each use
was measured at 3.3 us more for each ``F.linear`` and 1.2 us for each ``p.grad`` of a parameter that is here (6.2 and 0.2 us).
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
    """What torch calls a use of a tensor's attributes: ``__get__``, ``__set__``."""
    return [getattr(getattr(_T, name), way) for name in names.split() if hasattr(_T, name) for way in ways]


#: What does not look at values.
_PLAIN: Final = frozenset(
    [
        *attributes("dtype device layout is_leaf is_meta is_sparse is_cuda is_cpu is_xpu is_mps itemsize", "__get__"),
        *attributes("is_quantized is_mkldnn", "__get__"),
        *(_T.is_floating_point, _T.is_complex, _T.is_signed, _T.is_inference, _T.is_shared, _T.get_device),
        *(torch.is_floating_point, torch.is_complex, torch.is_signed, _T.element_size, _T.__hash__, _T.__format__),
        *(_T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor),
        torch._has_compatible_shallow_copy_type,
    ]
)
#: Of the parameter as a whole.
_SHAPE: Final = frozenset(
    [
        *attributes("shape ndim nbytes", "__get__"),
        *(_T.size, _T.dim, _T.numel, _T.ndimension, _T.nelement, _T.__len__, _T.stride, _T.is_contiguous, torch.numel),
    ]
)
#: A new tensor of the whole shape.
_LIKE: Final = frozenset(
    [torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like]
)
#: Nothing where the parameter is like that already: ``model.to(device)``.
_CONVERSIONS: Final = frozenset([_T.to, _T.cuda, _T.cpu, _T.float, _T.double, _T.half, _T.bfloat16, _T.type])

#: What the tensor in the values' place answers right too, where a parameter keeps a gradient of its own.
FOR_AUTOGRAD: Final = frozenset(
    [
        *attributes("grad_fn output_nr retains_grad names _version", "__get__"),
        *attributes("requires_grad grad _grad grad_dtype", "__get__", "__set__"),
        *attributes("_backward_hooks _post_accumulate_grad_hooks", "__get__", "__set__"),
        *(_T.grad.__delete__, _T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook),
        *(_T.retain_grad, torch.autograd.grad, torch.autograd.backward, _T.backward),
    ]
)

#: The same, and where it lies.
OF_ITSELF: Final = FOR_AUTOGRAD | {_T.data_ptr, _T.untyped_storage}


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which parameters are plain tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return call


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which makes tensors that a backward may save, in inference mode too: they outlive it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


class Absent:
    """Goes before the class of a parameter."""

    __slots__ = ()
    #: More functions that the tensor in the values' place answers right.
    plain: ClassVar[frozenset[Any]] = frozenset()

    def full_shape(self) -> torch.Size:
        shape: torch.Size = plainly(_T.shape.__get__)(self)
        return shape

    def fetch(self, function: Any) -> None:
        """Let the values be here for a function; BackendError, which names the parameter, where they cannot."""
        raise NotImplementedError

    def converted(self, made: torch.Tensor) -> torch.Tensor | None:
        """What a conversion to the dtype and device of ``made`` gives; None where it needs the values."""
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN or func in cls.plain:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SHAPE:
            return func(_without_values(args[0]), *args[1:], **kwargs)
        if func in _LIKE and isinstance(args[0], Absent):
            return func(_without_values(args[0]), *args[1:], **{"device": args[0].device, **kwargs})  # type: ignore[attr-defined]
        if func in _CONVERSIONS and "memory_format" not in kwargs:
            made = plainly(func)(*args, **kwargs)
            if made is args[0] or isinstance(made, str):
                return made
            if isinstance(args[0], Absent) and (like := args[0].converted(made)) is not None:
                return like
        for _, parameter in all_tensors((args, kwargs)):
            if isinstance(parameter, Absent):
                parameter.fetch(func)
        return func(*args, **kwargs)


def take_away(parameter: torch.nn.Parameter, kind: type[Absent], **attributes: Any) -> None:
    """Free a parameter's values, and give it a class that says so, and attributes."""
    parameter.data = blank(parameter)
    vars(parameter)["_present"] = type(parameter), tuple(attributes)
    vars(parameter).update(attributes)
    parameter.__class__ = kind  # type: ignore[assignment]


def bring_back(parameter: torch.nn.Parameter) -> None:
    """Give it its own class again; whoever calls gives it its values."""
    parameter.__class__, names = vars(parameter).pop("_present")
    for name in names:
        del vars(parameter)[name]


def about(parameter: Any) -> set[str]:
    """The names of the attributes that ``take_away`` has given it."""
    taken = vars(parameter).get("_present")
    return set() if taken is None else {"_present", *taken[1]}


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype in one element's memory: NaN, or the least integer; writing to it raises."""
    if tensor.is_floating_point() or tensor.is_complex():
        value: Any = float("nan")
    else:
        value = False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _without_values(parameter: Any) -> torch.Tensor:
    return torch.empty(parameter.full_shape(), dtype=parameter.dtype, device="meta")


def name_of(function: Any) -> str:
    """For messages: of an attribute, its own."""
    name = getattr(function, "__name__", repr(function))
    if name not in ("__get__", "__set__"):
        return str(name)
    owner = function.__self__  # `data` is a property of accel's own, which has no name
    return next((name for name, value in vars(_T).items() if value is owner), None) or str(owner.__name__)


def refuse_second_derivatives() -> None:
    """BackendError of a backward whose graph would lack what other ranks, or gathered weights, have computed."""
    raise BackendError(
        "a backward with create_graph=True on a backend that divides the model: what it computes is not all here, so that it "
        "cannot be differentiated; for gradient penalties choose a backend that keeps parameters whole"
    )


def refuse_other_tensor(name: str, library: str) -> None:
    """BackendError of a tensor in the place of a parameter: what a library gathered would be computed with, not the tensor."""
    raise BackendError(
        f"another tensor in the place of the parameter {name!r}: {library} gathers the model's own parameters; for "
        "torch.func.functional_call use a backend that keeps parameters whole, or compute with torch.nn.functional; to replace "
        "a parameter, call raw = accel.teardown(model), and set it up again"
    )

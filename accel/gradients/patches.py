"""What accel changes in other libraries: only while something of its own needs it, and so that others can change it too.

Every such change is made here: a function of a module, a value, a filter of warnings. Where another library has put something
of its own in the place since, that stays, and what of accel is inside of it passes the calls on.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from types import FrameType
from typing import Any, Final, Protocol, final

import torch
from torch.nn.utils import clip_grad

from ..process.control import is_lost, lost

_ABSENT: Final = object()


@final
class Patch:
    """A function that another one stands in for, from ``install`` to ``remove``. A context, too.

    Args:
        owner: where it is: ``vars`` of a module, or a table.
        name: under what.
        act: is called in its place, with the function that was there before the arguments.
        default: stands for a function that is not there.
    """

    def __init__(
        self,
        owner: MutableMapping[Any, Any],
        name: Any,
        act: Callable[..., Any],
        default: Callable[..., Any] | None = None,
    ) -> None:
        self._owner = owner
        self._name = name
        self._act = act
        self._default = default
        self._live = False
        #: What was put there, with what was there before: as long as it may be inside of somebody's own.
        self._made: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Put it there; again only where it is not."""
        self._live = True
        current = self._owner.get(self._name, _ABSENT)
        if not any(made is current for made, _ in self._made):
            self._made.append((self._standing_for(current), current))
            self._owner[self._name] = self._made[-1][0]

    def remove(self) -> None:
        """Put back what was there, unless somebody has put something else there."""
        self._live = False
        current = first = self._owner.get(self._name, _ABSENT)
        for made, before in reversed(self._made):
            current = before if made is current else current
        if current is first:
            return
        self._made.clear()
        if current is _ABSENT:
            del self._owner[self._name]
        else:
            self._owner[self._name] = current

    def _standing_for(self, found: Any) -> Callable[..., Any]:
        original: Any = self._default if found is _ABSENT else found

        def patched(*args: Any, **kwargs: Any) -> Any:
            return self._act(original, *args, **kwargs) if self._live else original(*args, **kwargs)

        return functools.wraps(original)(patched)

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *error: object) -> None:
        self.remove()


@contextlib.contextmanager
def replaced(owner: MutableMapping[Any, Any], name: Any, value: Any) -> Iterator[None]:
    """Inside, ``owner[name]`` is ``value``; what somebody puts there meanwhile stays."""
    before = owner.get(name, _ABSENT)
    owner[name] = value
    try:
        yield
    finally:
        if owner.get(name, _ABSENT) == value:
            if before is _ABSENT:
                del owner[name]
            else:
                owner[name] = before


def ignore_warnings(message: str = "", category: type[Warning] = Warning) -> Callable[[], None]:
    """Ignore warnings that begin with the regular expression ``message``, until what is returned is called.

    Unlike ``warnings.catch_warnings`` it leaves alone the filters that others add or remove meanwhile.
    """
    entry: Any = ("ignore", re.compile(message, re.IGNORECASE) if message else None, category, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined, unused-ignore]

    def undo() -> None:
        found: Any = warnings.filters
        found[:] = [one for one in found if one is not entry]

    return undo


# -- backwards ---------------------------------------------------------------------------------------------------------
# Tells the engines of a backward, makes ``inputs=...`` find the parameters in its graph, and a lost rank raise accel's error.
# An engine may have put other tensors in the parameters' places: autograd finds no way to those, and leaves their gradients
# alone without a word. ``Tensor.backward`` looks ``torch.autograd.backward`` up in its module: replacing it there reaches
# every loop.

_INPUTS: Final = 5  # its place among the arguments


def backward_patch(leaf: Callable[[torch.Tensor], torch.Tensor], before: Callable[[], None]) -> Patch:
    """The replaced function; ``leaf`` gives the tensor in the graph that a given one stands for, ``before`` hears of each."""

    def leaves(inputs: Any) -> Any:
        if isinstance(inputs, torch.Tensor):
            return leaf(inputs)
        if isinstance(inputs, torch.autograd.graph.GradientEdge):
            return inputs
        return [leaf(i) if isinstance(i, torch.Tensor) else i for i in inputs]

    def backward(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not the part of one that checkpointing computes again
            before()
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = leaves(kwargs["inputs"])
        elif len(args) > _INPUTS and args[_INPUTS] is not None:
            args = (*args[:_INPUTS], leaves(args[_INPUTS]), *args[_INPUTS + 1 :])
        try:
            original(*args, **kwargs)
        except RuntimeError as error:
            if is_lost(error):
                raise lost("a backward", error) from error
            raise

    return Patch(vars(torch.autograd), "backward", backward)


# -- Makes torch's own clipping functions see final gradients ----------------------------------------------------------
# ``torch.nn.utils.clip_grad_norm_``, ``clip_grad_value_`` and ``get_total_norm`` use helpers that they look up in their
# module's globals: replacing those reaches them however a loop imported them. One groups gradients, and is where they
# become final; one measures the norm to clip by, which adds up over the ranks where gradients lie on one rank each; one
# multiplies the gradients of given parameters, and alone is told the parameters.

_GROUP: Final = "_group_tensors_by_device_and_dtype"
_NORM: Final = "_get_total_norm"
_MULTIPLY: Final = "_clip_grads_with_norm_"


class ClipListener(Protocol):
    """What hears of clipping."""

    def before_clipping(self, gradients: Sequence[torch.Tensor]) -> None:
        """These gradients are about to be clipped or measured."""

    def before_multiplying(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of these parameters are about to be clipped by a norm."""

    def total_norm(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], norm_type: float
    ) -> torch.Tensor | None:
        """The norm over the ranks that ``clip_grad_norm_`` needs; None where it is that of ``gradients``."""

    def before_local_norm(self, gradients: Sequence[torch.Tensor]) -> None:
        """These gradients are about to be measured by a call that ``total_norm`` cannot answer."""


@final
class ClipPatch:
    """The replaced helpers; ``listener`` hears of their calls."""

    def __init__(self, listener: ClipListener) -> None:
        self._listener = listener
        self._inside = False
        acts: dict[str, Callable[..., Any]] = {_GROUP: self._group, _NORM: self._norm, _MULTIPLY: self._multiply}
        self._patches = [Patch(vars(clip_grad), name, act) for name, act in acts.items()]

    def install(self) -> None:
        """Replace the helpers; again is no second time."""
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        """Put torch's own back."""
        for patch in self._patches:
            patch.remove()

    def _group(self, original: Callable[..., Any], tensors: Sequence[Sequence[torch.Tensor]], *args: Any) -> Any:
        if not self._inside and sys._getframe(2).f_code.co_name == _NORM:  # who has called the patch
            self._listener.before_local_norm(tensors[0])
        self._listener.before_clipping(tensors[0])
        return original(tensors, *args)

    def _norm(
        self,
        original: Callable[..., torch.Tensor],
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._inside = True
        try:
            total = self._listener.total_norm(_clipped(sys._getframe(2)), gradients, float(norm_type))
            if total is None:
                return original(gradients, norm_type, error_if_nonfinite, foreach)
        finally:
            self._inside = False
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped"
            )
        return total

    def _multiply(self, original: Callable[..., None], parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._listener.before_multiplying(parameters)
        original(parameters, *args, **kwargs)


def _clipped(caller: FrameType) -> list[torch.Tensor]:
    """What ``clip_grad_norm_`` was given: its helper sees gradients only, of which a rank may have none."""
    return list(caller.f_locals["parameters"]) if caller.f_code.co_name == "clip_grad_norm_" else []


# -- Hears of the uses of ``tensor.data``, by which a program changes weights without a trace --------------------------
# What autograd's version counters would show, ``p.data.mul_(2)`` hides from them. ``torch.Tensor`` inherits the attribute from
# a class in C++: one of its own, on the Python class, is found first, and leaves nothing behind when it is deleted.

_DATA: Final[Any] = torch.Tensor.data


@final
class DataPatch:
    """The attribute in its place.

    Args:
        listener: hears of each use: the tensor, and what reading gave, or None before it is set.
        take: is given a tensor and the value to set first, and says whether it has taken it.
    """

    def __init__(
        self,
        listener: Callable[[torch.Tensor, torch.Tensor | None], None],
        take: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        self._listener = listener
        self._take = take
        self._own: property | None = None

    def install(self) -> None:
        """Put it there; again is no second time, and what another library has put there stays."""
        if self._own is not None or "data" in vars(torch.Tensor):
            return
        listener, take = self._listener, self._take

        def get(tensor: torch.Tensor) -> torch.Tensor:
            alias: torch.Tensor = _DATA.__get__(tensor)
            listener(tensor, alias)
            return alias

        def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
            # Conversions that change nothing (`model.to(device)`) put back what they have read.
            changed = not (_plain(value) and _plain(tensor) and value.data_ptr() == tensor.data_ptr())
            if changed:
                listener(tensor, None)
            if not take(tensor, value):
                _DATA.__set__(tensor, value)

        self._own = property(get, put, doc=_DATA.__doc__)
        torch.Tensor.data = self._own  # type: ignore[assignment]

    def remove(self) -> None:
        """Take it away, unless another library has put its own in its place."""
        if self._own is not None and vars(torch.Tensor).get("data") is self._own:
            del torch.Tensor.data
        self._own = None


def _plain(tensor: object) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)

"""Steps on what of divided tensors lies on this rank, where an optimizer treats each element by itself.

An operation on a library's own kind of divided tensor can cost many times what it costs on the part that is here. So torch's
own step runs on a view of the optimizer, which shares all of its attributes but the groups' parameters and the state: these
are parts there, made when the step asks for them, after its closure and after every hook. The optimizer itself is never changed:
whoever looks at it, also while it steps or after a step that failed, finds what is always there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from ...precision import here

#: Optimizers that treat each element by itself, so that a part of a parameter is stepped as in the whole.
ELEMENTWISE: Final = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
)
#: Of each a class with two attributes of its own, however the others are shared. Its groups are those that are there when asked.
_VIEWS: Final = {
    k: type(k.__name__, (k,), {"__slots__": ("state",), "param_groups": property(lambda view: view.state.groups())})
    for k in ELEMENTWISE
}
_LOCAL: Final = operator.attrgetter("_local_tensor")
_GRAD: Final = operator.attrgetter("grad")
#: What a subclass may change of them without changing what ``step`` computes; of ``step`` itself see ``_by_torch``.
_OUTSIDE: Final = {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"}


def elementwise(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch whose elementwise step an optimizer makes on local tensors; None where it needs DTensors."""
    kind, groups = type(optimizer), optimizer.param_groups
    at = next((i for i, c in enumerate(kind.__mro__) if c in ELEMENTWISE), None)
    if at is None or not _by_torch(kind.step) or "_init_group" in vars(optimizer):
        return None
    own: Any = kind.__mro__[at]
    changed = (n for c in kind.__mro__[:at] for n in vars(c) if not n.startswith("__") and n not in _OUTSIDE)
    divided = (g.get("differentiable") or any(hasattr(v, "_local_tensor") for v in g.values()) for g in groups)
    return None if any(hasattr(own, n) for n in changed) or any(divided) else own


def _by_torch(function: Any) -> bool:
    """Whether a function, and every one that it stands around, is of ``torch.optim``."""
    while function is not None:
        if not function.__globals__["__name__"].startswith("torch.optim."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@final
class LocalSteps(dict[torch.Tensor, Any]):
    """The steps of one optimizer: by part the state, which is kept for the next step and looked at anew in each.

    ``stepping`` hears which divided parameters are about to be written to.
    """

    def __init__(self, stepping: Callable[[Sequence[torch.Tensor]], None]) -> None:
        super().__init__()
        self._stepping = stepping
        #: All objects in the optimizer's state that these were made from, None where others came since.
        self._known: list[Any] | None = None
        #: Of the step that runs: the optimizer's attributes, its state, the parts with gradients, their parameters, and these by
        #: the parts' identity where they are asked for.
        self._attributes: dict[str, Any] = {}
        self._own: dict[torch.Tensor, Any] = {}
        self._stepped: list[torch.Tensor] = []
        self._written: list[torch.Tensor] = []
        self._whole: dict[int, torch.Tensor] = {}

    def view(self, optimizer: Optimizer, kind: type[Optimizer]) -> Optimizer:
        """What ``kind``'s own step is called with in the place of ``optimizer``."""
        self.end()
        self._attributes = vars(optimizer)
        view: Any = object.__new__(_VIEWS[kind])
        view.__dict__ = self._attributes
        view.state = self
        seen: Optimizer = view
        return seen

    def groups(self) -> list[_Group]:
        """The optimizer's, as a hook or the closure has left them."""
        return [_Group(group, self._parts) for group in self._attributes["param_groups"]]

    def end(self) -> None:
        for part in self._stepped:
            part.grad = None
        self._stepped.clear()
        self._written.clear()
        self._whole.clear()

    def _parts(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What of them lies here, with the gradients."""
        if not self._stepped:
            self._look_at_state()
        parts, written, stepped = parts_of(parameters), [], []
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, part, gradient in zip(parameters, parts, list(map(_GRAD, parameters)), strict=True):
                if part is parameter:
                    continue
                if gradient is None:
                    part.grad = None
                    continue
                usual = getattr(gradient, "_spec", None) is parameter._spec  # type: ignore[attr-defined]
                part.grad = gradient._local_tensor if usual else _rows(gradient, parameter)
                stepped.append(part)
                written.append(parameter)
        self._stepped += stepped
        self._written += written
        self._stepping(written)
        return parts

    def _look_at_state(self) -> None:
        """Forget what was made of other objects than are in the optimizer's state now, or for parts that were replaced."""
        self._own = self._attributes["state"]
        found = [*self._own.values(), *chain.from_iterable(map(dict.values, self._own.values()))]
        known = self._known
        same = known is not None and len(found) == len(known) and all(map(operator.is_, found, known))
        if not same or len(self) > len(self._own):
            self.clear()
            self._known = found

    def __missing__(self, part: torch.Tensor) -> Any:
        """The state of a part, as a step asks for it: some optimizers have none."""
        if len(self._whole) != len(self._stepped):
            self._whole = dict(zip(map(id, self._stepped), self._written, strict=True))
        parameter = self._whole.get(id(part))
        if parameter is None:
            return self._own[part]
        state = self[part] = _LocalState(self._own[parameter], parameter, self._forget)
        return state

    def _forget(self) -> None:
        """The state is another one now; an empty list would pass for one that a program has cleared since."""
        self._known = None


def local_of(value: Any) -> Any:
    """What of a DTensor lies here, the very tensor; any other value as it is."""
    return getattr(value, "_local_tensor", value)


def parts_of(tensors: Sequence[Any]) -> list[Any]:
    """``local_of`` of each."""
    try:
        return list(map(_LOCAL, tensors))
    except AttributeError:  # one that every rank has whole
        return list(map(local_of, tensors))


def _rows(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What lies here of a gradient that was assigned by hand: it may be divided otherwise."""
    return here(torch.empty_like(parameter).copy_(gradient))


@final
class _Group(dict[str, Any]):
    """A group whose parameters are made when they are asked for."""

    def __init__(self, group: dict[str, Any], parts: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        super().__init__(group)
        self._parameters, self._parts = self.pop("params"), parts

    def __missing__(self, key: str) -> list[torch.Tensor]:
        if key != "params":
            raise KeyError(key)
        return self._parts(self._parameters)


@final
class _LocalState(dict[str, Any]):
    """The state of one parameter on this rank; what is put there becomes a part of a divided tensor in the optimizer's."""

    __slots__ = ("_changed", "_own", "_parameter")

    def __init__(self, own: dict[str, Any], parameter: torch.Tensor, changed: Callable[[], None]) -> None:
        super().__init__((key, local_of(value)) for key, value in own.items())
        self._own, self._changed = own, changed
        self._parameter: Any = parameter

    def __setitem__(self, key: str, value: Any) -> None:
        if self.get(key) is value:
            return
        super().__setitem__(key, value)
        parameter = self._parameter
        if isinstance(value, torch.Tensor) and value.shape == parameter._local_tensor.shape:
            value = type(parameter)(value, parameter._spec, requires_grad=False)
        self._own[key] = value
        self._changed()

"""Steps on what of divided tensors lies on this rank, where an optimizer treats each element by itself.

An operation on a library's own kind of divided tensor can cost many times what it costs on the part that is here. So torch's
own step runs on a view of the optimizer, which shares all of its attributes but the groups' parameters and the state: these
are parts there, made when the step asks for them, after its closure and after every hook. The optimizer itself is never changed:
whoever looks at it, also while it steps or after a step that failed, finds what is always there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, final

import torch
from torch.optim import Optimizer

#: Optimizers that treat each element by itself, so that a part of a parameter is stepped as in the whole.
ELEMENTWISE: Final = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
)
#: Of each a class with two attributes of its own, however the others are shared.
_VIEWS: Final = {k: type(k.__name__, (k,), {"__slots__": ("param_groups", "state")}) for k in ELEMENTWISE}
#: What a subclass may change of them without changing what ``step`` computes; of ``step`` itself see ``_by_torch``.
_OUTSIDE: Final = {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"}


def elementwise(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch whose elementwise step an optimizer makes; None where it may make another."""
    kind = type(optimizer)
    classes = kind.__mro__
    at = next((i for i, c in enumerate(classes) if c in ELEMENTWISE), None)
    if at is None or not _by_torch(kind.step) or "_init_group" in vars(optimizer):
        return None
    changed = (n for c in classes[:at] for n in vars(c) if not n.startswith("__") and n not in _OUTSIDE)
    return None if any(hasattr(classes[at], n) for n in changed) else classes[at]


def _by_torch(function: Any) -> bool:
    """Whether a function, and every one that it stands around, is of ``torch.optim``."""
    while function is not None:
        if not function.__globals__["__name__"].startswith("torch.optim."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


class Division(Protocol):
    """How a backend divides tensors."""

    def parts(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What of each lies here; itself where it is whole."""

    def parts_of_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """What of their gradients lies here."""

    def parts_of_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of the values in a parameter's state lies here."""

    def divided(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of which ``part`` lies here, divided as ``parameter``."""

    def stepping(self, parameters: Sequence[torch.Tensor]) -> None:
        """Hear that these divided parameters are about to be written to."""


@final
class LocalSteps:
    """The steps of one optimizer. What they need of its state is kept for the next one, and looked at anew in each."""

    def __init__(self, division: Division) -> None:
        self._division = division
        #: By the identity of parts; and the optimizer's own state of each parameter as it was then.
        self._states: dict[int, _State] = {}
        self._known: list[dict[str, Any]] = []
        #: Of the step that runs: the optimizer's state, the parts with gradients, and their parameters by the parts' identity.
        self._own: dict[torch.Tensor, Any] = {}
        self._stepped: list[torch.Tensor] = []
        self._whole: dict[int, torch.Tensor] = {}

    def view(self, optimizer: Optimizer, kind: type[Optimizer]) -> Optimizer:
        """What ``kind``'s own step is called with in the place of ``optimizer``."""
        self.end()
        self._own = optimizer.state
        view: Any = object.__new__(_VIEWS[kind])
        view.__dict__ = vars(optimizer)
        view.state = self
        view.param_groups = [_Group(group, self._parts) for group in optimizer.param_groups]
        seen: Optimizer = view
        return seen

    def end(self) -> None:
        """Let go of the gradients, and of what was not stepped."""
        if not self._stepped:
            return
        for part in self._stepped:
            part.grad = None
        if len(self._states) > len(self._stepped):
            self._states = {key: state for key, state in self._states.items() if key in self._whole}
        self._known = [*self._own.values()]
        self._stepped.clear()
        self._whole.clear()

    def _parts(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What of them lies here, with the gradients."""
        if not self._stepped and not _same(self._known, self._own):
            self._states.clear()
        division, stepped, whole, written = self._division, self._stepped, self._whole, []
        parts, gradients = division.parts(parameters), division.parts_of_gradients(parameters)
        for parameter, part, gradient in zip(parameters, parts, gradients, strict=True):
            if part is not parameter:
                part.grad = gradient
                if gradient is not None:
                    whole[id(part)] = parameter
                    stepped.append(part)
                    written.append(parameter)
        division.stepping(written)
        return parts

    def __getitem__(self, part: torch.Tensor) -> Any:
        """The state of a part, as a step asks for it: some optimizers have none."""
        state = self._states.get(id(part))
        if state is not None and _same(state.given, state.own):
            return state
        parameter = self._whole.get(id(part))
        if parameter is None:
            return self._own[part]
        state = self._states[id(part)] = _State(self._own[parameter], part, parameter, self._division)
        return state


def _same(values: list[Any], state: dict[Any, Any]) -> bool:
    """Whether these very objects are the values of ``state``."""
    return len(values) == len(state) and all(map(operator.is_, values, state.values()))


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
class _State(dict[str, Any]):
    """The state of one parameter on this rank; what is put there becomes a part of a divided tensor in the optimizer's."""

    __slots__ = ("_division", "_part", "_whole", "given", "own")

    def __init__(self, own: dict[str, Any], part: torch.Tensor, whole: torch.Tensor, division: Division) -> None:
        super().__init__(division.parts_of_state(own))
        self.own, self.given = own, [*own.values()]
        self._part, self._whole, self._division = part, whole, division

    def __setitem__(self, key: str, value: Any) -> None:
        if self.get(key) is value:
            return
        super().__setitem__(key, value)
        alike = isinstance(value, torch.Tensor) and value.shape == self._part.shape
        self.own[key] = self._division.divided(value, self._whole) if alike else value
        self.given = [*self.own.values()]

"""This rank's local shards in ``param_groups`` during a step.

The user's optimizer steps plain tensors, which can be several times faster
than a step on a library's sharded tensors. The local shards are in the
groups from the last pre-hook of a step to its first post-hook, so the
user's hooks and closures see the parameters.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from ...precision import here
from ...shard import parameters_of
from .absent import as_plain
from .raw_objects import Args, Kwargs, Override, move_hook

#: Optimizers that update each element independently, so they can step a local shard.
_ELEMENTWISE: Final = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD),
    *(optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta),
)
#: Methods that a subclass may override. A different ``step`` is detected separately.
_OUTSIDE: Final = {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"}


def elementwise(optimizer: Optimizer) -> bool:
    """True if the optimizer steps as an elementwise optimizer of torch."""
    step: Any = type(optimizer).step
    overridden: set[str] = set()
    for kind in type(optimizer).__mro__:
        if kind in _ELEMENTWISE:
            # schedulefree's AdamW is a subclass with its own step.
            own = vars(kind).keys() | vars(Optimizer).keys()
            is_same = inspect.unwrap(step) is inspect.unwrap(kind.step)
            return is_same and overridden.isdisjoint(own)
        overridden.update(name for name in vars(kind) if not name.startswith("__"))
        overridden -= _OUTSIDE
    return False


class PartsInGroups:
    """Puts local shards into an optimizer's groups during a step. Local.

    ``parts_of`` returns the local shards of a group's parameters. ``close``
    restores the optimizer, which is referenced weakly.
    """

    def __init__(self, optimizer: Optimizer, parts_of: Callable[[list[Any]], list[Any]]) -> None:
        self._parts_of = parts_of
        #: The groups of the running step, with their original lists of parameters.
        self._groups: list[tuple[dict[str, Any], list[Any]]] = []
        self._reference = weakref.ref(optimizer)
        self._before = optimizer.register_step_pre_hook(self._begin_step)
        self._after = optimizer.register_step_post_hook(self._end_step)
        move_hook(self._after, last=False)
        self._override = Override(optimizer, "step", self._step)

    def close(self) -> None:
        """Leave the optimizer as it was."""
        self.take_out()
        self._before.remove()
        self._after.remove()
        self._override.remove()

    def _step(self, optimizer: Any, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        # Run after the user's pre-hooks, which may edit ``p.grad``.
        move_hook(self._before, last=True)
        try:
            return original(*args, **kwargs)
        finally:
            # If the step raised, its post-hook didn't run.
            self.take_out()

    def put_in(self, optimizer: Optimizer) -> None:
        """Replace the parameters in the groups by local shards."""
        # DeepSpeed's engine may have put shards in before the step.
        self.take_out()
        for group in optimizer.param_groups:
            self._groups.append((group, group["params"]))
            group["params"] = self._parts_of(group["params"])

    def take_out(self) -> None:
        """Put the lists of parameters back. Harmless outside a step."""
        for group, parameters in self._groups:
            group["params"] = parameters
        self._groups.clear()

    def _begin_step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Any:
        # A compiled step updates the parameters directly.
        if torch.compiler.is_compiling():
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.put_in(optimizer)
            return None

        def closure_with_parameters() -> Any:
            # The closure must see parameters. An optimizer may call it several times.
            self.take_out()
            loss = closure()
            self.put_in(optimizer)
            return loss

        kwargs.pop("closure", None)
        return (optimizer, closure_with_parameters, *args[2:]), kwargs

    def _end_step(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.take_out()


# -- local shards of DTensors ----------------------------------------------------------------------

_LOCAL: Final = operator.attrgetter("_local_tensor")
_State = defaultdict[Any, Any]


def local_of(value: Any) -> Any:
    """Return a DTensor's local tensor, or any other value as it is."""
    return getattr(value, "_local_tensor", value)


def parts_of(tensors: Sequence[Any]) -> list[Any]:
    """Return ``local_of`` for each tensor."""
    try:
        return list(map(_LOCAL, tensors))
    except AttributeError:
        # FSDP2 doesn't shard a scalar, such as CLIP's logit_scale.
        return list(map(local_of, tensors))


@final
class LocalSteps(PartsInGroups):
    """Steps local tensors. First calls ``stepping`` with DTensors."""

    def __init__(self, optimizer: Optimizer, stepping: Callable[[list[Tensor]], None]) -> None:
        super().__init__(optimizer, parts_of)
        self._stepping = stepping
        #: During a step: the local tensors with gradients, the user's state, and the local values
        #: that replace the user's.
        self._stepped: list[Tensor] = []
        self._state: Any = None
        self._given: list[Any] = []

    def put_in(self, optimizer: Optimizer) -> None:
        super().put_in(optimizer)
        written: list[Tensor] = []
        with as_plain():
            for group, parameters in self._groups:
                for p, part in zip(parameters, group["params"], strict=True):
                    grad = p.grad
                    if part is not p and grad is not None:
                        part.grad = _local_gradient(grad, p)
                        self._stepped.append(part)
                        written.append(p)
        self._stepping(written)
        local: _State = defaultdict(dict)
        for p, values in optimizer.state.items():
            # A call of `local_of` for every value would be slow.
            kind = type(p)
            local[local_of(p)] = {
                key: local_of(value) if type(value) is kind else value
                for key, value in values.items()
            }
        self._state, self._given = optimizer.state, _values_of(local)
        optimizer.state = local

    def take_out(self) -> None:
        super().take_out()
        optimizer = self._reference()
        if self._state is not None and optimizer is not None:
            state, local, self._state = self._state, optimizer.state, None
            optimizer.state = state
            values = _values_of(local)
            is_new = len(values) != len(self._given)
            if is_new or not all(map(operator.is_, values, self._given)):
                self._adopt_state(parameters_of(optimizer), local, state)
            self._given = []
        for part in self._stepped:
            part.grad = None
        self._stepped.clear()

    def _adopt_state(self, parameters: Sequence[Any], local: _State, state: _State) -> None:
        """Copy the step's new values into ``state``."""
        by_part: dict[int, Any] = {}
        for p in [*state, *parameters]:
            by_part[id(local_of(p))] = p
        for part, values in local.items():
            p = by_part.get(id(part), part)
            known = state[p]
            for key, value in values.items():
                if local_of(known.get(key)) is not value:
                    known[key] = _like(p, value)
            for key in known.keys() - values.keys():
                del known[key]


def _values_of(state: _State) -> list[Any]:
    return [value for values in state.values() for value in values.values()]


def _spec_of(tensor: Any) -> Any:
    return getattr(tensor, "_spec", None)


def _local_gradient(gradient: Any, parameter: Any) -> Tensor:
    mine, spec = _spec_of(gradient), _spec_of(parameter)
    if mine is spec or mine == spec:
        return local_of(gradient)  # type: ignore[no-any-return]
    # The loop has assigned a full tensor to p.grad.
    return here(torch.empty_like(parameter).copy_(gradient))


def _like(parameter: Any, value: Any) -> Any:
    """Return a state value, as a DTensor if it has the local shape."""
    spec = _spec_of(parameter)
    if spec is None or not isinstance(value, Tensor):
        return value
    if value.shape != local_of(parameter).shape:
        return value
    return type(parameter)(value, spec, requires_grad=False)

"""This rank's parts of parameters in an optimizer's ``param_groups`` while it steps.

A backend that shards parameters lets the user's optimizer step the part on this rank: a plain
tensor, which can be several times as fast as the library's own kind of sharded tensor. The parts
are in the groups from the last pre-hook of a step to its first post-hook. So the user's hooks and
closures find the parameters, as they do between steps.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from ...precision import here
from .raw_objects import Override

#: Optimizers that treat each element by itself, so a part is stepped as in the full parameter.
_NAMES: Final = "SGD Adam AdamW Adamax NAdam RAdam RMSprop Rprop Adagrad Adadelta ASGD"
ELEMENTWISE: Final = frozenset(getattr(torch.optim, name) for name in _NAMES.split())
#: Methods that a subclass may override without changing what ``step`` computes.
_OUTSIDE: Final = {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"}


def elementwise(optimizer: Optimizer) -> bool:
    """True if an optimizer makes the step of one of torch's elementwise optimizers."""
    kind: Any = type(optimizer)
    return _is_elementwise(kind)


@functools.cache
def _is_elementwise(kind: Any) -> bool:
    base = next((c for c in kind.__mro__ if c in ELEMENTWISE), None)
    # schedulefree's AdamW has a step of its own.
    if base is None or inspect.unwrap(kind.step) is not inspect.unwrap(base.step):
        return False
    own_classes = kind.__mro__[: kind.__mro__.index(base)]
    names = {name for c in own_classes for name in vars(c) if not name.startswith("__")}
    return {name for name in names if hasattr(base, name)} <= _OUTSIDE


class PartsInGroups:
    """Puts this rank's parts into the groups of one optimizer while it steps. Local.

    ``parts_of`` returns the parts of a group's parameters: one for each, or fewer if this rank has
    nothing of some. ``close`` gives the optimizer back to its user. It is not kept alive.
    """

    def __init__(self, optimizer: Optimizer, parts_of: Callable[[list[Any]], list[Any]]) -> None:
        self._parts_of = parts_of
        #: The groups of the step that runs, with their lists of parameters.
        self._groups: list[tuple[dict[str, Any], list[Any]]] = []
        self._reference = weakref.ref(optimizer)
        self._before = optimizer.register_step_pre_hook(self._begin_step)
        self._after = optimizer.register_step_post_hook(self._end_step)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._after.id, last=False)
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
        # The user's pre-hooks run before, and may edit ``p.grad``.
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before.id)
        try:
            return original(*args, **kwargs)
        finally:
            # A step that raised has run no post-hook.
            self.take_out()

    def put_in(self, optimizer: Optimizer) -> None:
        """Replace the parameters in the groups by this rank's parts."""
        self.take_out()  # DeepSpeed's engine may have put them in before the step
        for group in optimizer.param_groups:
            self._groups.append((group, group["params"]))
            group["params"] = self._parts_of(group["params"])

    def take_out(self) -> None:
        """Put the parameters back, in the lists that held them. Harmless outside of a step."""
        for group, parameters in self._groups:
            group["params"] = parameters
        self._groups.clear()

    def _begin_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch.compiler.is_compiling():  # a compiled step works on the parameters themselves
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.put_in(optimizer)
            return None

        def closure_with_parameters() -> Any:
            # An optimizer may call the closure several times.
            self.take_out()
            loss = closure()
            self.put_in(optimizer)
            return loss

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, closure_with_parameters, *args[2:]), rest

    def _end_step(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.take_out()


# -- parts of DTensors -----------------------------------------------------------------------------

_LOCAL: Final = operator.attrgetter("_local_tensor")


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor, and any other value as it is."""
    return getattr(value, "_local_tensor", value)


def parts_of(tensors: Sequence[Any]) -> list[Any]:
    """Return ``local_of`` of each."""
    try:
        return list(map(_LOCAL, tensors))
    except AttributeError:
        # FSDP2 doesn't shard a scalar, such as CLIP's logit_scale.
        return list(map(local_of, tensors))


@final
class LocalSteps(PartsInGroups):
    """Steps on local tensors. ``stepping`` is called with the DTensors that are about to change."""

    def __init__(
        self, optimizer: Optimizer, stepping: Callable[[list[torch.Tensor]], None]
    ) -> None:
        super().__init__(optimizer, parts_of)
        self._stepping = stepping
        #: Of the step that runs: the local tensors that have gradients, the user's state, and the
        #: values that the step was given in its place.
        self._stepped: list[torch.Tensor] = []
        self._state: Any = None
        self._given: list[Any] = []

    def put_in(self, optimizer: Optimizer) -> None:
        super().put_in(optimizer)
        written: list[torch.Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            for group, parameters in self._groups:
                for parameter, part in zip(parameters, group["params"], strict=True):
                    gradient = parameter.grad
                    if part is not parameter and gradient is not None:
                        part.grad = _local_gradient(gradient, parameter)
                        self._stepped.append(part)
                        written.append(parameter)
        self._stepping(written)
        local: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, values in optimizer.state.items():
            # `local_of` of each value would be slow.
            kind = type(parameter)
            local[local_of(parameter)] = {
                key: local_of(value) if type(value) is kind else value
                for key, value in values.items()
            }
        self._state, self._given = optimizer.state, _values_of(local)
        optimizer.state = local

    def take_out(self) -> None:
        optimizer = self._reference()
        if self._state is not None and optimizer is not None:
            state, local, self._state = self._state, optimizer.state, None
            optimizer.state = state
            values = _values_of(local)
            if len(values) != len(self._given) or not all(map(operator.is_, values, self._given)):
                self._adopt_state(local, state)
            self._given = []
        for part in self._stepped:
            part.grad = None
        self._stepped.clear()
        super().take_out()

    def _adopt_state(self, local: defaultdict[Any, Any], state: defaultdict[Any, Any]) -> None:
        """Take what the step has added to the state, or replaced."""
        everything = chain(state, *(parameters for _, parameters in self._groups))
        by_part = {id(local_of(p)): p for p in everything}
        for part, values in local.items():
            parameter = by_part.get(id(part), part)
            known = state[parameter]
            for key, value in values.items():
                if local_of(known.get(key)) is not value:
                    known[key] = _like(parameter, value)
            for key in known.keys() - values.keys():
                del known[key]


def _values_of(state: defaultdict[Any, Any]) -> list[Any]:
    return [value for values in state.values() for value in values.values()]


def _local_gradient(gradient: Any, parameter: Any) -> torch.Tensor:
    spec = getattr(gradient, "_spec", None)
    if spec is parameter._spec or spec == parameter._spec:
        return local_of(gradient)  # type: ignore[no-any-return]
    # A program has assigned a full tensor to p.grad.
    return here(torch.empty_like(parameter).copy_(gradient))


def _like(parameter: Any, value: Any) -> Any:
    """Return a value of a parameter's state, as a DTensor if it has the local tensor's shape."""
    is_sharded = hasattr(parameter, "_spec") and isinstance(value, torch.Tensor)
    if is_sharded and value.shape == local_of(parameter).shape:
        return type(parameter)(value, parameter._spec, requires_grad=False)
    return value

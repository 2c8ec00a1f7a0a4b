"""This rank's parts of parameters in an optimizer's ``param_groups`` while it steps.

A backend that shards parameters lets the user's optimizer step the part on this rank: a plain
tensor, which can be several times as fast as the library's own kind of sharded tensor. The parts
stand in the groups from the last pre-hook of a step to its first post-hook. The user's hooks and
closures therefore find the parameters, as they do between steps.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from types import MethodType
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from ...precision import here

#: Optimizers that treat each element by itself, so a part is stepped as in the whole parameter.
ELEMENTWISE: Final = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "Adagrad",
        "Adadelta",
        "ASGD",
    )
)
#: Methods that a subclass may override without changing what ``step`` computes.
_OUTSIDE: Final = {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"}


def elementwise(optimizer: Optimizer) -> bool:
    """True if an optimizer makes the step of one of torch's elementwise optimizers."""
    kind: Any = type(optimizer)
    return _steps_elementwise(kind)


@functools.cache
def _steps_elementwise(kind: type[Optimizer]) -> bool:
    theirs = next((c for c in kind.__mro__ if c in ELEMENTWISE), None)
    if theirs is None or not _is_of_torch(kind.step):
        return False
    subclasses = kind.__mro__[: kind.__mro__.index(theirs)]
    overrides = {
        name
        for c in subclasses
        for name in vars(c)
        if hasattr(theirs, name) and not name.startswith("__")
    }
    return overrides <= _OUTSIDE


def _is_of_torch(function: Any) -> bool:
    """True if a function, and each one that it wraps, is defined in ``torch.optim``."""
    while function is not None:
        if not function.__globals__["__name__"].startswith("torch.optim."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


class PartsInGroups:
    """Puts this rank's parts into the groups of one optimizer while it steps. Local.

    ``parts_of`` returns the parts of a group's parameters: one for each, or fewer if this rank has
    nothing of some. ``close`` gives the optimizer back to its user. It is not kept alive.
    """

    def __init__(self, optimizer: Optimizer, parts_of: Callable[[list[Any]], list[Any]]) -> None:
        self._parts_of = parts_of
        #: The groups of the step that runs, with their lists of parameters.
        self._groups: list[tuple[dict[str, Any], list[Any]]] = []
        self._before = optimizer.register_step_pre_hook(self._begin_step)
        self._after = optimizer.register_step_post_hook(self._end_step)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._after.id, last=False)
        self._release = _guard_step(optimizer, self)

    def close(self) -> None:
        """Leave the optimizer as it was."""
        self.take_out()
        self._before.remove()
        self._after.remove()
        self._release()

    def be_last_hook(self, optimizer: Optimizer) -> None:
        """Let the user's pre-hooks run first, which may edit ``p.grad``."""
        hooks: Any = optimizer._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self._before.id:
            hooks.move_to_end(self._before.id)

    def put_in(self, optimizer: Optimizer) -> None:
        """Replace the parameters in the groups by this rank's parts."""
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
            self.take_out()
            self.put_in(optimizer)
            return None

        def closure_without_parts() -> Any:
            self.take_out()  # an optimizer may call it twice
            loss = closure()
            self.put_in(optimizer)
            return loss

        return (optimizer, closure_without_parts, *args[2:]), {
            k: v for k, v in kwargs.items() if k != "closure"
        }

    def _end_step(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.take_out()


def _guard_step(optimizer: Optimizer, parts: PartsInGroups) -> Callable[[], None]:
    """Make ``optimizer.step()`` restore the groups if it raises; return a function that undoes this.

    It is a MethodType because torch's schedulers wrap ``optimizer.step.__func__``. If one of them has
    wrapped it, the guard can't be removed, and becomes a plain call.
    """
    earlier = vars(optimizer).get("step")
    reference, active = weakref.ref(optimizer), [True]

    @functools.wraps(type(optimizer).step if earlier is None else earlier)
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        own = reference()
        assert own is not None  # somebody steps it
        call = functools.partial(type(own).step, own) if earlier is None else earlier
        if not active or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        try:
            parts.be_last_hook(own)
            return call(*args, **kwargs)
        except BaseException:
            parts.take_out()
            raise

    guarded = vars(optimizer)["step"] = MethodType(step, reference)

    def release() -> None:
        active.clear()
        own = reference()
        if own is None or vars(own).get("step") is not guarded:
            return
        if earlier is None:
            del vars(own)["step"]
        else:
            vars(own)["step"] = earlier

    return release


# -- parts of DTensors -----------------------------------------------------------------------------

_LOCAL: Final = operator.attrgetter("_local_tensor")


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor, and any other value as it is."""
    return getattr(value, "_local_tensor", value)


def parts_of(tensors: Sequence[Any]) -> list[Any]:
    """Return ``local_of`` of each."""
    try:
        return list(map(_LOCAL, tensors))
    except AttributeError:  # a scalar, which every rank has whole
        return list(map(local_of, tensors))


@final
class LocalSteps(PartsInGroups):
    """Steps on local tensors. ``stepping`` is called with the DTensors that are about to change."""

    def __init__(
        self, optimizer: Optimizer, stepping: Callable[[list[torch.Tensor]], None]
    ) -> None:
        super().__init__(optimizer, parts_of)
        self._stepping = stepping
        #: Of the step that runs: the local tensors that have gradients, the optimizer with the
        #: user's state, and the values in the state that the step was given.
        self._stepped: list[torch.Tensor] = []
        self._state: tuple[Optimizer, defaultdict[torch.Tensor, Any]] | None = None
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
        local: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for parameter, values in optimizer.state.items():
            part, kind = (
                local_of(parameter),
                type(parameter),
            )  # `local_of` of each value would be slow
            if part is not parameter:
                values = {k: v._local_tensor if type(v) is kind else v for k, v in values.items()}  # type: ignore[attr-defined]
            local[part] = values
        self._state, self._given = (optimizer, optimizer.state), _values_of(local)
        optimizer.state = local

    def take_out(self) -> None:
        if self._state is not None:
            optimizer, state = self._state
            local, optimizer.state = optimizer.state, state
            values = _values_of(local)
            if len(values) != len(self._given) or not all(map(operator.is_, values, self._given)):
                self._adopt_state(local, state)
            self._state, self._given = None, []
        for part in self._stepped:
            part.grad = None
        self._stepped.clear()
        super().take_out()

    def _adopt_state(
        self, local: defaultdict[torch.Tensor, Any], state: defaultdict[torch.Tensor, Any]
    ) -> None:
        """Take what the step has added to the state, or replaced."""
        everything = chain(state, *(parameters for _, parameters in self._groups))
        parameters = {id(local_of(p)): p for p in everything}
        for part, values in local.items():
            parameter: Any = parameters.get(id(part), part)
            if parameter is part:
                state[part] = values
                continue
            known = state[parameter]
            for key, value in values.items():
                if local_of(known.get(key)) is not value:
                    known[key] = _like(parameter, value)
            for key in known.keys() - values.keys():
                del known[key]


def _values_of(state: defaultdict[torch.Tensor, Any]) -> list[Any]:
    return list(
        chain.from_iterable(
            values.values() for values in state.values() if isinstance(values, dict)
        )
    )


def _local_gradient(gradient: Any, parameter: Any) -> torch.Tensor:
    spec = getattr(gradient, "_spec", None)
    if spec is parameter._spec or spec == parameter._spec:
        return gradient._local_tensor  # type: ignore[no-any-return]
    return here(torch.empty_like(parameter).copy_(gradient))  # assigned by hand


def _like(parameter: Any, value: Any) -> Any:
    """Return a value of a parameter's state, as a DTensor if it has the local tensor's shape."""
    if isinstance(value, torch.Tensor) and value.shape == parameter._local_tensor.shape:
        return type(parameter)(value, parameter._spec, requires_grad=False)
    return value

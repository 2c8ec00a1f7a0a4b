"""The class of the user's weights at stage 3.

DeepSpeed replaces a weight that is not gathered by an empty tensor, and torch would compute with
that: a weight penalty outside of the forward would be 0, for example. So each weight gets a class
that reads DeepSpeed's ``ds_status`` at every use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch._compile import _disable_dynamo

from ...errors import BackendError
from ..base.absent import FOR_AUTOGRAD, Absent, name_of
from .library import library

if TYPE_CHECKING:
    from .stage3 import Stage3


@final
class Stage3Weight(Absent, nn.Parameter):
    """A weight of a model at stage 3.

    A use of its values gathers them if a forward runs. Otherwise it raises BackendError.
    """

    __slots__ = ()
    plain = FOR_AUTOGRAD
    #: DeepSpeed's ``ZeroParamStatus.AVAILABLE``, and its mark inside of ``GatheredParameters``.
    available: Any
    by_user: str

    def is_here(self) -> bool:
        """True if its values are here, and stay until the code that uses them has ended.

        After a forward, values that no module needs may still be here. But a backward would find
        them gone.
        """
        facts = self.__dict__
        if facts["ds_status"] is not self.available:
            return False
        needed = facts["ds_persist"] or facts["ds_active_sub_modules"] or self.by_user in facts
        return bool(needed) or torch._C._current_graph_task_id() != -1

    def full_shape(self) -> torch.Size:
        return torch.Size(vars(self)["ds_shape"])

    def fetch(self, function: Any) -> None:
        if self.is_here():
            return
        stage3: Stage3 | None = vars(self)["ds_owner"]()
        if stage3 is None or not stage3.gather_for_forward(self):
            raise BackendError(
                f"{vars(self)['ds_name']} is sharded, so {name_of(function)}() can't use it "
                "outside of a forward. Use accel.full_state_dict(model), or a method of the model."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind = vars(self)["ds_class"]
        copied = memo[id(self)] = kind(self.detach().clone(), self.requires_grad)
        return copied


def by_library(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of DeepSpeed's that finds plain tensors, and makes tensors for autograd.

    ``inference_mode`` would make tensors with which training can't go on.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.is_inference_mode_enabled():
                return function(*args, **kwargs)
            with torch.inference_mode(False), torch.no_grad():
                return function(*args, **kwargs)

    return _disable_dynamo(call)


def mark(weight: Any, name: str, stage3: Stage3) -> None:
    """Give a weight its class until ``unmark``, and announce each gathering of it."""
    home = library("deepspeed.runtime.zero.partition_parameters")
    Stage3Weight.available = home.ZeroParamStatus.AVAILABLE
    Stage3Weight.by_user = home.DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR
    facts, partition = vars(weight), vars(weight)["partition"]

    def release(param_list: Any = None, **options: Any) -> None:
        # Small weights stay gathered, so that a penalty outside of forward can read them.
        partition([w for w in param_list or [weight] if not w.ds_persist], **options)

    facts.update(
        ds_owner=weakref.ref(stage3),
        ds_name=name,
        ds_class=type(weight),
        all_gather=by_library(stage3.announced(facts["all_gather"], f"the gathering of {name}")),
        all_gather_coalesced=by_library(facts["all_gather_coalesced"]),
        partition=by_library(release),
    )
    facts.pop("item", None)  # it gathers, which hangs if one rank asks for a number to print
    weight.__class__ = Stage3Weight


def unmark(weight: Any) -> None:
    """Give a weight its own class back. ``Snapshot`` takes the attributes away."""
    if type(weight) is Stage3Weight:
        weight.__class__ = vars(weight)["ds_class"]

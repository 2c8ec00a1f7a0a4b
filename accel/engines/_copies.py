"""Raw objects of which this rank holds a part: a copy or a pickle of one would look whole."""

from __future__ import annotations

import functools
from typing import Final, NoReturn

from torch import nn
from torch.optim import Optimizer

from ..errors import AccelError, BackendError, OptimizerError

#: How ``copy`` and ``pickle`` ask an object for what they take; of the instance, since the class is the user's.
_NAMES: Final = ("__deepcopy__", "__getstate__")


def refuse_copies(raw: nn.Module | Optimizer) -> None:
    """From now on ``copy`` and ``pickle`` of a raw object raise, as does ``torch.save`` of it."""
    kind = OptimizerError if isinstance(raw, Optimizer) else BackendError
    for name in _NAMES:
        vars(raw)[name] = functools.partial(_refuse, kind, copies_refused(raw))


def allow_copies(raw: nn.Module | Optimizer) -> None:
    """Undo ``refuse_copies``."""
    for name in _NAMES:
        if getattr(vars(raw).get(name), "func", None) is _refuse:
            del vars(raw)[name]


def copies_refused(raw: nn.Module | Optimizer) -> str:
    """What to do instead; it works on every backend."""
    kind = "optimizer" if isinstance(raw, Optimizer) else "model"
    ended = "its state is whole after accel.teardown(model)"
    if kind == "model":
        ended = "accel.teardown(model) returns it whole"
    return (
        f"this rank holds only its own part of this {type(raw).__name__}, so that a copy or pickle would miss the rest: copy or "
        f"pickle what accel.full_state_dict({kind}) returns, which every rank calls; {ended}; accel.save writes a checkpoint"
    )


def _refuse(kind: type[AccelError], text: str, *memo: object) -> NoReturn:
    raise kind(text)

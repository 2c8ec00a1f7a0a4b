"""First values of a model that was built without memory, from a checkpoint or a directory of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from torch import nn

from ..deferred import weights_of
from ..errors import CheckpointError
from . import record
from .differences import report
from .extract import choose
from .load import Loading, load
from .weights import is_weights_alone, open_source


def first_values(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """What fills the handle of a deferred module, once it has memory; None where there is nothing to read. Local.

    Raises:
        CheckpointError: what ``deferred_init(weights=...)`` names is not there, or does not fit the module; lists both sides.
        BackendError: the module's parameters are to come from several places.
    """
    directory = weights_of(module)
    if directory is None:
        return None
    state = _state_for(directory, module)
    with contextlib.ExitStack() as undo:
        loading = Loading(open_source(directory, state), 0, stream=False, planned=True)
        loading.meet(state, undo, convert=True)
        report(directory, [loading.differences], True, 0)

    def fill(handle: nn.Module) -> None:
        load(directory, _state_for(directory, handle), convert=True)

    return fill


def _state_for(directory: str, module: nn.Module) -> dict[str, Any]:
    """The state whose only model is ``module``, at its place in what ``directory`` holds."""
    if is_weights_alone(directory):
        return {"model": module}
    name, _ = choose(directory, record.read(directory)[0], None)
    parts = name.split("/")
    if any(part.startswith("[") for part in parts):
        raise CheckpointError(f"{directory}: its model {name!r} lies in a list, where it cannot be taken from")
    state: Any = module
    for part in reversed(parts):
        state = {unquote(part): state}
    found: dict[str, Any] = state
    return found

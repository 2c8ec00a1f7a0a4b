"""Hooks of torch: call at the end of a backward, and remove a list of hooks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    for hook in hooks:
        hook.remove()
    hooks.clear()

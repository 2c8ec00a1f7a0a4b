"""Small functions around autograd and hooks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def runs_backward() -> bool:
    """True inside a backward, also in a forward that activation checkpointing runs there."""
    return torch._C._current_graph_task_id() != -1


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    for hook in hooks:
        hook.remove()
    hooks.clear()

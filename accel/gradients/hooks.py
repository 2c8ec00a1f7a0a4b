"""Helpers for autograd and hooks."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.utils.hooks import RemovableHandle


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the current backward."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def runs_backward() -> bool:
    """True inside a backward, including forwards that it recomputes."""
    return _current_graph_task_id() != -1


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove hooks, and clear the list."""
    for hook in hooks:
        hook.remove()
    hooks.clear()

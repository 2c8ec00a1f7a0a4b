"""Tells the engines of a backward, makes ``inputs=...`` find the parameters in its graph, and a lost rank raise accel's error.

An engine may have put other tensors in the parameters' places: autograd finds no way to those, and leaves their gradients
alone without a word. ``Tensor.backward`` looks ``torch.autograd.backward`` up in its module: replacing it there reaches
every loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .control import is_lost, lost
from .patches import Patch

_INPUTS: Final = 5  # its place among the arguments


def backward_patch(leaf: Callable[[torch.Tensor], torch.Tensor], before: Callable[[], None]) -> Patch:
    """The replaced function; ``leaf`` gives the tensor in the graph that a given one stands for, ``before`` hears of each."""

    def leaves(inputs: Any) -> Any:
        if isinstance(inputs, torch.Tensor):
            return leaf(inputs)
        if isinstance(inputs, torch.autograd.graph.GradientEdge):
            return inputs
        return [leaf(i) if isinstance(i, torch.Tensor) else i for i in inputs]

    def backward(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not the part of one that checkpointing computes again
            before()
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = leaves(kwargs["inputs"])
        elif len(args) > _INPUTS and args[_INPUTS] is not None:
            args = (*args[:_INPUTS], leaves(args[_INPUTS]), *args[_INPUTS + 1 :])
        try:
            original(*args, **kwargs)
        except RuntimeError as error:
            if is_lost(error):
                raise lost("a backward", error) from error
            raise

    return Patch(vars(torch.autograd), "backward", backward)

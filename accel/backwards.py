"""Makes ``loss.backward(inputs=...)`` find the parameters in the graph, and a lost rank in it raise accel's error.

An engine may have put other tensors in the parameters' places: autograd finds no way to those, and leaves their gradients
alone without a word. ``Tensor.backward`` looks ``torch.autograd.backward`` up in its module: replacing it there reaches
every loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, final

import torch

from .control import is_lost, lost

_INPUTS: Final = 5  # its place among the arguments


@final
class BackwardPatch:
    """The replaced function; ``leaf`` gives the tensor in the graph that a given one stands for."""

    def __init__(self, leaf: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._leaf = leaf
        self._original: Callable[..., None] | None = None

    def install(self) -> None:
        """Replace it; again is no second time."""
        if self._original is None:
            self._original = original = torch.autograd.backward

            @functools.wraps(original)
            def backward(*args: Any, **kwargs: Any) -> None:
                if kwargs.get("inputs") is not None:
                    kwargs["inputs"] = self._leaves(kwargs["inputs"])
                elif len(args) > _INPUTS and args[_INPUTS] is not None:
                    args = (*args[:_INPUTS], self._leaves(args[_INPUTS]), *args[_INPUTS + 1 :])
                try:
                    original(*args, **kwargs)
                except RuntimeError as error:
                    if is_lost(error):
                        raise lost("a backward", error) from error
                    raise

            torch.autograd.backward = backward

    def remove(self) -> None:
        """Put torch's own back."""
        if self._original is not None:
            torch.autograd.backward, self._original = self._original, None

    def _leaves(self, inputs: Any) -> Any:
        if isinstance(inputs, torch.Tensor):
            return self._leaf(inputs)
        if isinstance(inputs, torch.autograd.graph.GradientEdge):
            return inputs
        return [self._leaf(i) if isinstance(i, torch.Tensor) else i for i in inputs]

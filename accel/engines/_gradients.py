"""The verbs of an engine about gradients: whether they are final, and making them so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..control import agree
from ..errors import BackendError, PrecisionError
from ..gradients import GradientLog
from ..precision import Accumulator, all_finite, here


class GradientVerbs:
    """As written here they serve engines that keep whole gradients in ``p.grad``."""

    module: nn.Module
    label: str
    parameters: list[nn.Parameter]
    log: GradientLog
    #: Gradients stay this rank's own until a step or clipping: a rebuild loses none, and their overflow is not seen before.
    defers: ClassVar[bool] = False
    #: Each rank has a part of the gradients, so that nothing is said of all of them without the others.
    partial_gradients: ClassVar[bool] = False

    def accumulators(self) -> Sequence[Accumulator]:
        """Everything in whose ``grad`` a backward may leave gradients of this model."""
        return self.parameters

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor in whose place a parameter of ``known`` stands in a graph."""
        return parameter

    def before_backward(self) -> None:
        """Hear that a backward is about to begin, of whatever graph."""
        return

    def has_gradients(self, *, zeros: bool) -> bool:
        """Whether there are any, judged alike on all ranks that saw the same backwards; ``zeros`` counts those of zeros."""
        mine = any(a.grad is not None and (zeros or bool(here(a.grad).any())) for a in self.accumulators())
        return any(agree(f"the gradients ({self.label})", mine)) if self.partial_gradients else mine

    def unsettled(self) -> bool:
        """Whether ``settle`` has something to do. Local."""
        return False

    def hides_gradients(self) -> bool:
        """Whether there are gradients that ``p.grad`` does not show, now or once they are final. Local."""
        return False

    def settle(self) -> None:
        """Make every gradient final. A collective where there is something to reduce."""
        if self.log.entries:
            self.log.fold(pending=False)

    def settle_unoptimized(self, indices: Sequence[int]) -> None:
        """At the end of a backward: make final what no step will, the gradients of parameters in no optimizer. Collective.

        Only for engines that override it; in the others these are final by themselves.
        """
        return

    def settle_for(self, optimizer: Optimizer) -> None:
        """``settle`` for a step; an engine may leave to each rank the gradients that it steps. Collective."""
        self.settle()

    def settle_clipped(self, gradients: Sequence[torch.Tensor]) -> bool:
        """``settle`` where torch clips these gradients of the model; True where it cannot, as it does not see them all."""
        before = sum(p.grad is not None for p in self.parameters)
        self.settle()
        return sum(p.grad is not None for p in self.parameters) > before

    def finite(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer``'s final gradients hold neither inf nor nan, judged alike on all ranks."""
        mine = all_finite(optimizer)
        return all(agree(f"the gradients' finiteness ({self.label})", mine)) if self.partial_gradients else mine

    @final
    def refuse_plain_gradients(self, *, zeros: bool) -> None:
        """Refuse gradients of an unscaled loss where accel scales it; ``zeros`` refuses zero gradients too.

        Raises:
            PrecisionError: says what to call instead.
        """
        if self.log.plain and self.has_gradients(zeros=zeros):
            raise PrecisionError(
                f"gradients of this '16-mixed' {type(self.module).__name__} came from a plain loss.backward(), so that the "
                "loss was not scaled: call accel.backward(loss), or use torch.amp.GradScaler as in raw PyTorch"
            )


def refuse_sparse(module: nn.Module, backend: str) -> None:
    """Refuse embeddings with sparse gradients, for an engine that cuts gradients into parts.

    Raises:
        BackendError: names them.
    """
    names = [n for n, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    if names:
        raise BackendError(
            f"backend {backend!r} cannot divide the sparse gradients of {', '.join(names[:5])}: use sparse=False there, or "
            "a backend with whole gradients"
        )

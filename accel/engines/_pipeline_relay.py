"""The forwards of a pipeline over ranks: all ranks compare, each runs its stage, autograd gets one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import nn

from ..control import agree
from ..errors import AccelError, BackendError
from ._pipeline_balance import times_of
from ._pipeline_channel import Channel, Message
from ._pipeline_checks import crc, meet
from ._pipeline_pass import Ends, Gradients, Pass, node
from ._pipeline_stages import Cut, Named, Stage, unflatten

_SAME_BATCH: Final = (
    "every rank of a pipeline needs the same batch and calls the same things: give the dataloader to accel.setup, draw "
    "random numbers of the data from generators seeded alike, and let no rank go its own way"
)
_SAME_LOSS: Final = "every rank must compute the same loss from the pipeline's output, with the same targets"


@final
class Relay:
    """Counts the forwards and compares them.

    Args:
        module: the user's Sequential.
        channel: to the other ranks.
    """

    def __init__(self, module: nn.Module, channel: Channel) -> None:
        self._module = module
        self._channel = channel
        self._forwards = 0
        self._what = ""

    def meet(self, tensors: Sequence[torch.Tensor], form: Any, mask: list[bool]) -> None:
        """Before each forward: all ranks begin it, with one batch. Collective.

        Raises:
            RankMismatchError: the ranks differ; nothing has changed.
        """
        self._what = f"forward {self._forwards} of a pipeline ({self._channel.label})"
        self._forwards += 1
        facts = {
            "whether gradients are on": torch.is_grad_enabled(),
            "the form of the batch": crc((repr(form), [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors])),
            "requires_grad of the parameters": crc(mask),
            "train() or eval() of a layer": crc([m.training for m in self._module.modules()]),
        }
        meet(self._what, facts, tensors, _SAME_BATCH)

    def times(self, children: Sequence[Named], batch: Any) -> list[float]:
        """What rank 0 measures, on every rank. Collective."""
        mine: tuple[list[float], str] = ([], "")
        if self._channel.rank == 0:
            try:
                mine = times_of(children, batch), ""
            except Exception as error:
                mine = [], f"{type(error).__name__}: {error}"
        times, problem = agree(f"Pipeline(balance='time') ({self._channel.label})", mine)[0]
        if problem:
            raise BackendError(f"measuring the children for Pipeline(balance='time') failed on rank 0: {problem}")
        return list(times)

    def run(
        self,
        stage: Stage,
        tensors: Sequence[torch.Tensor],
        form: Any,
        where: Cut,
        keep: list[bool],
        differentiable: bool,
    ) -> Any:
        """The output of all stages, the same on every rank. Collective."""
        if not differentiable:
            run = Pass(self._channel, stage, where, keep, None)
            out: Sequence[torch.Tensor] = run.forward(tensors, form)
        else:
            parameters: list[torch.Tensor] = [p for p in stage.parameters if p.requires_grad]
            run = Pass(self._channel, stage, where, keep, parameters)
            anchor = torch.empty(
                0, requires_grad=True
            )  # the output has a gradient also where this rank's stage has none
            ends = self._ends([t.requires_grad for t in tensors])
            out = node(run, ends, form, anchor, len(tensors), *tensors, *parameters)
        return unflatten(run.form, out)

    def _ends(self, wanted: list[bool]) -> Ends:
        """What comes before and after the backward; ``wanted`` says which tensors of the batch need a gradient."""
        channel, what = self._channel, f"the backward of {self._what}"

        def before(grads: Sequence[torch.Tensor | None], retain: bool) -> None:
            meet(what, {"retain_graph": retain}, grads, _SAME_LOSS)

        def after(found: Gradients, error: Exception | None, failure: str) -> Gradients:
            failures = [text for text in agree(f"the end of {what}", failure) if text]
            if error is not None:
                raise error
            if failures:
                raise AccelError(failures[0])
            inputs: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if any(wanted):
                inputs = channel.broadcast(0, Message(found.inputs) if channel.rank == 0 else None).tensors
            return Gradients(list(inputs), found.parameters)

        return Ends(before, after)

"""The forward of a pipeline over several ranks. Its backward is autograd's own.

On each rank a micro-batch goes through ``Recv``, the stage and ``Send``. ``Join`` returns the last
rank's output on every rank. In backward, ``Send`` receives and ``Recv`` sends gradients, so
``loss.backward()`` on every rank runs all stages backwards. Each function also passes on a token,
an empty tensor that requires a gradient. With it autograd reaches all functions of a rank, even if
a stage has no trainable parameters or detaches its input.

Autograd runs the newest node that is ready. So a rank takes a micro-batch back to its ``Recv``
before it begins with the one before, and two neighbors have the same order of messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch.autograd import Function

from ...errors import RankMismatchError
from ...process import Process, end_groups, ended
from ...process.control import Waiting, agree
from ...process.packing import bytes_of
from ...trees import put_back
from ..base.absent import refuse_second_derivatives
from ..base.inputs import SameInputs
from .stages import Stage, concatenate, flatten, micro_batches

#: The number of a forward, and of its micro-batch.
Place = tuple[int, int]
#: The tensors of a message, or the gradients of some of them.
Tensors = Sequence[Any]

# -- messages between ranks -----------------------------------------------------------------------


@final
class Channel:
    """The connection of this rank to the other stages.

    A message is a nested value. Its head travels on accel's own group, from CPU memory, so the
    receiver knows the shapes without waiting for a device. Tensors travel as bytes, because not
    every process group supports every dtype.
    """

    def __init__(self, process: Process, label: str) -> None:
        self.process = process
        self.label = label
        self.rank, self.last = process.place.rank, process.place.world_size - 1
        self.num_forwards = 0
        #: Compares the batches of the first forwards, and the gradients of their outputs.
        self.same = SameInputs(label, 0)
        #: True while a backward runs.
        self.in_backward = False
        self._waiting = Waiting(process, "a message of a pipeline")

    def send(self, to: int, place: Place, tensors: Tensors, form: Any = None) -> None:
        """Send the tensors of a nested value, and its form."""
        with self._waiting:
            head = (place, _kinds(tensors), form)
            dist.send_object_list([head], to, self.process.control)
            for content in self._contents(tensors):
                dist.send(content, to, self.process.group)

    def receive(self, source: int, place: Place) -> tuple[list[Any], Any]:
        """Return the tensors of a message and its form."""
        process = self.process
        with self._waiting:
            heads: list[Any] = [None]
            dist.recv_object_list(heads, source, process.control)
            sent, kinds, form = heads[0]
            if sent != place:
                text = f"Rank {self.rank} waits for {place}, but rank {source} sent {sent}."
                end_groups(text, mismatch=True)
                raise RankMismatchError(f"{text} Run the same forwards on every rank.")
            return self._filled(kinds, lambda data: dist.recv(data, source, process.group)), form

    def share(
        self, what: str, source: int, tensors: Tensors, form: Any = None
    ) -> tuple[Tensors, Any]:
        """Return the tensors of rank ``source`` and their form. Collective."""
        group = self.process.group
        kinds, form = agree(f"{what} ({self.label})", (_kinds(tensors), form))[source]
        with self._waiting:
            if self.rank != source:
                return self._filled(kinds, lambda data: dist.broadcast(data, source, group)), form
            for content in self._contents(tensors):
                dist.broadcast(content, source, group)
        return tensors, form

    def _contents(self, tensors: Tensors) -> list[torch.Tensor]:
        carrier = self.process.carrier
        return [bytes_of(t, carrier) for t in tensors if t is not None and t.numel()]

    def _filled(self, kinds: Tensors, fill: Callable[[torch.Tensor], object]) -> list[Any]:
        """Return new tensors of these kinds, with the bytes that ``fill`` receives."""
        tensors: list[Any] = []
        for kind in kinds:
            tensors.append(None)
            if kind is not None:
                shape, dtype, requires_grad = kind
                size = shape.numel() * dtype.itemsize
                data = torch.empty(size, dtype=torch.uint8, device=self.process.carrier)
                if size:
                    fill(data)
                values = data.view(dtype).view(shape).to(self.process.device)
                tensors[-1] = values.requires_grad_(requires_grad)
        return tensors

    def start_backward(self, grads: Tensors) -> None:
        """Compare the gradients of an output between ranks, the first times. Collective then."""
        self.same.call(lambda: None, tuple(grads), {}, "backward")
        self.in_backward = True

    def fail(self, what: str) -> None:
        """End the process groups after an exception, because other ranks wait for messages."""
        if not ended():
            error = sys.exc_info()[1]
            reason = f"{type(error).__name__}: {error}"
            end_groups(f"a {what} of {self.label} failed on rank {self.rank}: {reason}")


def _kinds(tensors: Tensors) -> list[Any]:
    return [None if t is None else (t.shape, t.dtype, t.requires_grad) for t in tensors]


# -- autograd functions ---------------------------------------------------------------------------


def _apply(function: Any, *args: Any) -> Any:
    """Call a function, because ``apply`` has no types."""
    return function.apply(*args)


def _outputs(ctx: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return aliases of a function's inputs, which nn.ReLU(inplace=True) may change."""
    ctx.set_materialize_grads(False)
    aliases = [t.detach() for t in tensors]
    constant = [a for a, t in zip(aliases, tensors, strict=True) if not t.requires_grad]
    ctx.mark_non_differentiable(*constant)
    return aliases


@final
class Enter(Function):
    """A batch that requires gradients. Backward gives every rank those of the first stage."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, token: torch.Tensor, *batch: torch.Tensor) -> Any:
        ctx.channel = channel
        return token.detach(), *_outputs(ctx, batch)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        channel: Channel = ctx.channel
        grads_of_first, _ = channel.share("the gradients of a batch", 0, grads)
        return None, token, *grads_of_first


@final
class Recv(Function):
    """The inputs of a stage. Backward sends their gradients to the previous rank."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, place: Place, token: torch.Tensor, *inputs: Any) -> Any:
        ctx.channel, ctx.place = channel, place
        return token.detach(), *_outputs(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        channel: Channel = ctx.channel
        channel.send(channel.rank - 1, ctx.place, grads)
        return None, None, token, *(None for _ in grads)


@final
class Send(Function):
    """Send the outputs of a stage. Backward receives their gradients from the next rank."""

    @staticmethod
    def forward(
        ctx: Any, channel: Channel, place: Place, form: Any, token: torch.Tensor, *outputs: Any
    ) -> Any:
        ctx.channel, ctx.place = channel, place
        channel.send(channel.rank + 1, place, outputs, form)
        return token.detach()

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        grads, _ = ctx.channel.receive(ctx.channel.rank + 1, ctx.place)
        return None, None, None, token, *grads


@final
class Join(Function):
    """The output of the last stage. Backward of a pipeline begins here."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, count: int, *tensors: torch.Tensor) -> Any:
        ctx.channel, ctx.count = channel, count
        # A second backward without retain_graph=True raises torch's error here, on every rank.
        ctx.save_for_backward(tensors[0])
        return tuple(_outputs(ctx, tensors[count:]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (token,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivatives()
        channel: Channel = ctx.channel
        channel.start_backward(grads)
        own = grads if channel.rank == channel.last else [None] * len(grads)
        return None, None, *[token.detach()] * ctx.count, *own


# -- one forward ----------------------------------------------------------------------------------


def forward(
    channel: Channel,
    stage: Stage,
    tensors: Tensors,
    form: Any,
    sizes: Sequence[int],
    keep: Sequence[bool],
) -> Any:
    """Return the last stage's output on every rank. Collective.

    Args:
        tensors: the batch, from which ``form`` makes the stage's input.
        sizes: the sizes of the micro-batches.
        keep: for each micro-batch, if its activations are kept for backward.
    """
    channel.num_forwards += 1
    is_last, grad = channel.rank == channel.last, torch.is_grad_enabled()
    token = torch.empty(0, device=channel.process.device, requires_grad=grad)
    if grad and any(t.requires_grad for t in tensors):
        token, *tensors = _apply(Enter, channel, token, *tensors)
    tokens: list[torch.Tensor] = []
    outputs: list[Any] = []
    for number, inputs in enumerate(micro_batches(tensors, sizes)):
        place, end, batch_form = (channel.num_forwards, number), token, form
        if channel.rank > 0:
            inputs, batch_form = channel.receive(channel.rank - 1, place)
            end, *inputs = _apply(Recv, channel, place, token, *inputs)
        output = stage.run(put_back(batch_form, inputs), keep[number])
        if is_last:
            outputs.append(output)
        else:
            flat, out_form = flatten(output, f"the output of {stage.name}")
            end = _apply(Send, channel, place, out_form, end, *flat)
        tokens.append(end)
    flat, out_form = flatten(concatenate(outputs, sizes), "output") if is_last else ([], None)
    shared, out_form = channel.share("the output of a forward", channel.last, flat, out_form)
    return put_back(out_form, _apply(Join, channel, len(tokens), *tokens, *shared))

"""The forward of a pipeline over several ranks. Its backward is autograd's own.

On each rank a micro-batch goes through the stage between two autograd functions. The first receives
its inputs and the second sends its outputs. In backward they send and receive gradients, so
``loss.backward()`` on every rank runs all stages backwards. Each function also passes on a token,
an empty tensor that requires a gradient. With it autograd reaches all functions of a rank, even if
a stage has no trainable parameters or detaches its input.

Autograd runs the newest node that is ready. So a rank takes a micro-batch back to its inputs before
it begins with the one before, and two neighbors have the same order of messages.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from ...errors import BackendError, RankMismatchError
from ...process import Process, end_groups, ended
from ...process.control import Waiting, agree
from ...process.packing import broadcast_, bytes_of, is_dense, to_bytes, to_tensor
from ...trees import TensorPlace, map_tensors, put_back, walk
from ..base.absent import refuse_second_derivatives
from ..base.activations import run_again
from ..base.inputs import SameInputs

Place = tuple[int, int]  # the number of a forward, and of its micro-batch
Tensors = Sequence[Any]  # or the gradients of some of them

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# -- messages between ranks -----------------------------------------------------------------------


@final
class Channel:
    """The connection of this rank to the other stages.

    The head of a message travels on accel's own group, so the receiver knows the shapes without
    waiting for a device. Tensors travel as bytes, because not every group supports every dtype.
    """

    def __init__(self, process: Process, label: str) -> None:
        self.process, self.label = process, label
        self.rank, self.last = process.place.rank, process.place.world_size - 1
        self.num_forwards = 0
        #: Compares the batches of the first forwards, and the gradients of their outputs.
        self.same = SameInputs(label, 0)
        #: True while a backward runs.
        self.in_backward = False
        self._waiting = Waiting(process, "a message of a pipeline")
        #: The sends of the last message, with the memory that they read.
        self._sends: list[tuple[Any, torch.Tensor]] = []

    def send(self, to: int, place: Place, tensors: Tensors, form: Any = None) -> None:
        """Begin to send the tensors of a nested value and its form, after the last message."""
        head = to_tensor(pickle.dumps((place, _kinds(tensors), form)))
        size = torch.tensor([len(head)], device="cpu")
        self.finish_sends()
        with self._waiting:
            for data in (size, head):
                self._sends.append((dist.isend(data, to, self.process.control), data))
            for tensor in _filled(tensors):
                data = bytes_of(tensor, self.process.carrier)
                self._sends.append((dist.isend(data, to, self.process.group), data))

    def finish_sends(self) -> None:
        """Wait until the last message is sent."""
        with self._waiting:
            for work, _ in self._sends:
                work.wait()
        self._sends.clear()

    def receive(self, source: int, place: Place) -> tuple[Tensors, Any]:
        """Return the tensors of a message and its form."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        with self._waiting:
            dist.recv(size, source, self.process.control)
            head = to_tensor(bytes(int(size)))
            dist.recv(head, source, self.process.control)
            sent, kinds, form = pickle.loads(to_bytes(head))
            if sent != place:
                text = f"Rank {self.rank} waits for {place}, but rank {source} sent {sent}."
                end_groups(text, mismatch=True)
                raise RankMismatchError(f"{text} Run the same forwards on every rank.")
            tensors = self._empty(kinds)
            for tensor in _filled(tensors):
                data = bytes_of(tensor, self.process.carrier)
                dist.recv(data, source, self.process.group)
                if data.device != tensor.device:
                    bytes_of(tensor, tensor.device).copy_(data)
        return tensors, form

    def share(
        self, what: str, source: int, tensors: Tensors, form: Any = None
    ) -> tuple[Tensors, Any]:
        """Return the tensors of rank ``source`` and their form. Collective."""
        kinds, form = agree(f"{what} ({self.label})", (_kinds(tensors), form))[source]
        self.finish_sends()
        if self.rank != source:
            tensors = self._empty(kinds)
        with self._waiting:
            broadcast_(_filled(tensors), self.process.group, source)
        return tensors, form

    def _empty(self, kinds: Sequence[Any]) -> Tensors:
        tensors: list[Any] = [None] * len(kinds)
        for number, kind in enumerate(kinds):
            if kind is not None:
                shape, dtype, requires_grad = kind
                values = torch.empty(shape, dtype=dtype, device=self.process.device)
                tensors[number] = values.requires_grad_(requires_grad)
        return tensors

    def fail(self, what: str) -> None:
        """End the process groups after an exception, because other ranks wait for messages."""
        if not ended():
            error = sys.exc_info()[1]
            reason = f"{type(error).__name__}: {error}"
            end_groups(f"a {what} of {self.label} failed on rank {self.rank}: {reason}")


def _kinds(tensors: Tensors) -> list[Any]:
    return [None if t is None else (t.shape, t.dtype, t.requires_grad) for t in tensors]


def _filled(tensors: Tensors) -> list[torch.Tensor]:
    return [t.detach() for t in tensors if t is not None and t.numel()]


# -- micro-batches --------------------------------------------------------------------------------


def flatten(value: Any, name: str) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors of a nested value, and the value with a ``TensorPlace`` for each tensor.

    Raises:
        BackendError: the value contains something that can't be sent to another rank.
    """
    tensors: list[torch.Tensor] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and is_dense(leaf):
            tensors.append(leaf)
            return TensorPlace(len(tensors) - 1)
        if isinstance(leaf, _PLAIN):
            return leaf
        # The gradients of tensors inside of an object, or of a sparse tensor, would be lost.
        raise BackendError(
            f"A pipeline can't send {path} ({type(leaf).__name__}) to other ranks. "
            "Pass dense tensors and plain values in dicts, lists or tuples."
        )

    return tensors, walk(visit, value, name)


def micro_batches(tensors: Tensors, chunks: int) -> list[Tensors]:
    """Return the tensors of each micro-batch. A tensor without dimensions is in all of them."""
    sizes = {len(t) for t in tensors if t.dim()}
    if chunks > 1 and len(sizes) != 1:
        raise BackendError(
            f"Pipeline(chunks={chunks}) splits inputs along dim 0, but their sizes there are "
            f"{sorted(sizes)}. Give all inputs the batch as dim 0, or use chunks=1."
        )
    count = min(chunks, max(sizes, default=1))
    if count < 2:
        return [tensors]
    columns = [t.tensor_split(count) if t.dim() else (t,) * count for t in tensors]
    return list(zip(*columns, strict=True))


def concatenate(outputs: Sequence[Tensors], batches: Sequence[Tensors]) -> Tensors:
    """Return the output for the batch, given the outputs for its micro-batches."""
    if len(outputs) == 1:
        return outputs[0]
    for output, batch in zip(outputs, batches, strict=True):
        size = max(len(t) for t in batch if t.dim())
        if any(t.dim() == 0 or len(t) != size for t in output):
            raise BackendError(
                f"Pipeline(chunks > 1) needs an output with {size} rows for {size} samples, "
                f"but shapes are {[tuple(t.shape) for t in output]}. Use chunks=1."
            )
    return list(map(torch.cat, zip(*outputs, strict=True)))


def run_stage(stage: nn.Module, value: Any, keep: bool) -> Any:
    """Return the output for a micro-batch. Backward recomputes activations unless ``keep``."""
    if keep or not torch.is_grad_enabled():
        return stage(value)

    def forward_of_copy(value: Any) -> Any:
        # nn.ReLU(inplace=True) as the first child would change the input of the second run.
        return stage(map_tensors(torch.clone, value))

    return run_again(forward_of_copy, list(stage.modules()), (value,), {})


# -- a forward ------------------------------------------------------------------------------------


@final
class Exchange(Function):
    """A token and tensors that are passed on. Backward calls ``exchange`` with their gradients.

    ``exchange`` returns the gradients with which autograd goes on, or None if there are none.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Callable[[Tensors], Any], token: Any, *tensors: Any) -> Any:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        # A second backward without retain_graph=True raises torch's error here, on every rank.
        ctx.save_for_backward(token)
        # Aliases, because nn.ReLU(inplace=True) may change them.
        aliases = [t.detach() for t in tensors]
        constant = [a for a, t in zip(aliases, tensors, strict=True) if not t.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return token.detach(), *aliases

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: torch.Tensor | None) -> Any:
        (token,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivatives()
        received = ctx.exchange(grads)
        return None, token.detach(), *(received or [None] * len(grads))


_exchange: Any = Exchange.apply  # it has no types


def enter(channel: Channel, batch: Tensors) -> tuple[torch.Tensor, Tensors]:
    """Return the token of a forward and its batch, which gets gradients on every rank. Local."""
    grad = torch.is_grad_enabled()
    token = torch.empty(0, device=channel.process.device, requires_grad=grad)
    # The batch of a second pipeline is the output of the first.
    if grad and any(t.requires_grad for t in batch):
        title = "the gradients of a batch"
        token, *batch = _exchange(lambda g: channel.share(title, 0, g)[0], token, *batch)
    return token, batch


def forward(
    channel: Channel,
    stage: nn.Module,
    token: torch.Tensor,
    form: Any,
    batches: Sequence[Tensors],
    first_kept: int,
) -> Any:
    """Return the last stage's output on every rank. Collective.

    ``form`` has places for the tensors of a micro-batch. Backward computes the activations of the
    micro-batches before ``first_kept`` again.
    """
    before, after, is_last = channel.rank - 1, channel.rank + 1, channel.rank == channel.last
    channel.num_forwards += 1
    tokens: list[torch.Tensor] = []
    outputs: list[Tensors] = []
    for number, inputs in enumerate(batches):
        place, end, batch_form = (channel.num_forwards, number), token, form
        if channel.rank > 0:
            inputs, batch_form = channel.receive(before, place)
            end, *inputs = _exchange(partial(channel.send, before, place), end, *inputs)
        value = run_stage(stage, put_back(batch_form, inputs), number >= first_kept)
        output, out_form = flatten(value, "the output of a stage")
        if is_last:
            outputs.append(output)
        else:
            channel.send(after, place, output, out_form)
            gradients = partial(channel.receive, after, place)
            end, *_ = _exchange(lambda _, receive=gradients: receive()[0], end, *output)
        tokens.append(end)

    def start_backward(grads: Tensors) -> Tensors | None:
        # A rank with other targets would train on the last rank's loss.
        channel.same.call(lambda: None, tuple(grads), {}, "backward")
        channel.in_backward = True
        return grads if is_last else None

    joined = concatenate(outputs, batches) if is_last else []
    shared, out_form = channel.share("the output of a forward", channel.last, joined, out_form)
    _, *shared = _exchange(start_backward, torch.cat(tokens), *shared)
    return put_back(out_form, shared)

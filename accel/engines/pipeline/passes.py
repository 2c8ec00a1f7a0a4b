"""The forward of a pipeline over several ranks. Its backward is autograd's own.

On each rank a micro-batch goes through ``Recv``, the stage and ``Send``. ``Join`` returns the last
rank's output on every rank. In backward, ``Send`` receives and ``Recv`` sends gradients, so that
``loss.backward()`` on every rank runs all stages backwards. Each function also passes on a token, an
empty tensor that requires a gradient. With it autograd reaches all functions of a rank, even if a
stage has no trainable parameters or detaches its input.

Autograd runs the newest node that is ready. So a rank takes a micro-batch back to its ``Recv`` before
it begins with the one before, and both ends of a connection have the same order of messages.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.autograd import Function

from ...errors import AccelError, RankMismatchError
from ...gradients.hooks import at_end_of_backward
from ...process import Process, end_groups
from ...process.control import Waiting, agree, raise_together
from ...process.packing import bytes_of, framed, to_bytes, to_tensor, unframed
from ...process.transfer import Prints, refuse_other_values
from ...trees import put_back
from ..base.absent import refuse_second_derivatives
from .stages import Rows, Stage, concatenate, flatten, micro_batches

SAME_BATCH: Final = "Pass the loader to accel.setup, and give every rank the same batch."
_SAME_LOSS: Final = "Compute the same loss with the same targets on every rank."
_TAG: Final = 0x919E
#: Values of the first passes are compared, and then rarely, because the host waits for the device.
_FIRST_PASSES: Final = 4
_EVERY: Final = 1000

#: The number of a forward, and of its micro-batch.
Place = tuple[int, int]

# -- messages between ranks -----------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Message:
    """A nested value, or the gradients of one. In its head, kinds stand in place of the tensors."""

    place: Place
    tensors: Sequence[Any] = ()
    form: Any = None
    failed: bool = False

    @property
    def head(self) -> Message:
        kinds = [None if t is None else (t.shape, t.dtype, t.requires_grad) for t in self.tensors]
        return replace(self, tensors=kinds)

    def contents(self, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors as bytes, because not every process group supports every dtype."""
        return [bytes_of(t, device) for t in self.tensors if t is not None and t.numel()]


@final
class Channel:
    """The connection of this rank to the other stages.

    The head of a message travels on accel's own group, from CPU memory, so that the receiver knows
    the shapes without waiting for a device.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.rank, self.last = process.place.rank, process.place.world_size - 1
        #: The backward that runs. After an exception it stays until ``end``.
        self._backward = ""
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._num_passes = Counter[str]()

    def compare(
        self,
        what: str,
        facts: dict[str, Any],
        kind: str,
        tensors: Sequence[torch.Tensor],
        advice: str,
    ) -> None:
        """Raise RankMismatchError if facts differ, or the tensors of a checked pass. Collective."""
        self._num_passes[kind] += 1
        number = self._num_passes[kind]
        is_checked = number <= _FIRST_PASSES or number % _EVERY == 0
        answers = agree(what, (facts, Prints(tensors if is_checked else ()).read()))
        for rank, (others, _) in enumerate(answers):
            for name, value in answers[0][0].items():
                if others[name] != value:
                    text = f"{what}: {name} differs between rank 0 and rank {rank}. {advice}"
                    raise RankMismatchError(text)
        refuse_other_values(what, {rank: sums for rank, (_, sums) in enumerate(answers)}, advice)

    def end(self) -> None:
        """End the process groups if the backward failed: other ranks wait for its messages."""
        if self._backward:
            error = sys.exc_info()[1]
            text = f"{self._backward} failed on rank {self.rank}: {type(error).__name__}: {error}"
            self._backward = ""
            end_groups(text)
            self._sent.clear()

    def start_backward(self, what: str, grads: Sequence[torch.Tensor | None]) -> None:
        """Compare the gradients of an output between ranks. Collective."""
        facts = {"which outputs have a gradient": [grad is not None for grad in grads]}
        present = [grad for grad in grads if grad is not None]
        self.compare(what, facts, "backward", present, _SAME_LOSS)
        self._backward = what
        at_end_of_backward(self._finish_backward)

    def _finish_backward(self) -> None:
        self._backward = ""

    def send(self, to: int, message: Message) -> None:
        """Start to send. ``flush`` waits for the end."""
        head = framed(pickle.dumps(message.head))
        with self._transfer():
            for piece in map(to_tensor, head):
                self._sent.append((dist.isend(piece, to, self.process.control, _TAG), piece))
            for content in message.contents(self.process.carrier):
                self._sent.append((dist.isend(content, to, self.process.group, _TAG), content))

    def flush(self) -> None:
        with self._transfer():
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    def receive(self, source: int, place: Place) -> Message:
        process = self.process

        def piece(count: int) -> bytearray:
            data = torch.empty(count, dtype=torch.uint8, device="cpu")
            dist.recv(data, source, process.control, _TAG)
            return to_bytes(data)

        with self._transfer():
            head: Message = pickle.loads(unframed(piece))
            if head.place != place:
                text = f"Rank {self.rank} waits for {place}, but rank {source} sent {head.place}."
                end_groups(text, mismatch=True)
                raise RankMismatchError(f"{text} {_SAME_LOSS}")
            return self._filled(head, lambda data: dist.recv(data, source, process.group, _TAG))

    def broadcast(self, source: int, head: Message, message: Message) -> Message:
        """Return the message of rank ``source``, whose head is known. Collective."""
        group = self.process.group
        with self._transfer():
            if source != self.rank:
                return self._filled(head, lambda data: dist.broadcast(data, source, group))
            for content in message.contents(self.process.carrier):
                dist.broadcast(content, source, group)
        return message

    def _filled(self, head: Message, fill: Callable[[torch.Tensor], object]) -> Message:
        def tensor(shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
            size = shape.numel() * dtype.itemsize
            data = torch.empty(size, dtype=torch.uint8, device=self.process.carrier)
            if size:
                fill(data)
            values = data.view(dtype).view(shape).to(self.process.device)
            return values.requires_grad_(requires_grad)

        tensors = [None if kind is None else tensor(*kind) for kind in head.tensors]
        return replace(head, tensors=tensors)

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        try:
            with Waiting(self.process, "a message of a pipeline"):
                yield
        except (
            AccelError
        ):  # The connections are closed, and gloo's threads must not free tensors at exit.
            self._sent.clear()
            raise


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
    def forward(ctx: Any, run: Pass, token: torch.Tensor, *batch: torch.Tensor) -> Any:
        ctx.run = run
        return token.detach(), *_outputs(ctx, batch)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        run: Pass = ctx.run
        message = Message((run.number, 0), grads)
        heads = agree(f"the gradients of the batch of {run.what}", message.head)
        return None, token, *run.channel.broadcast(0, heads[0], message).tensors


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
        channel.send(channel.rank - 1, Message(ctx.place, grads))
        if ctx.place[1] == 0:  # The first micro-batch is the last in backward.
            channel.flush()
        return None, None, token, *(None for _ in grads)


@final
class Send(Function):
    """Send the outputs of a stage. Backward receives their gradients from the next rank."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, message: Message, token: torch.Tensor, *_: Any) -> Any:
        ctx.channel, ctx.place = channel, message.place
        channel.send(channel.rank + 1, message)
        return token.detach()

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        channel: Channel = ctx.channel
        return None, None, token, *channel.receive(channel.rank + 1, ctx.place).tensors


@final
class Join(Function):
    """The output of the last stage. Backward of a pass begins here."""

    @staticmethod
    def forward(ctx: Any, run: Pass, count: int, *tensors: torch.Tensor) -> Any:
        ctx.run, ctx.count = run, count
        # A second backward without retain_graph=True raises torch's error here, on every rank.
        ctx.save_for_backward(tensors[0])
        return tuple(_outputs(ctx, tensors[count:]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (token,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivatives()
        run: Pass = ctx.run
        run.channel.start_backward(f"the backward of {run.what}", grads)
        is_last = run.channel.rank == run.channel.last
        own = grads if is_last else [None] * len(grads)
        return None, None, *[token.detach()] * ctx.count, *own


# -- one forward ----------------------------------------------------------------------------------


@final
@dataclass(eq=False)
class Pass:
    """One forward of a pipeline on this rank.

    Args:
        what: its name in messages.
        keep: whether to keep the activations of each micro-batch.
    """

    channel: Channel
    stage: Stage
    what: str
    number: int
    rows: Rows
    keep: Sequence[bool]

    def run(self, batch: Sequence[torch.Tensor], form: Any) -> Any:
        """Return the last stage's output on every rank. Collective.

        Raises:
            AccelError: a stage failed. Its rank raises the stage's own error.
        """
        channel, grad = self.channel, torch.is_grad_enabled()
        token = torch.empty(0, device=channel.process.device, requires_grad=grad)
        if grad and any(t.requires_grad for t in batch):
            token, *batch = _apply(Enter, self, token, *batch)
        tokens: list[torch.Tensor] = []
        outputs: list[Any] = []
        errors: list[Exception] = []
        for number, tensors in enumerate(micro_batches(batch, self.rows)):
            message = Message((self.number, number), tensors, form)
            if channel.rank > 0:
                message = channel.receive(channel.rank - 1, message.place)
            if not message.failed and not errors:
                try:
                    end, output = self._run_stage(message, token, self.keep[number])
                    tokens.append(end)
                    outputs.append(output)
                    continue
                except Exception as error:
                    errors.append(error)
            if channel.rank < channel.last:
                channel.send(channel.rank + 1, Message(message.place, failed=True))
        return self._join(tokens, outputs, errors)

    def _run_stage(self, message: Message, token: Any, keep: bool) -> tuple[torch.Tensor, Any]:
        """Return the token to begin a backward with, and the output of the last stage."""
        channel, tensors = self.channel, message.tensors
        if channel.rank > 0:
            token, *tensors = _apply(Recv, channel, message.place, token, *tensors)
        output = self.stage.run(put_back(message.form, tensors), keep)
        if channel.rank == channel.last:
            return token, output
        tensors, form = flatten(output, f"the output of {self.stage.name}")
        return _apply(Send, channel, Message(message.place, tensors, form), token, *tensors), None

    def _join(self, tokens: list[torch.Tensor], outputs: list[Any], errors: list[Exception]) -> Any:
        channel, message = self.channel, Message((self.number, 0))
        if channel.rank == channel.last and len(outputs) == len(self.rows):
            try:
                tensors, form = flatten(concatenate(outputs, self.rows), "output")
                message = Message(message.place, tensors, form)
            except Exception as error:
                errors.append(error)
        text = "".join(f"{type(error).__name__}: {error}" for error in errors)
        answers = agree(f"the end of {self.what}", (text, message.head))
        channel.flush()
        texts = [text for text, _ in answers]
        # A variable for the error would keep its traceback, and the graph, until gc.collect().
        raise_together(self.what, errors.pop() if errors else None, texts, AccelError)
        message = channel.broadcast(channel.last, answers[-1][1], message)
        output = _apply(Join, self, len(tokens), *tokens, *message.tensors)
        return put_back(message.form, output)

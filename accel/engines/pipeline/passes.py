"""The forward of a pipeline. Autograd runs the backward.

On each rank a micro-batch goes through the stage between two autograd functions.
The first receives its inputs and the second sends its outputs. In backward they
send and receive gradients, so ``loss.backward()`` on every rank runs all stages
backwards. Each function also passes on a token, an empty tensor that requires a
gradient. Through it, autograd reaches all functions of a rank, even if a stage has
no trainable parameters or detaches its input.

Autograd runs the newest node that is ready. Every rank therefore runs the backward
of the newest micro-batch to its end first, and neighbors exchange messages in the
same order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import Optimizer

from ...errors import BackendError, PrecisionError, RankMismatchError
from ...process import end_groups
from ...process.control import Waiting, agree
from ...process.packing import broadcast_, bytes_of, is_dense, receive_value, send_value
from ...trees import TensorPlace, map_tensors, put_back, walk
from ..base.absent import refuse_second_derivatives
from ..base.activations import run_again
from ..base.engine import Engine
from ..base.gradients import Gradients
from ..base.inputs import SameInputs

Place = tuple[int, int]  # the numbers of a forward and a micro-batch
Tensors = Sequence[Any]  # tensors, or their gradients or None
Message = tuple[Tensors, Any]  # tensors, and a value with placeholders

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# -- gradients, and messages between ranks --------------------------------------------------------


@final
class PipelineGradients(Gradients):
    """The gradients of a stage, and its messages with neighbors.

    The header of a message is sent over accel's own group, so the receiver knows
    the shapes without waiting for a device. Tensors are sent as bytes, because
    not every group supports every dtype.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        place = engine.process.place
        self.rank, self.last = place.rank, place.world_size - 1
        self.num_forwards = 0
        #: Compares the batches of the first forwards, and the gradients of their outputs.
        self.same = SameInputs(engine.label, 0)
        #: True while a backward runs.
        self.in_backward = False
        self._waiting = Waiting(engine.process, "a message of a pipeline")
        #: The unfinished sends of the last message, with the memory that they read.
        self._sends: list[tuple[Any, Tensor]] = []

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        if outermost and self.in_backward:
            self.in_backward = False
            if completed:
                self._finish_sends()
            else:
                self.fail("backward")
        super().backward_ends(completed, outermost)

    def parts(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return [p.grad for p in parameters if p.grad is not None], []

    def before_step(self, optimizer: Optimizer) -> None:
        # Otherwise GradScaler would skip the step on some ranks only.
        if self.engine.distributed and getattr(optimizer, "found_inf", None) is not None:
            raise PrecisionError(
                "torch.amp.GradScaler checks only the pipeline stage of its own rank. "
                'Use precision="16-mixed" and accel.backward(loss).'
            )

    def send(self, to: int, place: Place, tensors: Tensors, form: Any = None) -> None:
        """Finish the last message, and start to send tensors and form."""
        self._finish_sends()
        with self._waiting:
            self._sends += send_value((place, _kinds(tensors), form), to, self.process.control)
            for tensor in _filled(tensors):
                data = bytes_of(tensor, self.process.carrier)
                self._sends.append((dist.isend(data, to, self.process.group), data))

    def _finish_sends(self) -> None:
        with self._waiting:
            for work, _ in self._sends:
                work.wait()
        self._sends.clear()

    def receive(self, source: int, place: Place) -> Message:
        """Receive a message. Return its tensors and form."""
        with self._waiting:
            sent, kinds, form = receive_value(source, self.process.control)
            if sent != place:
                raise RankMismatchError(
                    f"Rank {self.rank} expects micro-batch {place}, but rank {source} sent {sent}. "
                    "Run the same forwards on every rank."
                )
            tensors = self._empty(kinds)
            for tensor in _filled(tensors):
                data = bytes_of(tensor, self.process.carrier)
                dist.recv(data, source, self.process.group)
                if data.device != tensor.device:
                    bytes_of(tensor, tensor.device).copy_(data)
        return tensors, form

    def share(self, what: str, source: int, tensors: Tensors, form: Any = None) -> Message:
        """Broadcast the tensors and form of rank ``source``. Collective."""
        what = f"{what} ({self.engine.label})"
        kinds, form = agree(what, (_kinds(tensors), form))[source]
        self._finish_sends()
        if self.rank != source:
            tensors = self._empty(kinds)
        with self._waiting:
            broadcast_(_filled(tensors), self.process.group, source)
        return tensors, form

    def _empty(self, kinds: Sequence[Any]) -> Tensors:
        def empty(shape: torch.Size, dtype: torch.dtype, grad: bool) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=self.process.device)
            return tensor.requires_grad_(grad)

        return [None if kind is None else empty(*kind) for kind in kinds]

    def fail(self, what: str) -> None:
        """End the process groups, because other ranks wait for messages."""
        error = sys.exc_info()[1]
        what = f"a {what} of {self.engine.label} failed on rank {self.rank}"
        end_groups(f"{what}: {type(error).__name__}: {error}")


def _kinds(tensors: Tensors) -> list[Any]:
    return [None if t is None else (t.shape, t.dtype, t.requires_grad) for t in tensors]


def _filled(tensors: Tensors) -> list[Tensor]:
    return [t.detach() for t in tensors if t is not None and t.numel()]


# -- micro-batches --------------------------------------------------------------------------------


def flatten(value: Any, name: str) -> tuple[list[Tensor], Any]:
    """Return a value's tensors, and the value with placeholders.

    Raises:
        BackendError: the value contains an object that can't be sent.
    """
    tensors: list[Tensor] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and is_dense(leaf):
            tensors.append(leaf)
            return TensorPlace(len(tensors) - 1)
        if isinstance(leaf, _PLAIN):
            return leaf
        # The gradients of a sparse tensor, or of tensors inside an object, would be lost.
        raise BackendError(
            f"A pipeline can't send {path} ({type(leaf).__name__}) to other ranks. "
            "Pass dense tensors and plain values in dicts, lists or tuples."
        )

    return tensors, walk(visit, value, name)


def micro_batches(tensors: Tensors, chunks: int) -> list[Tensors]:
    """Return the tensors of each micro-batch. All get every scalar."""
    if chunks == 1:
        return [tensors]
    sizes = set(map(len, filter(Tensor.dim, tensors)))
    if len(sizes) != 1:
        raise BackendError(
            f"Pipeline(chunks={chunks}) can't split inputs with sizes {sorted(sizes)} "
            "in dim 0. Make dim 0 of every input the batch, or use chunks=1."
        )
    count = max(1, min(chunks, *sizes))
    columns = [t.tensor_split(count) if t.dim() else (t,) * count for t in tensors]
    return list(zip(*columns, strict=True))


def recomputed(stage: nn.Module, value: Any) -> Any:
    """Return the output for a micro-batch. Backward recomputes it."""

    def forward_of_copy(value: Any) -> Any:
        # An nn.ReLU(inplace=True) as first child would change the input of the recomputation.
        return stage(map_tensors(torch.clone, value))

    return run_again(forward_of_copy, list(stage.modules()), (value,), {})


# -- a forward ------------------------------------------------------------------------------------


@final
class Exchange(Function):
    """Pass on a token and tensors. Backward exchanges gradients.

    ``exchange`` returns the gradients that autograd propagates, or None.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Any, token: Any, *tensors: Any) -> Any:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        # Saved, so that a second backward without retain_graph=True raises on every rank.
        ctx.save_for_backward(token)
        # Return aliases, because nn.ReLU(inplace=True) may change them.
        aliases = [t.detach() for t in tensors]
        pairs = zip(aliases, tensors, strict=True)
        ctx.mark_non_differentiable(*[a for a, t in pairs if not t.requires_grad])
        return token.detach(), *aliases

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: Tensor | None) -> Any:
        (token,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivatives()
        received = ctx.exchange(grads)
        return None, token.detach(), *(received or [None] * len(grads))


_exchange: Any = Exchange.apply


def forward(gradients: PipelineGradients, stage: nn.Module, options: Any, input: Any) -> Any:
    """Return the last stage's output on every rank. Collective."""
    tensors, form = flatten(input, "input")
    grad = torch.is_grad_enabled()
    token = torch.empty(0, device=gradients.process.device, requires_grad=grad)
    # If the batch is the output of another pipeline, every rank there needs its gradients.
    if grad and any(t.requires_grad for t in tensors):
        share = partial(gradients.share, "the gradients of a batch", 0)
        token, *tensors = _exchange(lambda grads: share(grads)[0], token, *tensors)
    batches = micro_batches(tensors, options.chunks)
    kept = len(batches)
    if grad and options.checkpoint != "never":
        kept = int(options.checkpoint == "except_last")
    # Evaluation may use a different loader, so its first batches are compared too.
    gradients.same.call(lambda: None, (tensors,), {}, "" if grad else "forward")
    try:
        return _forward(gradients, stage, token, form, batches, kept)
    except BaseException:
        gradients.fail("forward")
        raise


def _forward(
    gradients: PipelineGradients,
    stage: nn.Module,
    token: Tensor,
    form: Any,
    batches: Sequence[Tensors],
    kept: int,
) -> Any:
    """Run the micro-batches. The last ``kept`` keep activations. Collective."""
    rank, is_last = gradients.rank, gradients.rank == gradients.last
    gradients.num_forwards += 1
    tokens: list[Tensor] = []
    outputs: list[Tensors] = []
    for number, inputs in enumerate(batches):
        place, end, batch_form = (gradients.num_forwards, number), token, form
        if rank > 0:
            inputs, batch_form = gradients.receive(rank - 1, place)
            end, *inputs = _exchange(partial(gradients.send, rank - 1, place), end, *inputs)
        value = put_back(batch_form, inputs)
        keeps = number + kept >= len(batches)
        value = stage(value) if keeps else recomputed(stage, value)
        output, out_form = flatten(value, "the output of a stage")
        if is_last:
            outputs.append(output)
        else:
            gradients.send(rank + 1, place, output, out_form)
            receive = partial(gradients.receive, rank + 1, place)
            end, *_ = _exchange(lambda _, receive=receive: receive()[0], end, *output)
        tokens.append(end)

    def start_backward(grads: Tensors) -> Tensors | None:
        # Compare gradients. Only the last rank's count, so different targets would be ignored.
        gradients.same.call(lambda: None, tuple(grads), {}, "backward")
        gradients.in_backward = True
        return grads if is_last else None

    if len(outputs) > 1:
        outputs = [list(map(torch.cat, zip(*outputs, strict=True)))]
    joined = outputs[0] if is_last else []
    what = "the output of a forward"
    shared, out_form = gradients.share(what, gradients.last, joined, out_form)
    _, *shared = _exchange(start_backward, torch.cat(tokens), *shared)
    return put_back(out_form, shared)

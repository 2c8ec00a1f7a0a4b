"""A pipeline over ranks: one forward with its backward, as one node of autograd on every rank.

Each rank runs its own stage. The node's backward runs the micro-batches through the stages in the opposite direction,
so that the user's ``loss.backward()`` is all that is called.
"""

from __future__ import annotations

import contextlib
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...errors import AccelError, BackendError, RankMismatchError
from ...process import Process
from ...process.control import agree, lost
from ...process.packing import bytes_of, framed, to_bytes, to_tensor, unframed
from ...process.transfer import Prints, refuse_other_values
from ...trees import put_back
from ..base.absent import refuse_second_derivatives
from .stages import Cut, Stage, flatten, pieces, put_together, without_hooks

SAME_BATCH: Final = (
    "every rank of a pipeline needs the same batch and calls the same things: give the dataloader to accel.setup, draw "
    "random numbers of the data from generators seeded alike, and let no rank go its own way"
)
_SAME_LOSS: Final = "every rank must compute the same loss from the pipeline's output, with the same targets"
_TAG: Final = 0x919E

#: The rank, and its error.
Failure = tuple[int, str]

# -- the ranks do the same --------------------------------------------------------------------------------------------


def crc(value: object) -> int:
    """A short number that is the same for equal values on all ranks."""
    return zlib.crc32(repr(value).encode())


def meet(what: str, facts: dict[str, Any], advice: str) -> None:
    """All ranks do ``what`` with equal facts, or each raises (RankMismatchError) the first difference. Collective."""
    answers = agree(what, list(facts.values()))
    for rank, theirs in enumerate(answers):
        for name, first, other in zip(facts, answers[0], theirs, strict=True):
            if first != other:
                raise RankMismatchError(f"{what}: {name} differs between rank 0 and rank {rank}: {advice}")


# -- messages between the stages ---------------------------------------------------------------------------------------


class Head(NamedTuple):
    """What is known of a message without the contents of its tensors, whose shapes may be others in every message."""

    kinds: list[tuple[torch.Size, torch.dtype, bool] | None]  # the last one: whether it has a gradient
    form: Any = None
    failure: Failure | None = None


class Message(NamedTuple):
    """What passes between stages: a nested value, or where and how its making failed."""

    tensors: list[torch.Tensor | None]
    form: Any = None
    failure: Failure | None = None

    @property
    def head(self) -> Head:
        kinds = [None if t is None else (t.shape, t.dtype, t.requires_grad) for t in self.tensors]
        return Head(kinds, self.form, self.failure)

    def contents(self) -> list[torch.Tensor]:
        """Those of the tensors, as bytes, since not every backend knows every dtype."""
        return [bytes_of(t, t.device) for t in self.tensors if t is not None and t.numel()]


def _sendable(value: Any, name: str) -> tuple[list[torch.Tensor], Any]:
    """``flatten``; BackendError too of containers whose class another process would not find."""
    tensors, form = flatten(value, name)
    try:
        pickle.dumps(form)
    except Exception as error:
        raise BackendError(
            f"{name} goes to other processes, and cannot be sent: {error}; define its classes at the top level of a module"
        ) from error
    return tensors, form


@final
class Channel:
    """This rank's connection with the other stages.

    The head of a message travels from host to host, on accel's own group and before the contents, which travel from device
    to device: a host knows what comes without waiting for a device, so that it runs ahead of its own.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.rank = process.place.rank
        self.last = process.place.world_size - 1
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, to: int, message: Message) -> None:
        """Begin to send; ``flush`` waits for the end."""
        process = self._process
        with self._transfer():
            for piece in map(to_tensor, framed(pickle.dumps(message.head))):
                self._sent.append((dist.isend(piece, to, process.control, _TAG), piece))
            for content in message.contents():
                travelling = content.to(process.carrier)
                self._sent.append((dist.isend(travelling, to, process.group, _TAG), travelling))

    def flush(self) -> None:
        """Let go of what was sent, once the neighbours have it."""
        with self._transfer():
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    def receive(self, source: int) -> Message:
        process = self._process

        def piece(count: int) -> bytearray:
            data = torch.empty(count, dtype=torch.uint8, device="cpu")
            dist.recv(data, source, process.control, _TAG)
            return to_bytes(data)

        with self._transfer():
            head = pickle.loads(unframed(piece))
            return self._filled(head, lambda content: dist.recv(content, source, process.group, _TAG))

    def broadcast(self, source: int, head: Head, message: Message) -> Message:
        """Give every rank the message of ``source``, whose head they know. Collective."""
        group = self._process.group
        with self._transfer():
            if source != self.rank:
                return self._filled(head, lambda content: dist.broadcast(content, source, group))
            for content in message.contents():
                dist.broadcast(content.to(self._process.carrier), source, group)
        return message

    def _filled(self, head: Head, get: Callable[[torch.Tensor], object]) -> Message:
        """The message of a head; ``get`` fills the contents of one tensor after the other."""

        def tensor(shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
            count = shape.numel() * dtype.itemsize
            content = torch.empty(count, dtype=torch.uint8, device=self._process.carrier)
            if count:
                get(content)
            return content.view(dtype).view(shape).to(self._process.device).requires_grad_(requires_grad)

        return Message([None if kind is None else tensor(*kind) for kind in head.kinds], head.form, head.failure)

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._sent.clear()
            raise lost("a message of a pipeline", error) from error


# -- a forward and its backward ---------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What one micro-batch's backward needs: the stage's inputs, and the ends of its graph (None: no gradient)."""

    leaves: list[torch.Tensor]
    ends: list[GradientEdge | None]


@final
@dataclass(eq=False)
class Pass:
    """One forward on this rank, and its backward."""

    channel: Channel
    stage: Stage
    what: str  # names it for messages
    where: Cut
    keep: list[bool]  # of each micro-batch, whether its activations are kept
    grad: bool  # a backward may come

    def __post_init__(self) -> None:
        self._parameters: list[torch.Tensor] = [p for p in self.stage.parameters if self.grad and p.requires_grad]
        self._wanted: list[bool] = []
        self._form: Any = None
        self._kept: list[_Kept] = []
        self._used = False
        #: Of the forward or backward that runs: this stage's own error, and what failed here or at a stage before.
        self._error: Exception | None = None
        self._failure: Failure | None = None

    def run(self, batch: Sequence[torch.Tensor], form: Any) -> Any:
        """The output of all stages, the same on every rank. Collective."""
        if self.grad:
            # The output has a gradient also where this rank's stage has none.
            anchor = torch.empty(0, requires_grad=True, device="cpu")
            out = _node(self, form, anchor, len(batch), *batch, *self._parameters)
        else:
            out = self.forward(batch, form)
        return put_back(self._form, out)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """An error inside goes to the other ranks with the messages, and is raised when all have come to the end."""
        try:
            yield
        except Exception as error:
            self._error, self._failure = error, (self.channel.rank, f"{type(error).__name__}: {error}")

    def _receive(self, source: int) -> Message:
        message = self.channel.receive(source)
        self._failure = self._failure or message.failure
        return message

    def forward(self, batch: Sequence[torch.Tensor], form: Any) -> list[torch.Tensor]:
        """Run the micro-batches through this stage; the output of the last one is every rank's."""
        channel, outputs, seen = self.channel, [], Prints(batch)
        first, last = channel.rank == 0, channel.rank == channel.last
        self._wanted = [self.grad and t.requires_grad for t in batch]
        parts = pieces(batch, self.where) if first else []
        for number, keep in enumerate(self.keep):
            if first:
                leaves = [t.detach().requires_grad_(w) for t, w in zip(parts[number], self._wanted, strict=True)]
                given = Message([*leaves], form)
            else:
                given = self._receive(channel.rank - 1)
            out = Message([])
            if self._failure is None:
                with self._noting():
                    out, value = self._compute(given, keep)
                    outputs.append(value)
            if not last:
                channel.send(channel.rank + 1, Message(out.tensors, out.form, self._failure))
        whole = self._whole(outputs) if last else Message([])
        channel.flush()
        heads = self._end("forward", seen, SAME_BATCH, whole.head)
        whole = channel.broadcast(channel.last, heads[-1], whole)
        self._form = whole.form
        return [t for t in whole.tensors if t is not None]

    def _compute(self, given: Message, keep: bool) -> tuple[Message, Any]:
        with torch.set_grad_enabled(self.grad):
            tensors = [_alias(t) if t is not None and t.requires_grad else t for t in given.tensors]
            out = self.stage.run(put_back(given.form, tensors), keep, len(self.keep) == 1)
            results, form = _sendable(out, f"the output of {self.stage.names[-1]}")
        if self.grad:
            leaves = [t for t in given.tensors if t is not None]
            self._kept.append(_Kept(leaves, [get_gradient_edge(t) if t.requires_grad else None for t in results]))
        detached = [t.detach().requires_grad_(t.requires_grad) for t in results]
        return Message([*detached], form), put_back(form, detached)

    def _whole(self, outputs: list[Any]) -> Message:
        tensors: list[torch.Tensor] = []
        form = None
        if self._failure is None:
            with self._noting(), torch.set_grad_enabled(self.grad):  # so that it is seen which parts have a gradient
                tensors, form = _sendable(put_together(outputs, self.where), "output")
        return Message([*tensors], form, self._failure)

    def backward(self, grads: Sequence[torch.Tensor | None], retain: bool, twice: bool) -> list[torch.Tensor | None]:
        """Run the micro-batches back through this stage: the gradients of the batch and of the stage's parameters."""
        if self._used:
            raise BackendError("a second backward of one forward: use retain_graph=True in the first one")
        given = [grad is not None for grad in grads]
        facts = {"retain_graph": retain, "create_graph": twice, "which parts of the output have a gradient": given}
        meet(f"the backward of {self.what}", facts, _SAME_LOSS)
        if twice:  # a rank has the graph of its own stage alone
            refuse_second_derivatives()
        seen = Prints([grad for grad in grads if grad is not None])
        self._error = self._failure = None
        channel = self.channel
        first, last = channel.rank == 0, channel.rank == channel.last
        totals: list[torch.Tensor | None] = [None] * len(self._parameters)
        of_batch: list[list[torch.Tensor | None]] = []
        for number in reversed(range(len(self._kept))):
            leaves, ends = self._kept[number]
            where = self.where[number]
            came = [g if g is None or where is None else g[where] for g in grads] if last else []
            if not last and any(end is not None for end in ends):
                came = self._receive(channel.rank + 1).tensors
            found: list[torch.Tensor | None] = [None] * len(leaves)
            if self._failure is None:
                with self._noting():
                    found, mine = self._differentiate(leaves, ends, came, retain)
                    # Not in place: what autograd gives may be shared.
                    totals = [b if a is None else a if b is None else a + b for a, b in zip(totals, mine, strict=True)]
            if first:
                of_batch.insert(0, found)
            elif any(leaf.requires_grad for leaf in leaves):
                channel.send(channel.rank - 1, Message(found, None, self._failure))
        channel.flush()
        inputs = Message(self._of_batch(of_batch) if first and self._failure is None else [])
        if not retain:
            self._used = True
            self._kept.clear()
        heads = self._end("backward", seen, _SAME_LOSS, inputs.head)
        if any(self._wanted):
            return [*channel.broadcast(0, heads[0], inputs).tensors, *totals]
        return [*[None] * len(self._wanted), *totals]

    def _end(self, which: str, seen: Prints, advice: str, head: Head) -> list[Head]:
        """Every rank's head, once all ranks have come here well and with equal tensors.

        Only here the host needs numbers of the device, which had them before all that the pass has given it to do.
        """
        what = self.what if which == "forward" else f"the {which} of {self.what}"
        failed = ""
        if self._failure is not None:
            failed = f"the {which} of the pipeline failed on rank {self._failure[0]}: {self._failure[1]}"
        answers = agree(f"the end of {what}", (failed, seen.read(), head))
        own, self._error = self._error, None  # through a graph it would hold the frames that hold the graph
        if own is not None:
            try:
                raise own
            finally:
                del own
        for problem, *_ in answers:
            if problem:
                raise AccelError(problem)
        refuse_other_values(what, {rank: sums for rank, (_, sums, _) in enumerate(answers)}, advice)
        return [theirs for *_, theirs in answers]

    def _differentiate(
        self,
        leaves: list[torch.Tensor],
        ends: list[GradientEdge | None],
        grads: Sequence[torch.Tensor | None],
        retain: bool,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        pairs = [(e, g) for e, g in zip(ends, grads, strict=False) if e is not None and g is not None]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        wanted = [*inputs, *self._parameters]
        if not pairs or not wanted:
            return [None] * len(leaves), [None] * len(self._parameters)
        with without_hooks(self._parameters):
            outputs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, wanted, given, retain_graph=retain, allow_unused=True)
        of_inputs = iter(found[: len(inputs)])
        return [next(of_inputs) if leaf.requires_grad else None for leaf in leaves], list(found[len(inputs) :])

    def _of_batch(self, found: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """The batch's gradients from those of its micro-batches, which are all of the first stage."""

        def join(parts: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]) -> torch.Tensor | None:
            known = [p for p in parts if p is not None]
            if len(parts) == 1 or not known:
                return parts[0]
            if known[0].dim() == 0:
                return torch.stack(known).sum()
            return torch.cat([torch.zeros_like(t) if p is None else p for p, t in zip(parts, leaves, strict=True)])

        leaves = zip(*(kept.leaves for kept in self._kept), strict=True)
        return list(map(join, zip(*found, strict=True), leaves))


@final
class _Alias(torch.autograd.Function):
    """The same memory as a tensor that is no leaf: a stage may begin with a module that works in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_alias: Any = _Alias.apply


@final
class _Node(torch.autograd.Function):
    """A pass as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, run: Pass, form: Any, anchor: torch.Tensor, count: int, *tensors: Any) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        found = run.forward(tensors[:count], form)
        out = tuple(t.detach() for t in found)
        ctx.mark_non_differentiable(*(o for o, t in zip(out, found, strict=True) if not t.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        retain: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        twice = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            return None, None, None, None, *ctx.run.backward(grads, retain, twice)


_node: Any = _Node.apply

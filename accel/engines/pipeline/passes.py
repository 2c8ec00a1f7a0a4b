"""A pipeline over ranks: one forward with its backward, as one node of autograd on every rank.

Each rank runs its own stage. The node's backward runs the micro-batches through the stages in the opposite direction,
so that the user's ``loss.backward()`` is all that is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...errors import AccelError, BackendError
from ...process.control import agree
from .channel import Channel, Failure, Message
from .checks import crc, meet
from .stages import Cut, Named, Stage, flatten, put_together, times_of, unflatten, without_hooks


class _Kept(NamedTuple):
    """What one micro-batch's backward needs: the stage's inputs, and the ends of its graph (None: no gradient)."""

    leaves: list[torch.Tensor]
    ends: list[GradientEdge | None]


class PassGradients(NamedTuple):
    """What a backward gives: gradients of the batch (on the first stage) and of the stage's parameters."""

    inputs: list[torch.Tensor | None]
    parameters: list[torch.Tensor | None]


@final
class Pass:
    """One forward on this rank, and its backward.

    Args:
        channel: to the other stages.
        stage: this rank's.
        where: how the batch is cut.
        keep: for each micro-batch, whether its activations are kept.
        parameters: the stage's parameters that get gradients; None where no gradient is wanted at all.
    """

    def __init__(
        self, channel: Channel, stage: Stage, where: Cut, keep: list[bool], parameters: list[torch.Tensor] | None
    ) -> None:
        self._channel = channel
        self._stage = stage
        self._where = where
        self._keep = keep
        self.parameters = parameters or []
        self._grad = parameters is not None
        self._kept: list[_Kept] = []
        self.form: Any = None
        self.used = False

    def forward(self, batch: Sequence[torch.Tensor], form: Any) -> list[torch.Tensor]:
        """Run the micro-batches through this stage; the output of the last one is every rank's."""
        channel, outputs = self._channel, []
        first, last = channel.rank == 0, channel.rank == channel.last
        pieces = self._where.pieces(batch) if first else []
        error: Exception | None = None
        failure: Failure | None = None
        for number, keep in enumerate(self._keep):
            if first:
                given = Message(
                    [t.detach().requires_grad_(self._grad and t.requires_grad) for t in pieces[number]], form
                )
            else:
                given = channel.receive(channel.rank - 1)
                failure = failure or given.failure
            out = Message([])
            if failure is None:
                try:
                    out, value = self._compute(given, keep)
                    outputs.append(value)
                except Exception as caught:
                    error, failure = caught, (channel.rank, _say(caught))
            if not last:
                channel.send(channel.rank + 1, Message(out.tensors, out.form, failure))
        whole: Message | None = None
        if last:
            whole, error, failure = self._whole(outputs, error, failure)
        channel.flush()
        return self._end_forward(channel.broadcast(channel.last, whole), error)

    def _compute(self, given: Message, keep: bool) -> tuple[Message, Any]:
        with torch.set_grad_enabled(self._grad):
            tensors = [_alias(t) if t is not None and t.requires_grad else t for t in given.tensors]
            out = self._stage.run(unflatten(given.form, tensors), keep)
            results, form = flatten(out, f"the output of {self._stage.names[-1]}")
        if self._grad:
            leaves = [t for t in given.tensors if t is not None]
            self._kept.append(_Kept(leaves, [get_gradient_edge(t) if t.requires_grad else None for t in results]))
        detached = [t.detach().requires_grad_(t.requires_grad) for t in results]
        return Message([*detached], form), unflatten(form, detached)

    def _whole(
        self, outputs: list[Any], error: Exception | None, failure: Failure | None
    ) -> tuple[Message, Exception | None, Failure | None]:
        """The output of the whole batch, on the last stage."""
        tensors: list[torch.Tensor] = []
        form = None
        if failure is None:
            try:
                with torch.set_grad_enabled(self._grad):  # so that it is seen which parts have a gradient
                    tensors, form = flatten(put_together(outputs, self._where), "output")
            except Exception as caught:
                error, failure = caught, (self._channel.rank, _say(caught))
        return Message([*tensors], form, failure), error, failure

    def _end_forward(self, out: Message, error: Exception | None) -> list[torch.Tensor]:
        if error is not None:
            raise error
        if out.failure is not None:
            rank, text = out.failure
            raise AccelError(f"the forward of the pipeline failed on rank {rank}: {text}")
        self.form = out.form
        return [t for t in out.tensors if t is not None]

    def backward(
        self, grads: Sequence[torch.Tensor | None], retain: bool
    ) -> tuple[PassGradients, Exception | None, str]:
        """Run the micro-batches back through this stage.

        Returns:
            The gradients; an error of this stage; and what failed here or further down, if anything.
        """
        channel = self._channel
        first, last = channel.rank == 0, channel.rank == channel.last
        totals = _Totals(len(self.parameters))
        of_batch: list[list[torch.Tensor | None]] = []
        error: Exception | None = None
        failure: Failure | None = None
        for number in reversed(range(len(self._kept))):
            leaves, ends = self._kept[number]
            came = self._piece(grads, number) if last else []
            if not last and any(end is not None for end in ends):
                message = channel.receive(channel.rank + 1)
                came, failure = message.tensors, failure or message.failure
            found: list[torch.Tensor | None] = [None] * len(leaves)
            if failure is None:
                try:
                    found, mine = self._differentiate(leaves, ends, came, retain)
                    totals.add(mine)
                except Exception as caught:
                    error, failure = caught, (channel.rank, _say(caught))
            if first:
                of_batch.insert(0, found)
            elif any(leaf.requires_grad for leaf in leaves):
                channel.send(channel.rank - 1, Message(found, None, failure))
        channel.flush()
        inputs = self._of_batch(of_batch) if failure is None else []
        if not retain:
            self.used = True
            self._kept.clear()
        text = "" if failure is None else f"the backward of the pipeline failed on rank {failure[0]}: {failure[1]}"
        return PassGradients(inputs, totals.values), error, text

    def _piece(self, grads: Sequence[torch.Tensor | None], number: int) -> list[torch.Tensor | None]:
        where = self._where.slices[number]
        return [g if g is None or where is None else g[where] for g in grads]

    def _differentiate(
        self,
        leaves: list[torch.Tensor],
        ends: list[GradientEdge | None],
        grads: Sequence[torch.Tensor | None],
        retain: bool,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """The gradients of one micro-batch's inputs and of the parameters."""
        pairs = [(e, g) for e, g in zip(ends, grads, strict=False) if e is not None and g is not None]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        wanted = [*inputs, *self.parameters]
        if not pairs or not wanted:
            return [None] * len(leaves), [None] * len(self.parameters)
        with without_hooks(self.parameters):
            found = torch.autograd.grad(
                [e for e, _ in pairs], wanted, [g for _, g in pairs], retain_graph=retain, allow_unused=True
            )
        of_inputs = iter(found[: len(inputs)])
        return [next(of_inputs) if leaf.requires_grad else None for leaf in leaves], list(found[len(inputs) :])

    def _of_batch(self, found: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """The batch's gradients from those of its micro-batches, which are all of the first stage."""
        joined: list[torch.Tensor | None] = []
        for index, parts in enumerate(zip(*found, strict=True)):
            known = [p for p in parts if p is not None]
            leaves = [kept.leaves[index] for kept in self._kept]
            if len(parts) == 1 or not known:
                joined.append(parts[0])
            elif known[0].dim() == 0:
                joined.append(torch.stack(known).sum())
            else:
                joined.append(
                    torch.cat([torch.zeros_like(t) if p is None else p for p, t in zip(parts, leaves, strict=True)])
                )
        return joined


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
class _Totals:
    """Sums of the micro-batches' gradients, with as few copies at a time as can be."""

    def __init__(self, count: int) -> None:
        self.values: list[torch.Tensor | None] = [None] * count
        self._own: set[int] = set()

    def add(self, grads: list[torch.Tensor | None]) -> None:
        """Add one micro-batch's; empties ``grads``."""
        for index in range(len(grads)):
            grad, grads[index] = grads[index], None
            total = self.values[index]
            if grad is None:
                continue
            if total is None:
                self.values[index] = grad
            elif index in self._own:
                total.add_(grad)
            else:  # what autograd gives may be shared
                self.values[index] = total + grad
                self._own.add(index)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Ends(NamedTuple):
    """What the engine does around a pass's backward: compare the ranks before, and their errors and results after."""

    before: Callable[[Sequence[torch.Tensor | None], bool], None]
    after: Callable[[PassGradients, Exception | None, str], PassGradients]


class Node(torch.autograd.Function):
    """A pass as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, run: Pass, ends: Ends, form: Any, anchor: torch.Tensor, count: int, *tensors: Any) -> Any:
        ctx.run, ctx.ends = run, ends
        ctx.set_materialize_grads(False)
        found = run.forward(tensors[:count], form)
        out = tuple(t.detach() for t in found)
        ctx.mark_non_differentiable(*(o for o, t in zip(out, found, strict=True) if not t.requires_grad))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        run: Pass = ctx.run
        if run.used:
            raise BackendError("a second backward of one forward: use retain_graph=True in the first one")
        retain: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.ends.before(grads, retain)
        found = ctx.ends.after(*run.backward(grads, retain))
        return None, None, None, None, None, *found.inputs, *found.parameters


node: Any = Node.apply


# -- pipeline relay ----------------------------------------------------------------------------------------------------
# The forwards of a pipeline over ranks: all ranks compare, each runs its stage, autograd gets one node.

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

        def after(found: PassGradients, error: Exception | None, failure: str) -> PassGradients:
            failures = [text for text in agree(f"the end of {what}", failure) if text]
            if error is not None:
                raise error
            if failures:
                raise AccelError(failures[0])
            inputs: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if any(wanted):
                inputs = channel.broadcast(0, Message(found.inputs) if channel.rank == 0 else None).tensors
            return PassGradients(list(inputs), found.parameters)

        return Ends(before, after)

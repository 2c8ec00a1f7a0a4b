"""The gradients of one model, and the steps that use them: what is pending, how it becomes final, who may step with it."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError, PrecisionError
from ...gradients.clip import clip_parts_, part_of
from ...gradients.log import BackwardEnd, GradientLog
from ...gradients.patches import BackwardListener
from ...precision import Accumulator, all_finite, here
from ...process import Process
from ...process.control import Waiting, agree, announce
from ...process.packing import broadcast_, writable
from ...shard import parameters_of

if TYPE_CHECKING:
    from .engine import Engine


class Gradients:
    """As written here it serves engines whose backward leaves whole and final gradients in ``p.grad``.

    *Local* methods run no collective; *collective* ones are called on every rank.
    """

    #: Each rank has a part of the gradients, or of what is stepped, so that nothing is said of all without the others.
    partial: ClassVar[bool] = False
    #: Of those the whole gradients of some parameters, and nothing of the others: a norm over all adds up over the ranks.
    spread: ClassVar[bool] = False
    #: The ranks' gradients are reduced together, so that what is trainable must be the same on all.
    reduced: ClassVar[bool] = False
    #: Reduced gradients are told from others by the log.
    logged: ClassVar[bool] = False
    #: Gradients stay this rank's own until a step or clipping, so that a change of ``requires_grad`` loses none.
    deferred: ClassVar[bool] = False
    #: Also optimizers that were never given to ``setup`` need ``before_step``.
    before_any_step: ClassVar[bool] = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.process = engine.process
        self.log = GradientLog(())
        self.buffers = Buffers(engine.module, engine.process, getattr(engine.options, "broadcast_buffers", True))
        #: The numbers of the parameters that are in no optimizer: a loop may update them by hand.
        self.unoptimized: list[int] = []
        #: Inside ``no_sync``; whether a backward there left gradients that ``end_backward`` would have made final.
        self.accumulating = self.held_back = False
        self._backward_end = BackwardEnd((), self._end_backward)
        #: Hears of every backward, of whatever graph, over several ranks.
        self.listener: BackwardListener | None = None
        kind = type(self)
        #: Whether ``before_step``, ``stepped_as`` and ``after_step`` do something here.
        self.prepares_steps = kind.before_step is not Gradients.before_step
        self.replaces_steps = kind.stepped_as is not Gradients.stepped_as
        self.finishes_steps = kind.after_step is not Gradients.after_step

    @property
    def watched(self) -> bool:
        """Whether torch's clipping and the steps of optimizers that accel does not know concern these gradients."""
        engine = self.engine
        return engine.precision.scaled or (engine.distributed and (self.reduced or self.spread))

    @property
    def spares(self) -> bool:
        """Whether backwards under ``no_sync`` save messages, and take no memory for it."""
        return False

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Log the gradients of these parameters, where they are logged."""
        self.log.close()
        engine = self.engine
        needed = engine.precision.scaled or (engine.distributed and self.logged)
        self.log = GradientLog(parameters if needed else ())

    @final
    def close(self) -> None:
        self.log.close()
        self._backward_end.close()

    # -- what there is --------------------------------------------------------------------------------------------

    def holders(self) -> Sequence[Accumulator]:
        """Everything in whose ``grad`` a backward may leave gradients of this model. Local."""
        return self.engine.parameters

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor in whose place a parameter of ``engine.known`` stands in a graph. Local."""
        return parameter

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        """The one of ``engine.parameters`` that a parameter of the module stands for. Local."""
        return parameter

    def exist(self, *, zeros: bool) -> bool:
        """Whether there are any, judged alike on all ranks that saw the same backwards; ``zeros`` counts those of zeros."""
        mine = any(a.grad is not None and (zeros or bool(here(a.grad).any())) for a in self.holders())
        return any(agree(f"the gradients ({self.engine.label})", mine)) if self.partial else mine

    def pending(self) -> bool:
        """Whether ``settle`` has something to do. Local."""
        return False

    def hidden(self) -> bool:
        """Whether there are gradients that ``p.grad`` does not show, now or once they are final. Local."""
        return False

    def finite(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer``'s final gradients hold neither inf nor nan, judged alike on all ranks."""
        mine = all_finite(optimizer)
        return all(agree(f"the gradients' finiteness ({self.engine.label})", mine)) if self.partial else mine

    # -- making them final ----------------------------------------------------------------------------------------

    def end_backward(self, indices: Sequence[int]) -> None:
        """At the end of a backward: make final what no step will, the gradients of parameters in no optimizer. Collective.

        Only for engines that override it; in the others these are final by themselves.
        """

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Make gradients final. Collective where there is something to reduce.

        ``optimizer`` is about to step: only its gradients, and each rank needs those only that it steps. None: all of them, for
        code that looks at ``p.grad`` on this rank.
        """
        if self.log.entries:
            self.log.fold(stepping=optimizer)

    def accumulate(self, accumulating: bool) -> None:
        """Begin or end ``no_sync``: whether backward passes of the forwards from now on skip the reduction. Local."""
        self.accumulating = accumulating

    @property
    def in_parts(self) -> bool:
        """Whether final gradients lie in parts on the ranks, of which ``parts`` tells. Local."""
        return False

    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What lies here of the final gradients of these: what this rank counts in a norm, and what another one does. Local."""
        raise NotImplementedError

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip by the global norm of the model's gradients; return the norm before, 0-dim. Collective."""
        parameters = self.engine.parameters
        if self.in_parts:
            self.finalize("accel.clip_grad_norm_", parameters)
            return self.clip_parts(max_norm, norm_type, error_if_nonfinite)
        self.settle()  # every rank clips all parameters, so there is nothing to compare
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    @final
    def clip_parts(self, max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clip gradients that are final and lie in parts. Collective."""
        return clip_parts_([part_of(self, self.engine.parameters)], (), max_norm, norm_type, error_if_nonfinite)

    def norm_for_user(self, norm: torch.Tensor) -> torch.Tensor:
        """Return a norm over all ranks in the form in which torch returns that of such parameters. Local."""
        return norm

    def finalize(self, what: str, parameters: Sequence[torch.Tensor]) -> None:
        """Make gradients final because ``what`` clips those of these parameters. Collective.

        Raises:
            RankMismatchError: on every rank, if the ranks clip different parameters.
        """
        if self.in_parts:
            self.announce(what)
            self.settle()
        elif self.pending():
            self.settle()
            names = self.engine.holdings.parameter_names
            self.engine.compare(what, sorted({names[id(p)] for p in parameters}), other_parameters)

    # -- steps ----------------------------------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameters that the engine would not keep equal on all ranks. Local."""
        engine = self.engine
        if engine.distributed:
            check_parameters(optimizer, engine.known, engine.module, type(optimizer).__name__)

    def before_step(self, optimizer: Optimizer) -> None:
        """Hear that ``optimizer`` is about to step."""

    def stepped_as(self, optimizer: Optimizer) -> Optimizer:
        """What torch's own step is called with in the place of ``optimizer``. Local."""
        return optimizer

    def after_step(self, optimizer: Optimizer) -> None:
        """Hear that ``optimizer`` has stepped."""

    def break_step(self) -> None:
        """Hear that an optimizer's step ended with an exception. Local."""

    def steps_part(self, optimizer: Optimizer) -> bool:
        """Whether each rank steps other parameters, or other parts of them. Local."""
        return False

    # -- the same for all -----------------------------------------------------------------------------------------

    def find_unoptimized(self) -> None:
        """See which parameters are in no optimizer's groups. Local."""
        engine = self.engine
        held = {id(p) for optimizer in engine.optimizers for p in parameters_of(optimizer)}
        self.unoptimized = [i for i, p in enumerate(engine.parameters) if id(p) not in held]
        self._backward_end.close()
        if engine.distributed and type(self).end_backward is not Gradients.end_backward:
            self._backward_end = BackwardEnd([engine.parameters[i] for i in self.unoptimized], self._end_backward)

    @final
    def announce(self, what: str, details: Hashable = None) -> None:
        """Say that a collective is next that has no comparison of its own. Collective where it was not to be expected."""
        announce(self.process, f"{what} ({self.engine.label})", details)

    @final
    def announce_step(self, optimizer: Optimizer) -> None:
        """Say that a step is next, which comes after equally many backwards on all ranks."""
        steppers = list(self.engine.steppers)
        self.announce("optimizer.step()", steppers.index(id(optimizer)) if id(optimizer) in steppers else None)
        self.process.order.restart()

    @final
    def _end_backward(self) -> None:
        self.held_back = True
        if not self.accumulating and not self.engine.ended:
            self.end_held_back()
            if not self.engine.optimizers:
                self.engine.drift.count_backward()

    @final
    def end_held_back(self) -> None:
        """Make final what backwards left in parameters in no optimizer, and ``no_sync`` held back. Collective where it did."""
        if self.held_back:
            self.end_backward(self.unoptimized)
            self.held_back = False

    @final
    def refuse_plain(self, *, zeros: bool) -> None:
        """Refuse (PrecisionError) gradients of an unscaled loss where accel scales it; ``zeros`` refuses zero gradients too."""
        if self.log.plain and self.exist(zeros=zeros):
            raise PrecisionError(
                f"gradients of this '16-mixed' {self.engine.kind} came from a plain loss.backward(), so that "
                "the loss was not scaled: call accel.backward(loss), or use torch.amp.GradScaler as in raw PyTorch"
            )


def other_parameters(given: Sequence[Sequence[str]]) -> str:
    """Return which parameters some ranks clip and others don't."""
    missing = {name for names in given for name in names if any(name not in others for others in given)}
    return (
        f"some were not given {', '.join(sorted(missing)[:5])} (their p.grad was None?); give all of model.parameters()"
    )


class Buffers:
    """A module's buffers, which all ranks take from rank 0 once a step, where forwards may have changed them, if ``asked`` to.

    They are found anew each time: a forward may put another tensor in a buffer's place.
    """

    def __init__(self, module: nn.Module, process: Process, asked: bool) -> None:
        self._module = module
        self._process = process
        self._asked = asked and process.place.world_size > 1
        #: Which all ranks have alike: setup has compared them.
        self._shapes = _shapes_of(dict(module.named_buffers()))
        #: Whether there are any to give.
        self.wanted = self._asked and any(True for _ in module.buffers())
        self.stale = False

    def registered(self) -> None:
        """Hear that the module got one."""
        self.wanted = self._asked

    def touch(self) -> None:
        """Note a forward whose changes are to reach all ranks."""
        self.stale = self.wanted

    def synchronize(self) -> None:
        """Give every rank rank 0's, where there are any. Collective.

        RankMismatchError where a rank has others than there were, or of other shapes, and another one has not.
        """
        if self.wanted:
            what = f"the buffers that rank 0 gives to all ({type(self._module).__name__})"
            buffers = dict(self._module.named_buffers())
            if (found := _shapes_of(buffers)) != self._shapes:
                changed = sorted(dict(self._shapes.items() ^ found.items()))
                shapes = ", ".join(f"{name} {list(found.get(name, ()))}" for name in changed[:5])
                one_shape = f"{what}, which must have one shape on all ranks, as a plain attribute need not: {shapes}"
                announce(self._process, one_shape)
            with Waiting(self._process, what):
                broadcast_(writable(buffers.values()), self._process.group)
        self.stale = False


def _shapes_of(buffers: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: () if is_lazy(one) else tuple(one.shape) for name, one in buffers.items()}


def check_parameters(optimizer: Optimizer, known: Any, module: nn.Module, path: str) -> None:
    """Refuse (OptimizerError) an optimizer's parameters whose identity is not among ``known``, by name."""
    strangers = [
        f"param_groups[{g}]['params'][{i}] of shape {tuple(p.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if id(p) not in known
    ]
    if strangers:
        raise OptimizerError(
            f"{path} holds parameters that {type(module).__name__} doesn't have: {', '.join(strangers[:3])}. If it trains two "
            'models, set up one that contains both: accel.setup(nn.ModuleDict({"a": a, "b": b}), optimizer).'
        )


def refuse_sparse(module: nn.Module, backend: str) -> None:
    """Refuse (BackendError) embeddings with sparse gradients, for an engine that cuts gradients into parts, by name."""
    names = [n for n, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    if names:
        raise BackendError(
            f"backend {backend!r} cannot divide the sparse gradients of {', '.join(names[:5])}: use sparse=False there, or "
            "a backend with whole gradients"
        )


def refuse_quantized(module: nn.Module, backend: str) -> None:
    """Raise BackendError if a parameter consists of several tensors, as torchao's quantized weights do."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "__tensor_flatten__"):
            raise BackendError(
                f"backend={backend!r} can't shard the quantized parameter {name} ({type(parameter.data).__name__}). "
                'Use backend="ddp" or "sharded".'
            )


def refuse_scripts(module: nn.Module, backend: str) -> None:
    """Refuse (BackendError) scripted modules, for an engine that needs hooks or methods which they do not have, by name."""
    names = [n or "the model" for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if names:
        raise BackendError(
            f"backend {backend!r} needs hooks, which what torch.jit.script or trace has made does not take: "
            f"{', '.join(names[:5])}; give accel.setup the model as it was before, or use backend='ddp'"
        )


def refuse_overlaps(module: nn.Module, backend: str) -> None:
    """Raise BackendError if two parameters begin at the same place in memory, because a sharded model would train them apart."""
    held: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if is_lazy(parameter) or parameter.is_meta or parameter.layout != torch.strided or not parameter.numel():
            continue
        other = held.setdefault(parameter.data_ptr(), name) if type(parameter.data) is torch.Tensor else name
        if other != name:
            raise BackendError(
                f"{other} and {name} are two Parameters with the same memory, which backend {backend!r} would part, so that "
                "they would train apart: make them one Parameter (a.weight = b.weight), or use backend='ddp'"
            )


@final
class Interruption:
    """What follows where an exception ended a backward or a reduction: what it left is cleared, its gradients are refused. Local.

    Attributes:
        running: by autograd's numbers, the backwards that have begun and not ended; the backend adds and removes them.
        incomplete: there may be gradients of one that will not end; until the backend knows that they were dropped.
        stale: what one left half-way, or a forward did, is still in the library; until the backend has cleared it.
        cut: a backward or a reduction did, so that nothing can be reduced before that.
    """

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.incomplete = self.stale = self.cut = False

    def notice(self) -> bool:
        """Whether there is something to clear; never while a backward runs."""
        if torch._C._current_graph_task_id() != -1:
            return False
        if self.running:
            self.running.clear()
            self.incomplete = self.stale = self.cut = True
        return self.stale

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Around a reduction of what backwards left: one that does not end has made some gradients final, and others not."""
        before, self.stale, self.cut, self.incomplete = self.stale, True, True, True
        yield
        self.stale, self.cut, self.incomplete = before, False, False

    def refuse(self) -> None:
        """Refuse (BackendError) gradients that are incomplete."""
        if self.incomplete:
            raise BackendError(
                "an exception ended a backward, a reduction of its gradients, or a forward after one, so that gradients are "
                "incomplete: call zero_grad(), then the model's handle, and backward again"
            )


def refuse_inside_backward() -> None:
    """BackendError where a backward runs: what reduces its gradients has not come to its end."""
    if torch._C._current_graph_task_id() != -1:
        raise BackendError(
            "an optimizer steps inside a backward, before its gradients are reduced: call step() after backward(), or run the "
            "forward under accel.no_sync"
        )

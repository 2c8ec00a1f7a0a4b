"""The gradients of one model, and the steps that use them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, PrecisionError
from ...gradients.clip import clip_sharded_
from ...gradients.hooks import runs_backward
from ...gradients.watch import Look, look, written
from ...precision import all_finite, here
from ...process import Process
from ...process.control import agree, announce
from .buffers import Buffers
from .placement import Placement
from .refusals import check_parameters
from .refusals import refuse_overlaps as refuse_overlaps
from .refusals import refuse_quantized as refuse_quantized
from .refusals import refuse_sparse as refuse_sparse

if TYPE_CHECKING:
    from .engine import Engine


class Gradients:
    """The gradients of an engine's model, and when they are final.

    As written here it serves backends whose backward leaves full, final gradients in ``p.grad``.
    *Local* methods run no collective. *Collective* methods are called on every rank.
    """

    #: Ranks reduce gradients together, so the same parameters must be trainable on all of them.
    reduced: ClassVar[bool] = False
    #: Gradients are reduced at the step, so a change of ``requires_grad`` loses none.
    deferred: ClassVar[bool] = False
    #: ``no_sync`` saves messages, and costs no memory.
    spares: ClassVar[bool] = False
    #: Optimizers that were never given to ``setup`` need ``before_step`` too.
    before_any_step: ClassVar[bool] = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.process: Process = engine.process
        asked = getattr(engine.options, "broadcast_buffers", True)
        self.buffers = Buffers(engine.module, engine.process, asked)
        #: True inside ``no_sync``.
        self.accumulating = False
        #: True if gradients came from a plain ``loss.backward()`` that accel did not scale.
        self.plain = False
        self._before: Look | None = None
        kind = type(self)
        #: True if ``before_step`` and ``after_step`` do something.
        self.prepares_steps = kind.before_step is not Gradients.before_step
        self.finishes_steps = kind.after_step is not Gradients.after_step

    @property
    @final
    def spread(self) -> bool:
        """True if ranks have different parameters."""
        return self.engine.placements.weights is Placement.BY_PARAMETER

    @property
    @final
    def watched(self) -> bool:
        """True if backwards, torch's clipping and unknown optimizers concern these gradients."""
        reduces = self.engine.distributed and (self.reduced or self.spread)
        return self.engine.precision.scaled or reduces

    # -- backwards ---------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Look at the gradients before an outermost backward. Local."""
        needed = self.engine.precision.scaled or not self.engine.optimizers
        self._before = look(self.holders()) if needed else None

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        """Reduce gradients if the engine has no optimizer whose step would. Collective then.

        Args:
            completed: False if the backward raised, maybe on this rank only. Then this is local.
            outermost: False if the backward ran inside of a different one.
        """
        if not outermost or self._before is None:
            return
        before, self._before = self._before, None
        if not written(before, look(self.holders())):
            return
        self.plain = True
        engine = self.engine
        reduces = engine.distributed and not self.accumulating and not engine.ended
        if completed and reduces and not engine.optimizers:
            # pytorch/examples updates weights by hand in its example "regression".
            self.settle()
            engine.drift.count_backward()

    @final
    def refuse_plain(self, *, zeros: bool) -> None:
        """Raise PrecisionError if there are gradients of an unscaled loss under ``16-mixed``.

        Zero gradients count only if ``zeros`` is True.
        """
        if not self.plain:
            return
        gradients = [here(a.grad) for a in self.holders() if a.grad is not None]
        exists = bool(gradients) if zeros else any(bool(grad.any()) for grad in gradients)
        if self.engine.placements.partial:  # maybe on other ranks only
            exists = any(agree(f"the gradients ({self.engine.label})", exists))
        if exists:
            raise PrecisionError(
                f"A plain loss.backward() made gradients of this '16-mixed' {self.engine.kind} "
                "without scaling the loss. Call accel.backward(loss), or use torch.amp.GradScaler."
            )

    # -- which tensor is which ---------------------------------------------------------------------

    def holders(self) -> Sequence[Any]:
        """Return everything with a ``grad`` that a backward of this model writes. Local."""
        return self.engine.parameters

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that autograd knows in the place of a parameter. Local."""
        return parameter

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the one of ``engine.parameters`` that a module's parameter stands for. Local."""
        return parameter

    # -- final gradients ---------------------------------------------------------------------------

    def pending(self) -> bool:
        """True if ``settle`` would reduce something. Local."""
        return False

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Make gradients final. Collective if there is something to reduce.

        Args:
            optimizer: it is about to step, and each rank needs only the gradients that it steps.
                None makes all gradients final, for code that looks at ``p.grad`` on this rank.
        """

    def accumulate(self, accumulating: bool) -> None:
        """Begin or end ``no_sync``. Local."""
        self.accumulating = accumulating

    def hidden(self) -> bool:
        """True if ``p.grad`` doesn't show all gradients, even once they are final. Local."""
        return False

    @final
    def finite(self, optimizer: Optimizer) -> bool:
        """True if the final gradients of ``optimizer`` have neither inf nor nan on any rank."""
        finite = all_finite(optimizer)
        if self.engine.placements.partial:
            finite = all(agree(f"the gradients' finiteness ({self.engine.label})", finite))
        return finite

    # -- clipping ----------------------------------------------------------------------------------

    @property
    def in_parts(self) -> bool:
        """True if final gradients are sharded, and ``parts`` returns this rank's. Local."""
        return self.engine.placements.gradients.sharded

    def parts(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the local gradients that this rank counts in a norm, and the copies. Local."""
        raise NotImplementedError

    def finalize(self, what: str, parameters: Sequence[torch.Tensor]) -> None:
        """Make gradients final because ``what`` clips those of ``parameters``. Collective.

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

    @final
    def clip_parts(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip sharded gradients that are final. Collective."""
        return clip_sharded_([(self, self.engine.parameters)], (), max_norm, norm_type, False)

    # -- steps -------------------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> None:
        """Raise OptimizerError for parameters that are not the engine's. Local."""
        engine = self.engine
        if engine.distributed:
            check_parameters(optimizer, engine.known, engine.module, type(optimizer).__name__)

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before ``optimizer`` steps."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after ``optimizer`` has stepped."""

    @final
    def announce(self, what: str, details: Hashable = None) -> None:
        """Announce a collective that compares nothing itself. Collective if it was unexpected."""
        announce(self.process, f"{what} ({self.engine.label})", details)

    @final
    def announce_step(self, optimizer: Optimizer) -> None:
        """Announce a step. All ranks have run equally many backwards before it."""
        steppers = list(self.engine.steppers)
        number = steppers.index(id(optimizer)) if id(optimizer) in steppers else None
        self.announce("optimizer.step()", number)
        self.process.order.restart()


def other_parameters(given: Sequence[Sequence[str]]) -> str:
    """Return which parameters some ranks clip and others don't."""
    common = set(given[0]).intersection(*given)
    missing = sorted(set().union(*given) - common)
    return f"some were not given {', '.join(missing[:5])}. Clip all of model.parameters()"


def refuse_inside_backward() -> None:
    """Raise BackendError if a backward runs, because its gradients are not reduced yet."""
    if runs_backward():
        raise BackendError(
            "Gradients are not final, because an optimizer steps inside a backward. "
            "Call step() after backward()."
        )

"""The gradients of a model, and the steps that use them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch import Tensor, nn
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

if TYPE_CHECKING:
    from .engine import Engine


class Gradients:
    """The gradients of a model, by default final after a backward."""

    #: True if ranks reduce gradients together, so trainable parameters must be equal on ranks.
    reduced: ClassVar[bool] = False
    #: True if gradients are reduced at the step, so changes of ``requires_grad`` lose none.
    deferred: ClassVar[bool] = False
    #: True if ``no_sync`` saves communication and uses no extra memory.
    spares: ClassVar[bool] = False
    #: True if optimizers that accel didn't set up need ``before_step`` too.
    before_any_step: ClassVar[bool] = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.process: Process = engine.process
        asked = getattr(engine.options, "broadcast_buffers", True)
        self.buffers = Buffers(engine.module, engine.process, asked)
        #: True inside ``no_sync``.
        self.accumulating = False
        #: True if gradients are from a plain ``loss.backward()`` that accel didn't scale.
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
        """True if accel watches backwards, clipping and unknown optimizers."""
        if self.engine.precision.scaled:
            return True
        return self.engine.distributed and (self.reduced or self.spread)

    # -- backwards ---------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Look at the gradients before an outermost backward. Local."""
        needed = self.engine.precision.scaled or not self.engine.optimizers
        self._before = look(self.holders()) if needed else None

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        """Reduce gradients if no optimizer will. Collective in this case.

        ``completed``: it didn't raise. ``outermost``: it isn't nested.
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
            engine.drift.count()

    @final
    def refuse_plain(self, *, zeros: bool) -> None:
        """Raise PrecisionError for unscaled gradients under ``16-mixed``."""
        if not self.plain:
            return
        gradients = [here(h.grad) for h in self.holders() if h.grad is not None]
        exists = bool(gradients)
        if not zeros:
            exists = any(bool(grad.any()) for grad in gradients)
        # If gradients are sharded, perhaps only other ranks have some.
        if self.engine.placements.partial:
            exists = any(agree(f"the gradients ({self.engine.label})", exists))
        if exists:
            raise PrecisionError(
                "A plain loss.backward() made gradients of this '16-mixed' "
                f"{self.engine.kind} without scaling the loss. "
                "Call accel.backward(loss), or use torch.amp.GradScaler."
            )

    # -- the tensors of a parameter ----------------------------------------------------------------

    def holders(self) -> Sequence[Any]:
        """Return all tensors that get a ``grad`` in backward. Local."""
        return self.engine.parameters

    def leaf(self, parameter: Tensor) -> Tensor:
        """Return the tensor that autograd uses for a parameter. Local."""
        return parameter

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter in ``engine.parameters``. Local."""
        return parameter

    # -- final gradients ---------------------------------------------------------------------------

    def pending(self) -> bool:
        """True if ``settle`` would reduce something. Local."""
        return False

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Make gradients final. Collective if ``pending``.

        Before a step of ``optimizer``, a rank needs only its own shards.
        """

    def accumulate(self, accumulating: bool) -> None:
        """Enter or leave ``no_sync``. Local."""
        self.accumulating = accumulating

    def hidden(self) -> bool:
        """True if ``p.grad`` doesn't show all final gradients. Local."""
        return False

    @final
    def finite(self, optimizer: Optimizer) -> bool:
        """True if final gradients have no inf or nan on any rank."""
        finite = all_finite(optimizer)
        if self.engine.placements.partial:
            title = f"the gradients' finiteness ({self.engine.label})"
            finite = all(agree(title, finite))
        return finite

    # -- clipping ----------------------------------------------------------------------------------

    @property
    def in_parts(self) -> bool:
        """True if final gradients are sharded, as in ``parts``. Local."""
        return self.engine.placements.gradients.sharded

    def parts(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return gradients to count in a norm, and uncounted copies. Local."""
        raise NotImplementedError

    def finalize(self, what: str, parameters: Sequence[Tensor]) -> None:
        """Make gradients final before they are clipped. Collective."""
        if self.in_parts:
            self.announce(what)
            self.settle()
        elif self.pending():
            self.settle()
            names = self.engine.holdings.parameter_names
            clipped = {names[id(p)] for p in parameters}
            self.engine.compare(what, sorted(clipped), other_parameters)

    @final
    def clip_parts(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip final sharded gradients. Collective."""
        owner: Any = (self, self.engine.parameters)
        return clip_sharded_([owner], (), max_norm, norm_type, False)

    # -- steps -------------------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> None:
        """Raise OptimizerError for parameters of other models. Local."""
        engine, name = self.engine, type(optimizer).__name__
        if engine.distributed:
            check_parameters(optimizer, engine.known, engine.module, name)

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before ``optimizer`` steps."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after ``optimizer`` has stepped."""

    @final
    def announce(self, what: str, details: Hashable = None) -> None:
        """Announce a collective. Collective if it was unexpected."""
        announce(self.process, f"{what} ({self.engine.label})", details)

    @final
    def announce_step(self, optimizer: Optimizer) -> None:
        """Announce a step. Ranks must have run equally many backwards."""
        steppers = list(self.engine.steppers)
        number = None
        if id(optimizer) in steppers:
            number = steppers.index(id(optimizer))
        self.announce("optimizer.step()", number)
        self.process.order.restart()


def other_parameters(given: Sequence[Sequence[str]]) -> str:
    """Return an error text with parameters that only some ranks clip."""
    common = set(given[0]).intersection(*given)
    missing = sorted(set().union(*given) - common)
    names = ", ".join(missing[:5])
    return f"some were not given {names}. Clip all of model.parameters()"


def refuse_inside_backward() -> None:
    """Raise BackendError inside a backward."""
    if runs_backward():
        raise BackendError(
            "Gradients are not final, because an optimizer steps inside "
            "a backward. Call step() after backward()."
        )

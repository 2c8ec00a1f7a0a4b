"""The step of the user's optimizer, with final and finite gradients."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ...errors import AccelError, BackendError, OptimizerError, PrecisionError
from ...gradients.hooks import remove_hooks
from ...handles import HiddenAttribute
from ...precision import gradients_of, here
from ...process import current
from ...process.control import Waiting, agree, raise_lost
from ...shard import parameters_of
from .drift import compare_load
from .raw_objects import Args, Function, Kwargs, Override, move_hook

if TYPE_CHECKING:
    from .engine import Engine

#: torch.amp.GradScaler always steps an optimizer with this attribute. It passes the scale and the
#: overflow in the attributes ``grad_scale`` and ``found_inf``.
_PROTOCOL: Final = "_step_supports_amp_scaling"


def refuse_changes(engine: Engine) -> None:
    """Raise if process groups have ended or parameters changed. Local."""
    if engine.ended:
        raise AccelError(f"{engine.label} can't continue: {engine.ended}")
    gradients, module = engine.gradients, engine.module
    now = {(name, id(gradients.canonical(p))) for name, p in module.named_parameters()}
    changed = now ^ {(name, id(p)) for name, p in engine.named.items()}
    if changed:
        names = ", ".join(sorted(dict(changed))[:10])
        raise BackendError(
            f"{engine.kind} has added or replaced parameters after "
            f"accel.setup: {names}. Call raw = accel.teardown(model), "
            "and set it up again."
        )
    engine.restructured = False


def prepare(
    engine: Engine, optimizer: Optimizer, *, by_grad_scaler: bool = False, in_closure: bool = False
) -> None:
    """Make gradients final before a step, or in a closure. Collective.

    ``by_grad_scaler`` allows gradients from a plain backward.
    """
    if engine.restructured:
        refuse_changes(engine)
    gradients = engine.gradients
    if engine.precision.scaled:
        if not by_grad_scaler:
            gradients.refuse_plain(zeros=True)
        gradients.plain = False
    try:
        if gradients.prepares_steps and not in_closure:
            gradients.before_step(optimizer)
        gradients.settle(optimizer)
    except RuntimeError as error:
        raise_lost(f"the reduction of gradients before a step ({engine.label})", error)
        raise
    # Raise if the groups ended meanwhile, because the device then has no valid sums.
    if engine.process.ended:
        current()


@final
class Stepper:
    """accel's hooks on the user's optimizer, until ``close``. It holds the engine weakly."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine = weakref.ref(engine)
        self.optimizer = optimizer
        self._serial = engine.loss_scale.serial
        #: Parameters of a skipped step, with their gradients.
        self._hidden: list[tuple[Tensor, Tensor]] = []
        #: False if accel unscales the gradients for the user's GradScaler.
        self._fused = hasattr(optimizer, _PROTOCOL)
        self._attributes = {"step_was_skipped": False, "skipped_steps": 0}
        if not self._fused:
            self._attributes[_PROTOCOL] = True
        vars(optimizer).update(self._attributes)
        HiddenAttribute.put(optimizer, self._engine)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # The user's hooks see final gradients and weights, even if they were registered before.
        for hook in self._hooks:
            move_hook(hook, last=False)
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._loading))
        self._override = Override(optimizer, "add_param_group", self._add_param_group)

    def close(self) -> None:
        """Leave the optimizer as it was."""
        remove_hooks(self._hooks)
        HiddenAttribute.clear(self.optimizer)
        self._override.remove()
        self._show_gradients()
        for name in self._attributes:
            vars(self.optimizer).pop(name, None)

    def _add_param_group(self, optimizer: Any, original: Any, /, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        engine = self._engine()
        try:
            if engine is not None:
                engine.gradients.check(optimizer)
        except OptimizerError:
            optimizer.param_groups.pop()
            raise

    # -- hooks of the optimizer --------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Any:
        # A compiled graph can't contain communication between ranks.
        if torch.compiler.is_compiling():
            return _outside_graphs(self._before, optimizer, args, kwargs)
        engine = self._engine()
        if engine is None:
            return None
        drift = engine.drift  # `count` is inlined, because every step runs this
        # Cleared after the step. If it raises, `progress` differs between ranks, and a save raises.
        drift.steps = drift.broken = drift.steps + 1
        if drift.steps >= drift.next:
            drift.check()
        if self._hidden:
            self._show_gradients()
        if kwargs or len(args) > 1:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if callable(closure):
                global_closure = self._global_closure(engine, closure)
                engine.gradients.before_step(optimizer)
                kwargs.pop("closure", None)
                return (optimizer, global_closure, *args[2:]), kwargs
        attributes = optimizer.__dict__
        if attributes.get("found_inf") is not None:
            self._prepare_for_scaler(engine, optimizer)
            return None
        prepare(engine, optimizer)
        new_backward = self._serial != engine.loss_scale.serial
        # The program may step a second time with the gradients that have overflowed.
        if new_backward or attributes["step_was_skipped"] is not False:
            self._serial = engine.loss_scale.serial
            finite = engine.gradients.finite(optimizer)
            self._count(not engine.loss_scale.judge(finite))
        return None

    def _after(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
        if torch.compiler.is_compiling():
            _outside_graphs(self._after, optimizer, args, kwargs)
            return
        engine = self._engine()
        if engine is None:
            return
        if engine.gradients.finishes_steps:
            with Waiting(engine.process, "the end of optimizer.step()"):
                engine.gradients.after_step(optimizer)
        engine.drift.broken = 0
        if self._hidden:
            self._show_gradients()

    def _loading(self, optimizer: Optimizer, _: object) -> None:
        engine = self._engine()
        if engine is not None:
            compare_load(engine, f"load_state_dict() of {type(optimizer).__name__}")

    def _count(self, skipped: bool | Tensor) -> None:
        """Count a skipped step, and hide its gradients."""
        counts = vars(self.optimizer)
        counts["step_was_skipped"] = skipped
        counts["skipped_steps"] += skipped
        if skipped is not True:
            return
        for p in parameters_of(self.optimizer):
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def _show_gradients(self) -> None:
        """Put the gradients of a skipped step back."""
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden.clear()

    # -- the user's GradScaler ---------------------------------------------------------------------

    def _prepare_for_scaler(self, engine: Engine, optimizer: Any) -> None:
        """Make gradients final for a step by the user's GradScaler."""
        scale, found_inf = optimizer.grad_scale, optimizer.found_inf
        try:
            if engine.gradients.pending() or engine.gradients.hidden():
                raise PrecisionError(
                    "torch.amp.GradScaler can't check gradients that backend "
                    f"{engine.name!r} reduces in the step. "
                    "Use accel.backward(loss) and optimizer.step()."
                )
            prepare(engine, optimizer, by_grad_scaler=True)
        except BaseException:
            # GradScaler deletes these only after a step, so the next step would use stale values.
            del optimizer.grad_scale, optimizer.found_inf
            raise
        # A fused optimizer unscales and skips by itself, without a synchronization.
        if self._fused:
            self._count(found_inf > 0)
            return
        # Not earlier, because the pipeline's `before_step` looks for `found_inf`.
        optimizer.grad_scale = optimizer.found_inf = None
        gradients = gradients_of(optimizer)
        if scale is not None and gradients:
            factor = scale.double().reciprocal().float().to(gradients[0].device)
            torch._foreach_mul_(list(map(here, gradients)), factor)
        self._count(bool(found_inf.item()))

    # -- closures ----------------------------------------------------------------------------------

    def _global_closure(self, engine: Engine, closure: Function) -> Function:
        """Return the closure with final gradients and the mean of losses."""
        if engine.precision.scaled:
            raise PrecisionError(
                "optimizer.step(closure) can't use loss scaling. Use 'bf16-mixed' or '32-true'."
            )

        def global_closure() -> Any:
            loss = closure()
            prepare(engine, self.optimizer, in_closure=True)
            if not engine.distributed:
                return loss
            local = loss.item() if isinstance(loss, Tensor) else loss
            losses = agree(f"the loss of a closure ({engine.label})", local)
            if None in losses:
                return None
            mean = sum(losses) / len(losses)
            return torch.full_like(loss, mean) if isinstance(loss, Tensor) else mean

        return global_closure


@_disable_dynamo
def _outside_graphs(hook: Function, *args: Any) -> Any:
    return hook(*args)


def refuse_steps(optimizer: Optimizer, reason: str) -> None:
    """Make the steps of an optimizer raise, because some of its state is lost."""

    def refuse(*_: object) -> None:
        raise OptimizerError(
            f"This optimizer has lost part of its state: {reason}. "
            "Build a new one, and load a checkpoint."
        )

    optimizer.register_step_pre_hook(refuse)

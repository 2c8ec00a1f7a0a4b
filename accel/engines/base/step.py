"""What happens around the step of a user's optimizer, whichever object the user steps."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import AccelError, BackendError, OptimizerError, PrecisionError, RankMismatchError
from ...gradients.hooks import remove_hooks
from ...precision import gradients_of, here
from ...process import current
from ...process.control import Waiting, agree, raise_lost
from ...shard import parameters_of
from .drift import compare_load

if TYPE_CHECKING:
    from .engine import Engine

_PROTOCOL: Final = "_step_supports_amp_scaling"


def take_added_groups(engine: Engine, optimizer: Optimizer) -> None:
    """Take groups that were added to the raw optimizer since its last step, or refuse them (OptimizerError). Local."""
    if (stepper := engine.steppers.get(id(optimizer))) is not None:
        stepper.look(engine)


def refuse_changes(engine: Engine) -> None:
    """Refuse to go on with ended groups (AccelError), or with other parameters than ``setup`` found (BackendError). Local."""
    if engine.ended:
        raise AccelError(f"the process groups were ended, this engine cannot go on: {engine.ended}")
    found = {n: id(engine.gradients.canonical(p)) for n, p in engine.module.named_parameters()}
    known = {n: id(p) for n, p in engine.named.items()}
    changed = sorted(n for n in found.keys() | known.keys() if found.get(n) != known.get(n))
    if changed:
        raise BackendError(
            f"parameters of this {engine.kind} were added or replaced after accel.setup: "
            f"{', '.join(changed[:5])}; call raw = accel.teardown(model) and set it up again"
        )
    engine.restructured = False


def prepare(
    engine: Engine, optimizer: Optimizer, *, by_grad_scaler: bool = False, in_closure: bool = False
) -> None:
    """Make the gradients final that ``optimizer`` is about to step. Collective.

    Args:
        by_grad_scaler: the user's GradScaler steps, so gradients of a plain backward are right.
        in_closure: a closure inside of the step has computed them.
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
    if engine.process.ended:  # a device that waited for the other ranks has no sums
        current()


def _put_first(hooks: Any, hook: RemovableHandle) -> None:
    hooks.move_to_end(hook.id, last=False)


@final
class Stepper:
    """Hooks on one raw optimizer: gradients are final before it steps, and a step that overflowed changes nothing.

    A user's ``torch.amp.GradScaler`` is met by torch's own protocol: an optimizer that says it supports scaling is
    always stepped, and finds scale and overflow in its attributes ``grad_scale`` and ``found_inf``.
    The engine is held weakly: an optimizer that is kept does not keep its model.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine = weakref.ref(engine)
        self.optimizer = optimizer
        self._num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        self._serial = engine.loss_scale.serial
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Whether the last step was skipped, and how many were; tensors where an optimizer judges on its device.
        self.skipped: bool | torch.Tensor = False
        self.skips: int | torch.Tensor = 0
        names = list(inspect.signature(type(optimizer).step).parameters)
        self._closure_at = names.index("closure") if "closure" in names else -1
        self._fused = hasattr(optimizer, _PROTOCOL)
        if not self._fused:
            setattr(optimizer, _PROTOCOL, True)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_load_state_dict_pre_hook(self._loading),
        ]
        # The user's see final gradients, also those that were registered before.
        _put_first(optimizer._optimizer_step_pre_hooks, self._hooks[0])
        self._finishes = False
        if engine.gradients.finishes_steps:
            self._finish_steps()

    def close(self) -> None:
        """Give the optimizer back to its user."""
        remove_hooks(self._hooks)
        if not self._fused:
            delattr(self.optimizer, _PROTOCOL)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group to the optimizer, which is left as it was when the group is refused."""
        engine = self._engine()
        assert engine is not None  # its handle is not ended
        self.optimizer.add_param_group(group)
        try:
            engine.gradients.check(self.optimizer)
        except OptimizerError:
            self.optimizer.param_groups.pop()
            raise

    def look(self, engine: Engine) -> None:
        """Take groups that were added to the raw optimizer, or refuse them (OptimizerError). Local."""
        num_parameters = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if num_parameters != self._num_parameters:
            engine.gradients.check(self.optimizer)
            self._num_parameters = num_parameters

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            torch.compiler.is_compiling()
        ):  # the step; of what ranks tell each other there is no graph
            return _outside_graphs(self._before, optimizer, args, kwargs)
        engine = self._engine()
        if engine is None:
            return None
        drift = engine.drift  # inline, because every step comes here
        drift.steps += 1
        if drift.steps >= drift.next:
            drift.check()
        num_parameters = 0  # counted here: no call in a usual step
        for group in optimizer.param_groups:
            num_parameters += len(group["params"])
        if num_parameters != self._num_parameters:
            self.look(engine)
        replaced = (
            self._with_global_closure(engine, args, kwargs) if len(args) > 1 or kwargs else None
        )
        if replaced is not None:
            engine.gradients.before_step(optimizer)
        elif optimizer.__dict__.get("found_inf") is not None:
            self._prepare_scaled(engine)
        else:
            prepare(engine, optimizer)
            if self._serial != engine.loss_scale.serial or self.skipped is not False:
                self._judge(engine)
            # Schedulers on the handle see by it that a step of the raw optimizer came before theirs.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return replaced

    def _judge(self, engine: Engine) -> None:
        """Skip the step if gradients of a scaled loss have overflowed, also a second one with them."""
        self._serial = engine.loss_scale.serial
        self._note(engine, not engine.loss_scale.judge(engine.gradients.finite(self.optimizer)))

    def _prepare_scaled(self, engine: Engine) -> None:
        """Make gradients final for a step by the user's GradScaler, which may be skipped."""
        found_inf = self.optimizer.__dict__["found_inf"]
        try:
            self._refuse_double_scaling(engine)
            prepare(engine, self.optimizer, by_grad_scaler=True)
        except BaseException:
            # A GradScaler takes these back after a step only, so the next one would take them for its own.
            for name in ("grad_scale", "found_inf"):
                self.optimizer.__dict__.pop(name, None)
            raise
        self._note(engine, self._unscale_for_user(found_inf))
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _note(self, engine: Engine, skipped: bool | torch.Tensor) -> None:
        """Count a skipped step, and hide the gradients from it."""
        if engine.process.ended:  # while this was read from the device
            current()
        self.skipped = skipped
        self.skips = self.skips + skipped
        if skipped is True:
            self._hide_gradients()

    def _with_global_closure(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the arguments of ``step`` with its closure replaced, or None without a closure."""
        at = self._closure_at
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._global(engine, kwargs["closure"])}
        if 0 < at < len(args) and args[at] is not None:
            return (*args[:at], self._global(engine, args[at]), *args[at + 1 :]), kwargs
        return None

    def _refuse_double_scaling(self, engine: Engine) -> None:
        if self._serial != engine.loss_scale.serial:
            raise PrecisionError(
                "torch.amp.GradScaler steps gradients of accel.backward, which are not scaled. Use one of the two."
            )
        if engine.gradients.pending() or engine.gradients.hidden():
            raise PrecisionError(
                f"torch.amp.GradScaler checked gradients before backend {engine.name!r} has reduced them. "
                "Use accel.backward(loss) and optimizer.step()."
            )

    def _unscale_for_user(self, found_inf: torch.Tensor) -> bool | torch.Tensor:
        """Unscale gradients. Return True if the step is skipped.

        Optimizers that support scaling unscale and skip by themselves, without a synchronization.
        """
        if self._fused:
            return found_inf > 0
        scale, self.optimizer.grad_scale = self.optimizer.grad_scale, None  # type: ignore[attr-defined]
        self.optimizer.found_inf = None  # type: ignore[attr-defined]
        if scale is not None and (grads := gradients_of(self.optimizer)):
            torch._foreach_mul_(
                list(map(here, grads)), scale.double().reciprocal().float().to(grads[0].device)
            )
        return bool(found_inf.item())

    def _loading(self, optimizer: Optimizer, _: object) -> None:
        if (engine := self._engine()) is not None and engine.distributed and engine.synchronizes:
            compare_load(engine, f"load_state_dict() of {type(optimizer).__name__}")

    def _finish_steps(self) -> None:
        if not self._finishes:
            self._finishes = True
            self._hooks.append(self.optimizer.register_step_post_hook(self._after))
            _put_first(self.optimizer._optimizer_step_post_hooks, self._hooks[-1])

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            _outside_graphs(self._after, optimizer, args, kwargs)
            return
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()
        engine = self._engine()
        if engine is not None:
            with Waiting(engine.process, "the end of optimizer.step()"):
                engine.gradients.after_step(optimizer)

    def _hide_gradients(self) -> None:
        """Let the overflowed step find no gradient: optimizers then skip the parameter, its state included."""
        self._finish_steps()
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _global(self, engine: Engine, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure with final gradients and the mean of the ranks' losses."""
        if engine.precision.scaled:
            raise PrecisionError(
                "optimizer.step(closure) has no loss scaling. Use 'bf16-mixed' or '32-true'."
            )
        process = engine.process

        def global_closure() -> Any:
            loss = closure()
            prepare(engine, self.optimizer, in_closure=True)
            world = process.place.world_size
            if world == 1:
                return loss
            device = loss.device if isinstance(loss, torch.Tensor) else "cpu"
            local = None if loss is None else torch.as_tensor(loss, device=device).detach()
            value = None if local is None else local.item()
            by_rank = agree(f"the loss of a closure ({engine.label})", value)
            losses = [value for value in by_rank if value is not None]
            if len(losses) not in (0, world):
                raise RankMismatchError(
                    f"the closure gave a loss on {len(losses)} of {world} ranks. Return it on every rank."
                )
            if local is None:
                return None
            dtype = local.dtype if local.is_floating_point() else torch.float32
            return torch.tensor(sum(losses) / world, dtype=dtype, device=process.device)

        return global_closure


@_disable_dynamo
def _outside_graphs(hook: Callable[..., Any], *args: Any) -> Any:
    return hook(*args)


def refuse_steps(optimizer: Optimizer, reason: str) -> None:
    """Make an optimizer raise whose state on this rank will stay partial."""

    def refuse(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        raise OptimizerError(
            f"{type(stepped).__name__} has only this rank's part of its state, since the other ranks took no part in the end "
            f"of its model's engine ({reason}): build a new optimizer and load a checkpoint"
        )

    optimizer.register_step_pre_hook(refuse)

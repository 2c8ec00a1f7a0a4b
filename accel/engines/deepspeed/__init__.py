"""``deepspeed``: ZeRO stages 0 to 3. DeepSpeed divides, gathers and reduces; the user's own optimizer steps the parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError, PrecisionError
from ...precision import Accumulator
from ...process import Process
from ...process.control import agree
from ...process.environments import available
from .._averaging import AveragedGradients
from ..base.absent import plainly
from ..base.engine import Context, Engine, SequenceOptions, lost_weights
from ..base.gradients import (
    refuse_inside_backward,
    refuse_overlaps,
    refuse_quantized,
    refuse_scripts,
    refuse_sparse,
)
from ..base.memory import MemoryUse, TensorSize
from .config import Configuration, refuse_parameters
from .library import probe, release_groups
from .offload import choose_adam, describe_adam, level_steps, new_state, refuse_optimizer, store_state
from .partitions import Flat, Partitions
from .stage3 import Stage3
from .state import DeepSpeedHoldings
from .weights import put_methods, remove_methods

logger = logging.getLogger("accel")

#: Said of parameters.
_UNSEEN: Final = (
    "got gradients, but no optimizer steps them, and at stage 3 a loop cannot update them by hand: p.grad is None, and the "
    "weights are divided over the ranks"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed(SequenceOptions):
    """Options of ``deepspeed``.

    Args:
        stage: 0 divides nothing, 1 the optimizer's state, 2 the gradients as well, 3 the weights as well
            (None: the configuration's, else 2).
        offload_optimizer: the weights that the optimizer steps, their gradients and its state are in CPU memory.
        offload_parameters: the parts of the weights are in CPU memory (stage 3).
        config: a DeepSpeed configuration, or the path of one as JSON. What contradicts a raw loop is refused by its key.
    """

    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: Mapping[str, Any] | str | Path | None = None

    leading = "stage"

    def check_values(self) -> None:
        if self.stage not in (None, 0, 1, 2, 3):
            raise BackendError(f"DeepSpeed(stage={self.stage!r}): expected 0, 1, 2 or 3")


DeepSpeed.variants = tuple(DeepSpeed(stage=stage) for stage in (0, 1, 3))


@final
class ZeROGradients(AveragedGradients):
    """Gradients of this rank's fragments are kept until ``zero_grad``; the user's own optimizer steps the fragments.

    Between ``before_step`` and ``after_step`` these are in the parameters' places in its groups. While nothing is divided,
    gradients are each rank's own until ``settle`` averages them.
    """

    partial, deferred = True, False
    engine: DeepSpeedEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: Steps, or is about to.
        self.stepping: Optimizer | None = None
        self._creating = contextlib.ExitStack()
        #: Groups that have fragments now, with the parameters in whose places these are.
        self.held: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        #: Parameters with final gradients in fragments, and those of them that were stepped with and not dropped since.
        self._kept: set[int | None] = set()
        self._spent: set[int | None] = set()
        self._told = False
        #: Parameters whose assigned gradients took the place of others before the next forward.
        self._renewed: set[int] = set()
        #: Whether an optimizer has stepped, or may have, what the other ranks do not see yet.
        self._unspread = False
        #: At stage 3, parameters in no optimizer that got gradients in the last backward.
        self._unseen: list[int] = []
        self.listener = self

    def holders(self) -> Sequence[Accumulator]:
        """The fragments too: at stages 2 and 3 gradients come there while backward runs."""
        zero = self.engine.zero
        return self.engine.parameters if zero is None else [*self.engine.parameters, *zero.fragments.values()]

    def pending(self) -> bool:
        zero = self.engine.zero
        return super().pending() if zero is None else bool(self.log.entries) or bool(self._assigned(zero))

    def hidden(self) -> bool:
        return self.engine.zero is not None and (bool(self._kept) or self.pending())

    @plainly
    def _assigned(self, zero: Partitions) -> list[int]:
        """The parameters whose ``p.grad`` no backward explains, whose own is in a fragment or waits: assigned by hand. Local."""
        parameters = self.engine.parameters
        found = [i for i, p in enumerate(parameters) if p.grad is not None and i not in zero.whole_gradients]
        came = set(self.log.entries) if found else set()
        return [i for i in found if parameters[i].grad is not zero.waiting.get(i) and ~i not in came]

    def find_unoptimized(self) -> None:
        """Their gradients stay whole, where the weights do."""
        super().find_unoptimized()
        zero = self.engine.zero
        if zero is not None and not zero.divides_weights:
            zero.whole_gradients = set(self.unoptimized)

    @contextlib.contextmanager
    def forward(self, zero: Partitions) -> Iterator[None]:
        """Around whatever uses weights: what was assigned or written since takes effect, and an exception is noticed."""
        if zero.interruption.notice():
            self._start_anew(zero)
        if self._unspread:
            self.engine.compare("the weights of a step that an exception ended")
            self.publish(zero)
        if self.engine.stage == 3:
            self._refuse_unseen()
            self.engine.take_edits()
        if assigned := self._assigned(zero):
            zero.replace(assigned)
            self._spent.difference_update(assigned)
            self._renewed.update(assigned)
        try:
            yield
        except BaseException:
            # Inside a backward it is activation checkpointing that ends early, or the backward itself that ends by it.
            if torch._C._current_graph_task_id() == -1:
                zero.interruption.stale = zero.eager  # else nothing is in its buckets
            raise

    def _start_anew(self, zero: Partitions) -> None:
        self.engine.compare("a new start after an exception")
        zero.reset()

    def begin(self, run: object, create_graph: bool) -> None:
        """A backward whose forward may have been called around the engine, since an exception ended another one."""
        if (zero := self.engine.zero) is None or zero.divides_weights:  # there such a forward has begun already
            return
        zero.interruption.notice()
        if zero.interruption.cut and zero.eager:
            self._start_anew(zero)

    def end(self, run: object) -> None:
        """Nothing: its end is noticed as it is reached."""

    def publish(self, zero: Partitions) -> None:
        """Let every rank see the stepped weights. Collective."""
        zero.spread()
        self._unspread = False

    def accumulate(self, accumulating: bool) -> None:
        super().accumulate(accumulating)
        if self.engine.zero is not None:
            self.engine.zero.local = accumulating

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Reduce what no hook has reduced; what the hooks did is compared over the ranks."""
        if (zero := self.engine.zero) is None:
            super().settle(optimizer)
        else:
            if optimizer is not None and zero.eager and not zero.local:
                refuse_inside_backward()
            zero.interruption.notice()
            zero.interruption.refuse()
            if zero.interruption.cut:
                self._start_anew(zero)
                zero.interruption.refuse()
            if self.pending():
                self._reduce(zero)
            self.log.fold(stepping=optimizer)
        if self.stepping is not None:
            self._show(self.stepping)

    def _reduce(self, zero: Partitions) -> None:
        assigned = self._assigned(zero)
        entries = tuple(self.log.entries) if zero.eager else ()
        came = hash((entries, tuple(assigned), tuple(sorted(self._renewed))))
        differ = lambda _: "other parameters, or in another order"  # noqa: E731
        held = self.engine.compare("the gradients of a step", came, differ, zero.held())
        with zero.interruption.reducing():
            zero.replace(assigned)
            self._spent.difference_update(assigned)
            zero.flush(held)
            self._note_fragments(zero, assigned)
            self.end_held_back()
            self._renewed.clear()
        self.buffers.synchronize()  # also where only a method, or the raw module, has changed them

    def _note_fragments(self, zero: Partitions, assigned: Iterable[int]) -> None:
        """The gradients since the last ``settle`` are there now, and those that were assigned."""
        came = {entry for entry in self.log.entries if entry not in zero.whole_gradients}
        self._kept.update(came, assigned)
        if not self._told and self._spent.intersection(came):
            self._told = True
            logger.warning(
                "gradients were added to those of an earlier step, which nothing has dropped since: where that is not meant, "
                "call zero_grad() of the optimizer or the model, since p.grad = None drops nothing under this backend"
            )

    def end_backward(self, indices: Sequence[int]) -> None:
        """Average them where they are whole; at stage 3 nothing can be updated by hand."""
        zero = self.engine.zero
        if zero is None:
            super().end_backward(indices)
        elif zero.divides_weights:
            self._note_unseen(indices)
        else:
            self._average(indices)

    def _note_unseen(self, indices: Sequence[int]) -> None:
        came = {i if i >= 0 else ~i for i in self.log.entries if i is not None}
        unseen = [i for i in indices if i in came]
        if unseen and not self._unseen:
            logger.warning(
                "%s %s: freeze what is not to be trained (backend %r reduces these gradients too), or use stage 2",
                ", ".join(self.engine.names[i] for i in unseen[:5]),
                _UNSEEN,
                self.engine.name,
            )
        self._unseen = unseen

    def _refuse_unseen(self) -> None:
        engine = self.engine
        if engine.steppers or not self._unseen or not torch.is_grad_enabled():
            return
        if unseen := [engine.names[i] for i in self._unseen if engine.parameters[i].requires_grad]:
            raise BackendError(
                f"{', '.join(unseen[:5])} {_UNSEEN}: train by an optimizer that is given to accel.setup, freeze the model "
                "(requires_grad_(False)), compute without gradients (torch.no_grad()), or use stage 2"
            )

    @property
    def in_parts(self) -> bool:
        return self.engine.zero is not None

    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        zero = self.engine.zero
        assert zero is not None  # `in_parts`
        return zero.gradients({zero.numbers[id(p)] for p in parameters})

    def behind(self, parameters: Sequence[torch.Tensor]) -> Sequence[Accumulator]:
        if (zero := self.engine.zero) is None:
            return ()
        self.settle()
        return [zero.fragments[i] for i in (zero.numbers[id(p)] for p in parameters) if i in zero.fragments]

    def drop(self, parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
        """After ``zero_grad`` of what has these parameters, which may be none of this model's. Local."""
        zero = self.engine.zero
        indices = [zero.numbers[id(p)] for p in parameters if id(p) in zero.numbers] if zero is not None else []
        if zero is None or not indices:
            return
        zero.interruption.notice()
        zero.interruption.incomplete = False
        zero.drop(indices, set_to_none)
        self._spent.difference_update(indices)
        if set_to_none:
            self._kept.difference_update(indices)
            self.log.drop(set(indices))

    def check(self, optimizer: Optimizer) -> None:
        super().check(optimizer)
        engine = self.engine
        settings = engine.configuration
        if engine.stage and engine.distributed:
            refuse_optimizer(optimizer, settings, self.process.device)
        offloads = engine.distributed and (settings.offload_optimizer or settings.offload_parameters)
        if offloads and any(group.get("capturable") for group in optimizer.param_groups):
            raise OptimizerError(
                f"{type(optimizer).__name__}(capturable=True) with DeepSpeed's offload: it would step weights in CPU memory, "
                "where torch has no such step: use capturable=False"
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """From now on, what is final is shown to this optimizer."""
        super().before_step(optimizer)
        self.break_step()
        self.engine.take_edits()
        self.stepping = optimizer
        zero = self.engine.zero
        if zero is not None:
            self.engine.holdings.refuse_state(optimizer)
            self.announce_step(optimizer)
            self._place(optimizer, zero)  # at once: some optimizers write before their closure
            if (folder := self.engine.configuration.state_folder) is not None:
                self._creating.enter_context(new_state(zero.stepped, folder))

    def _show(self, optimizer: Optimizer) -> None:
        """Clip as the configuration says, then put the fragments in the parameters' places in the groups."""
        if (max_norm := self.engine.configuration.clipping) > 0:
            if vars(optimizer).get("grad_scale") is not None:
                raise PrecisionError(
                    "gradient_clipping of a DeepSpeed configuration, and a GradScaler's gradients are scaled still: call "
                    "scaler.unscale_(optimizer) before scaler.step(optimizer)"
                )
            self.clip_final(max_norm, 2.0)
        zero = self.engine.zero
        if zero is None:
            return
        self._place(optimizer, zero)
        self._unspread = True
        for fragment in zero.fragments.values():
            fragment.weights.grad = None if fragment.grad is None else fragment.grad.to(fragment.weights.dtype)

    def _place(self, optimizer: Optimizer, zero: Partitions) -> None:
        for group in optimizer.param_groups if not self.held else ():
            self.held.append((group, group["params"]))
            fragments = [zero.fragments.get(zero.numbers[id(p)]) for p in group["params"]]
            group["params"] = [f.weights for f in fragments if f is not None]

    @contextlib.contextmanager
    def parameters_in_groups(self) -> Iterator[None]:
        """Inside a step too, for what asks the groups whose gradients there are: a rank may have no fragment in them."""
        placed = [(group, parameters, group["params"]) for group, parameters in self.held]
        for group, parameters, _ in placed:
            group["params"] = parameters
        try:
            yield
        finally:
            for group, _, fragments in placed:
                group["params"] = fragments

    def steps_part(self, optimizer: Optimizer) -> bool:
        return self.engine.zero is not None

    def break_step(self) -> None:
        self.stepping = None
        self._creating.close()
        for group, parameters in self.held:
            group["params"] = parameters
        if self.held and self.engine.zero is not None:
            for fragment in self.engine.zero.fragments.values():
                fragment.weights.grad = None
        self.held.clear()

    def level_steps(self, zero: Partitions) -> None:
        """After state was loaded, in which parameters that lie on other ranks may have the counts. Collective."""
        for optimizer in self.engine.optimizers:
            self._place(optimizer, zero)
            level_steps(optimizer, None, lambda mine: agree(f"the steps of an optimizer ({self.engine.label})", mine))
            self.break_step()

    def after_step(self, optimizer: Optimizer) -> None:
        level_steps(optimizer)
        self.break_step()
        if (zero := self.engine.zero) is not None:
            if (folder := self.engine.configuration.state_folder) is not None:
                store_state([optimizer.state[w] for w in zero.stepped if w in optimizer.state], folder)
            self._spent = set(self._kept)
            # Autograd tells by it that a graph was made with other values.
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            torch.autograd.graph.increment_version([p for p in parameters if zero.numbers[id(p)] in self._kept])
            self.publish(zero)


@final
class DeepSpeedEngine(Engine):
    """DeepSpeed divides the model, gathers its weights and reduces its gradients."""

    name = "deepspeed"
    options_type = DeepSpeed
    requires = {"deepspeed": "deepspeed>=0.19.8"}
    gradients_type = ZeROGradients
    gradients: ZeROGradients
    holdings_type = DeepSpeedHoldings
    holdings: DeepSpeedHoldings
    options: DeepSpeed

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self.configuration = Configuration(self.options)
        self.stage = self.configuration.stage
        self.zero: Partitions | None = None

    @classmethod
    def probe(cls) -> str:
        """Import the library, and tell whether its Adam for offloaded weights is compiled."""
        probe(torch.device(available()[0]))
        return describe_adam()

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        configuration = Configuration(options)
        configuration.check(process.place.world_size)
        if process.place.world_size > 1:
            refuse_sparse(module, cls.name)
            refuse_quantized(module, cls.name)
            if configuration.stage:
                refuse_scripts(module, cls.name)
                refuse_overlaps(module, cls.name)

    @classmethod
    def predict(cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int) -> MemoryUse:
        return Configuration(options).predict(tensors, world_size)

    def wrap(self) -> None:
        """Refuse what needs the precision; DeepSpeed itself divides in ``start``."""
        self.configuration.check_precision(self.precision.name)
        if not self.distributed or not self.stage:
            return
        refuse_parameters({n: p for n, p in self.named.items() if self.stage == 3 or p.requires_grad})
        if self.stage == 3 and any("_orig_mod" in m._modules for m in (self.entry, *self.module.modules())):
            raise BackendError("a torch.compile wrapper with DeepSpeed stage 3: its weights come and go; use stage 2")
        put_methods(self.module, self)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Rank 0's weights; then DeepSpeed divides them, if it has not yet; then the optimizers' state follows."""
        super().start(optimizers)
        if not self.distributed or not self.stage:
            return
        divides = self.zero is None and (self.stage == 3 or optimizers)
        if divides and any(p.is_floating_point() for p in self.parameters):
            self._divide()
            self.gradients.find_unoptimized()
        for optimizer in optimizers if self.zero is not None else ():
            state = {self.names[i]: optimizer.state.pop(self.parameters[i], {}) for i in self.indices(optimizer)}
            self.holdings.take(optimizer, state)
            self.holdings.guard.watch(optimizer)
        if self.zero is not None and self.configuration.chooses_adam:
            choose_adam(optimizers, self.zero.stepped, self.zero.library, self.configuration.compiles_adam)

    def _divide(self) -> None:
        if inference := [name for name, p in self.named.items() if p.is_inference()]:
            raise BackendError(
                f"torch.inference_mode() was on while {', '.join(inference[:5])} was made, which can have no gradients, as "
                "DeepSpeed needs: make the model outside of it"
            )
        self.zero = zero = Stage3(self) if self.stage == 3 else Flat(self)
        numel = sum(p.numel() for p in self.parameters)
        floating = [p for p in self.parameters if p.is_floating_point()]
        dtype = next((p for p in floating if p.requires_grad), floating[0]).dtype  # that of all which it divides
        device = self.process.device
        zero.start(self.configuration.complete(dtype, numel, self.process.backends.get(device.type)), device)
        if self.holdings.partial(None):
            self.holdings.guard.watch_modules(self.module, lambda m: any(True for _ in m.parameters()))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it; at stage 3 each module gathers its weights, for methods the root too."""
        if self.zero is None:
            return function(*args, **kwargs)
        with self.gradients.forward(self.zero):
            return self.zero.call(function, args, kwargs, function is self.entry)

    def attach(self, optimizer: Optimizer) -> None:
        self.gradients.check(optimizer)
        super().attach(optimizer)
        if self.distributed and self.stage:
            put_methods(optimizer, self)

    def detach(self, optimizer: Optimizer) -> None:
        self.gradients.break_step()
        remove_methods(optimizer)
        super().detach(optimizer)

    def take_edits(self) -> None:
        """Take over weights that the loop has written or replaced; refuse (BackendError) what the next step would undo."""
        if self.zero is not None and (edited := self.zero.take_edits()):
            raise BackendError(
                f"{', '.join(self.names[i] for i in edited[:5])} changed in place, which is lost: the optimizer steps other "
                "copies, divided over the ranks, of the shape and dtype that they had; set weights by load_state_dict(full) of "
                "the model's handle, on every rank"
            )

    def indices(self, optimizer: Optimizer) -> list[int]:
        numbers = {id(p): i for i, p in enumerate(self.parameters)}
        held = {id(group): parameters for group, parameters in self.gradients.held}
        return [numbers[id(p)] for g in optimizer.param_groups for p in held.get(id(g), g["params"])]

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        self.holdings.guard.release_modules()
        remove_methods(self.module)
        zero = self.zero if hasattr(self.zero, "zero") else None  # its start may have failed
        if zero is not None and not self.ended:
            self.holdings.restore(zero, optimizers)
        self.zero = None
        if zero is not None and self.ended:
            self.holdings.leave(zero, optimizers)
            if self.stage == 3:
                raise lost_weights(self)

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        if self.zero is not None and hasattr(self.zero, "library"):
            release_groups([self.zero.library, *self.parameters])

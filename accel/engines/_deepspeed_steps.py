"""The user's own optimizer steps this rank's fragments, as if they were its parameters."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..control import Waiting
from ..precision import Accumulator
from . import _deepspeed_foreign
from ._deepspeed_partitions import Partitions
from ._deepspeed_verbs import Divided
from ._deepspeed_weights import plainly
from .base import Context

logger = logging.getLogger("accel")


class Stepping(Divided, ABC):
    """Between ``before_step`` and ``after_step`` the fragments are in the parameters' places in the groups."""

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self.stepping: Optimizer | None = None
        #: Every step clips to it; 0.0 for none.
        self.max_norm = 0.0
        #: Parameters with final gradients in fragments, and those of them that were stepped with and not dropped since.
        self._kept: set[int | None] = set()
        self._spent: set[int | None] = set()
        self._told = False
        #: Parameters whose assigned gradients took the place of others before the next forward.
        self._renewed: set[int] = set()
        # Where nothing is divided: whether what p.grad holds is known to be final, and who stepped with it.
        self._final = False
        self._stepped: set[int] = set()

    @classmethod
    def read_foreign(cls, path: str, load: Any, new: Any) -> dict[str, Any] | None:
        """What DeepSpeed's ``save_checkpoint`` wrote."""
        return _deepspeed_foreign.read(path, load, new)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm over all ranks' parts."""
        if self.zero is not None:
            self.announce("accel.clip_grad_norm_")
        self.settle()
        with Waiting(self.process, "accel.clip_grad_norm_"):
            return self._clip(max_norm, norm_type)

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.zero is None:
            return nn.utils.clip_grad_norm_(self.parameters, max_norm, norm_type)
        norm = self.zero.norm(float(norm_type), self.process.group, self.process.device)
        self.zero.scale((float(max_norm) / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def accumulators(self) -> Sequence[Accumulator]:
        """The fragments too: at stages 2 and 3 gradients come there while backward runs."""
        return self.parameters if self.zero is None else [*self.parameters, *self.zero.fragments.values()]

    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step; an exception leaves the groups as they were."""
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            self.hide()

    def before_step(self, optimizer: Optimizer) -> None:
        """From now on, what is final is shown to this optimizer."""
        self.hide()
        self.take_edits()
        if self.zero is not None:
            self.announce_step(optimizer)
        self.stepping = optimizer
        if self.zero is not None:  # at once: some optimizers write before their closure
            self._place(optimizer, self.zero)
        if self.log.entries:
            self._stepped.clear()
        elif id(optimizer) in self._stepped:  # without a backward in between: with gradients of unknown origin
            self._final = False
        self._stepped.add(id(optimizer))

    def unsettled(self) -> bool:
        """Whether gradients came since the last ``settle``."""
        return self.distributed and (bool(self.log.entries) or bool(self.assigned()))

    def hides_gradients(self) -> bool:
        """Whether fragments have any."""
        return self.zero is not None and (bool(self._kept) or self.unsettled())

    @plainly
    def assigned(self) -> list[int]:
        """The parameters whose ``p.grad`` no backward explains: it was assigned by hand. Local."""
        zero = self.zero
        if zero is None and self._final:
            return []
        found = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        came = set(self.log.entries) if found else set()
        if zero is not None:  # a backward's own is in a fragment, or waits
            found = [i for i in found if i not in zero.whole_gradients]
            return [i for i in found if self.parameters[i].grad is not zero.waiting.get(i) and ~i not in came]
        return [i for i in found if i not in came and ~i not in came]

    def renew(self, zero: Partitions) -> None:
        """Drop what assigned gradients take the place of, before a backward adds to them. Local."""
        if assigned := self.assigned():
            zero.replace(assigned)
            self.dropped(assigned, whole=False)
            self._renewed.update(assigned)

    def note_final(self) -> None:
        """Note that every gradient is final now."""
        if self.stepping is None:
            self._stepped.clear()
        self.log.fold(pending=False)
        self._renewed.clear()
        self._final = True

    def keep(self, assigned: Iterable[int]) -> None:
        """Note that the gradients since the last ``settle`` are in fragments now, and those that were assigned."""
        whole = set() if self.zero is None else self.zero.whole_gradients
        came = {entry for entry in self.log.entries if entry not in whole}
        self._kept.update(came, assigned)
        if not self._told and self._spent.intersection(came):
            self._told = True
            logger.warning(
                "gradients were added to those of an earlier step, which nothing has dropped since: where that is not meant, "
                "call zero_grad() of the optimizer or the model, since p.grad = None drops nothing under this backend"
            )

    def dropped(self, indices: Iterable[int], *, whole: bool) -> None:
        """Note that gradients were dropped; ``whole`` where none is left, not even zeros."""
        self._spent.difference_update(indices)
        if whole:
            self._kept.difference_update(indices)

    def show(self, optimizer: Optimizer) -> None:
        """Clip as the configuration says, then put the fragments in the parameters' places in the groups."""
        if self.max_norm > 0:
            self._clip(self.max_norm, 2.0)
        if self.zero is None:
            return
        self._place(optimizer, self.zero)
        for fragment in self.zero.fragments.values():
            fragment.weights.grad = None if fragment.grad is None else fragment.grad.to(fragment.weights.dtype)

    def _place(self, optimizer: Optimizer, zero: Partitions) -> None:
        for group in optimizer.param_groups if not self.held else ():
            self.held.append((group, group["params"]))
            fragments = [zero.fragments.get(zero.numbers[id(p)]) for p in group["params"]]
            group["params"] = [f.weights for f in fragments if f is not None]

    def steps_part(self, optimizer: Optimizer) -> bool:
        """Where there are fragments."""
        return self.zero is not None

    @contextlib.contextmanager
    def outside_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Fragments are in the groups; then every rank sees the weights."""
        if self.zero is None or self.held:  # or inside a step
            yield
            return
        self.take_edits()
        try:
            self._place(optimizer, self.zero)
            yield
        finally:
            self.hide()
        self.zero.spread()

    def hide(self) -> None:
        """Put the parameters back."""
        self.stepping = None
        for group, parameters in self.held:
            group["params"] = parameters
        if self.held and self.zero is not None:
            for fragment in self.zero.fragments.values():
                fragment.weights.grad = None
        self.held.clear()

    def before_closure(self, optimizer: Optimizer) -> None:
        """Every rank sees what the fragments are now."""
        if self.zero is not None:
            self.zero.spread()

    def after_step(self, optimizer: Optimizer) -> None:
        """Every rank sees the new weights."""
        self.hide()
        if self.zero is not None:
            self._spent = set(self._kept)
            self.zero.spread()

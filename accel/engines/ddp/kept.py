"""Gradients that a loop has besides the parameters, where the reducer's buckets have their place."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any, Final, final

import torch
from torch import nn

logger = logging.getLogger("accel")


def _count_unused() -> int:
    """References to a tensor that a list and torch hold, as ``map`` counts them."""
    parameter = nn.Parameter(torch.empty(0, device="cpu"))
    parameter.grad = torch.empty(0, device="cpu")
    return next(map(sys.getrefcount, [parameter.grad]))


_UNUSED: Final = _count_unused()
#: Of a storage, in C++: its tensors, as a rule.
_uses: Any = torch._C._storage_Use_Count


@final
class KeptGradients:
    """With ``gradient_as_bucket_view`` a reduction puts views of its buckets into ``p.grad``, and writes where the last ones lie.

    A loop sees neither. Views that it still has, though no parameter does, get memory of their own first. Gradients of its own
    memory that it has too (a list of them, views of one flat tensor) get the result, and their places back. Python's count of a
    tensor tells of both. Of what only shares a bucket's memory (``p.grad.data``, a slice) torch's count of the bucket tells,
    but not where it is: a warning says so. One such name may be left over from a loop.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._parameters: Sequence[nn.Parameter] = ()
        #: The views, by the numbers of their parameters, as far as they are known.
        self._numbers: list[int] = []
        self._views: list[torch.Tensor] = []
        #: The buckets, none once there was a warning, and how often torch counts these where nobody else has a part of them.
        self._buckets: list[int] = []
        self._count = 0
        self._told = False
        #: The loop's own gradients in a reduction, with the numbers of their parameters and with their memory.
        self._own: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def reset(self, parameters: Sequence[nn.Parameter]) -> None:
        """New buckets are made now, of these parameters; ``give_back`` ends what that does to gradients that are there."""
        self._own = self._find_own() if parameters is self._parameters else []
        self._parameters, self._numbers, self._views, self._buckets = parameters, [], [], []

    def begin(self) -> None:
        """Hear that a reduction is about to begin."""
        views = self._views
        if views and max(map(sys.getrefcount, views)) > _UNUSED:
            for place, count in enumerate(list(map(sys.getrefcount, views))):
                view = views[place]
                if count > _UNUSED and self._parameters[self._numbers[place]].grad is not view:
                    with torch.no_grad():
                        own = view.clone()
                    # Who has `view` has the copy then, and torch's reducer writes to what was `view`.
                    swap: Any = torch._C._swap_tensor_impl
                    swap(view, own)
                    views[place] = own
        first = self._parameters[0].grad
        self._own = [] if first is None or (views and views[0] is first) else self._find_own()
        if self._buckets and sum(map(_uses, self._buckets)) > self._count + 1:
            self._told, self._buckets = True, []
            logger.warning(
                "%s: tensors that lie in the memory of gradients (p.grad.data, p.grad.detach(), a slice) are still held where "
                "the next backward begins, which overwrites them: keep p.grad itself, or p.grad.clone()",
                self._kind,
            )

    def end(self) -> None:
        """Hear that it has ended, so that gradients lie in the buckets: in the same places, as long as these are the same."""
        back = self.give_back() if self._own else ()
        known = self._views and len(self._views) == len(self._parameters)
        if not known or self._views[0] is not self._parameters[0].grad:
            self._note(back)

    def give_back(self) -> Container[int]:
        """Put the loop's own gradients into their parameters again, with the values that these have; for which that was to do."""
        own, self._own, back = self._own, [], set()
        with torch.no_grad():
            for number, tensor, memory in own:
                parameter = self._parameters[number]
                if parameter.grad is None or parameter.grad.data_ptr() == memory.data_ptr():
                    continue
                back.add(number)
                memory.copy_(parameter.grad)
                if parameter.grad is tensor:  # torch has moved it
                    tensor.data = memory
                else:
                    parameter.grad = tensor
        return back

    def _note(self, own: Container[int]) -> None:
        found = dict(zip(self._numbers, self._views, strict=True))  # also of those that got none this time
        grads = [None if i in own else p.grad for i, p in enumerate(self._parameters)]
        found |= {i: grad for i, grad in enumerate(grads) if type(grad) is torch.Tensor}
        self._numbers, self._views = sorted(found), [found[number] for number in sorted(found)]
        if not self._told:
            self._buckets = list({v.untyped_storage()._cdata for v in self._views})
            self._count = sum(map(_uses, self._buckets))

    def _find_own(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """The gradients that somebody besides their parameters has, or, where they are no views of buckets, a part of them."""
        known = set(map(id, self._views))
        grads = [p.grad for p in self._parameters]
        places = [g.untyped_storage()._cdata if type(g) is torch.Tensor else 0 for g in grads]
        times, own = Counter(places), []
        for number, count in enumerate(list(map(sys.getrefcount, grads))):
            grad, place = grads[number], places[number]
            if grad is not None and place:
                view = id(grad) in known
                if count > _UNUSED + view or (not view and _uses(place) > times[place]):
                    own.append((number, grad, grad.detach()))
        return own

"""Gradients that a loop keeps over ``zero_grad()``, and that lie in the reducer's buckets."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import nn

logger = logging.getLogger("accel")

#: References to a tensor that only a list holds, as `map` counts them.
_UNUSED: Final = next(map(sys.getrefcount, [torch.empty(0, device="cpu")]))
#: Of a storage, in C++: its tensors, as a rule.
_uses: Any = torch._C._storage_Use_Count


@final
class KeptGradients:
    """With ``gradient_as_bucket_view`` a reduction writes where the last one's gradients lie.

    Those that the loop still has, though no parameter does, get memory of their own first, so that they stay as they are with
    torch's default. Python's count of a gradient tells of them. Of what only shares its memory (``p.grad.data``, a slice)
    torch's count of the bucket tells, but not where it is: a warning says so. One such name may be left over from a loop.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._parameters: Sequence[nn.Parameter] = ()
        #: The gradients of the last reduction. As long as the first parameter's is the same one, the others are.
        self.views: list[torch.Tensor | None] = []
        #: The buckets, none once there was a warning, and how often torch counts these where nobody else has a part of them.
        self._buckets: list[int] = []
        self._uses = 0
        self._told = False

    def reset(self, parameters: Sequence[nn.Parameter]) -> None:
        """New buckets, of these parameters."""
        self._parameters, self.views, self._buckets = parameters, [], []

    def reduced(self) -> None:
        """Note where the gradients of a reduction lie."""
        self.views = [p.grad if type(p.grad) is torch.Tensor else None for p in self._parameters]
        if not self._told:
            self._buckets = list({v.untyped_storage()._cdata for v in self.views if v is not None})
            self._uses = sum(map(_uses, self._buckets))

    def keep(self) -> None:
        """Give them memory of their own, before a reduction."""
        views = self.views
        if views and max(map(sys.getrefcount, views)) > _UNUSED:
            for index, count in enumerate(list(map(sys.getrefcount, views))):
                view = views[index]
                if view is not None and count > _UNUSED and self._parameters[index].grad is not view:
                    with torch.no_grad():
                        own = view.clone()
                    # Who has `view` has the copy then, and torch's reducer writes to what was `view`.
                    swap: Any = torch._C._swap_tensor_impl
                    swap(view, own)
                    views[index] = own
        if self._buckets and sum(map(_uses, self._buckets)) > self._uses + 1:
            self._told, self._buckets = True, []
            logger.warning(
                "%s: tensors that lie in the memory of gradients (p.grad.data, p.grad.detach(), a slice) are still held where "
                "the next backward begins, which overwrites them: keep p.grad itself, or p.grad.clone()",
                self._kind,
            )

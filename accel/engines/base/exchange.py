"""What the attention of a forward exchanges with the other ranks of its sequence, in the place of torch's functions."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import BackendError
from ...gradients.average import mean_over
from ...process.control import Waiting

if TYPE_CHECKING:
    from .sequence import SequenceParallel

_now = threading.local()


@final
class Exchange:
    """What the attention of one forward exchanges, also computed again; ``size`` is 1 where it has the whole sequence."""

    def __init__(self, sequence: SequenceParallel, length: int, padding: Tensor | None, size: int) -> None:
        self.sequence, self.size, self._length, self._padding = sequence, size, length, padding
        self._grad, self.calls = torch.is_grad_enabled(), 0
        self._causal: Tensor | None = None

    def attention(
        self, original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Of some heads, over the whole sequence."""
        kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
        mask, causal = kwargs.pop("attn_mask", None), kwargs.pop("is_causal", False)
        self._refuse((query, key, value), mask)
        self.calls += 1
        if self._padding is not None:
            mask, causal = self._without_padding(mask, causal), False
        if self.size == 1:
            return original(query, key, value, mask, is_causal=causal, **kwargs)
        # Fewer heads of keys than ranks are repeated as far as needed.
        times = (
            math.lcm(key.shape[1], self.size) // key.shape[1]
            if kwargs.get("enable_gqa")
            else query.shape[1] // key.shape[1]
        )
        key, value = (t.repeat_interleave(times, 1) if times > 1 else t for t in (key, value))
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(self.size, -3)[self.sequence.rank]
        out = original(*_swapped(self, True, query, key, value), mask, is_causal=causal, **kwargs)
        return _swapped(self, False, out)[0]

    def _refuse(self, given: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> None:
        n, size, problem = self._length // self.size, self.size, ""
        if any(t.dim() != 4 or t.shape[2] != n for t in given):
            problem = (
                f"of {', '.join(str(tuple(t.shape)) for t in given)}: query, key and value were expected as (batch, heads, {n}, "
                "size): cross attention, a cache of earlier tokens, and tokens that the model adds are not supported"
            )
        elif (heads := given[0].shape[1]) % size or heads % math.lcm(given[1].shape[1], size):
            problem = (
                f"has {heads} heads of queries and {given[1].shape[1]} of keys, which do not divide over {size} ranks"
            )
        elif mask is not None and any(m not in (1, self._length) for m in mask.shape[-2:]):
            problem = (
                f"has a mask of shape {tuple(mask.shape)}, expected was one of all {self._length} tokens: "
                "leave it out where it is the causal one (is_causal=True), else give the model a whole one, which is not cut"
            )
        elif self._grad and not torch.is_grad_enabled() and not getattr(_now, "again", False):
            problem = (
                "is under torch.no_grad() inside of a forward with gradients, as in activation checkpointing of other libraries, "
                "which would compute it again without the other ranks: use torch.utils.checkpoint"
            )
        if problem:
            raise BackendError(f"sequence_parallel={size}: attention of {self.sequence.label} {problem}")

    def _without_padding(self, mask: Tensor | None, causal: bool) -> Tensor:
        assert self._padding is not None
        none = self._padding[:, None, None]
        if causal:
            if self._causal is None:
                self._causal = (
                    torch.ones(self._length, self._length, dtype=torch.bool, device=none.device).tril() & ~none
                )
            return self._causal
        return (
            ~none if mask is None else mask & ~none if mask.dtype is torch.bool else mask.masked_fill(none, -math.inf)
        )

    def cross_entropy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The mean over the tokens of all parts, which may have different numbers of ignored ones."""
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        options, target = given.arguments, given.arguments["target"]
        old = options["size_average"] is not None or options["reduce"] is not None
        if self.size == 1 or options["reduction"] != "mean" or target.is_floating_point() or old:
            return original(*args, **kwargs)
        total = original(**options | {"reduction": "sum"})
        count, weight = target != options["ignore_index"], options["weight"]
        count = count if weight is None else weight[target.where(count, 0)] * count
        with Waiting(self.sequence.process, f"the mean of a loss ({self.sequence.label})"):
            return mean_over(total, count.sum(), self.sequence.group, self.size)

    def swap(self, inward: bool, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Parts of all heads for all of some heads (``inward``), or the way back. Collective."""
        if len({t.dtype for t in tensors}) > 1:
            return [self.swap(inward, (t,))[0] for t in tensors]
        before, after = (1, 2) if inward else (2, 1)
        pieces = [t.unflatten(before, (self.size, -1)).movedim(before, 0) for t in tensors]
        sent = torch.cat([piece.flatten(1) for piece in pieces], 1)
        came = torch.empty_like(sent)
        with Waiting(self.sequence.process, f"the exchange of an attention ({self.sequence.label})"):
            dist.all_to_all_single(came, sent, group=self.sequence.group)
        found = zip(came.split([piece[0].numel() for piece in pieces], 1), pieces, strict=True)
        return [flat.view(piece.shape).movedim(0, after).flatten(after, after + 1) for flat, piece in found]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, inward: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.inward = exchange, inward
        return tuple(exchange.swap(inward, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_swapped(ctx.exchange, not ctx.inward, *grads)


_swapped: Any = _Swap.apply


# -- what stands in for torch's functions -------------------------------------------------------------------------------


@contextlib.contextmanager
def within(exchange: Exchange | None, again: bool = False) -> Iterator[None]:
    """Inside, attention of this thread exchanges by ``exchange``; ``again``: as activation checkpointing computes again."""
    before = getattr(_now, "exchange", None), getattr(_now, "again", False)
    _now.exchange, _now.again = exchange, again
    try:
        yield
    finally:
        _now.exchange, _now.again = before


def attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the place of ``scaled_dot_product_attention``."""
    exchange = getattr(_now, "exchange", None)
    return original(*args, **kwargs) if exchange is None else exchange.attention(original, *args, **kwargs)


def cross_entropy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the place of torch's own."""
    exchange = getattr(_now, "exchange", None)
    return original(*args, **kwargs) if exchange is None else exchange.cross_entropy(original, *args, **kwargs)


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that activation checkpointing calls again in a backward, perhaps in another thread."""
    exchange = getattr(_now, "exchange", None)

    def call(*args: Any, **kwargs: Any) -> Any:
        with within(exchange, again=True):
            return function(*args, **kwargs)

    return function if exchange is None else call

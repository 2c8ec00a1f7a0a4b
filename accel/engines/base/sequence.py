"""``sequence_parallel``: neighboring ranks hold shards of each sequence.

This is Ulysses (Jacobs et al., arXiv 2309.14509). An all-to-all before
attention gives each rank some heads of the full sequence, and an all-to-all
after it restores the shards. The rest of the model must treat tokens
independently.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import threading
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import BackendError
from ...gradients.hooks import runs_backward
from ...gradients.patches import sequence_patches
from ...gradients.totals import mean_over
from ...process import Process
from ...process.control import Waiting
from ...process.startup import mesh_of
from ...trees import all_tensors, walk
from .inputs import SameInputs
from .raw_objects import Function

if TYPE_CHECKING:
    from .engine import Engine

#: The label of a token without a loss, in torch and transformers.
_IGNORED: Final = -100


def sequence_size(options: Any, process: Process) -> int:
    """Return the number of ranks that share a sequence. Local."""
    world_size = process.place.world_size
    size: int = getattr(options, "sequence_parallel", 1)
    if world_size == 1:
        return 1
    if world_size % size:
        raise BackendError(
            f"sequence_parallel={size} doesn't divide the {world_size} ranks. Use a divisor."
        )
    return size


def _tokens(batch: Any) -> Tensor | None:
    """Return the tokens of a batch with transformers' keys, or None."""
    if not isinstance(batch, MutableMapping):
        return None
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    return tokens if isinstance(tokens, Tensor) and tokens.dim() > 1 else None


def prepared(module: nn.Module, batch: Any) -> Any:
    """Add positions and shifted labels to a transformers batch."""
    tokens = _tokens(batch)
    if tokens is None:
        return batch
    # Otherwise transformers would compute both from this rank's shard alone.
    batch = copy.copy(batch)
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" in parameters and batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
    labels = batch.get("labels")
    loss = getattr(module, "loss_function", None)
    is_causal = getattr(loss, "__name__", "") == "ForCausalLMLoss"
    if is_causal and isinstance(labels, Tensor) and "shift_labels" not in batch:
        padded = nn.functional.pad(labels, (0, 1), value=_IGNORED)
        batch["shift_labels"] = padded[..., 1:].contiguous()
    return batch


@final
class SequenceParallel:
    """Shards an engine's batches, and exchanges heads in attention."""

    def __init__(self, engine: Engine, size: int) -> None:
        self._engine, self.size = engine, size
        self.process, self.label = engine.process, engine.label
        replica, self.rank = divmod(engine.process.place.rank, size)
        #: True inside ``accel.whole_sequences``.
        self.whole = False
        self.running = False
        self._same_inputs = SameInputs(f"{self.label} (accel.shard_sequence)", replica)
        #: The lengths of all shards that ``shard`` has returned.
        self.lengths: set[int] = set()
        self._exchanges = 0
        self.patches = sequence_patches(engine.module, _attention, _cross_entropy)
        _live.add(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share a sequence. Collective on first access."""
        axes = {"sequence": self.size}
        replicas = self.process.place.world_size // self.size
        if replicas > 1:
            axes = {"data": replicas} | axes
        mesh = mesh_of(self.process, axes)
        # By index, because the names change if the process groups are started again.
        return mesh.get_group(mesh.ndim - 1)

    def shard(self, batch: Any, dim: int) -> Any:
        """Return this rank's shards along ``dim``. Collective."""
        self._same_inputs.call(lambda: None, (batch,), {})
        # Create the group here, because all ranks call this method.
        assert self.group is not None
        tokens = _tokens(batch) if dim == 1 else None
        tensors = all_tensors(batch if tokens is None else tokens)
        length = next((t.shape[dim] for _, t in tensors if t.dim() > dim), 0)
        if not length or length % self.size:
            raise BackendError(
                f"accel.shard_sequence can't divide {length} tokens over "
                f"{self.size} ranks. Pad them on the right, with labels of "
                f"{_IGNORED}."
            )
        if tokens is not None:
            batch = prepared(self._engine.module, batch)
            _drop_mask(batch, tokens)
        self.lengths.add(length // self.size)

        def cut(_: str, leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.shape[dim : dim + 1] == (length,):
                return leaf.chunk(self.size, dim)[self.rank].contiguous()
            return leaf

        return walk(cut, batch, "")

    @contextlib.contextmanager
    def forward(self, function: Function) -> Iterator[None]:
        """Exchange heads in the attention of a forward or method."""
        mha, outer = torch.backends.mha, getattr(_now, "sequence", None)
        fast = mha.get_fastpath_enabled()
        # The fast path of nn.TransformerEncoder bypasses scaled_dot_product_attention.
        mha.set_fastpath_enabled(fast and self.whole)
        _now.sequence = None if self.whole else self
        self._exchanges, self.running = 0, True
        try:
            yield
        finally:
            self.running, _now.sequence = False, outer
            mha.set_fastpath_enabled(fast)
        # For example with attn_implementation="eager" in transformers, or softmax(q @ k.mT) @ v.
        is_forward = function is self._engine.entry
        if is_forward and not self.whole and not self._exchanges:
            raise BackendError(
                f"{self.label} called no scaled_dot_product_attention, so tokens "
                "only attended to their own shard. Use "
                "attn_implementation='sdpa' or need_weights=False."
            )

    def attention(
        self, original: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute attention of some heads over the full sequence."""
        shapes = [tuple(t.shape) for t in (query, key, value)]
        lengths = {shape[2] if len(shape) == 4 else 0 for shape in shapes}
        if len(lengths) > 1 or not lengths <= self.lengths:
            raise BackendError(
                f"Attention of {self.label} got {shapes}, which are not shards. "
                "Call accel.shard_sequence(model, batch), or use "
                "accel.whole_sequences(model)."
            )
        # Repeat the heads of keys and values until the ranks can divide them evenly.
        repeats = math.lcm(key.shape[1], self.size) // key.shape[1]
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        self._exchanges += 1
        out = original(*_swapped(self, True, query, key, value), *args, **kwargs)
        return _swapped(self, False, out)[0]

    def cross_entropy(
        self, original: Any, logits: Tensor, target: Tensor, weight: Any = None, **options: Any
    ) -> Any:
        """Compute the mean over the tokens of all shards."""
        if options.get("reduction", "mean") != "mean" or target.is_floating_point():
            return original(logits, target, weight, **options)
        total = original(logits, target, weight, **options | {"reduction": "sum"})
        count = target != options.get("ignore_index", _IGNORED)
        if weight is not None:
            count = weight[target.where(count, 0)] * count
        with Waiting(self.process, f"the mean of a loss ({self.label})"):
            return mean_over(total, count.sum(), self.group, self.size)

    def swap(self, inward: bool, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange shards of all heads for sequences of some heads, or back."""
        before, after = (1, 2) if inward else (2, 1)
        shape = (self.size, -1)
        pieces = [t.unflatten(before, shape).movedim(before, 0) for t in tensors]
        sent = torch.cat([piece.flatten(1) for piece in pieces], 1)
        received = torch.empty_like(sent)
        with Waiting(self.process, f"the exchange of an attention ({self.label})"):
            dist.all_to_all_single(received, sent, group=self.group)
        swapped = []
        for piece in pieces:
            flat, received = received.tensor_split([piece[0].numel()], 1)
            block = flat.reshape(piece.shape).movedim(0, after)
            swapped.append(block.flatten(after, after + 1))
        return swapped


def _drop_mask(batch: Any, tokens: Tensor) -> None:
    """Remove an ``attention_mask`` that masks nothing."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
        return
    if not bool(mask.all()):
        raise BackendError(
            "accel.shard_sequence doesn't support padding in attention_mask. "
            "For a causal model, leave out the mask and pad on the right "
            f"with labels of {_IGNORED}."
        )
    batch["attention_mask"] = None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequence: SequenceParallel, inward: bool, *tensors: Tensor) -> Any:
        ctx.sequence, ctx.inward = sequence, inward
        return tuple(sequence.swap(inward, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_swapped(ctx.sequence, not ctx.inward, *grads)


_swapped: Any = _Swap.apply

_now = threading.local()
_live: weakref.WeakSet[SequenceParallel] = weakref.WeakSet()


def _current(length: int | None = None) -> SequenceParallel | None:
    """Return the ``SequenceParallel`` of the running forward, or None."""
    sequence: SequenceParallel | None = getattr(_now, "sequence", None)
    if sequence is None and runs_backward() and not torch.compiler.is_compiling():
        # Activation checkpointing recomputes a forward, perhaps in a thread of autograd.
        for sequence in _live:
            if length is None or length in sequence.lengths:
                return sequence
        return None
    return sequence


def _attention(original: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    sequence = _current(query.shape[2] if query.dim() == 4 else 0)
    call = original if sequence is None else partial(sequence.attention, original)
    return call(query, *args, **kwargs)


def _cross_entropy(original: Any, *args: Any, **kwargs: Any) -> Any:
    sequence = _current()
    call = original if sequence is None else partial(sequence.cross_entropy, original)
    return call(*args, **kwargs)

"""``sequence_parallel``: neighbouring ranks hold shards of each sequence and exchange them for heads in attention.

This is Ulysses (Jacobs et al., arXiv 2309.14509). An all-to-all before attention gives each rank some heads of the full
sequence, and an all-to-all after it restores the shards. The rest of the model must treat tokens independently.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import BackendError
from ...gradients.patches import sequence_patches
from ...gradients.totals import mean_over
from ...handles import HiddenAttribute
from ...process import Process
from ...process.control import Waiting
from ...process.startup import mesh_of
from ...trees import all_tensors, walk
from .inputs import SameInputs

if TYPE_CHECKING:
    from .engine import Engine

_IGNORED: Final = -100  # as a label, by torch and transformers


def sequence_size(options: Any, process: Process) -> int:
    """Return how many ranks share one sequence. Local.

    Raises:
        BackendError: the number of processes is not a multiple of it.
    """
    size = getattr(options, "sequence_parallel", 1)
    world = process.place.world_size
    if world > 1 and world % size:
        raise BackendError(
            f"sequence_parallel={size}: {world} processes do not divide into groups of {size}"
        )
    return size if world > 1 else 1


def _tokens(batch: Any) -> Tensor | None:
    """Return the tokens of a batch with transformers' names."""
    if not isinstance(batch, MutableMapping):
        return None
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    return tokens if isinstance(tokens, Tensor) and tokens.dim() > 1 else None


def prepared(module: nn.Module, batch: Any) -> Any:
    """Add the positions and shifted labels of the full sequence to a batch with transformers' names.

    A model of transformers would number and shift its shard instead.
    """
    if (tokens := _tokens(batch)) is None:
        return batch
    parameters = inspect.signature(module.forward).parameters
    labels = batch.get("labels")
    batch = copy.copy(batch)
    if "position_ids" in parameters and batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
    causal = getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    if causal and isinstance(labels, Tensor) and "shift_labels" not in batch:
        padded = nn.functional.pad(labels, (0, 1), value=_IGNORED)
        batch["shift_labels"] = padded[..., 1:].contiguous()
    return batch


@final
class SequenceParallel:
    """The sequences of one engine: cuts its batches and exchanges heads in its attention."""

    def __init__(self, engine: Engine, size: int) -> None:
        self._engine, self.process, self.label, self.size = (
            engine,
            engine.process,
            engine.label,
            size,
        )
        replica, self.rank = divmod(engine.process.place.rank, size)
        #: True inside ``accel.whole_sequences``.
        self.whole = False
        self.running = False
        self._same_inputs = SameInputs(f"{engine.label} (accel.shard_sequence)", replica)
        #: Lengths of the shards that forwards were given.
        self.lengths: set[int] = set()
        self.exchanges = 0
        self.patches = sequence_patches(engine.module, _attention, _cross_entropy)
        _live.add(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share one sequence. Collective at first."""
        axes = {"data": self.process.place.world_size // self.size, "sequence": self.size}
        mesh = mesh_of(self.process, {name: n for name, n in axes.items() if n > 1})
        return mesh.get_group(mesh.ndim - 1)

    def shard(self, batch: Any, dim: int) -> Any:
        """Return this rank's shard of each tensor that has the sequence along ``dim``. Collective."""
        self._same_inputs.call(lambda: None, (batch,), {})
        assert self.group is not None  # it is created here, where all ranks are
        tokens = _tokens(batch) if dim == 1 else None
        tensors = [tokens] if tokens is not None else [t for _, t in all_tensors(batch, "batch")]
        lengths = [t.shape[dim] for t in tensors if t.dim() > dim >= 0]
        if not lengths:
            raise BackendError(
                f"accel.shard_sequence(dim={dim!r}): no tensor of the batch has such a dimension (the first is 0)"
            )
        length = lengths[0]
        if length % self.size:
            raise BackendError(
                f"accel.shard_sequence: sequences of {length} tokens do not divide over {self.size} ranks. "
                f"Pad them on the right to a multiple of {self.size}, with labels of {_IGNORED}."
            )
        if tokens is not None:
            batch = prepared(self._engine.module, batch)
            _drop_mask(batch, tokens)

        def cut(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != length:
                return leaf
            shard = leaf.chunk(self.size, dim)[self.rank].clone(
                memory_format=torch.contiguous_format
            )
            HiddenAttribute.put(shard, length)  # forward accepts marked tensors only
            return shard

        return walk(cut, batch, "")

    @contextlib.contextmanager
    def forward(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Exchange heads in the attention of a forward, or of a user's method, that is given shards."""
        tensors = [t for _, t in all_tensors((args, kwargs), "input")]
        lengths = {length for t in tensors if isinstance(length := HiddenAttribute.get(t), int)}
        if len(lengths) > 1:
            raise BackendError(
                f"{self.label} got shards of sequences of different lengths: {sorted(lengths)}."
            )
        if lengths and self.whole:
            raise BackendError(
                f"{self.label} got shards inside accel.whole_sequences. Pass full sequences there."
            )
        if (
            not lengths
            and not self.whole
            and (any(t.dim() for t in tensors) or function is self._engine.entry)
        ):
            raise BackendError(
                f"{self.label} with sequence_parallel={self.size} got tensors that are not shards. Call "
                "batch = accel.shard_sequence(model, batch) last, after .to(device) and slices."
            )
        self.lengths.update(length // self.size for length in lengths)
        fast, outer = torch.backends.mha.get_fastpath_enabled(), getattr(_now, "sequence", None)
        # The fast path of nn.TransformerEncoder calls no attention function of torch.
        torch.backends.mha.set_fastpath_enabled(fast and not lengths)
        self.exchanges, self.running, _now.sequence = 0, True, self if lengths else None
        try:
            yield
        finally:
            self.running, _now.sequence = False, outer
            torch.backends.mha.set_fastpath_enabled(fast)
        if lengths and not self.exchanges:
            raise BackendError(
                f"{self.label} called no scaled_dot_product_attention, so its shards saw only themselves. "
                "Use attn_implementation='sdpa' or need_weights=False."
            )

    # -- attention ------------------------------------------------------------------------------------------------

    def attention(
        self,
        original: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute attention of some heads over the full sequence."""
        kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
        mask = kwargs.pop("attn_mask", None)
        self._check_attention((query, key, value), mask)
        self.exchanges += 1
        # Fewer heads of keys than ranks are repeated as far as needed.
        heads = math.lcm(key.shape[1], self.size) if kwargs.get("enable_gqa") else query.shape[1]
        if (times := heads // key.shape[1]) > 1:
            key, value = (t.repeat_interleave(times, 1) for t in (key, value))
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(self.size, -3)[self.rank]
        out = original(*_swapped(self, True, query, key, value), mask, **kwargs)
        return _swapped(self, False, out)[0]

    def _check_attention(self, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> None:
        query, key, _ = tensors
        problem = ""
        if (
            any(t.dim() != 4 or t.shape[2] not in self.lengths for t in tensors)
            or key.shape[2] != query.shape[2]
        ):
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            problem = (
                f"got {shapes}, expected (batch, heads, {min(self.lengths)}, size). Cross attention, caches of "
                "earlier tokens and tokens that the model adds are not supported"
            )
        elif query.shape[1] % math.lcm(key.shape[1], self.size):
            heads = f"{query.shape[1]} heads of queries and {key.shape[1]} of keys"
            problem = f"has {heads}, which do not divide over {self.size} ranks"
        elif mask is not None and any(
            n not in (1, query.shape[2] * self.size) for n in mask.shape[-2:]
        ):
            problem = (
                f"got a mask of shape {tuple(mask.shape)}, expected all {query.shape[2] * self.size} tokens. Pass "
                "the full mask, which is not cut, or is_causal=True"
            )
        if problem:
            raise BackendError(
                f"sequence_parallel={self.size}: attention of {self.label} {problem}."
            )

    def cross_entropy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the mean over the tokens of all shards, which may ignore different numbers of tokens."""
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        options, target = given.arguments, given.arguments["target"]
        if options["reduction"] != "mean" or target.is_floating_point():
            return original(*args, **kwargs)
        total = original(**options | {"reduction": "sum"})
        count, weight = target != options["ignore_index"], options["weight"]
        if weight is not None:
            count = weight[target.where(count, 0)] * count
        with Waiting(self.process, f"the mean of a loss ({self.label})"):
            return mean_over(total, count.sum(), self.group, self.size)

    def swap(self, inward: bool, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Exchange shards of all heads for some heads of all tokens (``inward``), or back. Collective."""
        if len({t.dtype for t in tensors}) > 1:
            return [self.swap(inward, (t,))[0] for t in tensors]
        before, after = (1, 2) if inward else (2, 1)
        pieces = [t.unflatten(before, (self.size, -1)).movedim(before, 0) for t in tensors]
        sent = torch.cat([piece.flatten(1) for piece in pieces], 1)
        received = torch.empty_like(sent)
        with Waiting(self.process, f"the exchange of an attention ({self.label})"):
            dist.all_to_all_single(received, sent, group=self.group)
        flat = received.split([piece[0].numel() for piece in pieces], 1)
        blocks = [
            f.view(piece.shape).movedim(0, after) for f, piece in zip(flat, pieces, strict=True)
        ]
        return [block.flatten(after, after + 1) for block in blocks]


def _drop_mask(batch: Any, tokens: Tensor) -> None:
    """Remove an ``attention_mask`` without padding. A model would make one of its shard only."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
        return
    if not bool(mask.all()):
        raise BackendError(
            "accel.shard_sequence does not support padding in attention_mask. For a causal model, pad on the right "
            f"with labels of {_IGNORED} and leave the mask out."
        )
    batch["attention_mask"] = None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sequence: SequenceParallel, inward: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sequence, ctx.inward = sequence, inward
        return tuple(sequence.swap(inward, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_swapped(ctx.sequence, not ctx.inward, *grads)


_swapped: Any = _Swap.apply

# -- what is called in the place of torch's functions --------------------------------------------------------------------

_now = threading.local()
_live: weakref.WeakSet[SequenceParallel] = weakref.WeakSet()


def _sequence_of(length: int | None = None) -> SequenceParallel | None:
    """Return the engine that computes, if it was given shards."""
    sequence: SequenceParallel | None = getattr(_now, "sequence", None)
    if (
        sequence is not None
        or torch.compiler.is_compiling()
        or torch._C._current_graph_task_id() == -1
    ):
        return sequence
    # Activation checkpointing computes a forward again in backward, perhaps in a thread of autograd's.
    return next((s for s in _live if length is None or length in s.lengths), None)


def _attention(original: Callable[..., Any], query: Tensor, *args: Any, **kwargs: Any) -> Any:
    sequence = _sequence_of(query.shape[2] if query.dim() == 4 else 0)
    if sequence is None:
        return original(query, *args, **kwargs)
    return sequence.attention(original, query, *args, **kwargs)


def _cross_entropy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    sequence = _sequence_of()
    return (
        original(*args, **kwargs)
        if sequence is None
        else sequence.cross_entropy(original, *args, **kwargs)
    )

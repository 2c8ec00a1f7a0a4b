"""``sequence_parallel``: neighbouring ranks have parts of each sequence, and exchange them for heads in attention.

That is Ulysses (Jacobs et al., arXiv 2309.14509): an all-to-all before attention, after which each rank has some heads of the
whole sequence, and one after it. Everything else of a model must treat tokens one by one. Whether it does, the model is asked:
before its first forward of a kind it computes a short sequence whole and in parts.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import BackendError
from ...gradients.patches import sequence_patches
from ...gradients.totals import mean_over
from ...handles import HiddenAttribute
from ...process import Process
from ...process.control import Waiting, agree
from ...process.rng import put_torch_states, torch_states
from ...process.startup import mesh_of
from ...trees import all_tensors, walk
from .inputs import SameInputs

if TYPE_CHECKING:
    from .engine import Engine

#: Tokens of each rank in the short sequence.
_SHORT: Final = 8
_IGNORED: Final = -100  # as a label, by torch and transformers
_HOW: Final = (
    "attention must call torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa', need_weights=False), the "
    "model must be given all that numbers or orders tokens, as position_ids and shifted labels, made before "
    "accel.shard_sequence cuts them, and nothing else of it may look at several tokens"
)


def sequence_size(options: Any, process: Process) -> int:
    """How many ranks have parts of one sequence; BackendError where the processes do not divide so. Local."""
    size, world = getattr(options, "sequence_parallel", 1), process.place.world_size
    if world > 1 and world % size:
        raise BackendError(f"sequence_parallel={size}: {world} processes do not divide into groups of {size}")
    return size if world > 1 else 1


class Part(NamedTuple):
    """What is remembered of a tensor that is a part."""

    dim: int
    length: int  # of the whole
    padding: Tensor | None  # which tokens of the whole are none
    made: bool  # by accel: a model that has the whole sequence makes it itself


def _part_of(leaf: Any) -> Part | None:
    found = HiddenAttribute.get(leaf) if isinstance(leaf, Tensor) else None
    return found if isinstance(found, Part) else None


def _tensors(tree: Any) -> dict[str, Tensor]:
    return dict(all_tensors(tree, "output"))


def _tokens(batch: Any) -> Tensor | None:
    """Those of a batch as transformers names them."""
    found = batch.get("input_ids", batch.get("inputs_embeds")) if isinstance(batch, MutableMapping) else None
    return found if isinstance(found, Tensor) and found.dim() > 1 else None


def prepared(module: nn.Module, batch: Any) -> tuple[Any, set[int]]:
    """The batch with what a model of transformers must be given where it has a part; the identities of what was made."""
    if (tokens := _tokens(batch)) is None:
        return batch, set()
    parameters, made, labels = inspect.signature(module.forward).parameters, {}, batch.get("labels")
    if "position_ids" in parameters and batch.get("position_ids") is None:
        made["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
    causal = getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    if causal and isinstance(labels, Tensor) and "shift_labels" not in batch:
        made["shift_labels"] = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:].contiguous()
    batch = copy.copy(batch)
    batch.update(made)
    return batch, set(map(id, made.values()))


@final
class SequenceParallel:
    """Cuts the sequences of one engine, and lets its forwards exchange the parts, of which one sequence has ``size``."""

    def __init__(self, engine: Engine, size: int) -> None:
        self._engine, self.process, self.label, self.size = engine, engine.process, engine.label, size
        place, self.rank = divmod(engine.process.place.rank, size)
        #: Inside ``accel.whole_sequences``, and inside a forward.
        self.whole = self.running = False
        self._alike, self._checked = SameInputs(f"{engine.label} (accel.shard_sequence)", place), dict[Any, int]()
        self.patches = sequence_patches(engine.module, attention, cross_entropy, bound)

    @property
    def group(self) -> dist.ProcessGroup:
        """Of the ranks that have parts of one sequence. Collective at first."""
        axes = {"data": self.process.place.world_size // self.size, "sequence": self.size}
        mesh = mesh_of(self.process, {name: n for name, n in axes.items() if n > 1})
        return mesh.get_group(mesh.ndim - 1)

    def shard(self, batch: Any, dim: int) -> Any:
        """This rank's part of each tensor that has the sequence along ``dim``."""
        self._alike.call(lambda: None, (batch,), {})
        assert self.group is not None
        tokens, made, padding = _tokens(batch) if dim == 1 else None, set[int](), None
        tensors = [tokens] if tokens is not None else list(_tensors(batch).values())
        lengths = [t.shape[dim] for t in tensors if t.dim() > dim >= 0]
        if not lengths:
            raise BackendError(
                f"accel.shard_sequence(dim={dim!r}): no tensor of the batch has such a dimension (the first is 0)"
            )
        if (length := lengths[0]) % self.size:
            raise BackendError(
                f"accel.shard_sequence: sequences of {length} tokens do not divide over {self.size} ranks: pad them to a "
                f"multiple of {self.size}, with labels of {_IGNORED} in the padding"
            )
        if tokens is not None:
            batch, made = prepared(self._engine.module, batch)
            mask = batch.get("attention_mask")
            if isinstance(mask, Tensor) and mask.shape == tokens.shape[:2]:  # a model would make one of its part only
                batch["attention_mask"], padding = None, None if bool(mask.all()) else mask == 0
        pieces: dict[int, Tensor] = {}

        def cut(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != length:
                return leaf
            if id(leaf) not in pieces:
                mine = leaf.chunk(self.size, dim)[self.rank]
                piece = pieces[id(leaf)] = mine.clone(memory_format=torch.contiguous_format)
                HiddenAttribute.put(piece, Part(dim, length, padding, id(leaf) in made))
            return pieces[id(leaf)]

        return walk(cut, batch, "")

    @contextlib.contextmanager
    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Around a forward, or a method of the user's. Collective where it is given parts."""
        leaves = _tensors((args, kwargs))
        parts = [part for leaf in leaves.values() if (part := _part_of(leaf)) is not None]
        if len({part.length for part in parts}) > 1 or (parts and self.whole):
            what = "parts inside of accel.whole_sequences" if self.whole else "parts of sequences of different lengths"
            raise BackendError(f"a forward of {self.label} with {what}")
        if not parts and not self.whole and (any(t.dim() for t in leaves.values()) or function is self._engine.entry):
            raise BackendError(
                f"{self.label} with sequence_parallel={self.size} was given tensors that are no parts of a sequence: call it "
                "with batch = accel.shard_sequence(model, batch), after the last change of its tensors (.to(device), slices), or "
                "with whole sequences inside of accel.whole_sequences(model)"
            )
        exchange = None
        if parts:
            found = [(path, leaf.dim(), _part_of(leaf)) for path, leaf in leaves.items()]
            kinds = [(path, dims, part and (part.dim, part.made)) for path, dims, part in found]
            kind, part = (getattr(function, "__name__", ""), *kinds), max(parts, key=lambda p: p.padding is not None)
            count = self._checked.get(kind, 1)
            if count and not count & (count - 1) and self._check(function, (args, kwargs), part):
                count = -1  # not again
            self._checked[kind] = count and count + 1
            exchange = Exchange(self, part.length, part.padding, self.size)
        with self._running(exchange):
            yield
        if exchange is not None and not exchange.calls:
            raise BackendError(f"no attention of {self.label} exchanged its parts: {_HOW}")

    @contextlib.contextmanager
    def _running(self, exchange: Exchange | None) -> Iterator[None]:
        fast, self.running = torch.backends.mha.get_fastpath_enabled(), True
        # That of nn.TransformerEncoder calls no function of torch for attention.
        torch.backends.mha.set_fastpath_enabled(fast and exchange is None)
        try:
            with within(exchange):
                yield
        finally:
            self.running = False
            torch.backends.mha.set_fastpath_enabled(fast)

    def _check(self, function: Callable[..., Any], given: Any, part: Part) -> bool:
        """Compute a short sequence whole and in parts, and refuse a model that gives something else. Collective.

        Says whether all was seen: the labels of a short sequence may all be ignored, which makes a loss nan.
        """
        n = part.length // self.size
        if all(_part_of(leaf) is not None or not leaf.dim() for leaf in _tensors(given).values()):
            n = min(_SHORT, n)  # else a mask of the whole sequence may be among them
        length, padding = n * self.size, None if part.padding is None else part.padding[:, : n * self.size]

        def short(path: str, leaf: Any, size: int) -> Any:
            own = _part_of(leaf)
            if own is None or (own.made and size == 1):
                return leaf if own is None else None
            pieces = [torch.empty_like(leaf) for _ in range(self.size)]
            dist.all_gather(pieces, leaf, group=self.group)
            whole = torch.cat(pieces, own.dim).narrow(own.dim, 0, length)
            if own.made and path.endswith('"shift_labels"]'):
                whole[:, -1] = _IGNORED  # where this sequence ends
            return whole if size == 1 else whole.chunk(size, own.dim)[self.rank].contiguous()

        engine, outputs = self._engine, []
        # Without autocast, which would hide what is small.
        run: Callable[..., Any] = engine.run
        if engine.precision.storage is not None:
            run = lambda *call: engine.precision.call(engine.run, call, {})  # noqa: E731
        plain = engine.entry is engine.module
        uncompiled: Any = contextlib.nullcontext() if plain else torch.compiler.set_stance("force_eager")
        with torch.no_grad(), _as_before(engine.module), uncompiled:
            for size in (1, self.size):
                args, kwargs = walk(lambda path, leaf, size=size: short(path, leaf, size), given, "")  # type: ignore[misc]
                exchange = Exchange(self, length, padding, size)
                with self._running(exchange):
                    outputs.append(_tensors(run(function, args, kwargs)))
        problem, seen = self._difference(outputs[0], outputs[1], n, part.dim)
        if problem:
            calls = "" if exchange.calls else "no call of scaled_dot_product_attention came; "
            raise BackendError(
                f"{self.label} computes something else from parts of a sequence than from the whole: {problem}; {calls}{_HOW}"
            )
        return seen

    def _difference(self, whole: dict[str, Tensor], mine: dict[str, Tensor], n: int, dim: int) -> tuple[str, bool]:
        """Where outputs are no parts of the whole one, the same on every rank. Collective."""
        problem = "" if whole.keys() == mine.keys() else f"the outputs are {', '.join(whole)} and {', '.join(mine)}"
        half = getattr(self._engine.options, "param_dtype", None) is not None or any(
            t.is_floating_point() and t.itemsize < 4 for t in (*mine.values(), *self._engine.module.parameters())
        )
        room = 5e-2 if half else 1e-4 if torch.get_float32_matmul_precision() == "highest" else 1e-2
        numbers = {}
        for path, part in mine.items() if not problem else ():
            if part.dim() or whole[path].dim():
                if not _same(self._part(whole[path], part, n, dim), part, room):
                    problem = f"{path} of shape {tuple(part.shape)} has other values than that part of the whole one"
            else:
                numbers[path] = float(whole[path]), float(part)  # of a mean each rank has its share
        told = agree(f"a short sequence ({self.label})", (problem, numbers))
        problems = [text for text, _ in told if text]
        for first in range(0, len(told), self.size) if not problems else ():
            for path, (one, _) in told[first][1].items():
                mean = sum(theirs[path][1] for _, theirs in told[first : first + self.size]) / self.size
                if not abs(mean - one) <= room * abs(one) and (one == one or mean == mean):
                    problems.append(f"{path} is {one:.6g} for the whole, and {mean:.6g} as the mean of its parts")
        return problems[0] if problems else "", all(one == one for _, theirs in told for one, _ in theirs.values())

    def _part(self, whole: Tensor, like: Tensor, n: int, dim: int) -> Tensor:
        """This rank's part of an output, which may have batch and sequence in one dimension."""
        apart = [d for d, (a, b) in enumerate(zip(whole.shape, like.shape, strict=False)) if a == self.size * b != b]
        if len(apart) != 1:
            return whole
        d = apart[0]
        if dim == 0 or like.shape[d] % n:
            return whole.chunk(self.size, d)[self.rank]
        parts: Tensor = whole.unflatten(d, (-1, self.size, n))
        return parts.select(d + 1, self.rank).flatten(d, d + 1)


def _same(one: Tensor, other: Tensor, room: float) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(one.double().nan_to_num().abs().max()) if one.numel() else 0.0
    near: bool = torch.allclose(one.double(), other.double(), 0, room * scale, equal_nan=True)
    return near


@contextlib.contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Inside, the module evaluates; afterwards nothing has changed."""
    training, states = {m: m.training for m in module.modules()}, torch_states()
    buffers = [(b, b.clone()) for b in module.buffers()]
    try:
        for child in training:
            child.training = False
        yield
    finally:
        for child, was in training.items():
            child.training = was
        put_torch_states(states)
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


# -- what the attention of a forward exchanges -------------------------------------------------------------------------

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
        heads = math.lcm(key.shape[1], self.size) if kwargs.get("enable_gqa") else query.shape[1]
        times = heads // key.shape[1]
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
                every = torch.ones(self._length, self._length, dtype=torch.bool, device=none.device)
                self._causal = every.tril() & ~none
            return self._causal
        if mask is None:
            return ~none
        return mask & ~none if mask.dtype is torch.bool else mask.masked_fill(none, -math.inf)

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

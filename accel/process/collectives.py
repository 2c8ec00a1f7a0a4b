"""Collectives over nested containers of tensors, numbers and other objects."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import AccelError, RankMismatchError, described
from ..trees import map_tensors, walk
from . import current
from .control import Waiting, agree, locked
from .packing import broadcast_, bytes_of, is_dense, to_bytes, to_tensor

T = TypeVar("T")

# The reduction of tensors over the ranks, and of the list of all ranks' numbers.
_OPS: Final[Mapping[str, tuple[Any, Callable[[Sequence[Any]], Any]]]] = {
    "sum": (dist.ReduceOp.SUM, sum),
    "mean": (dist.ReduceOp.SUM, lambda values: sum(values) / len(values)),
    "max": (dist.ReduceOp.MAX, max),
    "min": (dist.ReduceOp.MIN, min),
    "product": (dist.ReduceOp.PRODUCT, math.prod),
}


# -- public functions ------------------------------------------------------------------------------


@overload
def all_reduce(data: int, op: Literal["mean"]) -> float: ...
@overload
def all_reduce(data: T, op: str = "sum") -> T: ...
@locked
@torch.no_grad()
def all_reduce(data: T, op: str = "sum") -> T:
    """Combine each tensor and number over the ranks. Collective.

    The result of a tensor is the reduction of the stacked tensors of all ranks: bool and integer
    tensors add as int64, their mean has the default dtype, and NaN wins in "max" and "min". Results
    are new tensors without gradients. On one process you get your own tensors back. None stays
    None.

    Args:
        data: a tensor or number, or nested dicts, lists, tuples, namedtuples and dataclasses.
        op: "sum", "mean", "max", "min" or "product".

    Raises:
        RankMismatchError: structure, shapes, dtypes or ``op`` differ between ranks.
        AccelError: a leaf is not a tensor or number, or ``op`` is unknown.
    """

    def number(leaf: Any) -> tuple[str, Any]:
        # NumPy's scalars count as numbers.
        if isinstance(leaf, int | float | complex) or getattr(leaf, "shape", None) == ():
            return "a number", leaf
        raise AccelError(f"{described(leaf)}; expected a tensor or number")

    problem = "" if op in tuple(_OPS) else f"expected op to be one of {', '.join(_OPS)}"
    exchange = _Exchange(f"all_reduce(op={op!r})", data, number, problem=problem)
    results = {}
    for path, tensor in exchange.tensors.items():
        if tensor.is_complex() and op not in ("sum", "mean"):
            raise AccelError(f"{exchange.call}: {path} is complex, which has no {op} over ranks")
        if len(exchange.all_shapes) > 1:
            results[path] = _reduce_tensor(exchange, tensor, op)
        else:
            results[path] = _without_gradient(tensor).to(_reduced_dtype(tensor.dtype, op))
    for path in exchange.others:
        results[path] = _reduce_numbers([others[path] for others in exchange.all_others], op)
    reduced: T = exchange.replaced(results)
    return reduced


@overload
def all_gather(
    data: T, *, gradients: bool = False, pad: float | None = None, objects: Literal[False] = False
) -> T: ...
@overload
def all_gather(
    data: Any, *, gradients: bool = False, pad: float | None = None, objects: bool
) -> Any: ...
@locked
def all_gather(
    data: Any, *, gradients: bool = False, pad: float | None = None, objects: bool = False
) -> Any:
    """Concatenate each tensor of all ranks along its first dimension. Collective.

    The first dimension may differ between ranks. Tensors without dimensions become a tensor with a
    value per rank. On one process you get your own tensors back. None stays None.

    Args:
        data: a tensor, or nested dicts, lists, tuples, namedtuples and dataclasses of tensors.
        gradients: let gradients flow back, as a contrastive loss over all ranks' samples needs.
            Every rank must then use the result in its loss, because backward is a collective too.
        pad: the value that fills the other dimensions up to the longest of all ranks, because
            ``generate`` returns different lengths.
        objects: gather any object that can be pickled. The lists of all ranks are joined, and any
            other object becomes a list with an item per rank. Tensors arrive on your device.

    Raises:
        RankMismatchError: structure, dtypes or the other dimensions differ between ranks.
        AccelError: a leaf is not a tensor, or can't be pickled.
    """
    return gather(data, gradients=gradients, pad=pad, objects=objects)


def gather(
    data: Any,
    *,
    gradients: bool = False,
    pad: float | None = None,
    objects: bool = False,
    problem: str = "",
) -> Any:
    """Gather as ``all_gather`` does. If a rank has a ``problem``, all ranks raise AccelError."""

    def pickled(leaf: Any) -> tuple[str, Any]:
        return "a list of objects" if isinstance(leaf, list) else "an object", _pack(leaf)

    gradients = gradients and torch.is_grad_enabled()
    given = {"gradients": gradients, "pad": pad, "objects": objects}
    texts = [f"{name}={value!r}" for name, value in given.items() if value not in (False, None)]
    exchange = _Exchange(
        f"all_gather({', '.join(texts)})",
        data,
        pickled if objects else _refuse,
        objects=objects,
        free_dims=1 if pad is None else sys.maxsize,
        problem=problem,
    )
    results: dict[str, Any] = {}
    for path in exchange.others:
        items = [_unpack(others[path]) for others in exchange.all_others]
        results[path] = sum(items, []) if isinstance(items[0], list) else items
    place = exchange.process.place
    for path, tensor in exchange.tensors.items():
        if place.world_size == 1:
            results[path] = tensor if gradients else _without_gradient(tensor)
            continue
        if pad is not None:
            sizes = zip(*(shapes[path] for shapes in exchange.all_shapes), strict=True)
            tensor = _padded(tensor, list(map(max, sizes)), pad)
        rows = exchange.rows(path)
        results[path] = _gather_rows(exchange, tensor, rows)
        if gradients and tensor.requires_grad:
            start = sum(rows[: place.rank])
            results[path] = _with_gradient(tensor, results[path], start)
    return exchange.replaced(results)


@locked
@torch.no_grad()
def broadcast(data: T, src: int = 0, *, objects: bool = False) -> T:
    """Return the tensors of rank ``src`` on every rank. Collective.

    On one process you get your own tensors back. None stays None.

    Args:
        data: a tensor, or nested dicts, lists, tuples, namedtuples and dataclasses of tensors.
        src: the rank that sends.
        objects: send any object that can be pickled. The other ranks may pass anything, such as
            None. Tensors arrive on your device.

    Raises:
        RankMismatchError: structure, shapes, dtypes, ``objects`` or ``src`` differ between ranks.
        AccelError: a leaf is not a tensor or can't be pickled, or ``src`` is not a rank.
    """
    process = current()
    rank, world = process.place.rank, process.place.world_size
    call = f"broadcast(src={src!r}{', objects=True' if objects else ''})"
    is_rank = type(src) is int and 0 <= src < world
    problem = "" if is_rank else f"expected src to be a rank from 0 to {world - 1}"
    sent: Any = data
    if objects:
        sent = torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            sent = to_tensor(_pack(data)) if rank == src else sent
        except AccelError as error:
            problem = str(error)
    exchange = _Exchange(call, sent, _refuse, free_dims=int(objects), problem=problem)
    if world == 1:
        own = {path: _without_gradient(tensor) for path, tensor in exchange.tensors.items()}
        return data if objects else exchange.replaced(own)
    if objects and rank != src:
        exchange.tensors["data"] = sent.new_empty(exchange.rows("data")[src])
    copies = [bytes_of(tensor, exchange.carrier).clone() for tensor in exchange.tensors.values()]
    with Waiting(process, call):
        broadcast_(copies, process.group, src)
    results = {}
    for (path, tensor), copy in zip(exchange.tensors.items(), copies, strict=True):
        results[path] = copy.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)
    received: T = _unpack(to_bytes(results["data"])) if objects else exchange.replaced(results)
    return received


# -- leaves ----------------------------------------------------------------------------------------


def walked(visit: Callable[[str, Any], Any], data: T, objects: bool) -> T:
    """Return the data with ``visit(path, leaf)`` in each leaf's place.

    With ``objects``, a list is a leaf. So is a tuple of texts, which torch's collate makes from a
    batch of texts.
    """

    def is_leaf(tree: Any) -> bool:
        is_texts = type(tree) is tuple and len(tree) > 0 and isinstance(tree[0], str | bytes)
        return objects and (isinstance(tree, list) or is_texts)

    def visit_list(path: str, leaf: Any) -> Any:
        return visit(path, list(leaf) if is_leaf(leaf) else leaf)

    return walk(visit_list, data, "data", is_leaf)


def _refuse(leaf: Any) -> tuple[str, Any]:
    expected = "expected a tensor, or dicts, lists and tuples of tensors"
    raise AccelError(f"{described(leaf)}; {expected}; objects=True sends what can be pickled")


def _dense(tensor: Tensor) -> Tensor:
    # A gradient of FSDP, or its norm. Only this rank's shard would be sent.
    if hasattr(tensor, "full_tensor"):
        raise AccelError("a DTensor; call full_tensor() first")
    if not is_dense(tensor):
        raise AccelError(f"a {tensor.layout} tensor on {tensor.device}; expected a dense tensor")
    return tensor


def _pack(leaf: Any) -> bytearray:
    def copied(tensor: Tensor) -> Tensor:
        # torch.save writes the whole storage, also for a single row of a dataset.
        return _dense(tensor).detach().clone()

    buffer = io.BytesIO()
    try:
        torch.save(map_tensors(copied, leaf, others=True), buffer)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        kind = type(leaf).__qualname__
        raise AccelError(f"a {kind} that cannot be pickled: {reason}") from error
    return bytearray(buffer.getbuffer())


def _unpack(content: bytearray) -> Any:
    def place(storage: Any, location: str) -> Any:
        target = location if location == "cpu" else str(current().device)
        return torch.serialization.default_restore_location(storage, target)

    return torch.load(io.BytesIO(content), map_location=place, weights_only=False)


def _without_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


class _Exchange:
    """The leaves of this rank's data by path, compared over the ranks.

    Attributes:
        tensors: leaves that torch.distributed sends.
        others: leaves that are sent with the comparison: numbers, and pickled objects.
        carrier: the device on which tensors travel.
        all_shapes, all_others: every rank's shapes and other leaves.
    """

    def __init__(
        self,
        call: str,
        data: Any,
        accept: Callable[[Any], tuple[str, Any]],
        *,
        objects: bool = False,
        free_dims: int = 0,
        problem: str = "",
    ) -> None:
        """Raise on every rank if the leaves differ or a rank has a problem. Collective.

        Args:
            accept: returns the kind of a leaf that isn't a tensor, and the value to send.
            free_dims: how many dimensions of a tensor may have different sizes on the ranks.
        """
        self.call, self.data, self.objects = call, data, objects
        self.process = current()
        self.tensors: dict[str, Tensor] = {}
        self.others: dict[str, Any] = {}
        kinds: dict[str, str] = {}

        def visit(path: str, leaf: Any) -> Any:
            nonlocal problem
            try:
                if isinstance(leaf, Tensor):
                    self.tensors[path] = _dense(leaf)
                elif leaf is None and not objects:
                    kinds[path] = "None"
                else:
                    kinds[path], self.others[path] = accept(leaf)
            except AccelError as error:
                problem = problem or f"{path} is {error}"
            return leaf

        walked(visit, data, objects)
        # The order of a dict's keys may differ between ranks.
        self.tensors = dict(sorted(self.tensors.items()))
        on_cpu = all(tensor.device.type == "cpu" for tensor in self.tensors.values())
        through_cpu = on_cpu and "cpu" in self.process.backends
        self.carrier = torch.device("cpu") if through_cpu else self.process.carrier
        shapes = {}
        for path, tensor in self.tensors.items():
            shapes[path] = tuple(tensor.shape)
            sizes = list(map(str, tensor.shape))
            sizes[:free_dims] = ["any"] * len(sizes[:free_dims])
            kind = f"{tensor.dtype} of shape ({', '.join(sizes)}) sent on {self.carrier.type}"
            kinds[path] = kind
        answers = agree(call, (problem, kinds, shapes, self.others))
        hint = ". Pass pad=value to fill the shorter ones" if free_dims == 1 else ""
        _compare(call, [(text, kinds) for text, kinds, *_ in answers], hint)
        self.all_shapes = [shapes for _, _, shapes, _ in answers]
        self.all_others = [others for *_, others in answers]

    def rows(self, path: str) -> list[int]:
        """Return each rank's number of rows."""
        return [shapes[path][0] if shapes[path] else 1 for shapes in self.all_shapes]

    def replaced(self, results: Mapping[str, Any]) -> Any:
        """Return the data with the results in the places of the leaves. None stays None."""
        return walked(lambda path, leaf: results.get(path), self.data, self.objects)


def _compare(call: str, answers: Sequence[tuple[str, dict[str, str]]], hint: str) -> None:
    for rank, (problem, _) in enumerate(answers):
        if problem:
            raise AccelError(f"{call} on rank {rank}: {problem}")
    first = answers[0][1]
    for rank, (_, other) in enumerate(answers):
        for path in sorted(first.keys() | other.keys()):
            here, there = first.get(path, "absent"), other.get(path, "absent")
            if here != there:
                text = f"{path} is {here} on rank 0 and {there} on rank {rank}"
                raise RankMismatchError(f"{call}: {text}{hint}")


# -- single leaves ---------------------------------------------------------------------------------


def _reduce_numbers(values: Sequence[Any], op: str) -> Any:
    plain = [value.item() if hasattr(value, "item") else value for value in values]
    if op in ("max", "min"):
        for value in plain:
            if value != value:
                return value  # NaN, which Python's max ignores unless it is the first
    return _OPS[op][1](plain)


def _reduced_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex or op in ("max", "min"):
        return dtype
    return torch.get_default_dtype() if op == "mean" else torch.int64


def _reduce_tensor(exchange: _Exchange, tensor: Tensor, op: str) -> Tensor:
    # All backends reduce these dtypes, without overflow or loss.
    narrow = torch.float32 if tensor.is_floating_point() else torch.int64
    narrow = torch.complex64 if tensor.is_complex() else narrow
    wide = tensor.detach().to(
        exchange.carrier, torch.promote_types(tensor.dtype, narrow), copy=True
    )
    wide = torch.view_as_real(wide.resolve_conj()) if tensor.is_complex() else wide
    wide, group = wide.contiguous(), exchange.process.group
    is_nan = wide.isnan().to(torch.uint8) if op in ("max", "min") else None
    with Waiting(exchange.process, exchange.call):
        dist.all_reduce(wide, _OPS[op][0], group=group)
        if is_nan is not None and wide.is_floating_point():
            # Backends compare numbers, and every comparison with NaN is false.
            dist.all_reduce(is_nan, dist.ReduceOp.MAX, group=group)
            wide.masked_fill_(is_nan.bool(), math.nan)
    wide = wide / exchange.process.place.world_size if op == "mean" else wide
    wide = torch.view_as_complex(wide) if tensor.is_complex() else wide
    return wide.to(tensor.device, _reduced_dtype(tensor.dtype, op))


def _padded(tensor: Tensor, longest: Sequence[int], value: float) -> Tensor:
    """Fill all dimensions but the first."""
    padded = tensor.new_full((*tensor.shape[:1], *longest[1:]), value)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded


@torch.no_grad()
def _gather_rows(exchange: _Exchange, tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the rows of all ranks. They travel as bytes, in messages of equal lengths."""
    width = math.prod(tensor.shape[1:]) * tensor.itemsize
    sent = torch.zeros(max(rows) * width, dtype=torch.uint8, device=exchange.carrier)
    sent[: tensor.nbytes] = bytes_of(tensor, exchange.carrier)
    received = [torch.empty_like(sent) for _ in rows]
    with Waiting(exchange.process, exchange.call):
        dist.all_gather(received, sent, group=exchange.process.group)
    parts = [part[: number * width] for part, number in zip(received, rows, strict=True)]
    values = torch.cat(parts).view(tensor.dtype)
    return values.reshape(sum(rows), *tensor.shape[1:]).to(tensor.device)


class _WithGradient(torch.autograd.Function):
    """The rows of all ranks, as a function of this rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: Tensor, start: int) -> Tensor:
        ctx.shape, ctx.start = tensor.shape, start
        return rows.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        number = ctx.shape[0] if ctx.shape else 1
        own_rows = all_reduce(grad)[ctx.start : ctx.start + number]
        return own_rows.reshape(ctx.shape), None, None


_with_gradient: Any = _WithGradient.apply

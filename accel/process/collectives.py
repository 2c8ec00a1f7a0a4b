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

from ..errors import AccelError, RankMismatchError, described, text_of_error
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
    problem = "" if op in _OPS else f"expected op to be one of {', '.join(_OPS)}"
    exchange = _Exchange(f"all_reduce(op={op!r})", data, _number, problem=problem)
    results: dict[str, Any] = {}
    for path in exchange.tensors:
        results[path] = _reduce_tensor(exchange, path, op)
    for path in exchange.others:
        results[path] = _reduce_numbers(exchange.sent_by_all(path), op)
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
    data: Any, *, pad: float | None, objects: bool, gradients: bool = False, problem: str = ""
) -> Any:
    """Gather as ``all_gather`` does. If a rank has a ``problem``, all ranks raise AccelError."""
    gradients = gradients and torch.is_grad_enabled()
    call = f"all_gather(gradients={gradients}, pad={pad}, objects={objects})"
    accept = _pickled if objects else _refuse
    free_dims = 1 if pad is None else sys.maxsize
    exchange = _Exchange(call, data, accept, objects, free_dims, problem)
    gather_with_gradient: Any = _GatherWithGradient.apply
    results: dict[str, Any] = {}
    for path in exchange.others:
        items = list(map(_unpack, exchange.sent_by_all(path)))
        results[path] = sum(items, []) if isinstance(items[0], list) else items
    for path, tensor in exchange.tensors.items():
        if pad is not None:
            tensor = _padded(tensor, exchange.sent_by_all(path), pad)
        if not gradients or not tensor.requires_grad:
            results[path] = _gather_rows(tensor, exchange, path)
        elif exchange.world == 1:
            results[path] = tensor
        else:
            results[path] = gather_with_gradient(tensor, exchange, path)
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
    rank, world = current().place.rank, current().place.world_size
    is_rank = type(src) is int and 0 <= src < world
    problem = "" if is_rank else f"expected src to be a rank from 0 to {world - 1}"
    sent: Any = data
    if objects:
        sent = torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            sent = to_tensor(_pack(data)) if rank == src else sent
        except AccelError as error:
            problem = str(error)
    call = f"broadcast(src={src!r}, objects={objects})"
    exchange = _Exchange(call, sent, _refuse, free_dims=int(objects), problem=problem)
    if world == 1:
        return data if objects else exchange.replaced(map_tensors(_detached, exchange.tensors))
    if objects and rank != src:
        exchange.tensors["data"] = sent.new_empty(exchange.sent_by_all("data")[src])
    copies: dict[str, Tensor] = {}
    for path, tensor in exchange.tensors.items():
        copies[path] = tensor.detach().to(exchange.carrier, copy=True)
    with Waiting(exchange.process, call):
        broadcast_(copies.values(), exchange.group, src)
    for path, tensor in exchange.tensors.items():
        copies[path] = copies[path].to(tensor.device)
    received: T = _unpack(to_bytes(copies["data"])) if objects else exchange.replaced(copies)
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


def _number(leaf: Any) -> tuple[str, Any]:
    # NumPy's scalars count as numbers.
    if isinstance(leaf, int | float | complex) or getattr(leaf, "shape", None) == ():
        return "a number", leaf.item() if hasattr(leaf, "item") else leaf
    raise AccelError(f"{described(leaf)}; expected a tensor or number")


def _pickled(leaf: Any) -> tuple[str, Any]:
    return "a list of objects" if isinstance(leaf, list) else "an object", _pack(leaf)


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


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _pack(leaf: Any) -> bytearray:
    def copied(tensor: Tensor) -> Tensor:
        # torch.save writes the whole storage, also for a single row of a dataset.
        return _dense(tensor).detach().clone()

    buffer = io.BytesIO()
    try:
        torch.save(map_tensors(copied, leaf), buffer)
    except Exception as error:
        text = f"a {type(leaf).__qualname__} that cannot be pickled: {text_of_error(error)}"
        raise AccelError(text) from error
    return bytearray(buffer.getbuffer())


def _unpack(content: bytearray) -> Any:
    def place(storage: Any, location: str) -> Any:
        target = location if location == "cpu" else str(current().device)
        return torch.serialization.default_restore_location(storage, target)

    return torch.load(io.BytesIO(content), map_location=place, weights_only=False)


class _Exchange:
    """The leaves of this rank's data by path, compared over the ranks.

    Attributes:
        tensors: leaves that torch.distributed sends.
        others: the paths of the leaves that travel with the comparison.
        carrier: the device on which the tensors travel.
    """

    def __init__(
        self,
        call: str,
        data: Any,
        accept: Callable[[Any], tuple[str, Any]],
        objects: bool = False,
        free_dims: int = 0,
        problem: str = "",
    ) -> None:
        """Raise on every rank if the leaves differ or a rank has a problem. Collective.

        ``accept`` returns the kind of a leaf beside the tensors, and the value to send. The first
        ``free_dims`` dimensions of a tensor may have different sizes on the ranks.
        """
        self.call, self._data, self._objects = call, data, objects
        process = self.process = current()
        self.rank, self.world = process.place.rank, process.place.world_size
        self.group = process.group
        self.tensors: dict[str, Tensor] = {}
        leaves: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        sent: dict[str, Any] = {}  # numbers and pickled objects, then shapes
        walked(leaves.setdefault, data, objects)
        # The order of a dict's keys may differ between ranks.
        for path in sorted(leaves):
            leaf = leaves[path]
            try:
                if isinstance(leaf, Tensor):
                    self.tensors[path] = _dense(leaf)
                elif leaf is None and not objects:
                    kinds[path] = "None"
                else:
                    kinds[path], sent[path] = accept(leaf)
            except AccelError as error:
                problem = problem or f"{path} is {error}"
        self.others = list(sent)
        self.carrier = self._choose_carrier()
        for path, tensor in self.tensors.items():
            sent[path] = tuple(tensor.shape)
            sizes = list(map(str, tensor.shape))
            sizes[:free_dims] = ["any"] * len(sizes[:free_dims])
            shape = ", ".join(sizes)
            kinds[path] = f"{tensor.dtype} of shape ({shape}) sent on {self.carrier.type}"
        hint = ". Pass pad=value to fill the shorter ones" if free_dims == 1 else ""
        self._answers = agree(call, (problem, kinds, sent))
        self._raise_difference(hint)

    def _choose_carrier(self) -> torch.device:
        for tensor in self.tensors.values():
            if tensor.device.type != "cpu":
                return self.process.carrier
        on_cpu = "cpu" in self.process.backends
        return torch.device("cpu") if on_cpu else self.process.carrier

    def _raise_difference(self, hint: str) -> None:
        for rank, (problem, _, _) in enumerate(self._answers):
            if problem:
                raise AccelError(f"{self.call} on rank {rank}: {problem}")
        first = self._answers[0][1]
        for rank, (_, other, _) in enumerate(self._answers):
            for path in sorted(first.keys() | other.keys()):
                here, there = first.get(path, "absent"), other.get(path, "absent")
                if here != there:
                    text = f"{path} is {here} on rank 0 and {there} on rank {rank}"
                    raise RankMismatchError(f"{self.call}: {text}{hint}")

    def sent_by_all(self, path: str) -> list[Any]:
        """Return each rank's shape of a tensor, or its value of another leaf."""
        return [sent[path] for _, _, sent in self._answers]

    def replaced(self, results: Mapping[str, Any]) -> Any:
        """Return the data with the results in the places of the leaves. None stays None."""
        return walked(lambda path, leaf: results.get(path), self._data, self._objects)


# -- single leaves ---------------------------------------------------------------------------------


def _reduce_numbers(values: Sequence[Any], op: str) -> Any:
    if op in ("max", "min"):
        for value in values:
            if value != value:
                return value  # NaN, which Python's max ignores unless it is the first
    return _OPS[op][1](values)


def _reduce_tensor(exchange: _Exchange, path: str, op: str) -> Tensor:
    tensor, world = _detached(exchange.tensors[path]), exchange.world
    is_float = tensor.is_floating_point() or tensor.is_complex()
    dtype = tensor.dtype
    if not is_float and op not in ("max", "min"):
        dtype = torch.get_default_dtype() if op == "mean" else torch.int64
    if world == 1:
        return tensor.to(dtype)
    # All backends reduce these dtypes, without overflow or loss.
    wide_dtype = torch.promote_types(tensor.dtype, torch.float32 if is_float else torch.int64)
    wide = tensor.to(exchange.carrier, wide_dtype, copy=True).resolve_conj().contiguous()
    keeps_nan = is_float and op in ("max", "min")
    is_nan = wide.isnan().to(torch.uint8) if keeps_nan else wide
    with Waiting(exchange.process, exchange.call):
        dist.all_reduce(wide, _OPS[op][0], group=exchange.group)
        if keeps_nan:
            # Backends compare numbers, and every comparison with NaN is false.
            dist.all_reduce(is_nan, dist.ReduceOp.MAX, group=exchange.group)
            wide.masked_fill_(is_nan.bool(), math.nan)
    if op == "mean":
        wide = wide / world
    return wide.to(tensor.device, dtype)


def _padded(tensor: Tensor, shapes: Sequence[tuple[int, ...]], value: float) -> Tensor:
    """Fill all dimensions but the first up to the longest of all ranks."""
    longest = list(map(max, zip(*shapes, strict=True)))[1:]
    if list(tensor.shape[1:]) == longest:
        return tensor
    padded = tensor.new_full((len(tensor), *longest), value)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded


@torch.no_grad()
def _gather_rows(tensor: Tensor, exchange: _Exchange, path: str) -> Tensor:
    """Return the rows of all ranks. They travel as bytes, in messages of equal lengths."""
    rows = _rows_of_all(exchange, path)
    if len(rows) == 1:
        return _detached(tensor)
    width = math.prod(tensor.shape[1:]) * tensor.itemsize
    sent = torch.zeros(max(rows) * width, dtype=torch.uint8, device=exchange.carrier)
    sent[: tensor.nbytes] = bytes_of(tensor, exchange.carrier)
    received = list(sent.repeat(len(rows), 1))
    with Waiting(exchange.process, exchange.call):
        dist.all_gather(received, sent, group=exchange.group)
    for rank, number in enumerate(rows):
        received[rank] = received[rank][: number * width]
    values = torch.cat(received).view(tensor.dtype)
    return values.reshape(sum(rows), *tensor.shape[1:]).to(tensor.device)


def _rows_of_all(exchange: _Exchange, path: str) -> list[int]:
    return [shape[0] if shape else 1 for shape in exchange.sent_by_all(path)]


class _GatherWithGradient(torch.autograd.Function):
    """``_gather_rows``, with a backward that reduces the gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: _Exchange, path: str) -> Tensor:
        rows, rank = _rows_of_all(exchange, path), exchange.rank
        ctx.shape, ctx.rows = tensor.shape, slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        return _gather_rows(tensor, exchange, path).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce(grad)[ctx.rows].reshape(ctx.shape), None, None

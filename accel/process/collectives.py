"""Collectives over nested containers of tensors, numbers and other objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import AccelError, RankMismatchError, described
from ..trees import map_tensors, walk
from . import Process, current
from .control import Waiting, agree, locked
from .packing import broadcast_, bytes_of, is_dense, packed, to_bytes, to_tensor, unpacked

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
    problem = "" if op in tuple(_OPS) else f"expected op to be one of {', '.join(_OPS)}"

    def describe(leaf: Any) -> str:
        if isinstance(leaf, Tensor) and leaf.is_complex() and op not in ("sum", "mean"):
            raise _WrongLeafError(f"complex, which has no {op} over ranks")
        # NumPy's scalars count as numbers.
        number = isinstance(leaf, int | float | complex) or getattr(leaf, "shape", None) == ()
        return "a number" if number and not isinstance(leaf, Tensor) else ""

    call = f"all_reduce(op={op!r})"
    leaves = _Leaves(data, describe, hint="numbers are reduced too", problem=problem)
    shared = _share(call, leaves)
    results: dict[str, Any] = {}
    for path in leaves.sent:
        results[path] = _reduce_numbers([sent[path] for sent in shared.sent], op)
    for path, tensor in shared.tensors.items():
        if len(shared.sent) == 1:
            results[path] = _without_gradient(tensor).to(_reduced_dtype(tensor.dtype, op))
    if len(shared.sent) > 1:
        results |= _reduce_tensors(shared, op, call)
    return _replace(data, results)


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
    gradients = gradients and torch.is_grad_enabled()
    options = {"gradients": gradients, "objects": objects}
    given = [f"{name}=True" for name, value in options.items() if value]
    given += [] if pad is None else [f"pad={pad!r}"]
    call = f"all_gather({', '.join(given)})" if given else "all_gather"

    def describe(leaf: Any) -> str:
        if not objects or isinstance(leaf, Tensor):
            return ""
        return "a list of objects" if isinstance(leaf, list) else "an object"

    hint = "objects=True sends what can be pickled"
    leaves = _Leaves(data, describe, hint=hint, objects=objects, problem=problem)
    shared = _share(call, leaves, any_rows=True, pad=pad, gradients=gradients)
    results: dict[str, Any] = {}
    for path, kind in leaves.sent_kinds.items():
        items = [_unpack(sent[path], shared.process) for sent in shared.sent]
        results[path] = sum(items, []) if kind == "a list of objects" else items
    if len(shared.sent) == 1:
        for path, tensor in shared.tensors.items():
            results[path] = tensor if gradients else _without_gradient(tensor)
        return _replace(data, results, objects)
    results |= _gather_tensors(shared)
    for path, tensor in shared.tensors.items():
        if gradients and tensor.requires_grad:
            start = shared.rows(path)[: shared.process.place.rank]
            results[path] = _with_gradient(tensor, results[path], sum(start))
    return _replace(data, results, objects)


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
    world = process.place.world_size
    call = f"broadcast(src={src!r}{', objects=True' if objects else ''})"
    is_rank = type(src) is int and 0 <= src < world
    problem = "" if is_rank else f"expected src to be a rank from 0 to {world - 1}"
    if objects:
        value: T = _broadcast_object(call, data, src, process, problem)
        return value
    shared = _share(call, _Leaves(data, problem=problem))
    if world == 1:
        own = {path: _without_gradient(tensor) for path, tensor in shared.tensors.items()}
        return _replace(data, own)
    carrier = shared.carrier
    copies = {path: bytes_of(tensor, carrier).clone() for path, tensor in shared.tensors.items()}
    with Waiting(process, call):
        broadcast_(copies.values(), process.group, src)
    results = {}
    for path, tensor in shared.tensors.items():
        values = copies[path].view(tensor.dtype)
        results[path] = values.reshape(tensor.shape).to(tensor.device)
    return _replace(data, results)


def _broadcast_object(call: str, data: Any, src: int, process: Process, problem: str) -> Any:
    content = bytearray()
    if process.place.rank == src:
        try:
            content = _pack(data)
        except Exception as error:
            problem = problem or str(error)
    answers = agree(call, (problem, len(content)))
    for rank, (text, _) in enumerate(answers):
        if text:
            raise AccelError(f"{call} on rank {rank}: {text}")
    if len(answers) == 1:
        return data
    buffer = to_tensor(content or bytes(answers[src][1]))
    return _unpack(to_bytes(broadcast(buffer, src)), process)


# -- the leaves of the data ------------------------------------------------------------------------


class _WrongLeafError(Exception):
    """A leaf can't be sent. The text says why, after "data[0] is"."""


class _Leaves:
    """The leaves of this rank's data by path, and the texts by which the ranks compare them.

    Attributes:
        tensors: leaves that go through torch.distributed.
        sent: other leaves, which go with the comparison: numbers, and objects as bytes.
        kinds: for each path a text that must be equal on all ranks.
        problem: why this rank can't send its data, or an empty text.
    """

    def __init__(
        self,
        data: Any,
        describe: Callable[[Any], str] = lambda leaf: "",
        *,
        hint: str = "objects=True sends what can be pickled",
        objects: bool = False,
        problem: str = "",
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.sent: dict[str, Any] = {}
        self.sent_kinds: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self.problem = problem

        def visit(path: str, leaf: Any) -> Any:
            try:
                kind = describe(leaf)
                if kind:
                    self.sent_kinds[path] = self.kinds[path] = kind
                    self.sent[path] = _pack(leaf) if objects else leaf
                elif leaf is None:
                    self.kinds[path] = "None"
                else:
                    self.tensors[path] = _check_tensor(leaf, hint)
            except _WrongLeafError as error:
                self.problem = self.problem or f"{path} is {error}"
            return leaf

        walked(visit, data, objects)
        self.tensors = {path: self.tensors[path] for path in sorted(self.tensors)}


def walked(visit: Callable[[str, Any], Any], data: T, objects: bool) -> T:
    """Return the data with ``visit(path, leaf)`` in each leaf's place.

    With ``objects``, a list is a leaf. So is a tuple of texts, which torch's collate makes from a
    batch of texts.
    """
    if not objects:
        return walk(visit, data, "data")

    def is_texts(tree: Any) -> bool:
        plain = type(tree) is tuple and len(tree) > 0
        return plain and all(isinstance(item, str | bytes) for item in tree)

    def visit_list(path: str, leaf: Any) -> Any:
        return visit(path, list(leaf) if is_texts(leaf) else leaf)

    return walk(visit_list, data, "data", lambda tree: isinstance(tree, list) or is_texts(tree))


def _check_tensor(leaf: Any, hint: str = "") -> Tensor:
    if not isinstance(leaf, Tensor):
        expected = "expected a tensor, or dicts, lists and tuples of tensors"
        raise _WrongLeafError(f"{described(leaf)}; {expected}; {hint}")
    if type(leaf) is not Tensor and hasattr(leaf, "full_tensor"):
        raise _WrongLeafError("a DTensor; call full_tensor() first")
    if not is_dense(leaf):
        kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else leaf.layout
        raise _WrongLeafError(f"a {kind} tensor on {leaf.device}; expected a dense tensor")
    return leaf


def _pack(leaf: Any) -> bytearray:
    try:
        return to_bytes(packed(map_tensors(_check_tensor, leaf)))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        kind = type(leaf).__qualname__
        raise _WrongLeafError(f"a {kind} that cannot be pickled: {reason}") from error


def _unpack(content: bytearray, process: Process) -> Any:
    try:
        return unpacked(torch.frombuffer(content, dtype=torch.uint8), process.device)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise AccelError(f"A received object can't be unpickled: {reason}") from error


def _without_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _replace(data: T, results: Mapping[str, Any], objects: bool = False) -> T:
    """Return the data with the results in the places of the leaves. None stays None."""
    return walked(lambda path, leaf: results.get(path), data, objects)


# -- comparing the leaves over the ranks -----------------------------------------------------------


@dataclass(frozen=True)
class _Shared:
    """This rank's tensors, and the shapes and sent leaves of all ranks, after they were compared.

    Attributes:
        carrier: the device on which tensors travel.
    """

    process: Process
    carrier: torch.device
    tensors: dict[str, Tensor]
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, path: str) -> list[int]:
        """Return each rank's number of rows."""
        return [shapes[path][0] if shapes[path] else 1 for shapes in self.shapes]


def _share(
    call: str,
    leaves: _Leaves,
    *,
    any_rows: bool = False,
    pad: float | None = None,
    gradients: bool = False,
) -> _Shared:
    """Compare the ranks' leaves. Raise on every rank if they differ or a rank has a problem."""
    process = current()
    only_cpu = all(tensor.device.type == "cpu" for tensor in leaves.tensors.values())
    through_cpu = only_cpu and "cpu" in process.backends
    carrier = torch.device("cpu") if through_cpu else process.carrier
    for path, tensor in leaves.tensors.items():
        size = ["any"] * tensor.dim() if pad is not None else [str(n) for n in tensor.shape]
        size[:1] = ["any"] if any_rows and size else size[:1]
        carried = " with gradients" if gradients and tensor.requires_grad else ""
        shape = ", ".join(size)
        leaves.kinds[path] = f"{tensor.dtype} of shape ({shape}){carried} sent on {carrier.type}"
    shapes = {path: tuple(tensor.shape) for path, tensor in leaves.tensors.items()}
    answers = agree(call, (leaves.problem, leaves.kinds, shapes, leaves.sent))
    for rank, (problem, *_) in enumerate(answers):
        if problem:
            raise AccelError(f"{call} on rank {rank}: {problem}")
    first = answers[0][1]
    for rank, (_, kinds, *_) in enumerate(answers):
        for path in sorted(first.keys() | kinds.keys()):
            if first.get(path) != kinds.get(path):
                here, there = first.get(path, "absent"), kinds.get(path, "absent")
                text = f"{call}: {path} is {here} on rank 0 and {there} on rank {rank}"
                if any_rows and here.partition(" of shape ")[0] == there.partition(" of shape ")[0]:
                    text += "; pad=value fills what is shorter"
                raise RankMismatchError(text)
    tensors = leaves.tensors
    all_shapes = [shapes for _, _, shapes, _ in answers]
    if pad is not None and len(answers) > 1:
        tensors, all_shapes = _pad_tensors(tensors, all_shapes, pad)
    sent = [sent for *_, sent in answers]
    return _Shared(process, carrier, tensors, all_shapes, sent)


# -- all_reduce ------------------------------------------------------------------------------------


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


def _reduce_tensors(shared: _Shared, op: str, call: str) -> dict[str, Tensor]:
    wide = {path: _widen(tensor.detach()) for path, tensor in shared.tensors.items()}
    results = {}
    for dtype in sorted({tensor.dtype for tensor in wide.values()}, key=str):
        paths = [path for path, tensor in wide.items() if tensor.dtype is dtype]
        flat = torch.cat([wide[path].reshape(-1).to(shared.carrier) for path in paths])
        with Waiting(shared.process, call):
            _reduce_flat(flat, op, shared.process.group)
        if op == "mean":
            flat = flat / shared.process.place.world_size
        pieces = torch.split(flat, [wide[path].numel() for path in paths])
        for path, piece in zip(paths, pieces, strict=True):
            tensor = shared.tensors[path]
            if tensor.is_complex():
                piece = torch.view_as_complex(piece.reshape(-1, 2))
            dtype_of_result = _reduced_dtype(tensor.dtype, op)
            narrow = piece.to(tensor.device, dtype_of_result, copy=True)
            results[path] = narrow.reshape(tensor.shape)
    return results


def _widen(tensor: Tensor) -> Tensor:
    """Convert to a dtype that all backends reduce without overflow or loss."""
    if tensor.is_complex():
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.complex64))
        return torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _reduce_flat(flat: Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    # Backends compare numbers, and every comparison with NaN is false.
    can_hide_nan = op in ("max", "min") and flat.is_floating_point()
    is_nan = flat.isnan().to(torch.uint8) if can_hide_nan else None
    dist.all_reduce(flat, _OPS[op][0], group=group)
    if is_nan is not None:
        dist.all_reduce(is_nan, dist.ReduceOp.MAX, group=group)
        flat.masked_fill_(is_nan.bool(), math.nan)


# -- all_gather ------------------------------------------------------------------------------------


def _pad_tensors(
    tensors: dict[str, Tensor], shapes: list[dict[str, tuple[int, ...]]], pad: float
) -> tuple[dict[str, Tensor], list[dict[str, tuple[int, ...]]]]:
    """Fill all dimensions but the first to the longest of all ranks."""
    padded = {}
    longest = {}
    for path, tensor in tensors.items():
        sizes = zip(*(rank_shapes[path] for rank_shapes in shapes), strict=True)
        longest[path] = [max(size) for size in sizes]
        ends: list[int] = []
        for size, full in zip(tensor.shape[1:], longest[path][1:], strict=True):
            ends = [0, full - size, *ends]  # nn.functional.pad begins with the last dimension
        padded[path] = nn.functional.pad(tensor, ends, value=pad) if any(ends) else tensor
    new_shapes = [
        {path: (*shape[:1], *longest[path][1:]) for path, shape in rank_shapes.items()}
        for rank_shapes in shapes
    ]
    return padded, new_shapes


@torch.no_grad()
def _gather_tensors(shared: _Shared) -> dict[str, Tensor]:
    """Gather all tensors in one collective, as bytes."""
    sizes = []
    for shapes in shared.shapes:
        tensors = shared.tensors.items()
        sizes.append([math.prod(shapes[path]) * tensor.itemsize for path, tensor in tensors])
    longest = max(map(sum, sizes))
    empty = torch.empty(0, dtype=torch.uint8, device=shared.carrier)
    rows = [bytes_of(tensor, shared.carrier) for tensor in shared.tensors.values()]
    sent = torch.cat([empty, *rows])
    sent = nn.functional.pad(sent, (0, longest - len(sent)))
    received = [torch.empty_like(sent) for _ in sizes]
    with Waiting(shared.process, "all_gather"):
        dist.all_gather(received, sent, group=shared.process.group)
    pieces = []
    for buffer, size in zip(received, sizes, strict=True):
        pieces.append(torch.split(buffer[: sum(size)], size))
    results = {}
    for (path, tensor), *parts in zip(shared.tensors.items(), *pieces, strict=True):
        number = sum(shared.rows(path))
        values = torch.cat(parts).view(tensor.dtype)
        results[path] = values.reshape(number, *tensor.shape[1:]).to(tensor.device)
    return results


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

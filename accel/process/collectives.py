"""Collectives over nested containers of the user's tensors, on the default process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import AccelError, RankMismatchError
from ..trees import map_tensors, walk
from . import Process, current
from .control import Waiting, agree, locked
from .packing import broadcast_

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@locked
@torch.no_grad()
def all_reduce(data: T, op: str = "sum") -> T:
    """Combines each tensor over the ranks, as stacking the ranks' tensors and reducing the new dimension would.

    So bool and integer tensors add and multiply as int64, their mean has the default dtype, and NaN wins in "max" and
    "min". The results are new tensors that carry no gradient; on one process they are the given ones.

    Args:
        data: A tensor, or nested dicts, lists, tuples, namedtuples and dataclasses of tensors.
        op: "sum", "mean", "max", "min" or "product".

    Raises:
        RankMismatchError: the ranks differ in structure, shapes, dtypes or ``op``; on every rank.
        AccelError: a leaf is no tensor, ``op`` is unknown or means nothing for a dtype; on every rank.
    """
    what = f"all_reduce(op={op!r})"
    problem = "" if op in tuple(_OPS) else f"expected op to be one of {', '.join(_OPS)}"
    process, carrier, tensors, _ = _begin(what, data, problem, lambda tensor: _irreducible(tensor, op))
    if process.place.world_size == 1:
        return map_tensors(lambda tensor: _free(tensor).to(_reduced_dtype(tensor.dtype, op)), data)
    wide = {path: _widen(tensor.detach()) for path, tensor in tensors.items()}
    results = {}
    for dtype in sorted({tensor.dtype for tensor in wide.values()}, key=str):
        paths = [path for path, tensor in wide.items() if tensor.dtype is dtype]
        flat = torch.cat([wide[path].reshape(-1).to(carrier) for path in paths])
        with Waiting(process, what):
            _reduce(flat, op, process.group)
        flat = flat / process.place.world_size if op == "mean" else flat
        for path, piece in zip(paths, torch.split(flat, [wide[path].numel() for path in paths]), strict=True):
            results[path] = _narrow(piece, tensors[path], op)
    return walk(lambda path, _: results[path], data, "data")


@locked
def all_gather(data: T, *, gradients: bool = False) -> T:
    """Concatenates each tensor of all ranks along its first dimension, which may differ between ranks.

    Tensors without dimensions become one of as many values as there are ranks. On one process, an identity.

    Args:
        data: A tensor, or nested dicts, lists, tuples, namedtuples and dataclasses of tensors.
        gradients: Let gradients flow back, as a contrastive loss over all ranks' samples needs it: each rank's tensor gets the
            sum of all ranks' gradients of its rows. The backward is a collective then: every rank uses the result in its
            loss. Otherwise the results carry no gradient.

    Raises:
        RankMismatchError: the ranks differ in structure, dtypes, the other dimensions, or in what carries a gradient;
            on every rank.
        AccelError: a leaf is no tensor; on every rank.
    """
    carry = gradients and torch.is_grad_enabled()
    what = "all_gather(gradients=True)" if carry else "all_gather"
    process, carrier, tensors, shapes = _begin(what, data, rows=True, gradients=carry)
    if process.place.world_size == 1:
        return data if carry else map_tensors(_free, data)
    results = _gather(process, carrier, tensors, shapes)
    for path in [path for path, tensor in tensors.items() if carry and tensor.requires_grad]:
        start = sum(theirs[path][0] if theirs[path] else 1 for theirs in shapes[: process.place.rank])
        results[path] = _with_gradient(tensors[path], results[path], start)
    return walk(lambda path, _: results[path], data, "data")


@torch.no_grad()
def _gather(
    process: Process, carrier: torch.device, tensors: dict[str, Tensor], shapes: list[dict[str, tuple[int, ...]]]
) -> dict[str, Any]:
    mine = _pack(tensors.values(), carrier)
    sizes = [[math.prod(theirs[path]) * tensor.itemsize for path, tensor in tensors.items()] for theirs in shapes]
    longest = max(map(sum, sizes))
    buffers = [torch.empty(longest, dtype=torch.uint8, device=carrier) for _ in sizes]
    with Waiting(process, "all_gather"):
        dist.all_gather(buffers, nn.functional.pad(mine, (0, longest - mine.numel())), group=process.group)
    pieces = [torch.split(buffer[: sum(size)], size) for buffer, size in zip(buffers, sizes, strict=True)]
    results = {}
    for (path, tensor), *parts in zip(tensors.items(), *pieces, strict=True):
        number = sum(theirs[path][0] if theirs[path] else 1 for theirs in shapes)
        rows = torch.cat(parts).view(tensor.dtype).reshape(number, *tensor.shape[1:])
        results[path] = rows.to(tensor.device)
    return results


class _WithGradient(torch.autograd.Function):
    """A tensor's rows among those of all ranks, as a function of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: Tensor, start: int) -> Tensor:
        ctx.shape, ctx.start = tensor.shape, start
        return rows.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        number = ctx.shape[0] if ctx.shape else 1
        return all_reduce(grad)[ctx.start : ctx.start + number].reshape(ctx.shape), None, None


_with_gradient: Any = _WithGradient.apply


@locked
@torch.no_grad()
def broadcast(data: T, src: int = 0) -> T:
    """Gives every rank the tensors of rank ``src``. On one process, an identity.

    Args:
        data: A tensor, or nested dicts, lists, tuples, namedtuples and dataclasses of tensors.
        src: The rank whose tensors all get.

    Raises:
        RankMismatchError: the ranks differ in structure, shapes, dtypes or ``src``; on every rank.
        AccelError: a leaf is no tensor, or ``src`` is no rank; on every rank.
    """
    what, world = f"broadcast(src={src!r})", current().place.world_size
    problem = "" if type(src) is int and 0 <= src < world else f"expected src to be a rank from 0 to {world - 1}"
    process, carrier, tensors, _ = _begin(what, data, problem)
    if world == 1:
        return map_tensors(_free, data)
    copies = {path: _pack([tensor], carrier) for path, tensor in tensors.items()}
    with Waiting(process, what):
        broadcast_(copies.values(), process.group, src)
    return walk(lambda path, t: copies[path].view(t.dtype).reshape(t.shape).to(t.device), data, "data")


def _begin(
    what: str,
    data: Any,
    problem: str = "",
    refuse: Callable[[Tensor], str] = lambda _: "",
    *,
    rows: bool = False,
    gradients: bool = False,
) -> tuple[Process, torch.device, dict[str, Tensor], list[dict[str, tuple[int, ...]]]]:
    """What all ranks need to begin: where the data travels, this rank's tensors by path, and every rank's shapes.

    Raises on every rank where a rank has a problem or their data does not fit together.
    """
    process = current()
    found: dict[str, Tensor] = {}
    problems = [problem] if problem else []

    def visit(path: str, leaf: Any) -> Any:
        reason = _no_tensor(leaf) or refuse(leaf)
        if reason:
            problems.append(f"{path} is {reason}")
        else:
            found[path] = leaf
        return leaf

    walk(visit, data, "data")
    tensors = {path: found[path] for path in sorted(found)}
    # As CPU tensors, unless they are on devices that have a backend of their own.
    only_cpu = "cpu" in process.backends and all(tensor.device.type == "cpu" for tensor in found.values())
    carrier = torch.device("cpu") if only_cpu else process.carrier
    kinds = {
        path: f"{_describe(tensor, rows)}{' with gradients' if gradients and tensor.requires_grad else ''} sent on {carrier.type}"
        for path, tensor in tensors.items()
    }
    shapes = {path: tuple(tensor.shape) for path, tensor in tensors.items()}
    answers = agree(what, (problems[:1], kinds, shapes))
    for number, (reasons, _, _) in enumerate(answers):
        if reasons:
            raise AccelError(f"{what} on rank {number}: {reasons[0]}")
    for number, (_, theirs, _) in enumerate(answers):
        for path in sorted(kinds.keys() | theirs.keys()):
            first, other = answers[0][1].get(path, "absent"), theirs.get(path, "absent")
            if first != other:
                raise RankMismatchError(f"{what}: {path} is {first} on rank 0 and {other} on rank {number}")
    return process, carrier, tensors, [theirs for _, _, theirs in answers]


def _free(tensor: Tensor) -> Tensor:
    """Without a gradient, as the results on several ranks are."""
    return tensor.detach() if tensor.requires_grad else tensor


def _no_tensor(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__qualname__}; expected a tensor, or dicts, lists and tuples of tensors"
    if hasattr(leaf, "full_tensor"):
        return "a DTensor, of which this rank has a part; call full_tensor() first"
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_meta:
        return f"a {leaf.layout} tensor on {leaf.device}; expected a dense one with values"
    return ""


def _irreducible(tensor: Tensor, op: str) -> str:
    if tensor.is_complex() and op not in ("sum", "mean"):
        return f"complex, which has no {op} over ranks"
    return "uint64, which is not reduced; convert it to int64" if tensor.dtype is torch.uint64 else ""


def _describe(tensor: Tensor, rows: bool) -> str:
    shape = [str(size) for size in tensor.shape]
    if rows and shape:
        shape[0] = "any"
    return f"{tensor.dtype} of shape ({', '.join(shape)})"


def _pack(tensors: Iterable[Tensor], carrier: torch.device) -> Tensor:
    """The bytes of the tensors: no backend refuses a dtype then."""
    dense = (tensor.detach().to(carrier).resolve_conj().resolve_neg().contiguous() for tensor in tensors)
    return torch.cat(
        [torch.empty(0, dtype=torch.uint8, device=carrier), *(t.reshape(-1).view(torch.uint8) for t in dense)]
    )


def _reduced_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex or op in ("max", "min"):
        return dtype
    return torch.get_default_dtype() if op == "mean" else torch.int64


def _widen(tensor: Tensor) -> Tensor:
    """In a dtype in which all backends reduce without overflow or loss."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.promote_types(tensor.dtype, torch.complex64)).resolve_conj())
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _narrow(piece: Tensor, like: Tensor, op: str) -> Tensor:
    if like.is_complex():
        piece = torch.view_as_complex(piece.reshape(*like.shape, 2))
    return piece.reshape(like.shape).to(like.device, _reduced_dtype(like.dtype, op), copy=True)


def _reduce(flat: Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    if op not in ("max", "min") or not flat.is_floating_point():
        dist.all_reduce(flat, _OPS[op], group=group)
        return
    # The backends compare, and every comparison with NaN is false.
    nan = flat.isnan().to(torch.uint8)
    dist.all_reduce(flat, _OPS[op], group=group)
    dist.all_reduce(nan, dist.ReduceOp.MAX, group=group)
    flat.masked_fill_(nan.bool(), math.nan)

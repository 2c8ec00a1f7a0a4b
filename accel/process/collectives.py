"""Collectives over nested containers of the user's tensors, on the default process group; of other values, on accel's own."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
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

#: What the ranks' batches are parts of, and what to do where that differs.
ORDER: Final = "the order of the loader's samples"
ORDERS: Final = (
    "each iteration of a loader is another epoch, also next(iter(loader)) on one rank: begin it on every rank, or use the raw "
    "DataLoader there"
)

#: How tensors are combined, and how numbers are.
_OPS: Final[Mapping[str, tuple[Any, Callable[[Sequence[Any]], Any]]]] = {
    "sum": (dist.ReduceOp.SUM, sum),
    "mean": (dist.ReduceOp.SUM, lambda values: sum(values) / len(values)),
    "max": (dist.ReduceOp.MAX, max),
    "min": (dist.ReduceOp.MIN, min),
    "product": (dist.ReduceOp.PRODUCT, math.prod),
}


@overload
def all_reduce(data: int, op: Literal["mean"]) -> float: ...
@overload
def all_reduce(data: T, op: str = "sum") -> T: ...
@locked
@torch.no_grad()
def all_reduce(data: T, op: str = "sum") -> T:
    """Combines each tensor and number over the ranks, as stacking the ranks' tensors and reducing the new dimension would.

    So bool and integer tensors add and multiply as int64, their mean has the default dtype, and NaN wins in "max" and
    "min". The results are new tensors that carry no gradient; on one process they are the given ones.
    Numbers are reduced as Python's own, also where one rank has an int and another a float: ints of any size, a mean is a
    float. NumPy's scalars give NumPy's scalars. None stays None, where all ranks have it.

    Args:
        data: A tensor or number, or nested dicts, lists, tuples, namedtuples and dataclasses of them.
        op: "sum", "mean", "max", "min" or "product".

    Raises:
        RankMismatchError: the ranks differ in structure, shapes, dtypes or ``op``; on every rank.
        AccelError: a leaf is no tensor or number, ``op`` is unknown or means nothing for a dtype; on every rank.
    """
    what = f"all_reduce(op={op!r})"
    problem = "" if op in tuple(_OPS) else f"expected op to be one of {', '.join(_OPS)}"
    refuse = functools.partial(_irreducible, op=op)
    process, carrier, tensors, _, sent = _begin(what, data, problem, refuse, sends=_number)
    mine = sent[process.place.rank]
    results: dict[str, Any] = {
        path: _reduced(path, mine[path], [theirs[path] for theirs in sent], op) for path in mine
    }
    if process.place.world_size == 1:
        return _replaced(
            data, results, lambda tensor: _free(tensor).to(_reduced_dtype(tensor.dtype, op))
        )
    wide = {path: _widen(tensor.detach()) for path, tensor in tensors.items()}
    for dtype in sorted({tensor.dtype for tensor in wide.values()}, key=str):
        paths = [path for path, tensor in wide.items() if tensor.dtype is dtype]
        flat = torch.cat([wide[path].reshape(-1).to(carrier) for path in paths])
        with Waiting(process, what):
            _reduce(flat, op, process.group)
        flat = flat / process.place.world_size if op == "mean" else flat
        for path, piece in zip(
            paths, torch.split(flat, [wide[path].numel() for path in paths]), strict=True
        ):
            results[path] = _narrow(piece, tensors[path], op)
    return _replaced(data, results, _free)


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
    """Concatenates each tensor of all ranks along its first dimension, which may differ between ranks.

    Tensors without dimensions become one of as many values as there are ranks. On one process, an identity. None stays
    None, where all ranks have it.

    Args:
        data: A tensor, or nested dicts, lists, tuples, namedtuples and dataclasses of tensors.
        pad: Fills the other dimensions at their ends, to the longest of all ranks (what ``generate`` gives differs in length).
        objects: Takes what are no tensors too. Each list is a list of items, which are whatever they are: the lists of all
            ranks are joined, in the order of the ranks; a tuple of texts, a batch of torch's collate, counts as a list.
            Anything else, also None, becomes a list of one for each rank, on one process of one. What is sent so is pickled,
            between the ranks of this job alone; tensors in it arrive on the rank's own device.
        gradients: Let gradients flow back, as a contrastive loss over all ranks' samples needs it: each rank's tensor gets the
            sum of all ranks' gradients of its rows. The backward is a collective then: every rank uses the result in its
            loss. Otherwise the results carry no gradient.

    Raises:
        RankMismatchError: the ranks differ in structure, dtypes, the other dimensions without ``pad``, or in what carries
            a gradient; on every rank.
        AccelError: a leaf is no tensor, or none that can be pickled, or ``pad`` is nothing that it can hold; on every rank.
    """
    return gather(data, gradients=gradients, pad=pad, objects=objects)


def gather(
    data: Any,
    *,
    gradients: bool = False,
    pad: float | None = None,
    objects: bool = False,
    alike: Mapping[str, str] = MappingProxyType({}),
    problem: str = "",
) -> Any:
    """``all_gather`` of what ranks have together, if the texts ``alike``, by what they say, are the same on all of them.

    AccelError on every rank where one has a ``problem``.
    """
    carry = gradients and torch.is_grad_enabled()
    options = {"gradients": carry, "pad": None if pad is None else repr(pad), "objects": objects}
    given = ", ".join(
        f"{name}={value}" for name, value in options.items() if value not in (False, None)
    )
    what, sends = (
        f"all_gather({given})" if given else "all_gather",
        _object if objects else lambda _: "",
    )
    refuse = functools.partial(_unfilled, pad=pad)
    process, carrier, tensors, shapes, sent = _begin(
        what,
        data,
        problem,
        refuse,
        rows=True,
        pad=pad is not None,
        gradients=carry,
        sends=sends,
        alike=alike,
    )
    results: dict[str, Any] = {}
    for path, mine in sent[process.place.rank].items():
        results[path] = [theirs[path] for theirs in sent]
        if isinstance(mine, list):
            results[path] = [item for theirs in results[path] for item in theirs]
    if process.place.world_size == 1:
        return _replaced(data, results, (lambda tensor: tensor) if carry else _free, objects)
    if pad is not None:
        tensors, shapes = _padded(tensors, shapes, pad)
    results |= _gather(process, carrier, tensors, shapes)
    for path in [path for path, tensor in tensors.items() if carry and tensor.requires_grad]:
        start = sum(
            theirs[path][0] if theirs[path] else 1 for theirs in shapes[: process.place.rank]
        )
        results[path] = _with_gradient(tensors[path], results[path], start)
    return _replaced(data, results, _free, objects)


@torch.no_grad()
def _gather(
    process: Process,
    carrier: torch.device,
    tensors: dict[str, Tensor],
    shapes: list[dict[str, tuple[int, ...]]],
) -> dict[str, Any]:
    mine = _pack(tensors.values(), carrier)
    sizes = [
        [math.prod(theirs[path]) * tensor.itemsize for path, tensor in tensors.items()]
        for theirs in shapes
    ]
    longest = max(map(sum, sizes))
    buffers = [torch.empty(longest, dtype=torch.uint8, device=carrier) for _ in sizes]
    with Waiting(process, "all_gather"):
        dist.all_gather(
            buffers, nn.functional.pad(mine, (0, longest - mine.numel())), group=process.group
        )
    pieces = [
        torch.split(buffer[: sum(size)], size) for buffer, size in zip(buffers, sizes, strict=True)
    ]
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
def broadcast(data: T, src: int = 0, *, objects: bool = False) -> T:
    """Gives every rank the tensors of rank ``src``. On one process, an identity. None stays None, where all ranks have it.

    Args:
        data: A tensor, or nested dicts, lists, tuples, namedtuples and dataclasses of tensors.
        src: The rank whose tensors all get.
        objects: Gives every rank whatever ``src`` has, as one object; the others may have anything, such as None. It is
            pickled, between the ranks of this job alone; tensors in it arrive on the rank's own device.

    Raises:
        RankMismatchError: the ranks differ in structure, shapes, dtypes, ``objects`` or ``src``; on every rank.
        AccelError: a leaf is no tensor, what ``src`` has cannot be pickled, or ``src`` is no rank; on every rank.
    """
    what, process = f"broadcast(src={src!r}{', objects=True' if objects else ''})", current()
    world, rank = process.place.world_size, process.place.rank
    problem = (
        ""
        if type(src) is int and 0 <= src < world
        else f"expected src to be a rank from 0 to {world - 1}"
    )
    if objects:
        value, reason = _packed(data) if rank == src else (bytearray(), "")
        answers = agree(what, (problem or reason, len(value)))
        if wrong := [
            f"{what} on rank {number}: {text}" for number, (text, _) in enumerate(answers) if text
        ]:
            raise AccelError(wrong[0])
        empty = torch.empty(answers[src][1], dtype=torch.uint8, device="cpu")
        content = broadcast(to_tensor(value) if rank == src else empty, src)
        loaded: T = _unpacked(to_bytes(content), process) if world > 1 else data
        return loaded
    process, carrier, tensors, *_ = _begin(what, data, problem)
    if world == 1:
        return _replaced(data, {}, _free)
    copies: dict[str, Any] = {path: _pack([tensor], carrier) for path, tensor in tensors.items()}
    with Waiting(process, what):
        broadcast_(copies.values(), process.group, src)
    for path, t in tensors.items():
        copies[path] = copies[path].view(t.dtype).reshape(t.shape).to(t.device)
    return _replaced(data, copies, _free)


def _begin(
    what: str,
    data: Any,
    problem: str = "",
    refuse: Callable[[Tensor], str] = lambda _: "",
    *,
    rows: bool = False,
    pad: bool = False,
    gradients: bool = False,
    sends: Callable[[Any], str] = lambda _: "",
    alike: Mapping[str, str] = MappingProxyType({}),
) -> tuple[
    Process, torch.device, dict[str, Tensor], list[dict[str, tuple[int, ...]]], list[dict[str, Any]]
]:
    """What all ranks need to begin: where data travels, this rank's tensors by path, every rank's shapes, and what else it sent.

    ``sends`` tells of a leaf that it goes at once: what it is called where the ranks are compared. Raises on every rank
    where a rank has a problem or their data does not fit together.
    """
    process = current()
    found: dict[str, Tensor] = {}
    kinds = dict(alike)
    sent: dict[str, Any] = {}
    problems = [problem] if problem else []
    more = (
        "numbers are reduced too" if sends is _number else "objects=True sends what can be pickled"
    )

    def visit(path: str, leaf: Any) -> Any:
        reason, kind = "", sends(leaf)
        if kind:
            kinds[path] = kind
            sent[path], reason = (leaf, "") if sends is _number else _packed(leaf)
        elif leaf is None:
            kinds[path] = "None"
        elif not (reason := _no_tensor(leaf, more) or refuse(leaf)):
            found[path] = leaf
        problems.extend([f"{path} is {reason}"] if reason else [])
        return leaf

    walked(visit, data, sends is _object)
    tensors = {path: found[path] for path in sorted(found)}
    carrier = _carrier(process, tensors.values())
    for path, tensor in tensors.items():
        carried = " with gradients" if gradients and tensor.requires_grad else ""
        kinds[path] = f"{_describe(tensor, rows, pad)}{carried} sent on {carrier.type}"
    shapes = {path: tuple(tensor.shape) for path, tensor in tensors.items()}
    answers = agree(what, (problems[:1], kinds, shapes, sent))
    _compare(what, answers, rows)
    all_sent = [
        {path: _unpacked(value, process) for path, value in theirs.items()}
        for *_, theirs in answers
    ]
    return process, carrier, tensors, [theirs for _, _, theirs, _ in answers], all_sent


def _carrier(process: Process, tensors: Iterable[Tensor]) -> torch.device:
    """They travel as CPU tensors, unless they are on devices that have a backend of their own."""
    only_cpu = "cpu" in process.backends and all(tensor.device.type == "cpu" for tensor in tensors)
    return torch.device("cpu") if only_cpu else process.carrier


def _compare(
    what: str,
    answers: Sequence[tuple[list[str], dict[str, str], dict[str, tuple[int, ...]], Any]],
    rows: bool,
) -> None:
    """Raise where a rank has a problem, or other kinds of leaves; ``rows``: where ``pad`` would make shapes equal."""
    for number, (reasons, *_) in enumerate(answers):
        if reasons:
            raise AccelError(f"{what} on rank {number}: {reasons[0]}")
    for number, (_, theirs, _, _) in enumerate(answers):
        for path in sorted(answers[0][1].keys() | theirs.keys()):
            first, other = answers[0][1].get(path, "absent"), theirs.get(path, "absent")
            if first != other:
                sizes = {shapes[path][1:] for _, _, shapes, _ in answers if path in shapes}
                fills = (
                    rows
                    and first.split()[0] == other.split()[0]
                    and len(set(map(len, sizes))) == 1 < len(sizes)
                )
                hint = (
                    f"; {ORDERS}"
                    if path == ORDER
                    else "; pad=value fills what is shorter"
                    if fills
                    else ""
                )
                raise RankMismatchError(
                    f"{what}: {path} is {first} on rank 0 and {other} on rank {number}{hint}"
                )


# -- leaves that are no tensors ----------------------------------------------------------------------------------------


def walked(visit: Callable[[str, Any], Any], data: T, objects: bool) -> T:
    """The data with ``visit(path, leaf)`` in each leaf's place; a list is a leaf where there are ``objects``.

    A tuple of texts, which torch's collate makes of a batch of them, is one then too.
    """

    def texts(tree: Any) -> bool:
        return (
            type(tree) is tuple
            and len(tree) > 0
            and all(isinstance(item, str | bytes) for item in tree)
        )

    if not objects:
        return walk(visit, data, "data")
    return walk(
        lambda path, leaf: visit(path, list(leaf) if texts(leaf) else leaf),
        data,
        "data",
        lambda tree: isinstance(tree, list) or texts(tree),
    )


def _object(leaf: object) -> str:
    return (
        ""
        if isinstance(leaf, Tensor)
        else "a list of objects"
        if isinstance(leaf, list)
        else "an object"
    )


def _number(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return ""
    scalar = getattr(leaf, "shape", None) == () and getattr(leaf.dtype, "kind", "") in tuple(
        "biufc"
    )
    return "a number" if scalar or isinstance(leaf, int | float | complex) else ""


def _replaced(
    data: T, results: Mapping[str, Any], free: Callable[[Tensor], Any], objects: bool = False
) -> T:
    """The data with the results in their leaves' places, and ``free`` of the tensors that have none. None stays None."""

    def visit(path: str, leaf: Any) -> Any:
        return (
            results[path] if path in results else free(leaf) if isinstance(leaf, Tensor) else None
        )

    return walked(visit, data, objects)


def _packed(leaf: Any) -> tuple[bytearray, str]:
    """The leaf as bytes, or why it has none."""

    def own(tensor: Tensor) -> Tensor:
        if reason := _no_tensor(tensor):
            raise AccelError(reason)
        return tensor.detach()

    try:
        return to_bytes(packed(map_tensors(own, leaf, others=True))), ""
    except Exception as error:
        return (
            bytearray(),
            f"a {type(leaf).__qualname__} that cannot be pickled: {type(error).__name__}: {error}",
        )


def _unpacked(value: Any, process: Process) -> Any:
    """What came packed; or the number itself."""
    if not isinstance(value, bytearray):
        return value
    try:
        return unpacked(torch.frombuffer(value, dtype=torch.uint8), process.device)
    except Exception as error:
        raise AccelError(
            f"an object that came cannot be unpickled: {type(error).__name__}: {error}"
        ) from error


def _reduced(path: str, like: Any, values: Sequence[Any], op: str) -> Any:
    """The ranks' numbers combined; NumPy's scalars as their like, or wider where torch's would be."""
    plain = [value.item() if hasattr(value, "dtype") else value for value in values]
    if op in ("max", "min") and any(isinstance(value, complex) for value in plain):
        raise AccelError(f"all_reduce(op={op!r}): {path} is complex, which has no {op} over ranks")
    nan = [value for value in plain if value != value]
    result = nan[0] if nan and op in ("max", "min") else _OPS[op][1](plain)
    if not hasattr(like, "dtype"):
        return result
    keeps = isinstance(result, type(like.item())) and (
        op in ("max", "min") or like.dtype.kind in "fc"
    )
    return like.dtype.type(result) if keeps else sys.modules["numpy"].asarray(result)[()]


# -- tensors -----------------------------------------------------------------------------------------------------------


def _unfilled(tensor: Tensor, pad: float | None) -> str:
    if pad is None:
        return ""
    if isinstance(pad, bool) and tensor.dtype is not torch.bool:
        return f"{tensor.dtype}, and pad={pad!r} is none: expected the number that fills what is shorter, as in pad=0"
    holds = False
    with contextlib.suppress(
        TypeError, ValueError, OverflowError, RuntimeError
    ):  # out of its range, or no number
        filled = tensor.new_full((1,), pad).item()
        inexact = tensor.is_floating_point() or tensor.is_complex()
        holds = filled == pad or (
            inexact and (pad != pad or abs(pad) <= torch.finfo(tensor.dtype).max)
        )
    return "" if holds else f"{tensor.dtype}, which cannot hold pad={pad!r}"


def _padded(
    tensors: dict[str, Tensor], shapes: Sequence[dict[str, tuple[int, ...]]], pad: float
) -> tuple[dict[str, Tensor], list[dict[str, tuple[int, ...]]]]:
    """The tensors with all but the first dimension as long as the longest of any rank, and all ranks' shapes then."""
    full = {
        path: [max(sizes) for sizes in zip(*(theirs[path] for theirs in shapes), strict=True)]
        for path in tensors
    }
    wider = {}
    for path, tensor in tensors.items():
        missing = [size - own for size, own in zip(full[path][1:], tensor.shape[1:], strict=True)]
        ends = [end for number in reversed(missing) for end in (0, number)]
        wider[path] = nn.functional.pad(tensor, ends, value=pad) if any(missing) else tensor
    return wider, [
        {path: (*size[:1], *full[path][1:]) for path, size in theirs.items()} for theirs in shapes
    ]


def _free(tensor: Tensor) -> Tensor:
    """Without a gradient, as the results on several ranks are."""
    return tensor.detach() if tensor.requires_grad else tensor


def _no_tensor(leaf: Any, more: str = "") -> str:
    if not isinstance(leaf, Tensor):
        return (
            f"{described(leaf)}; expected a tensor, or dicts, lists and tuples of tensors; {more}"
        )
    if type(leaf) is not Tensor and hasattr(leaf, "full_tensor"):
        return "a DTensor, of which this rank has a part; call full_tensor() first"
    if not is_dense(leaf):
        kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else leaf.layout
        return f"a {kind} tensor on {leaf.device}; expected a dense one with values"
    return ""


def _irreducible(tensor: Tensor, op: str) -> str:
    if tensor.is_complex() and op not in ("sum", "mean"):
        return f"complex, which has no {op} over ranks"
    return (
        "uint64, which is not reduced; convert it to int64" if tensor.dtype is torch.uint64 else ""
    )


def _describe(tensor: Tensor, rows: bool, pads: bool = False) -> str:
    shape = ["any"] * tensor.dim() if pads else [str(size) for size in tensor.shape]
    if rows and shape:
        shape[0] = "any"
    return f"{tensor.dtype} of shape ({', '.join(shape)})"


def _pack(tensors: Iterable[Tensor], carrier: torch.device) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=carrier)
    return torch.cat([empty, *(bytes_of(tensor, carrier) for tensor in tensors)])


def _reduced_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex or op in ("max", "min"):
        return dtype
    return torch.get_default_dtype() if op == "mean" else torch.int64


def _widen(tensor: Tensor) -> Tensor:
    """In a dtype in which all backends reduce without overflow or loss."""
    if tensor.is_complex():
        return torch.view_as_real(
            tensor.to(torch.promote_types(tensor.dtype, torch.complex64)).resolve_conj()
        )
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _narrow(piece: Tensor, like: Tensor, op: str) -> Tensor:
    if like.is_complex():
        piece = torch.view_as_complex(piece.reshape(*like.shape, 2))
    return piece.reshape(like.shape).to(like.device, _reduced_dtype(like.dtype, op), copy=True)


def _reduce(flat: Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    # The backends compare, and every comparison with NaN is false.
    nan = (
        flat.isnan().to(torch.uint8) if op in ("max", "min") and flat.is_floating_point() else None
    )
    dist.all_reduce(flat, _OPS[op][0], group=group)
    if nan is not None:
        dist.all_reduce(nan, dist.ReduceOp.MAX, group=group)
        flat.masked_fill_(nan.bool(), math.nan)

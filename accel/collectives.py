"""What the ranks tell each other: control values on accel's own group, and the user's tensors on the default group."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from .errors import AccelError, RankMismatchError, TimeoutError
from .process import Process, current, end_groups, ended, local_rank, rank, to_bytes, to_tensor

_BLOCK = 1024  # bytes that every exchange sends; a longer value takes a second round
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# -- control: small values, on accel's own group ------------------------------------------------------------------------


def short_timeout() -> timedelta:
    """How long to wait for ranks that are here already in a correct program."""
    return min(current().timeout, timedelta(seconds=60))


def agree(what: str, value: object, *, timeout: timedelta | None = None) -> list[Any]:
    """Gathers a small value of every rank, on accel's own group. Collective; for one thread at a time.

    Args:
        what: Names this meeting, the same on every rank.
        value: What this rank tells; it is pickled.
        timeout: How long to wait for the other ranks; the process's timeout if None.

    Returns:
        The values of all ranks, by rank.

    Raises:
        RankMismatchError: another rank is at another meeting; on every rank.
        TimeoutError: a rank did not come; the process groups are ended, so that no rank hangs.
        AccelError: a rank ended while this one waited; the process groups are ended.
    """
    process = current()
    if process.control is None:
        return [value]
    payload = pickle.dumps((what, value))
    framed = len(payload).to_bytes(8, "little") + payload
    limit = timeout or process.timeout
    blocks = _gather(process, what, framed[:_BLOCK].ljust(_BLOCK, b"\0"), limit)
    longest = 8 + max(int.from_bytes(block[:8], "little") for block in blocks)
    if longest > _BLOCK:
        blocks = _gather(process, what, framed.ljust(longest, b"\0"), limit)
    messages = [pickle.loads(block[8:]) for block in blocks]
    if any(theirs != what for theirs, _ in messages):
        places = "; ".join(f"rank {number} is in {theirs!r}" for number, (theirs, _) in enumerate(messages))
        raise RankMismatchError(f"the ranks are at different points of the program: {places}")
    return [theirs for _, theirs in messages]


def _gather(process: Process, what: str, block: bytes, limit: timedelta) -> list[bytearray]:
    """Every rank's block, which are equally long."""
    process.rounds += 1
    arrivals = process.store(str(process.rounds))
    mine = to_tensor(block)
    theirs = [torch.empty_like(mine) for _ in range(process.place.world_size)]
    patience = min(timedelta(seconds=1), limit / 4)
    try:
        work = dist.all_gather(theirs, mine, group=process.control, async_op=True)
        # To say who is missing, the ranks must say that they came; only those that wait for long do.
        late = not _done(work, patience)
        if late:
            arrivals.set(str(process.place.rank), "")
            late = not _done(work, limit - patience)
    except RuntimeError as error:
        arrivals.set(str(process.place.rank), "")
        if ended() or "imed out" not in str(error):
            raise _lost(what, error) from error
        late = True
    if late:
        raise _too_late(process, what, limit, arrivals, patience)
    return [to_bytes(tensor) for tensor in theirs]


def _done(work: Any, span: timedelta) -> bool:
    try:
        work.wait(span)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(span)  # it ended while this rank gave up: well, or with an error of its own
    return True


def _lost(what: str, error: RuntimeError) -> AccelError:
    reason = ended() or "a rank ended or failed; the first error of the ranks tells why"
    end_groups(reason)
    return AccelError(f"rank {rank()} cannot go on in {what!r}: {reason} ({error})")


def _too_late(
    process: Process, what: str, limit: timedelta, arrivals: distributed_c10d.Store, patience: timedelta
) -> TimeoutError:
    seconds = f"{limit.total_seconds():g} s"
    end_groups(f"not every rank came to {what!r} within {seconds}")
    time.sleep(patience.total_seconds())  # the ranks that came in the meantime say so now
    missing: list[str] = []

    def look() -> None:
        with contextlib.suppress(RuntimeError):
            missing.extend(str(r) for r in range(process.place.world_size) if not arrivals.check([str(r)]))

    # The store may be on a host that is gone.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(5)
    who = f"rank {', '.join(missing)} did not come" if missing else "some rank did not come"
    return TimeoutError(
        f"rank {process.place.rank} waited {seconds} in {what!r}, but {who}; the process groups were ended so that no "
        "rank hangs. Every rank must make this call: look for a call on one rank only (`if accel.is_main():`), a rank "
        "with fewer steps, or one that needs longer than accel.init(timeout=...)"
    )


def barrier() -> None:
    """Waits until every rank is here.

    Raises:
        AccelError: a rank did not come in time (TimeoutError), ended, or is at another call (RankMismatchError).
    """
    agree("barrier", None)


@contextlib.contextmanager
def main_first(*, local: bool = False) -> Iterator[None]:
    """Runs the body on rank 0 first, then on the others; with ``local`` on the first rank of each host. Collective.

    Raises:
        AccelError: the body failed on a rank that was first, so it does not run on the others.
    """
    first = (local_rank() if local else rank()) == 0
    problem = ""
    try:
        if first:
            yield
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        problems = agree("main_first", problem)
    for number, text in enumerate(problems):
        if text:
            raise AccelError(f"main_first: the body failed on rank {number}, which was first: {text}")
    if not first:
        yield


# -- trees: nested containers of tensors --------------------------------------------------------------------------------


def map_tensors(fn: Callable[[Tensor], Any], tree: Any, *, others: bool = False) -> Any:
    """The same nested dicts, lists, tuples, namedtuples and dataclasses with ``fn`` of each tensor.

    Containers in which nothing changed are returned themselves; the others are copied.

    Args:
        fn: Called with each tensor.
        tree: The nested containers, or one tensor.
        others: Keeps leaves that are no tensors; else they are refused.

    Raises:
        AccelError: a leaf is no tensor; named by its path, as ``data["a"][1]``.
    """

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        if others:
            return leaf
        raise AccelError(
            f"{path} is a {type(leaf).__qualname__}; expected a tensor, or dicts, lists and tuples of them"
        )

    return _walk(visit, tree, "data")


def _walk(visit: Callable[[str, Any], Any], tree: Any, path: str) -> Any:
    keys: list[Any]
    if isinstance(tree, MutableMapping):
        keys, values = list(tree), list(tree.values())
        paths = [f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]" for key in keys]
    elif isinstance(tree, list | tuple):
        keys, values = list(range(len(tree))), list(tree)
        names = getattr(tree, "_fields", None)
        paths = [f"{path}[{key}]" if names is None else f"{path}.{names[key]}" for key in keys]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        keys = [f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
        values, paths = [getattr(tree, key) for key in keys], [f"{path}.{key}" for key in keys]
    else:
        return visit(path, tree)
    new = [_walk(visit, value, name) for value, name in zip(values, paths, strict=True)]
    if all(mine is value for mine, value in zip(new, values, strict=True)):
        return tree
    return _rebuild(tree, keys, new)


def _rebuild(tree: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    if isinstance(tree, tuple):
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    result = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        if isinstance(tree, list | MutableMapping):
            result[key] = value
        else:
            object.__setattr__(result, key, value)  # also where the dataclass is frozen
    return result


# -- data: the user's tensors, on the default group ---------------------------------------------------------------------


@torch.no_grad()
def all_reduce(data: Any, op: str = "sum") -> Any:
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
    process, carrier, tensors, _ = _meet(what, data, problem, lambda tensor: _irreducible(tensor, op))
    if process.place.world_size == 1:
        return map_tensors(lambda tensor: _free(tensor).to(_reduced_dtype(tensor.dtype, op)), data)
    wide = {path: _widen(tensor.detach()) for path, tensor in tensors.items()}
    results = {}
    for dtype in sorted({tensor.dtype for tensor in wide.values()}, key=str):
        paths = [path for path, tensor in wide.items() if tensor.dtype is dtype]
        flat = torch.cat([wide[path].reshape(-1).to(carrier) for path in paths])
        with _transfer(what):
            _reduce(flat, op, process.group)
        flat = flat / process.place.world_size if op == "mean" else flat
        for path, piece in zip(paths, torch.split(flat, [wide[path].numel() for path in paths]), strict=True):
            results[path] = _narrow(piece, tensors[path], op)
    return _walk(lambda path, _: results[path], data, "data")


@torch.no_grad()
def all_gather(data: Any) -> Any:
    """Concatenates each tensor of all ranks along its first dimension, which may differ between ranks.

    Tensors without dimensions become one of as many values as there are ranks. On one process, an identity.

    Args:
        data: A tensor, or nested dicts, lists, tuples, namedtuples and dataclasses of tensors.

    Raises:
        RankMismatchError: the ranks differ in structure, dtypes or the other dimensions; on every rank.
        AccelError: a leaf is no tensor; on every rank.
    """
    process, carrier, tensors, shapes = _meet("all_gather", data, rows=True)
    if process.place.world_size == 1:
        return map_tensors(_free, data)
    mine = _pack(tensors, carrier)
    sizes = [[math.prod(theirs[path]) * tensor.itemsize for path, tensor in tensors.items()] for theirs in shapes]
    longest = max(map(sum, sizes))
    buffers = [torch.empty(longest, dtype=torch.uint8, device=carrier) for _ in sizes]
    with _transfer("all_gather"):
        dist.all_gather(buffers, nn.functional.pad(mine, (0, longest - mine.numel())), group=process.group)
    pieces = [torch.split(buffer[: sum(size)], size) for buffer, size in zip(buffers, sizes, strict=True)]
    results = {}
    for (path, tensor), *parts in zip(tensors.items(), *pieces, strict=True):
        number = sum(theirs[path][0] if theirs[path] else 1 for theirs in shapes)
        rows = torch.cat(parts).view(tensor.dtype).reshape(number, *tensor.shape[1:])
        results[path] = rows.to(tensor.device)
    return _walk(lambda path, _: results[path], data, "data")


@torch.no_grad()
def broadcast(data: Any, src: int = 0) -> Any:
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
    process, carrier, tensors, _ = _meet(what, data, problem)
    if world == 1:
        return map_tensors(_free, data)
    buffer = _pack(tensors, carrier)
    with _transfer(what):
        dist.broadcast(buffer, src, group=process.group)
    pieces = torch.split(buffer, [tensor.numel() * tensor.itemsize for tensor in tensors.values()])
    results = {
        path: piece.clone().view(tensor.dtype).reshape(tensor.shape).to(tensor.device)
        for (path, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }
    return _walk(lambda path, _: results[path], data, "data")


def _meet(
    what: str, data: Any, problem: str = "", refuse: Callable[[Tensor], str] = lambda _: "", rows: bool = False
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

    _walk(visit, data, "data")
    tensors = {path: found[path] for path in sorted(found)}
    carrier = _carrier(process, tensors)
    kinds = {path: f"{_describe(tensor, rows)} sent on {carrier.type}" for path, tensor in tensors.items()}
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


def _carrier(process: Process, tensors: dict[str, Tensor]) -> torch.device:
    """Where the data travels: as CPU tensors, unless it is on devices that have a backend of their own."""
    only_cpu = all(tensor.device.type == "cpu" for tensor in tensors.values())
    own = process.backends.get(process.device.type) not in (None, "gloo")
    if "cpu" not in process.backends or (own and not only_cpu):
        return process.device
    return torch.device("cpu")


@contextlib.contextmanager
def _transfer(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _lost(what, error) from error


def _pack(tensors: dict[str, Tensor], carrier: torch.device) -> Tensor:
    """The bytes of the tensors: no backend refuses a dtype then."""
    dense = (tensor.detach().to(carrier).resolve_conj().resolve_neg().contiguous() for tensor in tensors.values())
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

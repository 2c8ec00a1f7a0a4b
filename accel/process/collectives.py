"""Collectives over nested containers of tensors and other objects."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AccelError, RankMismatchError, described
from ..trees import map_tensors, walk
from . import current, rank
from .control import Waiting, agree
from .packing import broadcast_, bytes_of, is_dense, to_bytes, to_tensor

T = TypeVar("T")
_Accept: TypeAlias = Callable[[Any], tuple[str, Any]]

# Reductions of a list with each rank's number. As in torch, "max" and "min" return any NaN.
_OPS: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": lambda values: max(values, key=lambda value: (value != value, value)),
    "min": lambda values: min(values, key=lambda value: (value == value, value)),
    "product": math.prod,
}


# -- public functions ------------------------------------------------------------------------------


@torch.no_grad()
def all_reduce(data: T, op: str = "sum") -> T:
    """Reduce each tensor and number across ranks. Collective.

    Results are new tensors without gradients, equal to torch's reduction of the stacked
    tensors. The mean of integers has the default dtype. None stays None. A single
    process gets its own tensors back.

    Args:
        data: a tensor or number, or nested dicts, lists, tuples and dataclasses.
        op: "sum", "mean", "max", "min" or "product".

    Raises:
        RankMismatchError: structure, shapes, dtypes or ``op`` differ between ranks.
        AccelError: a leaf is not a tensor or number, or ``op`` is unknown.
    """
    problem = "" if op in _OPS else f"expected op to be one of {', '.join(_OPS)}"
    leaves = _Leaves(f"all_reduce(op={op!r})", data, _number, problem=problem)
    results: dict[str, Any] = {}
    for path in leaves.tensors:
        results[path] = _reduce_tensor(leaves, path, op)
    for path in leaves.others:
        results[path] = _OPS[op](leaves.by_rank(path))
    return leaves.replaced(data, results)


@overload
def all_gather(
    data: T, *, gradients: bool = False, pad: float | None = None, objects: Literal[False] = False
) -> T: ...
@overload
def all_gather(
    data: Any, *, gradients: bool = False, pad: float | None = None, objects: bool
) -> Any: ...
def all_gather(
    data: Any, *, gradients: bool = False, pad: float | None = None, objects: bool = False
) -> Any:
    """Concatenate each tensor across ranks along its first dimension. Collective.

    The first dimension may differ between ranks. Scalars become a tensor with a
    value per rank. None stays None. A single process gets its own tensors back.

    Args:
        data: a tensor, or nested containers of tensors.
        gradients: backpropagate through the result, for example in a contrastive loss.
            Every rank must use the result in its loss, because backward is a collective.
        pad: pad the other dimensions with this value up to the longest. For example,
            ``generate`` returns different lengths.
        objects: gather any object that can be pickled. Lists are joined. Any other
            object becomes a list with an item per rank. GPU tensors move to your device.

    Raises:
        AccelError: a leaf is not a tensor, or structure, dtypes or shapes differ.
    """
    return gather(data, gradients=gradients, pad=pad, objects=objects)


def gather(
    data: Any, *, pad: float | None, objects: bool, gradients: bool = False, problem: str = ""
) -> Any:
    """Gather like ``all_gather``. All ranks raise if a rank has a ``problem``."""
    gradients = gradients and torch.is_grad_enabled()
    call = f"all_gather(gradients={gradients}, pad={pad}, objects={objects})"
    accept = _pickled if objects else _refuse
    free_dims = 1 if pad is None else sys.maxsize
    leaves = _Leaves(call, data, accept, free_dims, problem)
    results: dict[str, Any] = {}
    for path in leaves.others:
        items = list(map(_unpack, leaves.by_rank(path)))
        results[path] = sum(items, []) if isinstance(items[0], list) else items
    for path, tensor in leaves.tensors.items():
        has_gradient = gradients and tensor.requires_grad
        if leaves.world == 1:
            results[path] = tensor if has_gradient else _detached(tensor)
            continue
        shapes = leaves.by_rank(path)
        if pad is not None:
            tensor = _padded(tensor, shapes, pad)
        rows = [shape[0] if shape else 1 for shape in shapes]
        gathered = _gather_rows(tensor, rows, leaves)
        if has_gradient:
            gathered = _let_gradients_flow(gathered, tensor, sum(rows[: rank()]))
        results[path] = gathered
    return leaves.replaced(data, results)


@torch.no_grad()
def broadcast(data: T, src: int = 0, *, objects: bool = False) -> T:
    """Return the tensors of rank ``src`` on every rank. Collective.

    None stays None. A single process gets its own tensors back.

    Args:
        data: a tensor, or nested containers of tensors.
        src: the rank that sends.
        objects: send any object that can be pickled. The other ranks may pass None.
            GPU tensors move to your device.

    Raises:
        AccelError: a leaf is not a tensor, or structure, shapes or dtypes differ.
    """
    sent: Any = data
    if objects:
        sent = to_tensor(_pack(data) if rank() == src else b"nothing")
    call = f"broadcast(src={src}, objects={objects})"
    leaves = _Leaves(call, sent, _refuse, free_dims=int(objects))
    tensors = leaves.tensors
    if leaves.world == 1:
        return data if objects else leaves.replaced(data, map_tensors(_detached, tensors))
    if objects and rank() != src:
        tensors["data"] = sent.new_empty(leaves.by_rank("data")[src])
    copies: dict[str, Tensor] = {}
    for path, tensor in tensors.items():
        copies[path] = tensor.detach().to(leaves.carrier, copy=True)
    with leaves.waiting():
        broadcast_(copies.values(), leaves.group, src)
    if objects:
        return _unpack(to_bytes(copies["data"]))  # type: ignore[no-any-return]
    for path, tensor in tensors.items():
        copies[path] = copies[path].to(tensor.device)
    return leaves.replaced(data, copies)


def walked(visit: Callable[[str, Any], Any], data: T, objects: bool) -> T:
    """Return the data with each leaf replaced by ``visit(path, leaf)``.

    With ``objects``, lists and tuples of strings are leaves.
    """

    def is_leaf(tree: Any) -> bool:
        # torch's collate may return a batch of strings as a tuple.
        is_texts = type(tree) is tuple and isinstance((*tree, None)[0], str | bytes)
        return objects and (isinstance(tree, list) or is_texts)

    def visit_list(path: str, leaf: Any) -> Any:
        return visit(path, list(leaf) if is_leaf(leaf) else leaf)

    return walk(visit_list, data, "data", is_leaf)


def _number(leaf: Any) -> tuple[str, Any]:
    # NumPy scalars, which have an empty shape, count as numbers.
    if isinstance(leaf, int | float | complex) or getattr(leaf, "shape", None) == ():
        return "a number", leaf.item() if hasattr(leaf, "item") else leaf
    raise AccelError(f"{described(leaf)}. Pass a tensor or number.")


def _pickled(leaf: Any) -> tuple[str, Any]:
    return "a list of objects" if isinstance(leaf, list) else "an object", _pack(leaf)


def _refuse(leaf: Any) -> tuple[str, Any]:
    expected = "Pass a tensor, or dicts, lists and tuples of tensors"
    raise AccelError(f"{described(leaf)}. {expected}, or set objects=True.")


def _dense(tensor: Tensor) -> Tensor:
    # For example an FSDP gradient or its norm. Only this rank's shard would be sent.
    if hasattr(tensor, "full_tensor"):
        raise AccelError("a DTensor. Call full_tensor() first.")
    if not is_dense(tensor):
        text = f"a {tensor.layout} tensor on {tensor.device}"
        raise AccelError(f"{text}. Pass a dense tensor.")
    return tensor


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _pack(leaf: Any) -> bytearray:
    def copied(tensor: Tensor) -> Tensor:
        # Clone, because torch.save writes the full storage even for a single row of a dataset.
        return _dense(tensor).detach().clone()

    buffer = io.BytesIO()
    torch.save(map_tensors(copied, leaf), buffer)
    return bytearray(buffer.getbuffer())


def _unpack(content: bytearray) -> Any:
    def place(storage: Any, location: str) -> Any:
        target = location if location == "cpu" else str(current().device)
        return torch.serialization.default_restore_location(storage, target)

    return torch.load(io.BytesIO(content), map_location=place, weights_only=False)


class _Leaves:
    """The leaves of this rank's data, by path."""

    def __init__(
        self, call: str, data: Any, accept: _Accept, free_dims: int = 0, problem: str = ""
    ) -> None:
        """Raise on every rank if leaves differ or a rank has a problem. Collective.

        ``accept`` returns the kind of a leaf that isn't a tensor, and the value to send.
        The ranks may have different sizes in the first ``free_dims`` dimensions.
        """
        objects = accept is _pickled
        self.call, self._objects = call, objects
        process = self._process = current()
        self.group, self.world = process.group, process.place.world_size
        #: Leaves that torch.distributed sends.
        self.tensors: dict[str, Tensor] = {}
        leaves: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        # First numbers and pickled objects by path, then the shapes of tensors.
        sent: dict[str, Any] = {}
        walked(leaves.setdefault, data, objects)
        # Sort, because the order of a dict's keys may differ between ranks.
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
        #: The paths of leaves that are sent along with the comparison.
        self.others = list(sent)
        on_cpu = "cpu" in process.backends and all(t.is_cpu for t in self.tensors.values())
        self.carrier = torch.device("cpu") if on_cpu else process.carrier
        for path, tensor in self.tensors.items():
            sent[path] = tuple(tensor.shape)
            sizes = list(map(str, tensor.shape))
            sizes[:free_dims] = ["any"] * len(sizes[:free_dims])
            kind = f"{tensor.dtype} of shape ({', '.join(sizes)})"
            kinds[path] = f"{kind} sent on {self.carrier.type}"
        self._answers = agree(call, (problem, kinds, sent))
        for number, (problem, _, _) in enumerate(self._answers):
            if problem:
                raise AccelError(f"{call} on rank {number}: {problem}")
        hint = ". Pass pad=value to fill the shorter ones" if free_dims == 1 else ""
        self._raise_difference(hint)

    def _raise_difference(self, hint: str) -> None:
        first = self._answers[0][1]
        for number, (_, other, _) in enumerate(self._answers):
            if other != first:
                path, _ = min(first.items() ^ other.items())
                here, there = first.get(path, "absent"), other.get(path, "absent")
                text = f"{path} is {here} on rank 0 and {there} on rank {number}"
                raise RankMismatchError(f"{self.call}: {text}{hint}")

    def waiting(self) -> Waiting:
        return Waiting(self._process, self.call)

    def by_rank(self, path: str) -> list[Any]:
        """Return each rank's shape or value of a leaf."""
        return [sent[path] for _, _, sent in self._answers]

    def replaced(self, data: T, results: Mapping[str, Any]) -> T:
        """Return the data with leaves replaced by results."""
        return walked(lambda path, leaf: results.get(path), data, self._objects)


def _reduce_tensor(leaves: _Leaves, path: str, op: str) -> Tensor:
    tensor, world = _detached(leaves.tensors[path]), leaves.world
    if op in ("max", "min"):
        # Backends drop NaN, because comparisons with NaN are false. Gather, and let torch reduce.
        if world == 1:
            return tensor
        rows = _gather_rows(tensor[None], [1] * world, leaves)
        return rows.amax(0) if op == "max" else rows.amin(0)
    is_float = tensor.is_floating_point() or tensor.is_complex()
    dtype = tensor.dtype
    if not is_float:
        dtype = torch.get_default_dtype() if op == "mean" else torch.int64
    if world == 1:
        return tensor.to(dtype)
    # Every backend reduces these dtypes, and they neither overflow nor lose precision.
    least = torch.float32 if is_float else torch.int64
    wide_dtype = torch.promote_types(tensor.dtype, least)
    wide = tensor.to(leaves.carrier, wide_dtype, copy=True).contiguous()
    reduction = dist.ReduceOp.PRODUCT if op == "product" else dist.ReduceOp.SUM
    with leaves.waiting():
        dist.all_reduce(wide, reduction, group=leaves.group)
    if op == "mean":
        wide = wide / world
    return wide.to(tensor.device, dtype)


def _padded(tensor: Tensor, shapes: Sequence[tuple[int, ...]], value: float) -> Tensor:
    """Pad all dimensions but the first to the longest."""
    longest = list(map(max, zip(*shapes, strict=True)))[1:]
    if list(tensor.shape[1:]) == longest:
        return tensor
    padded = tensor.new_full((len(tensor), *longest), value)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded


@torch.no_grad()
def _gather_rows(tensor: Tensor, rows: Sequence[int], leaves: _Leaves) -> Tensor:
    """Return the rows of all ranks."""
    # Send bytes, because some backends lack dtypes, and pad, because all_gather needs equal sizes.
    width = math.prod(tensor.shape[1:]) * tensor.itemsize
    sent = torch.zeros(max(rows) * width, dtype=torch.uint8, device=leaves.carrier)
    sent[: tensor.nbytes] = bytes_of(tensor, leaves.carrier)
    received = list(sent.repeat(len(rows), 1))
    with leaves.waiting():
        dist.all_gather(received, sent, group=leaves.group)
    for index, number in enumerate(rows):
        received[index] = received[index][: number * width]
    values = torch.cat(received).view(tensor.dtype)
    return values.reshape(sum(rows), *tensor.shape[1:]).to(tensor.device)


def _let_gradients_flow(gathered: Tensor, tensor: Tensor, begin: int) -> Tensor:
    """Insert this rank's tensor at its rows. Sum all ranks' gradients in backward."""
    own = tensor if tensor.dim() else tensor[None]
    rows = torch.cat([gathered[:begin], own, gathered[begin + len(own) :]])
    rows.register_hook(all_reduce)
    return rows

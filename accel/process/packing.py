"""Exchange objects as bytes, and many tensors in few collectives."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

Group: TypeAlias = dist.ProcessGroup | None

# -- objects ---------------------------------------------------------------------------------------

# The size in bytes of the first message, and of the length that precedes the content.
_FIRST: Final = 1024
_LENGTH: Final = 8


def to_tensor(data: bytes | bytearray) -> Tensor:
    """Return the bytes as a tensor with its own memory."""
    # The clone doesn't need the bytearray. A gloo thread may free it after Python has exited.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def to_bytes(tensor: Tensor) -> bytearray:
    """Return the bytes of a uint8 tensor."""
    data = bytearray(len(tensor))
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data


def gather_values(value: object, group: Any, timeout: timedelta) -> list[Any]:
    """Return every rank's value. Collective."""

    def gather(data: bytes, length: int) -> list[bytearray]:
        sent = to_tensor(data.ljust(length, b"\0"))
        rows = list(sent.repeat(group.size(), 1))
        dist.all_gather(rows, sent, group=group, async_op=True).wait(timeout)
        return list(map(to_bytes, rows))

    # torch's all_gather_object needs NumPy, and always sends two messages.
    content = pickle.dumps(value)
    data = len(content).to_bytes(_LENGTH, "little") + content
    messages = gather(data[:_FIRST], _FIRST)
    longest = max(int.from_bytes(message[:_LENGTH], "little") for message in messages)
    rest = _LENGTH + longest - _FIRST
    if rest > 0:
        for message, end in zip(messages, gather(data[_FIRST:], rest), strict=True):
            message += end
    # pickle ignores the zeros after the content.
    return [pickle.loads(message[_LENGTH:]) for message in messages]


def send_value(value: object, to: int, group: Group) -> list[tuple[Any, Tensor]]:
    """Start to send an object to a rank. Return the requests with their buffers."""
    content = to_tensor(pickle.dumps(value))
    length = to_tensor(len(content).to_bytes(_LENGTH, "little"))
    return [(dist.isend(data, to, group), data) for data in (length, content)]


def receive_value(source: int, group: Group) -> Any:
    """Return the object from another rank's ``send_value``."""
    length = to_tensor(bytes(_LENGTH))
    dist.recv(length, source, group)
    content = to_tensor(bytes(int.from_bytes(to_bytes(length), "little")))
    dist.recv(content, source, group)
    return pickle.loads(to_bytes(content))


def is_dense(tensor: Tensor) -> bool:
    """True if the tensor is strided and all of its values are in memory."""
    is_special = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout is torch.strided and not is_special


def row_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as a row with stride 1, as ``view(dtype)`` needs."""
    row = tensor.view(-1)
    # x[:1, 0] is contiguous, but its single element has the stride of a row of x.
    return row if row.stride(0) == 1 else row.as_strided(row.shape, (1,))


def bytes_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor's bytes on a device. Some backends don't support all dtypes."""
    return row_of(tensor.detach().to(device).contiguous()).view(torch.uint8)


# -- many tensors ----------------------------------------------------------------------------------

# On a CPU, copies should fit in the cache. On accelerators, each call is expensive.
_PIECE_BYTES: Final = 32 << 20
_CPU_PIECE_BYTES: Final = 8 << 20


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor], group: Group, src: int = 0) -> None:
    """Replace the tensors with those of rank ``src``, in place. Collective."""
    targets: list[Tensor] = []
    for tensor in tensors:
        # Elements of an expanded buffer share memory, so it can't be written in place.
        if 0 in tensor.stride() and not tensor.is_contiguous():
            tensor.data = tensor.contiguous()
        if tensor.numel():
            targets.append(tensor.data)
    sent = list(map(Tensor.contiguous, targets))
    rows = [row_of(tensor).view(torch.uint8) for tensor in sent]
    if rows:
        # DistributedDataParallel broadcasts its weights with this function.
        send: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]
        send(group or dist.group.WORLD, rows, _CPU_PIECE_BYTES, src)
        _copy_back(targets, sent)


@torch.no_grad()
def average_(tensors: Iterable[Tensor], world_size: int, add: Callable[[Tensor], object]) -> None:
    """Replace the tensors with their means. ``add`` sums a flat tensor. Collective."""
    targets = list(tensors)
    used = list(map(Tensor.contiguous, targets))
    for (piece,) in _pieces([used]):
        flat = torch.cat(piece).mul_(1 / world_size)
        add(flat)
        _unpack(flat, piece)
    _copy_back(targets, used)


@torch.no_grad()
def reduce_to_owners(by_owner: Sequence[Sequence[Tensor]], rank: int, group: Group) -> None:
    """Replace this rank's tensors with their means over all ranks. Collective."""
    # Each owner sums the tensors of all ranks. A reduction per owner takes twice as long.
    used = [list(map(Tensor.contiguous, tensors)) for tensors in by_owner]
    for pieces in _pieces(used):
        owned, pieces[rank] = pieces[rank], []
        sizes = [sum(view.nbytes for view in piece) for piece in pieces]
        lengths = [sum(view.nbytes for view in owned)] * len(pieces)
        lengths[rank] = 0
        views = list(itertools.chain(*pieces))
        sent = torch.cat(views) if views else owned[0].new_empty(0)
        # Send bytes, because some backends don't support all dtypes.
        received = torch.empty(sum(lengths), dtype=torch.uint8, device=sent.device)
        dist.all_to_all_single(received, sent.view(torch.uint8), lengths, sizes, group=group)
        if owned:
            parts = received.view(sent.dtype).view(len(pieces) - 1, -1)
            total = parts.sum(0) if len(parts) > 1 else parts[0]
            _unpack(total.add_(torch.cat(owned)).mul_(1 / len(pieces)), owned)
    _copy_back(by_owner[rank], used[rank])


def _pieces(by_owner: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield pieces: for each owner, flat views with one dtype and device."""
    kinds: defaultdict[Any, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in by_owner])
    for owner, tensors in enumerate(by_owner):
        for tensor in tensors:
            if tensor.numel():
                kinds[tensor.dtype, tensor.device][owner].append(row_of(tensor))
    for (dtype, device), owners in kinds.items():
        limit = _CPU_PIECE_BYTES if device.type == "cpu" else _PIECE_BYTES
        most = max(1, limit // dtype.itemsize // len(by_owner))
        splits = [_split(rows, most) for rows in owners]
        yield from map(list, itertools.zip_longest(*splits, fillvalue=[]))


def _split(rows: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield the rows in pieces of at most ``most`` elements."""
    piece: list[Tensor] = []
    room = most
    for row in rows:
        # split() costs more than the rest of this loop, and most rows are short.
        for view in row.split(most) if len(row) > most else (row,):
            if len(view) > room:
                yield piece
                piece, room = [], most
            piece.append(view)
            room -= len(view)
    if piece:
        yield piece


def _unpack(flat: Tensor, views: list[Tensor]) -> None:
    torch._foreach_copy_(views, _unflatten_dense_tensors(flat, views))


def _copy_back(tensors: Iterable[Tensor], used: Iterable[Tensor]) -> None:
    for tensor, source in zip(tensors, used, strict=True):
        if source.data_ptr() != tensor.data_ptr():
            tensor.copy_(source)

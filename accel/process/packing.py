"""Exchange objects in messages of known lengths, and many tensors in few collectives."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

# -- objects ---------------------------------------------------------------------------------------

_FIRST: Final = 1024  # bytes of the first message. The rest follows in a second one
_LENGTH: Final = 8  # bytes in front of the content, with its length


def to_tensor(data: bytes | bytearray) -> torch.Tensor:
    """Return the bytes as a tensor with its own memory.

    A gloo thread may free the tensor after the interpreter has ended. It must not need Python then.
    """
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def to_bytes(tensor: torch.Tensor) -> bytearray:
    """Return the bytes of a uint8 tensor."""
    data = bytearray(len(tensor))
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data


def gather_values(value: object, group: dist.ProcessGroup, timeout: timedelta) -> list[Any]:
    """Return every rank's value. Collective.

    torch's all_gather_object needs NumPy, and always sends two messages.
    """
    content = pickle.dumps(value)
    data = len(content).to_bytes(_LENGTH, "little") + content
    messages = _gather(data[:_FIRST].ljust(_FIRST, b"\0"), group, timeout)
    longest = max(int.from_bytes(message[:_LENGTH], "little") for message in messages)
    rest = _LENGTH + longest - _FIRST
    if rest > 0:
        ends = _gather(data[_FIRST:].ljust(rest, b"\0"), group, timeout)
        for message, end in zip(messages, ends, strict=True):
            message += end
    # pickle ignores the zeros behind the content.
    return [pickle.loads(message[_LENGTH:]) for message in messages]


def _gather(data: bytes, group: dist.ProcessGroup, timeout: timedelta) -> list[bytearray]:
    sent = to_tensor(data)
    received = sent.repeat(group.size(), 1)
    rows = list(received)
    dist.all_gather(rows, sent, group=group, async_op=True).wait(timeout)
    return list(map(to_bytes, rows))


def send_value(
    value: object, to: int, group: dist.ProcessGroup | None
) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send an object to a rank. Return the sends with their memory."""
    content = to_tensor(pickle.dumps(value))
    length = to_tensor(len(content).to_bytes(_LENGTH, "little"))
    return [(dist.isend(data, to, group), data) for data in (length, content)]


def receive_value(source: int, group: dist.ProcessGroup | None) -> Any:
    """Return the object from another rank's ``send_value``."""
    length = to_tensor(bytes(_LENGTH))
    dist.recv(length, source, group)
    content = to_tensor(bytes(int.from_bytes(to_bytes(length), "little")))
    dist.recv(content, source, group)
    return pickle.loads(to_bytes(content))


# -- single tensors --------------------------------------------------------------------------------


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the tensor's values are in memory, as those of a strided tensor."""
    sparse = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    return not (sparse or tensor.is_meta or torch.nn.parameter.is_lazy(tensor))


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a row with a stride of 1, for ``view(dtype)``.

    ``x[:1, 0]`` is contiguous, but its single element has the stride of a row of ``x``.
    """
    row = tensor.view(-1)
    return row if row.stride(0) == 1 else row.as_strided(row.shape, (1,))


def bytes_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor's bytes on a device. Some backends don't know all dtypes."""
    return row_of(_contiguous(tensor.detach().to(device))).view(torch.uint8)


def writable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors without autograd, in writable memory.

    ``expand()`` returns a tensor with several elements at one address. It gets its own memory.
    """
    written = []
    for tensor in tensors:
        if tensor.layout is torch.strided and 0 in tensor.stride() and not tensor.is_contiguous():
            tensor.data = tensor.contiguous()
        written.append(tensor.data)
    return written


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


# -- many tensors ----------------------------------------------------------------------------------

# Copies for a collective should stay in a CPU's cache. On accelerators, calls are expensive.
_PIECE_BYTES: Final = 32 << 20
_CPU_PIECE_BYTES: Final = 8 << 20


@torch.no_grad()
def broadcast_(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None, src: int = 0
) -> None:
    """Replace the tensors by those of rank ``src``, in place. Collective."""
    targets: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            targets.append(tensor)
            sent.append(_contiguous(tensor))
            rows.append(row_of(sent[-1]).view(torch.uint8))
    if not rows:
        return
    # DistributedDataParallel sends its weights with it.
    send: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]
    send(group or dist.group.WORLD, rows, _CPU_PIECE_BYTES, src)
    _copy_back(targets, sent)


@torch.no_grad()
def average_(
    tensors: Iterable[torch.Tensor], world_size: int, add: Callable[[torch.Tensor], object]
) -> None:
    """Replace each tensor by its mean over the ranks, in place. Collective.

    ``add`` sums a flat tensor over the ranks, in place.
    """
    targets = list(tensors)
    used = list(map(_contiguous, targets))
    for (piece,) in _pieces([used]):
        flat = torch.cat(piece).mul_(1 / world_size)
        add(flat)
        torch._foreach_copy_(piece, _unflatten_dense_tensors(flat, piece))
    _copy_back(targets, used)


@torch.no_grad()
def reduce_to_owners(
    by_owner: Sequence[Sequence[torch.Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Replace the tensors of this rank by their means over all ranks, in place. Collective.

    Each rank sends every owner its part, and the owner adds the parts up. This is twice as fast as
    a reduction for each owner, and adds in the same order on every backend.
    """
    used = [list(map(_contiguous, tensors)) for tensors in by_owner]
    for pieces in _pieces(used):
        owned, pieces[rank] = pieces[rank], []
        sizes = [sum(view.nbytes for view in piece) for piece in pieces]
        received_sizes = [sum(view.nbytes for view in owned)] * len(pieces)
        received_sizes[rank] = 0
        views = list(itertools.chain.from_iterable(pieces))
        sent = torch.cat(views) if views else owned[0].new_empty(0)
        # Bytes, because not every backend knows every dtype.
        received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=sent.device)
        dist.all_to_all_single(received, sent.view(torch.uint8), received_sizes, sizes, group=group)
        if owned:
            parts = received.view(sent.dtype).view(len(pieces) - 1, -1)
            total = parts.sum(0) if len(parts) > 1 else parts[0]
            torch._foreach_add_(owned, _unflatten_dense_tensors(total, owned))
            torch._foreach_mul_(owned, 1 / len(pieces))
    _copy_back(by_owner[rank], used[rank])


def _pieces(by_owner: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
    """Yield each owner's flat views for a collective, with the same dtype and device.

    The views of all owners together stay below a limit.
    """
    kinds: dict[Any, list[list[torch.Tensor]]] = {}
    for owner, tensors in enumerate(by_owner):
        for tensor in tensors:
            kind = tensor.dtype, tensor.device
            if kind not in kinds:
                kinds[kind] = [[] for _ in by_owner]
            if tensor.numel():
                kinds[kind][owner].append(row_of(tensor))
    for (dtype, device), owners in kinds.items():
        limit = _CPU_PIECE_BYTES if device.type == "cpu" else _PIECE_BYTES
        most = max(1, limit // dtype.itemsize // len(by_owner))
        splits = [_split(rows, most) for rows in owners]
        yield from map(list, itertools.zip_longest(*splits, fillvalue=[]))


def _split(rows: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Yield the rows in pieces of at most ``most`` elements. A longer row is cut."""
    piece: list[torch.Tensor] = []
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


def _copy_back(tensors: Iterable[torch.Tensor], used: Iterable[torch.Tensor]) -> None:
    for tensor, source in zip(tensors, used, strict=True):
        if source.data_ptr() != tensor.data_ptr():
            tensor.copy_(source)

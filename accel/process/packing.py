"""Send values as bytes, bytes in messages of known lengths, and many tensors in few collectives."""

from __future__ import annotations

import io
import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..trees import map_tensors

# -- content of any length in messages of a known length -------------------------------------------

_FIRST: Final = 1024  # bytes of the first message. The rest of the content follows in a second one
_LENGTH: Final = 8  # bytes in front of the content, with its length


def to_tensor(data: bytes | bytearray) -> torch.Tensor:
    """Return the bytes as a tensor that owns its memory.

    A gloo thread may free the tensor after the interpreter has ended. It must not need Python then.
    """
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def to_bytes(tensor: torch.Tensor) -> bytearray:
    """Return the bytes of a uint8 tensor."""
    data = bytearray(len(tensor))
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data


def gather_framed(content: bytes, gather: Callable[[bytes], list[bytearray]]) -> list[bytearray]:
    """Return every rank's content. ``gather`` returns all ranks' messages, of equal lengths."""
    data = len(content).to_bytes(_LENGTH, "little") + content
    messages = gather(data[:_FIRST].ljust(_FIRST, b"\0"))
    longest = max(map(_bytes_missing, messages))
    if longest:
        more = gather(data[_FIRST:].ljust(longest, b"\0"))
        messages = [start + end for start, end in zip(messages, more, strict=True)]
    return [_content(message) for message in messages]


def _bytes_missing(first: bytearray) -> int:
    return max(0, _LENGTH + int.from_bytes(first[:_LENGTH], "little") - len(first))


def _content(message: bytearray) -> bytearray:
    return message[_LENGTH : _LENGTH + int.from_bytes(message[:_LENGTH], "little")]


def begin_gather(message: bytes, group: dist.ProcessGroup) -> tuple[Any, list[torch.Tensor]]:
    """Start to gather messages of equal lengths. Return the work handle and the receive buffers."""
    sent = to_tensor(message)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    return dist.all_gather(received, sent, group=group, async_op=True), received


def gather_values(value: object, group: dist.ProcessGroup, timeout: timedelta) -> list[Any]:
    """Return every rank's value. Collective. torch's all_gather_object needs NumPy."""

    def gather(message: bytes) -> list[bytearray]:
        work, received = begin_gather(message, group)
        work.wait(timeout)
        return [to_bytes(tensor) for tensor in received]

    return [pickle.loads(content) for content in gather_framed(pickle.dumps(value), gather)]


# -- values of any kind, with tensors in them ------------------------------------------------------


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the tensor's values are in memory, as those of a strided tensor."""
    sparse = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    return not (sparse or tensor.is_meta or torch.nn.parameter.is_lazy(tensor))


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a row whose bytes can be viewed.

    ``x[:1, 0]`` is contiguous, but ``view(dtype)`` refuses the stride of its single element.
    """
    row = tensor.view(-1)
    return row if row.stride(0) == 1 else row.as_strided(row.shape, (1,))


def bytes_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor's bytes on a device. Some backends don't know all dtypes."""
    plain = tensor.detach().to(device).resolve_conj().resolve_neg()
    return row_of(plain.contiguous()).view(torch.uint8)


def packed(value: Any) -> torch.Tensor:
    """Return a value with tensors in it as bytes, pickled by ``torch.save``."""

    def without_rest(tensor: torch.Tensor) -> torch.Tensor:
        # torch.save writes the whole storage, also for a single row of a dataset.
        if type(tensor) is not torch.Tensor or not is_dense(tensor):
            return tensor
        tensor = tensor.detach()
        complete = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if complete else tensor.clone()

    buffer = io.BytesIO()
    torch.save(map_tensors(without_rest, value), buffer)
    return to_tensor(buffer.getvalue())


def unpacked(message: torch.Tensor, device: torch.device) -> Any:
    """Return the value. Its tensors that weren't on the CPU are on ``device``."""

    def place(storage: Any, location: str) -> Any:
        if location == "cpu":
            return storage
        on_device = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        on_device.copy_(torch.empty(0, dtype=torch.uint8).set_(storage.untyped()))
        return on_device.untyped_storage()

    content = io.BytesIO(to_bytes(message))
    return torch.load(content, map_location=place, weights_only=False)


# -- many tensors in few collectives ---------------------------------------------------------------

# Copies for one collective should stay in a CPU's cache. On accelerators, calls are expensive.
_PIECE_BYTES: Final = 32 << 20
_CPU_PIECE_BYTES: Final = 8 << 20


def _contiguous(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.resolve_conj().resolve_neg().contiguous() for t in tensors]


def _copy_back(tensors: Iterable[torch.Tensor], used: Iterable[torch.Tensor]) -> None:
    for tensor, source in zip(tensors, used, strict=True):
        if source.data_ptr() != tensor.data_ptr():
            tensor.copy_(source)


def _split(tensors: Iterable[torch.Tensor], share: int) -> Iterator[list[torch.Tensor]]:
    """Yield flat views of contiguous tensors of one dtype and device, in pieces of limited size.

    Args:
        share: the number of ranks whose pieces are in memory at a time.
    """
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        limit = _CPU_PIECE_BYTES if tensor.device.type == "cpu" else _PIECE_BYTES
        most = max(1, limit // tensor.itemsize // share)
        for view in row_of(tensor).split(most):
            if piece and size + view.numel() > most:
                yield piece
                piece, size = [], 0
            piece.append(view)
            size += view.numel()
    if piece:
        yield piece


def _pieces_by_owner(
    by_owner: Sequence[Sequence[torch.Tensor]],
) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """Yield for each collective the owners' pieces, which have one dtype and one device."""
    kinds: defaultdict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]]
    kinds = defaultdict(lambda: [[] for _ in by_owner])
    for owner, tensors in enumerate(by_owner):
        for tensor in tensors:
            if tensor.numel():
                kinds[tensor.dtype, tensor.device][owner].append(tensor)
    for owners in kinds.values():
        pieces = [_split(tensors, len(by_owner)) for tensors in owners]
        yield from itertools.zip_longest(*pieces, fillvalue=[])


def writable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors without autograd, in memory that can be written.

    ``expand()`` returns a tensor with several elements at one address. It gets its own memory.
    """
    written = []
    for tensor in tensors:
        if tensor.layout is torch.strided and 0 in tensor.stride() and not tensor.is_contiguous():
            tensor.data = tensor.contiguous()
        written.append(tensor.data)
    return written


@torch.no_grad()
def broadcast_(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None, src: int = 0
) -> None:
    """Replace the tensors by those of rank ``src``, in place. Collective."""
    targets = [tensor for tensor in tensors if tensor.numel()]
    used = _contiguous(targets)
    # Bytes, because not every backend knows every dtype.
    rows = [row_of(tensor).view(torch.uint8) for tensor in used]
    if rows:
        # What DistributedDataParallel sends its weights with.
        send: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]
        send(group or dist.group.WORLD, rows, _CPU_PIECE_BYTES, src)
    _copy_back(targets, used)


@torch.no_grad()
def reduce_to_owners(
    by_owner: Sequence[Sequence[torch.Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Replace the tensors of this rank by their means over all ranks, in place. Collective.

    Each rank sends every owner its part, and the owner adds the parts up. This needs less traffic
    than one reduction per owner, and the order of the addition is the same on every backend.

    Args:
        by_owner: for each rank the tensors that it owns, with the same shapes on all ranks.
    """
    world = len(by_owner)
    used = [_contiguous(tensors) for tensors in by_owner]
    for pieces in _pieces_by_owner(used):
        owned = pieces[rank]
        others = [[] if owner == rank else piece for owner, piece in enumerate(pieces)]
        tensors = list(itertools.chain.from_iterable(others))
        sent = _flatten_dense_tensors(tensors) if tensors else owned[0].new_empty(0)
        width = sent.itemsize
        send_sizes = [width * sum(t.numel() for t in piece) for piece in others]
        size = width * sum(t.numel() for t in owned)
        receive_sizes = [0 if owner == rank else size for owner in range(world)]
        # Bytes, because not every backend knows every dtype.
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=sent.device)
        dist.all_to_all_single(
            received, sent.view(torch.uint8), receive_sizes, send_sizes, group=group
        )
        if owned:
            parts = received.view(sent.dtype).view(world - 1, -1)
            total = parts.sum(0) if world > 2 else parts[0]
            torch._foreach_add_(owned, _unflatten_dense_tensors(total, owned))
            torch._foreach_mul_(owned, 1 / world)
    _copy_back(by_owner[rank], used[rank])


@torch.no_grad()
def average_(
    tensors: Iterable[torch.Tensor], world_size: int, add: Callable[[torch.Tensor], object]
) -> None:
    """Replace each tensor by its mean over the ranks, in place. Collective.

    Args:
        add: sums a flat tensor over the ranks, in place.
    """
    averaged = list(tensors)
    used = _contiguous(averaged)
    for (piece,) in _pieces_by_owner([used]):
        flat = torch.cat(piece).mul_(1 / world_size)
        add(flat)
        torch._foreach_copy_(piece, _unflatten_dense_tensors(flat, piece))
    _copy_back(averaged, used)

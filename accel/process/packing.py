"""What the ranks send each other in one piece: values as bytes, bytes in frames, many tensors as few flat ones."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..trees import map_tensors

# -- Bytes of any length in messages of a known one --------------------------------------------------------------------

_FIRST: Final = (
    1024  # bytes of the first message, which a second one follows where the content is longer
)
_LENGTH: Final = 8  # of them, in front of the content


def to_tensor(data: bytes | bytearray) -> torch.Tensor:
    """The bytes in memory of torch's own: a thread of gloo may be the last to let go, and must not need Python then."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def to_bytes(tensor: torch.Tensor) -> bytearray:
    """What a tensor of bytes holds."""
    data = bytearray(len(tensor))
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data


def framed(content: bytes) -> list[bytes]:
    """The one or two messages that carry ``content``."""
    data = len(content).to_bytes(_LENGTH, "little") + content
    return [data[:_FIRST].ljust(_FIRST, b"\0"), *filter(None, [data[_FIRST:]])]


def bytes_left(first: bytearray) -> int:
    """How many bytes come after the first message."""
    return max(0, _LENGTH + int.from_bytes(first[:_LENGTH], "little") - len(first))


def content_of(messages: bytearray) -> bytearray:
    """The content of messages that ``framed`` made, one after the other."""
    return messages[_LENGTH : _LENGTH + int.from_bytes(messages[:_LENGTH], "little")]


def unframed(receive: Callable[[int], bytearray]) -> bytearray:
    """The content of messages that ``framed`` made; ``receive`` gets the next one, of so many bytes."""
    first = receive(_FIRST)
    rest = bytes_left(first)
    return content_of(first + receive(rest) if rest else first)


def gather_framed(content: bytes, gather: Callable[[bytes], list[bytearray]]) -> list[bytearray]:
    """Every rank's content; ``gather`` gives every rank's message, which are equally long. A second time if one is longer."""
    first, *rest = framed(content)
    messages = gather(first)
    longest = max(map(bytes_left, messages))
    if longest:
        more = gather(b"".join(rest).ljust(longest, b"\0"))
        messages = [one + other for one, other in zip(messages, more, strict=True)]
    return list(map(content_of, messages))


def begin_gather(message: bytes, group: dist.ProcessGroup) -> tuple[Any, list[torch.Tensor]]:
    """Begins to give every rank the messages of all, which are equally long: what waits for it, and where they come."""
    mine = to_tensor(message)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    return dist.all_gather(theirs, mine, group=group, async_op=True), theirs


# -- Values of any kind, with the tensors in them ----------------------------------------------------------------------


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values lie in memory, one after the other."""
    odd = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    return not (odd or tensor.is_meta or torch.nn.parameter.is_lazy(tensor))


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in one dimension, in which bytes can be seen.

    A dimension of one element may have any stride, as that of ``x[:1, 0]`` has: it is contiguous, and torch sees none then.
    """
    row = tensor.view(-1)
    return row if row.stride(0) == 1 else row.as_strided(row.shape, (1,))


def bytes_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Those of its values, on a device: no backend refuses a dtype then."""
    return row_of(tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()).view(
        torch.uint8
    )


class _Pickler(pickle.Pickler):
    """Leaves the memory of tensors out, wherever they are: it is in ``parts``, once for all tensors that share it."""

    parts: dict[int, tuple[int, torch.Tensor]]

    def persistent_id(self, found: Any) -> Any:
        typed = isinstance(found, torch.storage.TypedStorage)
        memory = found._untyped_storage if typed else found
        if not isinstance(memory, torch.UntypedStorage) or memory.device.type == "meta":
            return None
        if memory._cdata not in self.parts:
            whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
            self.parts[memory._cdata] = len(self.parts), whole
        number, _ = self.parts[memory._cdata]
        return (
            number,
            memory.nbytes(),
            memory.device.type == "cpu",
            found.dtype if typed else torch.uint8,
        )


class _Unpickler(pickle.Unpickler):
    """Takes the memory of tensors from ``rest``, in the order in which it was left out."""

    rest: torch.Tensor
    device: torch.device
    parts: list[torch.UntypedStorage]

    def persistent_load(self, kind: Any) -> torch.storage.TypedStorage:
        number, size, on_host, dtype = kind
        if number == len(self.parts):
            mine, self.rest = self.rest.tensor_split([size])
            self.parts.append(
                (mine.clone() if on_host else mine.to(self.device, copy=True)).untyped_storage()
            )
        return torch.storage.TypedStorage(
            wrap_storage=self.parts[number], dtype=dtype, _internal=True
        )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Without the rest of what it is a part of."""
    if type(tensor) is not torch.Tensor or not is_dense(tensor):
        return tensor
    tensor = tensor.detach()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def packed(value: Any) -> torch.Tensor:
    """A value as bytes: pickled, and the memory of its tensors behind that. What shares memory inside of an object still does."""
    pickler = _Pickler(content := io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    pickler.parts = {}
    pickler.dump(map_tensors(_alone, value, others=True))
    head = len(content.getbuffer()).to_bytes(_LENGTH, "little") + content.getvalue()
    return torch.cat([to_tensor(head), *(whole.cpu() for _, whole in pickler.parts.values())])


def unpacked(message: torch.Tensor, device: torch.device) -> Any:
    """The value that ``packed`` was given; its tensors that were not on a host are on this device."""
    end = _LENGTH + int.from_bytes(to_bytes(message[:_LENGTH]), "little")
    unpickler = _Unpickler(io.BytesIO(to_bytes(message[_LENGTH:end])))
    unpickler.rest, unpickler.device, unpickler.parts = message[end:], device, []
    return unpickler.load()


# -- Many tensors in few collectives -----------------------------------------------------------------------------------

# What one collective moves. On the CPU the copies should stay in its cache; elsewhere calls are dear.
_PIECE_BYTES: Final = 32 << 20
_CPU_PIECE_BYTES: Final = 8 << 20


def _limit(dtype: torch.dtype, device: torch.device, owners: int) -> int:
    piece = _CPU_PIECE_BYTES if device.type == "cpu" else _PIECE_BYTES
    return max(1, piece // dtype.itemsize // owners)


def _calls_are_dear(device: torch.device) -> bool:
    """Whether one large collective beats several small ones; gloo gathers into memory of its own, from which it copies."""
    return device.type != "cpu"


def _uncut(limit: int, device: torch.device) -> int:
    """How many elements a tensor has at most that always comes as a whole: alone it needs no copy, which on the CPU decides."""
    return limit // 4 if _calls_are_dear(device) else limit


@final
class _Line:
    """Tensors one after the other, from whose front parts are taken."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._rest = list(reversed(list(tensors)))

    def __bool__(self) -> bool:
        return bool(self._rest)

    def take(self, limit: int, uncut: int) -> list[torch.Tensor]:
        """At most ``limit`` elements in all; of a tensor with more than ``uncut``, which is contiguous, a flat part."""
        part: list[torch.Tensor] = []
        room, rest = limit, self._rest
        if _numel(rest) <= limit:
            self._rest = []
            return rest[::-1]
        while rest:
            size = rest[-1].numel()
            if size > room:
                if size > uncut and room and (uncut < limit or not part):
                    first, more = rest.pop().view(-1).tensor_split([room])
                    part.append(first)
                    rest.append(more)
                break
            part.append(rest.pop())
            room -= size
        return part


def _pieces(
    by_owner: Sequence[Sequence[torch.Tensor]], share: Callable[[torch.device, int], int]
) -> Iterator[list[list[torch.Tensor]]]:
    """For each collective the part of each owner; one dtype and device at a time.

    ``share`` gives how many share a collective, for a device and the number of owners that have something left.
    """
    kinds: defaultdict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]]
    kinds = defaultdict(lambda: [[] for _ in by_owner])
    for owner, tensors in enumerate(by_owner):
        for tensor in tensors:
            if tensor.numel():
                kinds[tensor.dtype, tensor.device][owner].append(tensor)
    for (dtype, device), same in kinds.items():
        lines = list(map(_Line, same))
        while holders := sum(map(bool, lines)):
            limit = _limit(dtype, device, share(device, holders))
            yield [line.take(limit, _uncut(limit, device)) for line in lines]


def _cuttable(tensors: Iterable[torch.Tensor], owners: int) -> list[torch.Tensor]:
    """The same, with a contiguous copy in the place of one that may be cut."""
    return [
        t
        if t.is_contiguous() or t.numel() <= _uncut(_limit(t.dtype, t.device, owners), t.device)
        else t.contiguous()
        for t in tensors
    ]


def _put_back(tensors: Iterable[torch.Tensor], used: Iterable[torch.Tensor]) -> None:
    for tensor, copied in zip(tensors, used, strict=True):
        if copied is not tensor:
            tensor.copy_(copied)


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors one after the other; one that is contiguous is its own memory."""
    flat: torch.Tensor = _flatten_dense_tensors(tensors)
    return row_of(flat.resolve_conj().resolve_neg())


def _unflatten_into(tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
    torch._foreach_copy_(tensors, _unflatten_dense_tensors(flat, tensors))


#: Its name since torch 2.13, where the other one warns.
_all_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _first(parts: Sequence[list[torch.Tensor]]) -> torch.Tensor:
    return next(part[0] for part in parts if part)


def _gather_parts(
    parts: Sequence[list[torch.Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    everyone = _first(parts).new_empty(len(parts), max(map(_numel, parts)))
    flat = [row[: _numel(part)] for row, part in zip(everyone, parts, strict=True)]
    if parts[rank]:
        torch._foreach_copy_(_unflatten_dense_tensors(flat[rank], parts[rank]), parts[rank])
    everything = everyone.view(-1).view(torch.uint8)
    _all_gather(everything, everything.view(len(parts), -1)[rank], group=group)
    for owner, part in enumerate(parts):
        if part and owner != rank:
            _unflatten_into(part, flat[owner])


def _broadcast_parts(
    parts: Sequence[list[torch.Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    buffers = []
    for owner, part in enumerate(parts):
        if part:
            buffer = _flatten(part) if owner == rank else part[0].new_empty(_numel(part))
            work = dist.broadcast(buffer.view(torch.uint8), owner, group=group, async_op=True)
            buffers.append((owner, part, buffer, work))
    for owner, part, buffer, work in buffers:
        work.wait()
        if owner != rank:
            _unflatten_into(part, buffer)


@torch.no_grad()
def broadcast_from_owners(
    by_owner: Sequence[Sequence[torch.Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Give every rank the owners' values, in place; as bytes, since not every backend knows every dtype. Collective.

    ``by_owner`` has for each rank the tensors that it owns, with the same shapes on every rank.
    """
    world = len(by_owner)
    used = [_cuttable(tensors, world) for tensors in by_owner]
    owners = sum(map(bool, by_owner))
    for parts in _pieces(used, lambda device, left: left if _calls_are_dear(device) else owners):
        sizes = list(map(_numel, parts))
        # Where the parts are much alike, one collective for all of them, each as long as the longest.
        alike = 2 * world * max(sizes) <= 3 * sum(sizes)
        give = (
            _gather_parts if alike and _calls_are_dear(_first(parts).device) else _broadcast_parts
        )
        give(parts, rank, group)
    for owner, tensors in enumerate(by_owner):
        if owner != rank:
            _put_back(tensors, used[owner])


def writable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Their memory; one that has an element in several places, as ``expand()`` makes it, gets memory of its own first."""
    held = list(tensors)
    for tensor in held:
        if tensor.layout is torch.strided and 0 in tensor.stride() and not tensor.is_contiguous():
            tensor.data = tensor.contiguous()
    return [tensor.data for tensor in held]


def broadcast_(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None, src: int = 0
) -> None:
    """Give every rank rank ``src``'s values, in place. Collective."""
    owned = list(tensors)
    world = dist.get_world_size(group)
    broadcast_from_owners(
        [owned if owner == src else [] for owner in range(world)], dist.get_rank(group), group
    )


@torch.no_grad()
def reduce_to_owners(
    by_owner: Sequence[Sequence[torch.Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Replace, on each owner, its tensors by their means over the ranks; elsewhere they stay as they are. Collective.

    Each rank sends each owner its part and the owner adds them up: less traffic than reductions to one rank after the
    other, and one order of addition on any transport. ``by_owner`` as in ``broadcast_from_owners``.
    """
    world = len(by_owner)
    used = [_cuttable(tensors, world) for tensors in by_owner]
    for parts in _pieces(used, lambda *_: world):
        mine = parts[rank]
        others = [part if owner != rank else [] for owner, part in enumerate(parts)]
        tensors = [t for part in others for t in part]
        sent = _flatten(tensors) if tensors else mine[0].new_empty(0)
        # As bytes: not every transport knows every dtype.
        width = sent.itemsize
        size = width * _numel(mine)
        came = torch.empty((world - 1) * size, dtype=torch.uint8, device=sent.device)
        dist.all_to_all_single(
            came,
            sent.view(torch.uint8),
            [size if owner != rank else 0 for owner in range(world)],
            [width * _numel(part) for part in others],
            group=group,
        )
        if mine:
            rows = came.view(sent.dtype).view(world - 1, -1)
            torch._foreach_add_(
                mine, _unflatten_dense_tensors(rows.sum(0) if world > 2 else rows[0], mine)
            )
            factor: Any = 1 / world
            if not _calls_are_dear(sent.device) and sent.dtype in (torch.float32, torch.float64):
                factor = sent.new_full((), factor)  # takes a third of the time that a number does
            torch._foreach_mul_(mine, factor)
    _put_back(by_owner[rank], used[rank])


@torch.no_grad()
def average_(
    tensors: Iterable[torch.Tensor], world_size: int, add: Callable[[torch.Tensor], object]
) -> None:
    """Replace each tensor by its mean over the ranks, in place; ``add`` sums a flat piece over them, in place. Collective."""
    averaged = list(tensors)
    used = _cuttable(averaged, 1)
    for (piece,) in _pieces([used], lambda *_: 1):
        flat = torch.cat([t.reshape(-1) for t in piece]).mul_(1.0 / world_size)
        add(flat)
        _unflatten_into(piece, flat)
    _put_back(averaged, used)

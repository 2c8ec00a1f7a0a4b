"""Which rank owns which parameter, and the weights in flat memory by owner: fairscale's OSS, whose steps are the user's."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, KeysView, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from fairscale.nn.misc import ParamBucket  # type: ignore[import-untyped,import-not-found,unused-ignore]
from fairscale.optim.oss import OSS  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import nn

from ...process.control import agree
from ...process.packing import broadcast_from_owners

#: Bytes at whose multiples a parameter begins in a bucket: kernels read so many at once.
_ALIGNMENT: Final = 16
#: A bucket is sent in parts of at least so many parameters on average, or they are copied together.
_LEAST: Final = 16


@final
class Partition(OSS):  # type: ignore[misc,unused-ignore]
    """fairscale's OSS as far as it deals parameters out; nothing is stepped by it."""

    def _setup_flat_buffers(self) -> None:
        """Not here: fairscale's own has one dtype, moves whatever is frozen or thawed, and makes every layout contiguous."""


@final
class Bucket:
    """Parameters of one owner one after the other in one piece of memory, fairscale's ``ParamBucket``.

    A parameter that the program puts elsewhere (``p.data = ...``) stays there, and is copied.
    """

    def __init__(self, owner: int, parameters: Sequence[nn.Parameter]) -> None:
        self.owner, self.parameters = owner, parameters
        self.keys = dict.fromkeys(map(id, parameters))
        first = parameters[0]
        unit = max(1, _ALIGNMENT // first.element_size())
        self.starts = [0, *itertools.accumulate(-(-p.numel() // unit) * unit for p in parameters)]
        bucket = ParamBucket(self.starts[-1], first.dtype, first.device)
        for parameter, start in zip(parameters, self.starts, strict=False):
            bucket._fill = start
            bucket.add_param(parameter)
        self.buffer: torch.Tensor = bucket.buffer
        self._pointers = [p.data_ptr() for p in parameters]

    def runs(self, wanted: KeysView[int]) -> list[range]:
        """The places of the parameters whose identity is wanted, as ranges; none where these would be too many."""
        if self.keys.keys() <= wanted:
            return [range(len(self.keys))]
        places = [n for n, key in enumerate(self.keys) if key in wanted]
        cuts = [n for n in range(1, len(places)) if places[n] != places[n - 1] + 1]
        if not places or len(cuts) > len(places) // _LEAST:
            return []
        return [range(places[a], places[b - 1] + 1) for a, b in itertools.pairwise([0, *cuts, len(places)])]

    def message(self, run: range) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Memory that carries some of them, as bytes: not every transport knows every dtype.

        It is their own, or, where one does not lie here any more, other memory with a place for each, which come with it:
        in the old place of that one there may be what the program has kept of its values.
        """
        parameters = self.parameters[run.start : run.stop]
        start, end = self.starts[run.start], self.starts[run.stop - 1] + parameters[-1].numel()
        memory = self.buffer[start:end]
        if list(map(torch.Tensor.data_ptr, parameters)) == self._pointers[run.start : run.stop]:
            return memory.view(torch.uint8), [], []
        memory = torch.empty_like(memory)
        firsts = self.starts[run.start : run.stop]
        places = [memory[n - start :][: p.numel()].view(p.shape) for p, n in zip(parameters, firsts, strict=True)]
        return memory.view(torch.uint8), [*parameters], places

    def release(self) -> None:
        """Give each parameter memory of its own again, unless the program has other uses of it: an alias stays one."""
        storage = self.buffer.untyped_storage()
        here = [p for p in self.parameters if p.untyped_storage().data_ptr() == storage.data_ptr()]
        if _uses(storage) == len(here) + 2:  # the buffer's use, and the one by `storage`
            for parameter in here:
                parameter.data = parameter.data.clone()


def _alone(parameter: nn.Parameter) -> bool:
    """Whether a parameter may lie elsewhere and nobody would notice: no other tensor or process uses its memory."""
    if type(parameter) is not nn.Parameter or not parameter.numel() or not parameter.is_contiguous():
        return False
    storage = parameter.untyped_storage()
    own = storage.resizable() and storage.nbytes() == parameter.nbytes
    # The parameter's own use and the one by `storage`.
    return own and not (storage.device.type == "cpu" and storage.is_shared()) and _uses(storage) == 2


def _uses(storage: torch.UntypedStorage) -> int:
    number: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,unused-ignore]
    return number


@final
class Owners:
    """Gives each parameter to one rank by fairscale's partition: the next parameter to the rank that has the least.

    Asked again with more parameters, it leaves those where they are that have an owner. All ranks must ask alike.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._oss: Any = None
        self._order: dict[int, nn.Parameter] = {}
        self._buckets: list[Bucket] = []
        #: The owner's rank, by ``id`` of the parameter.
        self.rank_of: dict[int, int] = {}
        #: Differs where ranks did not ask alike.
        self.digest = 0

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give an owner to those that have none."""
        new = {id(p): p for p in parameters if id(p) not in self.rank_of}
        if not new:
            return
        # Only these can ever be trained.
        trained = {key: p for key, p in new.items() if p.is_floating_point() or p.is_complex()}
        self.rank_of.update(dict.fromkeys(new.keys() - trained.keys(), 0))
        self._order |= trained
        # Trainable ones first: these have gradients and state. From large to small, which balances best.
        group = {"params": sorted(trained.values(), key=lambda p: (not p.requires_grad, -p.numel()))}
        if trained:
            self._deal(group)
        dealt = [(p.shape, self.rank_of[key]) for key, p in trained.items()]
        self.digest = zlib.crc32(str([self.digest, *dealt]).encode())

    def _deal(self, group: dict[str, Any]) -> None:
        frozen = [p for p in self._order.values() if not p.requires_grad]
        for parameter in frozen:  # these would count as one element, and may be trained later
            parameter.requires_grad_(True)
        try:
            if self._oss is None:
                self._oss = Partition([group])
                self._oss.group = None  # it is not to keep a process group from its end
            else:
                self._oss.add_param_group(group)
            dealt = sorted(self._oss._param_to_rank.items(), key=lambda item: id(item[0]) not in self.rank_of)
            owner_at: dict[int, int] = {}
            for p, rank in dealt:  # parameters with the same memory are stepped in one place, one after the other
                place = p.data_ptr() if type(p) is nn.Parameter else -id(p)  # others may have none
                self.rank_of[id(p)] = owner_at.setdefault(place, self.rank_of.get(id(p), rank))
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def owns(self, parameter: torch.Tensor) -> bool:
        return self.rank_of.get(id(parameter)) == self._rank

    def by_owner(self, parameters: Iterable[nn.Parameter], tensors: Iterable[Any]) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = [[] for _ in range(self._world)]
        for parameter, tensor in zip(parameters, tensors, strict=True):
            found[self.rank_of[id(parameter)]].append(tensor)
        return found

    def flatten(self, label: str) -> None:
        """Put those that have an owner into buckets, in their order, unless some rank finds that one must stay. Collective."""
        held = {key for bucket in self._buckets for key in bucket.keys}
        new = [p for key, p in self._order.items() if key not in held]
        told = agree(f"where weights of {label} lie", bytes(map(_alone, new)))
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter, *alone in zip(new, *told, strict=True):
            if all(alone):
                kind = (self.rank_of[id(parameter)], parameter.dtype, parameter.device)
                kinds.setdefault(kind, []).append(parameter)
        self._buckets += [Bucket(owner, same) for (owner, *_), same in kinds.items()]

    @torch.no_grad()
    def publish(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        """Give every rank the owners' values. Collective."""
        rest = {id(p): p for p in parameters}
        sent = []
        for bucket in self._buckets:
            for run in bucket.runs(rest.keys()):
                flat, elsewhere, places = bucket.message(run)
                if bucket.owner == self._rank and elsewhere:
                    torch._foreach_copy_(places, elsewhere)
                work = dist.broadcast(flat, bucket.owner, group=group, async_op=True)
                sent.append((bucket, run, elsewhere, places, work))
        for bucket, run, elsewhere, places, work in sent:
            work.wait()
            if bucket.owner != self._rank:
                if elsewhere:
                    torch._foreach_copy_(elsewhere, places)
                # Autograd tells by it that a graph was made with other values.
                torch.autograd.graph.increment_version(bucket.parameters[run.start : run.stop])
            for parameter in bucket.parameters[run.start : run.stop]:
                del rest[id(parameter)]
        broadcast_from_owners(self.by_owner(rest.values(), rest.values()), self._rank, group)

    def release(self) -> None:
        for bucket in self._buckets:
            bucket.release()
        self._buckets.clear()

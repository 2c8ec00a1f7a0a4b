"""Loading: find what each rank needs, compare its checksums, agree, and fill it in place."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, final
from urllib.parse import unquote

import torch
from torch import nn

from .. import shard
from ..data import LoaderHandle
from ..deferred import weights_of
from ..errors import CheckpointError, is_url
from ..process import current
from ..process.control import locked, raise_together
from ..shard import Manifest, Shard
from . import folder, record
from .background import background
from .layout import digest
from .match import (
    Apply,
    Differences,
    Match,
    check_engines,
    check_objects,
    left_out,
    report,
    unfit,
    value_tensors,
)
from .objects import ModuleObject, OptimizerObject, RankObject, StatefulObject, StateObject, TensorObject, engines_of
from .placement import Placed, Sight, find, memory_place
from .reader import Reader
from .record import Record, Stored
from .safetensors import BY_NAME
from .state import OF_VALUES, State
from .steps import (
    DamageError,
    Progress,
    check_flags,
    check_options,
    exchange,
    explain,
    log_end,
    on_any_rank,
    on_every_rank,
    progress_bar,
)
from .values import Decoder, Json
from .verify import check_record, chunks_due
from .weights import Checkpoint, choose, is_weights_alone, open_checkpoint

logger = logging.getLogger("accel")


@locked
def load(
    dir: str | os.PathLike[str],
    state: dict[Any, Any] | None = None,
    *,
    strict: bool = True,
    check: Literal["first", "stream"] = "first",
    convert: bool = False,
    progress: bool = True,
) -> dict[Any, Any]:
    """Fill ``state`` in place from the checkpoint in ``dir``, whatever world size and backend saved it. Collective.

    A newer snapshot of ``dir`` in memory (``save(..., in_memory=True)``) is taken instead; where it is damaged or not whole, what
    is on disk is, with a warning.

    Args:
        dir: the checkpoint's directory; or one with ``model.safetensors``, or with ``model.safetensors.index.json`` and the
            shards that it names, as ``export`` and other libraries write them (diffusers with the stem
            ``diffusion_pytorch_model``). That has no checksums, and ``state`` then
            holds one model, which is filled.
        state: as for ``save``: handles, modules, optimizers, objects with a state dict and tensors are filled in place, plain
            values in its dicts are replaced. What the checkpoint has beside is left alone. None: only the plain values are
            returned.
        strict: raise where the checkpoint lacks something that ``state`` has, or a module lacks something that the
            checkpoint has of it; else what does not fit is skipped, with a warning that lists it.
        check: "first" compares all checksums before anything is changed; "stream" while it fills, in one pass, so that
            after an error the state may be partly filled.
        convert: convert tensors that were saved with another dtype; else they are differences.
        progress: as for ``save``.

    Returns:
        ``state``.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another format, or does not fit; on every rank.
    """
    current()
    partly = False

    def act() -> dict[Any, Any]:
        nonlocal partly
        try:
            with progress_bar("accel.load", shown=progress) as more:
                return _load_newest(dir, state, (strict, check, convert), progress, more)
        except _PartlyFilledError:
            partly = True
            raise
        except CheckpointError as error:
            if partly:
                raise _PartlyFilledError(f"{error}; an earlier checkpoint was replaced meanwhile: {_PARTLY}") from error
            raise

    def again(replaced: bool) -> bool:
        # What is skipped would have values of the earlier one.
        return on_any_rank("accel.load (again)", replaced) and (strict or not partly)

    return folder.read_standing(dir, act, again)


_PARTLY: Final = "the state may be partly filled: load a whole checkpoint before going on"


@final
class _PartlyFilledError(CheckpointError):
    """A load failed half-way, on some rank."""


def _load_newest(
    dir: str | os.PathLike[str], state: Any, options: tuple[Any, ...], progress: object, more: Progress
) -> dict[Any, Any]:
    """What is in memory, or else on disk. Collective."""
    strict, check, convert = options
    fill = functools.partial(_load, state, strict, convert, more)
    unusable: _UnusableSnapshot | None = None
    try:
        if (found := _snapshot(dir, options, progress)) is not None:
            return fill(None, *found)
    except _UnusableSnapshot as error:
        unusable = error
    try:
        on_disk = _open(dir, state, options)
    except CheckpointError as error:
        if unusable is None:
            raise
        where, goes_on = memory_place(folder.absolute(dir)), "accel.latest gives what is on disk"
        remedy = f"it is set aside in {where}: start again" if unusable.aside else f"remove {where}"
        raise CheckpointError(
            f"{error}; and its snapshot in memory cannot be loaded: {unusable}; {remedy}, and {goes_on}"
        ) from error
    if unusable is not None and current().place.rank == 0:
        logger.warning("the newer snapshot in memory cannot be loaded, so what is on disk is: %s", unusable)
    return fill(check, *on_disk)


@final
class _UnusableSnapshot(CheckpointError):
    """What memory has is damaged, and set ``aside``, or not whole. Nothing was changed."""

    def __init__(self, text: str, aside: bool = False) -> None:
        super().__init__(text)
        self.aside = aside


def _snapshot(
    dir: str | os.PathLike[str], options: tuple[object, ...], progress: object
) -> tuple[Checkpoint, Placed] | None:
    """What hosts have in memory, where it is newer than what is on disk; None where nothing is. Collective."""
    strict, check, convert = options

    def look() -> tuple[Record | None, tuple[object, Sight | None]]:
        check_flags(strict=strict, convert=convert, progress=progress)
        if check not in ("first", "stream"):
            raise CheckpointError(f"check={check!r}: expected 'first' or 'stream'")
        background.wait()
        directory, asked = folder.absolute(dir), (folder.named(dir), options)
        found, _ = folder.in_memory(directory)
        on_disk = folder.present(directory) if found else None
        if found is None or (on_disk is not None and on_disk.time > found.time):
            return None, (asked, None)
        return found, (asked, (found.time, found.id))

    own, told = exchange("accel.load (memory)", look)
    if not any(one for _, one in told) or any(asked != told[0][0] for asked, _ in told):
        return None  # where ranks ask for different things, `_open` says so
    where, sights = "", [one for _, one in told]
    try:
        where = on_every_rank("accel.load (memory)", lambda: str(memory_place(folder.absolute(dir), make=True)))
        return _placed(where, find(where, own, sights))
    except CheckpointError as error:
        raise _unusable(error, where, max(filter(None, sights))[1]) from error


def _unusable(error: CheckpointError, where: str, save: str) -> _UnusableSnapshot:
    """Of a snapshot that cannot be loaded: set aside on all hosts where a rank has found it damaged. Collective."""
    found = isinstance(error, DamageError)
    damaged = any(exchange("accel.load (memory)", lambda: (None, found))[1])
    if damaged:
        on_every_rank("accel.load (memory)", lambda: folder.set_aside(where, save))
    return _UnusableSnapshot(str(error), damaged)


def _load(
    state: Any,
    strict: bool,
    convert: bool,
    more: Progress,
    check: str | None,
    checkpoint: Checkpoint,
    placed: Placed | None,
) -> dict[Any, Any]:
    """``check`` is None of a snapshot: that is compared first, so that what is on disk can be taken instead."""
    process, begin = current(), time.monotonic()
    rank = process.place.rank
    with contextlib.ExitStack() as undo:

        def prepare() -> tuple[Loading, tuple[Differences, str, dict[str, str], int, int]]:
            loading = Loading(checkpoint, state, undo, rank, stream=check == "stream", convert=convert)
            size = 0 if is_url(checkpoint.directory) else sum(one.tensor.nbytes for one in loading.needs())
            if placed is None and checkpoint.headers is None:
                loading.files_of += str(folder.key_of(checkpoint.directory))  # ranks may each have a copy of their own
            return loading, (loading.differences, *loading.objects(), size, sum(1 << at for at in loading.unneeded))

        loading, told = exchange("accel.load", prepare)
        loading.reader.progress = more
        nowhere = functools.reduce(operator.and_, [places for *_, places in told])
        unneeded = [name for at, name in loading.unneeded.items() if nowhere >> at & 1]
        report(checkpoint.directory, [differences for differences, *_ in told], unneeded, strict, rank)
        check_objects([objects for _, objects, *_ in told])
        check_engines("accel.load", [engines for _, _, engines, *_ in told])
        try:
            if placed is not None:
                loading.files_of = placed.fetch(checkpoint.directory, loading.files())
            # Together they read much more of disks than there is: what ranks of a host read of one file, one of them compares.
            shared = sum(size for *_, size, _ in told) > 1.5 * checkpoint.record.nbytes
            if checkpoint.headers is None and (check != "stream" or shared):
                due = chunks_due(loading.reader, checkpoint.record, loading.needs(), process.place, loading.files_of)
                if check == "stream":
                    loading.due = due
                else:
                    on_every_rank("accel.load (the checksums)", lambda: loading.reader.verify_all(due))
        except CheckpointError as error:
            if check is not None:
                raise
            raise _unusable(error, checkpoint.directory, checkpoint.record.id) from error
        on_every_rank("accel.load (the values)", loading.decode)
        undo.pop_all()
        try:
            result: dict[Any, Any] = on_every_rank("accel.load", loading.apply)
        except CheckpointError as error:
            raise _PartlyFilledError(str(error)) from error
    loading.filled()
    log_end(checkpoint.directory, "loaded", sum(one.tensor.nbytes for one in loading.needs()), begin)
    return result if state is None else state


class Sighting(NamedTuple):
    """What a rank tells of what it is to load."""

    name: str
    digits: str
    options: tuple[object, ...]
    problem: str = ""  # where it sees none
    sight: Sight | None = None


def _open(dir: str | os.PathLike[str], state: Any, options: tuple[object, ...]) -> tuple[Checkpoint, Placed | None]:
    """What is there, which is the same on all ranks; and where it is, if that is on disks of hosts. Collective."""
    problem: CheckpointError | None = None

    def look() -> tuple[Checkpoint | None, Sighting]:
        nonlocal problem
        background.wait()
        name = folder.named(dir)
        try:
            found = open_checkpoint(folder.absolute(dir), state)
        except CheckpointError as error:
            problem = error  # another host may have it
            return None, Sighting(name, "", options, str(error))
        if found.record.hosts:
            return found, Sighting(name, found.digits, options, sight=(found.record.time, found.record.id))
        # Before anything is made in the sizes that the record names.
        reads = state is not None or any(name.startswith(OF_VALUES) for name in found.record.tensors)
        if reads and found.headers is None and current().place.rank == 0:
            folder.check_sizes(found.directory, found.record)
        return found, Sighting(name, found.digits, options)

    found, seen = exchange("accel.load (the record)", look)
    check_options("accel.load", "strict, check and convert", [one.options for one in seen])
    if any(one.sight for one in seen) and all(one.sight or one.problem for one in seen):
        return _open_placed(folder.absolute(dir), found, seen)
    raise_together("accel.load (the record)", problem, [one.problem for one in seen], CheckpointError)
    assert found is not None
    if any(one.digits != seen[0].digits for one in seen):
        raise CheckpointError(
            f"{found.directory}: the ranks see different checkpoints there; load after the save is done, from a file system "
            "that all of them see"
        )
    return found, None


def _open_placed(directory: str, found: Checkpoint | None, seen: Sequence[Sighting]) -> tuple[Checkpoint, Placed]:
    """Of what the hosts have, the newest save that is whole. Collective."""
    if len(names := {one.name for one in seen}) > 1:
        raise CheckpointError(
            f"accel.load: the ranks name different directories ({', '.join(sorted(names))}); accel.latest(root, "
            "placement='host') gives all the same"
        )
    return _placed(directory, find(directory, None if found is None else found.record, [one.sight for one in seen]))


def _placed(directory: str, placed: Placed) -> tuple[Checkpoint, Placed]:
    objects = check_record(placed.record, os.path.join(directory, record.NAME))
    return Checkpoint(directory, placed.record, placed.digits, objects), placed


@final
class Loading:
    """One rank's part of a load: what is to be filled, and from where; ``state`` is None where only plain values are asked for.

    ``undo`` takes what brings back how optimizers were, once they have state to be filled. ``stream``: compare checksums while
    filling; ``convert``: tensors of another dtype are none of the differences; ``planned``: nothing will be filled yet.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: Any,
        undo: contextlib.ExitStack,
        rank: int,
        *,
        stream: bool,
        convert: bool,
        planned: bool = False,
    ) -> None:
        self.found = checkpoint.record
        self.rank = rank
        self.path = checkpoint.path
        self.reader = Reader(checkpoint.directory, self.found, stream=stream, headers=checkpoint.headers)
        self._of_values: dict[str, torch.Tensor] = {}
        self._decoder = Decoder(self.path, self._fetch, checkpoint.objects)
        self._wanted: list[Shard] = []
        self._tied: list[tuple[str, str]] = []
        #: What the checkpoint has of the objects here, and this rank needs nothing of, by its place among all tensors: so that
        #: very many ranks, each with a part of a model, tell each other a bit for each, and no names.
        self.unneeded: dict[int, str] = {}
        self._places = {name: at for at, name in enumerate(self.found.tensors)}
        self._match = Match(State({} if state is None else state), self._decoder)
        self.differences = self._match.differences
        self._apply: Apply | None = None
        #: The chunks that this rank compares while it fills; None: all that it reads.
        self.due: dict[int, set[int]] | None = None
        #: One text for the ranks that read the same files by the same host.
        self.files_of = socket.gethostname()
        if state is None:
            self._match.plain.append(self.found.values)
        else:
            self._apply = self._match.visit(state, self.found.values)
        for one, node in self._match.objects:
            self._find_slots(one, node, undo, convert, planned)
        self._find_shared()

    def _fetch(self, name: str) -> torch.Tensor:
        if name not in self._of_values:
            self._of_values |= self.reader.read([name])
        return self._of_values[name].clone()

    def _find_slots(
        self, one: StateObject, node: Json, undo: contextlib.ExitStack, convert: bool, planned: bool
    ) -> None:
        if isinstance(one, TensorObject):  # a state can have very many of them
            own = one.name
            tensors = {"": self.found.tensors[own]} if own in self.found.tensors else {}
        else:
            own = f"{one.name}/"
            tensors = {name[len(own) :]: t for name, t in self.found.tensors.items() if name.startswith(own)}
        stored_as = {}
        if isinstance(one, ModuleObject):
            stored_as = self._untie(one, own, tensors)
            self._compare_extra(one, node["extra"])
        manifest: Manifest = {name: (t.shape, BY_NAME[t.dtype]) for name, t in tensors.items()}
        undo.callback(one.undo())
        touched = set()
        wanted: list[tuple[str, Shard]] = []
        left: set[str] = set()
        for name, slot in one.slots(manifest, node):
            stored = tensors.get(name)
            touched.add(name)
            here = f"{one.path}{f', {name}' if name else ''}"
            if stored is None:
                self.differences.missing.append(here)
            elif problem := unfit(stored, slot, convert, planned):
                self.differences.unfit.append(f"{here}: {problem}")
                left.add(name.rpartition("/")[0])
            else:
                saved_as = f"{own}{stored_as.get(name, name)}"
                wanted.append((name, Shard(saved_as, slot.shape, slot.start, slot.tensor, slot.box)))
        if isinstance(one, OptimizerObject):  # state of a parameter is of use as a whole
            one.left = left
            wanted = [(name, part) for name, part in wanted if name.rpartition("/")[0] not in left]
        self._wanted += [part for _, part in wanted]
        if not isinstance(one, TensorObject):
            for name in tensors.keys() - touched:
                self.unneeded[self._places[f"{own}{stored_as.get(name, name)}"]] = f"{one.path}, {name}"

    def _untie(self, one: ModuleObject, own: str, tensors: dict[str, Stored]) -> dict[str, str]:
        """Let a tied tensor have its first name in ``tensors`` alone; returns under which it was stored."""
        stored_as = {}
        for first, others in one.tied().items():
            for name in others:
                if name not in tensors:
                    continue
                if first not in tensors:
                    tensors[first], stored_as[first] = tensors[name], name
                else:
                    self._tied.append((f"{own}{stored_as.get(first, first)}", f"{own}{name}"))
                del tensors[name]
        return stored_as

    def _find_shared(self) -> None:
        """Objects may share a tensor, which can have but one value: a tied weight of two models, or one tensor under two keys."""
        names: dict[tuple[Any, ...], str] = {}
        for one in self._wanted:
            tensor = one.tensor
            if tensor.numel() and not tensor.is_meta:
                key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), one.start, one.box
                if (name := names.setdefault(key, one.name)) != one.name:
                    self._tied.append((name, one.name))

    def _compare_extra(self, one: ModuleObject, saved: Iterable[str]) -> None:
        """What is no tensor in a module is to be there on both sides, too."""
        mine = shard.extra_modules(one.module).keys()
        self.differences.missing.extend(f"{one.path}, {name}" for name in sorted(mine - set(saved)))
        self.differences.untouched.update(f"{one.path}, {name}" for name in set(saved) - mine)

    def _check_tied(self) -> None:
        for one, other in self._tied:
            a, b = self.found.tensors[one], self.found.tensors[other]
            if (a.dtype, a.shape) != (b.dtype, b.shape) or (self.rank == 0 and not self.reader.same(one, other)):
                raise CheckpointError(
                    f"{self.path}: {one} and {other} differ, and in the state they are one tensor; it is not this state's"
                )

    def objects(self) -> tuple[str, dict[str, str]]:
        """What is filled: a digest of names and kinds, and by path the models with an engine."""
        objects = [one for one, _ in self._match.objects]
        return digest([(one.name, one.kind) for one in objects]), engines_of(objects)

    def needs(self) -> list[Shard]:
        """What this rank reads."""
        return self._wanted + self._whole(self._in_values)

    def files(self) -> set[int]:
        """The numbers of the files that this rank reads."""
        tied = [name for pair in self._tied for name in pair] if self.rank == 0 else []
        return self.reader.files(self.needs() + self._whole(tied))

    def _whole(self, names: Iterable[str]) -> list[Shard]:
        """All of these tensors, without memory."""
        found = [(name, self.found.tensors[name]) for name in names]
        return [Shard(n, t.shape, 0, torch.empty(t.numel, dtype=torch.uint8, device="meta")) for n, t in found]

    @functools.cached_property
    def _in_values(self) -> list[str]:
        """The tensors that values consist of."""
        nodes = [*self._match.plain, *(node for _, node in self._match.objects)]
        names = (name for node in nodes for name in value_tensors(node))
        return [name for name in names if name.startswith(OF_VALUES) and name in self.found.tensors]

    def decode(self) -> None:
        """Make sure that all values can be decoded, before anything is changed."""
        self._check_tied()
        self._of_values |= self.reader.read(self._in_values)
        values = self._match.decode()
        if self._apply is None:
            self._apply = values.pop
            self._say_what_is_left_out()
        for one, node in self._match.objects:
            for value in one.encoded(node):
                self._decoder.decode(value)
            if isinstance(one, RankObject):
                for own in self._own(node):
                    self._decoder.decode(own)

    def _say_what_is_left_out(self) -> None:
        """An optimizer of torch's takes a state dict without its tensors, and begins anew."""
        found = list(left_out(self.found.values, self._decoder)) if self.rank == 0 else []
        if found:
            logger.warning(
                "%s: what accel.load gives without a state has no tensors: %d are left out of the containers in it, such as %s; "
                'give it what they belong to, as in accel.load(dir, {"optimizer": optimizer})',
                self.path,
                len(found),
                found[0],
            )

    def apply(self) -> Any:
        """Change the state; an error says that it came half-way."""
        try:
            self._restart_guards()
            objects = sorted(self._match.objects, key=lambda pair: _order(pair[0]))
            for one, node in objects:
                if isinstance(one, StatefulObject):
                    one.fill(node, self._decoder)
            with torch.no_grad():
                self.reader.fill(self._wanted, self.due)
                # Autograd must see that what it may have saved for a backward has changed.
                torch.autograd.graph.increment_version([one.tensor for one in self._wanted])
                for one, node in objects:
                    if not isinstance(one, StatefulObject | RankObject):
                        one.fill(node, self._decoder)
            assert self._apply is not None
            result = self._apply()
            for one, node in objects:
                if isinstance(one, RankObject):
                    one.fill_own(self._own(node), self._decoder, self.rank)
        except Exception as error:
            raise CheckpointError(f"{explain(error)}; {_PARTLY}") from error
        return result

    def _own(self, node: Json) -> list[Json]:
        """What each rank that saved has of its own."""
        return [own[node["name"]] for own in self.found.ranks]

    def _restart_guards(self) -> None:
        """What is filled with all its optimizers is one model again, wherever the ranks were interrupted before."""
        raws = {id(vars(one).get(one.kind)) for one, _ in self._match.objects}
        for engine in {one.engine for one, _ in self._match.objects if one.engine is not None}:
            if raws.issuperset(map(id, [engine.module, *engine.optimizers])):
                engine.drift.forget()
                engine.process.order.forget()

    def lacking_parameters(self, module: nn.Module) -> list[str]:
        """Of what the checkpoint lacks, the parameters of a module of the state."""
        paths = [one.path for one, _ in self._match.objects if isinstance(one, ModuleObject)]
        names = {f"{path}, {name}" for path in paths for name, _ in module.named_parameters(remove_duplicate=False)}
        return [name for name in self.differences.missing if name in names]

    def filled(self) -> None:
        """Tell the engines. Collective."""
        engines = {id(one.engine): one.engine for one, _ in self._match.objects if one.engine is not None}
        for engine in sorted(engines.values(), key=lambda e: e.serial):
            engine.holdings.filled()
            engine.refresh()


def _order(one: StateObject) -> bool:
    """Loaders come first: they refuse a state that is not theirs, and nothing is changed by then."""
    return not (isinstance(one, StatefulObject) and isinstance(one.value_object, LoaderHandle))


# -- First values of a model that was built without memory, from a checkpoint or a directory of weights ---------------


_WAY_OUT: Final = " (deferred_init(weights, strict=False) takes one that has more, or lacks buffers)"


def first_values(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """What fills the handle of a deferred module, once it has memory; None where there is nothing to read. Local.

    CheckpointError where what ``deferred_init(weights=...)`` names is not there, or does not fit, of which it lists both sides.
    """
    source = weights_of(module)
    if source is None:
        return None
    background.wait()
    directory = folder.absolute(source.weights)
    state = _state_for(directory, source.name, module)
    with contextlib.ExitStack() as undo:
        whole = open_checkpoint(directory, state)
        loading = Loading(whole, state, undo, 0, stream=False, convert=True, planned=True)
        if source.strict:
            report(directory, [loading.differences], loading.unneeded.values(), True, 0, _WAY_OUT)
        else:
            lacking = Differences(loading.lacking_parameters(module), loading.differences.unfit)
            report(directory, [lacking], (), True, 0, "")

    def fill(handle: nn.Module) -> None:
        load(directory, _state_for(directory, source.name, handle), strict=source.strict, convert=True)

    return fill


def _state_for(directory: str, name: str | None, module: nn.Module) -> dict[str, Any]:
    """The state whose only model is ``module``, at its place in what ``directory`` holds."""
    if is_weights_alone(directory):
        if name is not None:
            raise CheckpointError(f"{directory} has weights of one model, without a name: leave name={name!r} out")
        return {"model": module}
    name, _ = choose(directory, record.read(directory)[0], name)
    *above, last = name.split("/")
    if any(part.startswith("[") for part in (*above, last)):
        raise CheckpointError(
            f"{directory}: its model {name!r} lies in a list, or under a key that is no string, where it cannot be taken from"
        )
    state: dict[str, Any] = {unquote(last): module}
    for part in reversed(above):
        state = {unquote(part): state}
    return state

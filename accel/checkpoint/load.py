"""Load: match the state with the record on every rank, agree, and fill the state in place."""

from __future__ import annotations

import functools
import logging
import operator
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final
from urllib.parse import unquote

import torch
from torch import nn

from .. import shard
from ..deferred import weights_of
from ..engines import Engine
from ..errors import CheckpointError
from ..process import current, rank
from ..process.control import locked
from ..shard import Shard
from . import folder, record
from .background import background
from .match import Match, Summary, report, unfit
from .objects import (
    ModuleObject,
    Node,
    OptimizerObject,
    RankObject,
    Stage,
    StateObject,
    structure_of,
)
from .reader import Reader
from .record import Record, Stored
from .shards import BY_NAME
from .state import OF_VALUES, State
from .steps import check_arguments, check_equal, digest, exchange, explain, log_end, on_every_rank
from .values import Decoder, stored_tensors
from .weights import choose, is_weights_alone, open_checkpoint

logger = logging.getLogger("accel")

_PARTLY: Final = "the state may be partly filled: load a whole checkpoint before going on"


@locked
def load(
    dir: str | os.PathLike[str],
    state: dict[Any, Any] | None = None,
    *,
    strict: bool = True,
    convert: bool = False,
) -> dict[Any, Any]:
    """Fill ``state`` in place from the checkpoint in ``dir``. Collective.

    The checkpoint may come from any world size and backend.

    Args:
        dir: the directory of a checkpoint, or one with the weights of a model: with
            ``model.safetensors``, ``model.safetensors.index.json`` or the names of diffusers.
        state: as for ``save``. Handles, modules, optimizers, objects with a state dict and tensors
            are filled in place, and plain values in dicts are replaced. Keys that ``state`` doesn't
            name are left alone. None: only the plain values are returned.
        strict: raise if the checkpoint lacks something in ``state``, or a module lacks a tensor of
            the checkpoint. If False, warn, and load what fits.
        convert: convert tensors that were saved with a different dtype instead of raising.

    Returns:
        ``state``.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, of another format, or does not fit. It
            is raised on every rank. Checksums are compared while tensors are filled, so if the
            state may be partly filled, the error says so.

    Note:
        Call ``accel.verify(dir)`` first to find damage before anything is changed.
    """
    current()
    begin = time.monotonic()

    def prepare() -> tuple[Loading, Summary]:
        background.wait()
        directory = folder.absolute(dir)
        record = open_checkpoint(directory, state)
        loading = Loading(directory, record, state, convert)
        if record.version and rank() == 0:
            folder.check_sizes(directory, record)
        loading.decode()
        loading.summary.arguments = {"strict": strict, "convert": convert}
        return loading, loading.summary

    loading, summaries = exchange("accel.load", prepare)
    _check_equal(loading.directory, summaries)
    nowhere = functools.reduce(operator.and_, [one.unneeded for one in summaries])
    unneeded = [name for number, name in loading.unneeded.items() if nowhere >> number & 1]
    report(loading.directory, summaries, unneeded, strict)
    # Part of the state of an optimizer is of no use.
    loading.leave_alone(set().union(*(one.unfit_optimizers for one in summaries)))
    result: dict[Any, Any] = on_every_rank("accel.load (the tensors)", loading.apply)
    for engine in loading.engines:
        engine.holdings.filled()
        engine.refresh()
    log_end(loading.directory, "loaded", loading.nbytes, begin)
    return result if state is None else state


def _check_equal(directory: str, summaries: list[Summary]) -> None:
    check_arguments("accel.load", [one.arguments for one in summaries])
    check_equal(
        "{name}: the ranks see different checkpoints. "
        "Load after the save is done, from a file system that all ranks see.",
        [{directory: one.digits} for one in summaries],
    )
    check_equal(
        "accel.load: the state of rank {rank} has other objects than that of rank 0, "
        "and nothing was changed. Pass the same keys on every rank.",
        [{"": one.structure} for one in summaries],
    )


@dataclass(slots=True)
class Filling:
    """An object, and its saved values and tensors."""

    object: StateObject
    node: Node
    #: The shards to fill, each under the name of its tensor in the record.
    slots: list[Shard]
    #: The argument of ``StateObject.fill``.
    values: Any = None


@final
class Loading:
    """One rank's part of a load. ``state`` is None if only plain values are loaded."""

    def __init__(self, directory: str, record: Record, state: Any, convert: bool) -> None:
        self.directory = directory
        self._record = record
        self._reader = Reader(directory, record)
        self._convert = convert
        self._value_tensors: dict[str, torch.Tensor] = {}
        self._decoder = Decoder(self.directory, lambda name: self._value_tensors[name].clone())
        #: Tensors of the objects that this rank does not read, by their number in the checkpoint.
        self.unneeded: dict[int, str] = {}
        self._numbers = {name: number for number, name in enumerate(self._record.tensors)}
        given = None if state is None else State(state)
        self._match = Match(given, self._record.values, self._decoder)
        self.summary = self._match.summary
        tensors = self._tensors_of_objects()
        self._fillings = [
            self._compare(one, node, tensors[one.name]) for one, node in self._match.objects
        ]
        self.summary.digits = record.digits
        self.summary.structure = digest(structure_of([one for one, _ in self._match.objects]))
        # As bits, because there may be very many ranks.
        self.summary.unneeded = sum(1 << number for number in self.unneeded)

    def _tensors_of_objects(self) -> dict[str, dict[str, Stored]]:
        """Return the saved tensors of each object, by their names in it."""
        tensors: dict[str, dict[str, Stored]] = {one.name: {} for one, _ in self._match.objects}
        for name, stored in self._record.tensors.items():
            owner = name
            while owner not in tensors and "/" in owner:
                owner = owner.rpartition("/")[0]
            if owner in tensors:
                tensors[owner][name[len(owner) + 1 :]] = stored
        return tensors

    def _compare(self, one: StateObject, node: Node, tensors: dict[str, Stored]) -> Filling:
        """Find the shards of an object that are read, and the differences."""
        stored_as = {name: f"{one.name}/{name}" if name else one.name for name in tensors}
        if isinstance(one, ModuleObject):
            _untie(one, tensors, stored_as)
            extra, saved_extra = {*shard.extra_modules(one.module)}, {*node["extra"]}
            self.summary.missing += [f"{one.path}, {name}" for name in sorted(extra - saved_extra)]
            self.summary.untouched |= {f"{one.path}, {name}" for name in saved_extra - extra}
        slots, needed = [], set()
        manifest = {name: (t.shape, BY_NAME[t.dtype]) for name, t in tensors.items()}
        for name, slot in one.slots(manifest, node):
            needed.add(name)
            here = f"{one.path}, {name}" if name else one.path
            if name not in tensors:
                self.summary.missing.append(here)
            elif problem := unfit(tensors[name], slot, self._convert):
                self.summary.unfit.append(f"{here}: {problem}")
                if isinstance(one, OptimizerObject):
                    self.summary.unfit_optimizers.add(one.name)
            else:
                slots.append(replace(slot, name=stored_as[name]))
        for name in tensors.keys() - needed:
            self.unneeded[self._numbers[stored_as[name]]] = f"{one.path}, {name}"
        return Filling(one, node, slots)

    def decode(self) -> None:
        """Decode all values that are used, before anything is changed."""
        nodes = [*self._match.plain, *(filling.node for filling in self._fillings)]
        names = {name for node in nodes for name in stored_tensors(node)}
        values = [n for n in names if n.startswith(OF_VALUES) and n in self._numbers]
        self._value_tensors = self._reader.read(sorted(values))
        self._match.decode()
        left_out = self._match.left_out
        # Optimizers of torch accept a state dict without its tensors, and begin anew.
        if left_out and rank() == 0:
            logger.warning(
                "%s: accel.load without a state returns no tensors: %d are left out, such as %s. "
                'Pass their objects, as in accel.load(dir, {"optimizer": optimizer}).',
                self.directory,
                len(left_out),
                left_out[0],
            )
        for filling in self._fillings:
            one, node = filling.object, filling.node
            # Missing state of optimizers is created later.
            on_meta = [slot.name for slot in filling.slots if slot.tensor.is_meta]
            if on_meta and not isinstance(one, OptimizerObject):
                text = f"{one.path} is on the meta device. Call module.to_empty(device=...) first"
                self.summary.unfit.append(text)
            if isinstance(one, RankObject):
                node = {**node, "ranks": [own[node["name"]] for own in self._record.ranks]}
            filling.values = one.decode(node, self._decoder)

    def leave_alone(self, names: set[str]) -> None:
        """Do not change the optimizers with these names."""
        self._fillings = [one for one in self._fillings if one.object.name not in names]

    @property
    def engines(self) -> list[Engine]:
        """The engines of the objects, in the same order on all ranks."""
        engines = {filling.object.engine for filling in self._fillings}
        return sorted(filter(None, engines), key=lambda engine: engine.serial)

    @property
    def nbytes(self) -> int:
        """The bytes of the shards."""
        return sum(slot.tensor.nbytes for filling in self._fillings for slot in filling.slots)

    def apply(self) -> Any:
        """Change the state. If this raises, the state is partly filled, and the error says so."""
        try:
            self._restart_guards()
            self._fill(Stage.LOADERS)
            self._fill(Stage.STATE_DICTS)
            with torch.no_grad():
                self._fill_tensors()
                self._fill(Stage.TENSORS)
            result = self._match.update()
            self._fill(Stage.RANKS)
        except Exception as error:
            raise CheckpointError(f"{explain(error).rstrip('.')}; {_PARTLY}") from error
        return result

    def _fill(self, stage: Stage) -> None:
        for filling in self._fillings:
            if filling.object.stage is stage:
                filling.object.fill(filling.values)

    def _restart_guards(self) -> None:
        """Forget interrupted steps of models that are loaded with all their optimizers."""
        objects = [filling.object for filling in self._fillings]
        raws = {id(getattr(one, one.kind, None)) for one in objects}
        for engine in self.engines:
            if raws.issuperset(map(id, [engine.module, *engine.optimizers])):
                engine.drift.restart()
                engine.process.order.forget()

    def _fill_tensors(self) -> None:
        """Create the missing state of optimizers, and read all shards."""
        # A weight in two models has the values of the first one.
        wanted: dict[tuple[object, ...], Shard] = {}
        for filling in self._fillings:
            one = filling.object
            if isinstance(one, OptimizerObject):
                filling.slots = one.allocate()
            for slot in filling.slots:
                tensor = slot.tensor
                memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                wanted.setdefault(memory, slot)
        self._reader.fill(wanted.values())
        # Autograd must see that tensors it saved for a backward have changed.
        torch.autograd.graph.increment_version([slot.tensor for slot in wanted.values()])


def _untie(one: ModuleObject, tensors: dict[str, Stored], stored_as: dict[str, str]) -> None:
    """Keep the first name of each tied tensor, which may be stored under one of the others."""
    for first, others in one.tied().items():
        for name in others:
            if name in tensors and first not in tensors:
                tensors[first], stored_as[first] = tensors[name], stored_as[name]
            tensors.pop(name, None)


# -- the first values of a model without memory ----------------------------------------------------


def first_values(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """Return a function that fills the handle of a deferred module, or None without weights. Local.

    Raises:
        CheckpointError: the weights of ``deferred_init`` don't exist or don't fit.
    """
    source = weights_of(module)
    if source is None:
        return None
    background.wait()
    directory, keys = folder.absolute(source.weights), ["model"]
    if not is_weights_alone(directory):
        name, _ = choose(directory, record.read(directory), source.name)
        keys = name.split("/")
    elif source.name is not None:
        raise CheckpointError(
            f"{directory} has the weights of one model, without a name. Omit name={source.name!r}."
        )

    def state_of(model: nn.Module) -> dict[Any, Any]:
        state: Any = model
        for key in reversed(keys):
            state = {unquote(key): state}
        return dict(state)

    def fill(handle: nn.Module) -> None:
        load(directory, state_of(handle), convert=True)

    state = state_of(module)
    loading = Loading(directory, open_checkpoint(directory, state), state, convert=True)
    report(directory, [loading.summary], loading.unneeded.values(), strict=True)
    return fill

"""Load: match a state with the record on all ranks, and fill it in place."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, final
from urllib.parse import unquote

import torch
from torch import nn

from .. import shard
from ..deferred import weights_of
from ..engines import Engine
from ..errors import CheckpointError
from ..process import current, rank
from ..shard import Shard
from . import folder
from .background import background
from .match import Match, Summary, report, unfit
from .objects import (
    ModuleObject,
    OptimizerObject,
    RankObject,
    Stage,
    StateObject,
    structure_of,
)
from .reader import BoxReader
from .record import read
from .shards import BY_NAME
from .state import OF_VALUES, State
from .steps import (
    ARGUMENTS,
    check_equal,
    digest,
    exchange,
    explain,
    log_end,
    on_every_rank,
    paused_collector,
)
from .values import Decoder, stored_tensors
from .weights import choose, open_checkpoint, weights_at

#: The error texts for ranks that disagree, by attribute of ``Summary``.
_DIFFERENCES: Final = {
    "arguments": f"accel.load() got {ARGUMENTS}",
    "digits": "{name}: the ranks see different checkpoints. "
    "Load after the save is done, from a file system that all ranks share.",
    "structure": "accel.load: rank {rank} and rank 0 have different objects in the state. "
    "Nothing was changed. Pass the same keys on every rank.",
}
_PARTLY: Final = "The state may be partly filled. Load a complete checkpoint to continue."


@paused_collector()
def load(
    dir: str | os.PathLike[str],
    state: dict[Any, Any] | None = None,
    *,
    strict: bool = True,
    convert: bool = False,
) -> dict[Any, Any]:
    """Fill ``state`` in place from the checkpoint in ``dir``. Collective.

    The checkpoint may be from a different world size and backend.

    Args:
        dir: the directory of a checkpoint, or of a model's weights saved by transformers or
            diffusers, such as ``model.safetensors``.
        state: as for ``save``. Objects and tensors are filled in place, and plain values are
            replaced. Keys missing from ``state`` are skipped, except in dicts of plain
            values. If None, the plain values and tensors are returned.
        strict: if True, raise if the checkpoint lacks an entry of ``state``, or a module
            lacks a saved tensor. If False, warn and load the rest.
        convert: if True, convert tensors of a different dtype instead of raising.

    Returns:
        ``state``.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, has a different format, or does
            not fit. It is raised on every rank, and says if ``state`` may be partly filled.
            To find damage before you change ``state``, call ``accel.verify(dir)``.
    """
    current()
    begin = time.monotonic()

    def prepare() -> tuple[Loading, Summary]:
        background.wait()
        directory = folder.absolute(dir)
        loading = Loading(directory, state, convert)
        # Only rank 0 asks for the sizes, because 1,000 ranks with 1,000 files are slow.
        if loading.record.id and rank() == 0:
            folder.check_sizes(directory, loading.record)
        loading.decode()
        loading.summary.arguments = {"strict": strict, "convert": convert}
        return loading, loading.summary

    loading, summaries = exchange("accel.load", prepare)
    check_equal(summaries, _DIFFERENCES)
    report(loading.directory, summaries, strict)
    for summary in summaries:
        for name in summary.unfit_optimizers:
            # Skip the full optimizer. AdamW can't step with a step counter and no moments.
            loading.objects.pop(name, None)
    result: dict[Any, Any] = on_every_rank("accel.load (the tensors)", loading.apply)
    for engine in loading.engines:
        # filled() copies ZeRO's fp32 weights to bf16. refresh() handles changes of requires_grad.
        engine.holdings.filled()
        engine.refresh()
    log_end(loading.directory, "loaded", loading.nbytes, begin)
    return result if state is None else state


@final
class Loading:
    """A load on this rank. If ``state`` is None, it returns the values and tensors."""

    def __init__(self, directory: str, state: Any, convert: bool) -> None:
        self.directory = directory
        self.record = record = open_checkpoint(directory, state)
        self._reader = BoxReader(directory, record)
        self._convert = convert
        self.nbytes = 0
        #: The tensors in plain values, by name.
        self._tensors: dict[str, torch.Tensor] = {}
        self._decoder = Decoder(directory, self._tensors.__getitem__)
        given = None if state is None else State(state)
        self._match = Match(given, record.values, self._decoder)
        self.summary = self._match.summary
        self.summary.digits = {directory: record.digits}
        self.objects = self._match.objects
        self.summary.structure = {"": digest(structure_of(self.objects.values()))}
        #: For each object, its tensors' names in the record by their names in the object.
        names = defaultdict[str, dict[str, str]](dict)
        for name in record.tensors:
            owner = name
            while owner not in self.objects and "/" in owner:
                owner = owner.rpartition("/")[0]
            names[owner][name[len(owner) + 1 :]] = name
        for entry in self.objects.values():
            self._compare(entry, names[entry.name])

    def _compare(self, entry: StateObject, names: dict[str, str]) -> None:
        """Find the shards of an object to read, and what differs."""
        summary = self.summary
        tensors = self.record.tensors
        summary.saved += len(names)
        untouched = set[str]()
        if isinstance(entry, ModuleObject):
            extra = {*shard.extra_modules(entry.module)}
            saved_extra = {*entry.node["extra"]}
            for name in sorted(extra - saved_extra):
                summary.missing.append(f"{entry.path}, {name}")
            first_names = _untie(entry.module, names)
            untouched = names.keys() - first_names
            untouched |= saved_extra - extra
        manifest = {}
        for name, saved_name in names.items():
            stored = tensors[saved_name]
            manifest[name] = (stored.shape, BY_NAME[stored.dtype])
        for name, slot in entry.slots(manifest):
            # Hooks of state_dict() may rename tensors, so _untie doesn't know the name.
            untouched.discard(name)
            here = f"{entry.path}, {name}" if name else entry.path
            if name not in names:
                summary.missing.append(here)
                continue
            problem = unfit(tensors[names[name]], slot, self._convert)
            if not problem:
                entry.wanted.append(slot.named(names[name]))
                continue
            summary.unfit.append(f"{here}: {problem}")
            if isinstance(entry, OptimizerObject):
                summary.unfit_optimizers.add(entry.name)
        summary.fitting += len(entry.wanted)
        for name in untouched:
            summary.untouched.add(f"{entry.path}, {name}")

    def decode(self) -> None:
        """Decode all values to load, before anything is changed."""
        names = {*stored_tensors(self._match.plain)}
        # A tensor in the state is filled in place. Its name has no such prefix.
        nodes = [entry.node for entry in self.objects.values()]
        names |= {name for name in stored_tensors(nodes) if name.startswith(OF_VALUES)}
        self._tensors.update(self._reader.read(sorted(names)))
        self._match.decode()
        for entry in self.objects.values():
            # Missing optimizer state is on the meta device until apply() creates it.
            on_meta = any(slot.tensor.is_meta for slot in entry.wanted)
            if on_meta and not isinstance(entry, OptimizerObject):
                text = "is on the meta device. Call module.to_empty(device=...) first"
                self.summary.unfit.append(f"{entry.path} {text}")
            if isinstance(entry, RankObject):
                name = entry.node["name"]
                entry.node["ranks"] = [own[name] for own in self.record.ranks]
            entry.values = entry.decode(self._decoder)

    @property
    def engines(self) -> list[Engine]:
        """The engines of the objects, in the same order on all ranks."""
        engines = {entry.engine for entry in self.objects.values()}
        return sorted(filter(None, engines), key=lambda engine: engine.serial)

    def apply(self) -> Any:
        """Fill the state. Errors say that it may be partly filled."""
        try:
            self._restart_guards()
            self._fill_values(Stage.STATE_DICTS)
            with torch.no_grad():
                self._fill_tensors()
                self._fill_values(Stage.TENSORS)
            result = self._match.update()
            self._fill_values(Stage.RANKS)
        except Exception as error:
            raise CheckpointError(f"{explain(error).rstrip('.')}. {_PARTLY}") from error
        return result

    def _fill_values(self, stage: Stage) -> None:
        for entry in self.objects.values():
            if entry.stage is stage:
                entry.fill(entry.values)

    def _restart_guards(self) -> None:
        """Restart the drift guards of models loaded with all their optimizers."""
        raws = {id(getattr(entry, entry.kind, None)) for entry in self.objects.values()}
        for engine in self.engines:
            if raws.issuperset(map(id, [engine.module, *engine.optimizers])):
                engine.drift.restart()
                engine.process.order.forget()

    def _fill_tensors(self) -> None:
        """Create missing optimizer state, and read all shards."""
        # If two models share a weight, it gets the values of the first model.
        wanted: dict[tuple[object, ...], Shard] = {}
        for entry in self.objects.values():
            if isinstance(entry, OptimizerObject):
                entry.wanted = list(entry.allocate())
            for slot in entry.wanted:
                tensor = slot.tensor
                self.nbytes += tensor.nbytes
                memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                wanted.setdefault(memory, slot)
        self._reader.fill(wanted.values())
        # Otherwise autograd wouldn't notice that tensors it saved for a backward have changed.
        torch.autograd.graph.increment_version([slot.tensor for slot in wanted.values()])


def _untie(module: nn.Module, names: dict[str, str]) -> set[str]:
    """Replace names of tied tensors by their first names. Return all first names."""
    # transformers may have stored a tied tensor under any of its names.
    first_names = set()
    for first, *others in shard.tensor_names(module).values():
        first_names.add(first)
        for name in others:
            if name in names:
                names.setdefault(first, names.pop(name))
    return first_names


def first_values(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """Return a function that loads a deferred module's weights, or None. Local."""
    source = weights_of(module)
    if source is None:
        return None
    background.wait()
    directory, name = folder.absolute(source.weights), "model"
    if weights_at(directory) is None:
        name, _ = choose(directory, read(directory), source.name)

    def state_of(model: nn.Module) -> Any:
        state: Any = model
        for key in reversed(name.split("/")):
            state = {unquote(key): state}
        return state

    def fill(handle: nn.Module) -> None:
        load(directory, state_of(handle), convert=True)

    # Weights that don't fit raise here, before the engine is built.
    loading = Loading(directory, state_of(module), convert=True)
    report(directory, [loading.summary], strict=True)
    return fill

"""Load: match the state with the record on every rank, agree, and fill the state in place."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, final
from urllib.parse import unquote

import torch
from torch import nn

from .. import shard
from ..data import LoaderHandle
from ..deferred import weights_of
from ..errors import CheckpointError
from ..process import current, rank
from ..process.control import locked
from ..shard import Shard
from . import folder, record
from .background import background
from .match import Differences, Match, check_engines, report, unfit
from .objects import (
    ModuleObject,
    OptimizerObject,
    RankObject,
    StatefulObject,
    StateObject,
    TensorObject,
    engines_of,
)
from .reader import Reader
from .record import Stored
from .shards import BY_NAME
from .state import OF_VALUES, State
from .steps import check_arguments, digest, exchange, explain, log_end, on_every_rank
from .values import Decoder, Json, stored_tensors
from .weights import Checkpoint, choose, is_weights_alone, open_checkpoint

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
    with folder.reporting_replacement(dir), contextlib.ExitStack() as undo:

        def prepare() -> tuple[Loading, Summary]:
            background.wait()
            checkpoint = open_checkpoint(folder.absolute(dir), state)
            loading = Loading(checkpoint, state, undo, convert=convert)
            if loading.reads and checkpoint.record.version and rank() == 0:
                folder.check_sizes(checkpoint.directory, checkpoint.record)
            loading.decode()
            return loading, loading.summary({"strict": strict, "convert": convert})

        loading, summaries = exchange("accel.load", prepare)
        _check_equal(loading.directory, summaries)
        nowhere = functools.reduce(operator.and_, [one.unneeded for one in summaries])
        unneeded = [name for number, name in loading.unneeded.items() if nowhere >> number & 1]
        report(loading.directory, [one.differences for one in summaries], unneeded, strict, rank())
        _check_objects(summaries)
        loading.leave_alone({name for one in summaries for name in one.unfit_optimizers})
        undo.pop_all()
        result: dict[Any, Any] = on_every_rank("accel.load (the tensors)", loading.apply)
    loading.filled()
    log_end(loading.directory, "loaded", loading.nbytes, begin)
    return result if state is None else state


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of matching a state on one rank, which the ranks exchange."""

    arguments: dict[str, object]
    #: The checksum of the record.
    digits: str
    differences: Differences
    #: A digest of the names and kinds of the objects.
    objects: str
    #: The engine of each model by path.
    engines: dict[str, str]
    #: The numbers of ``Loading.unneeded`` as bits: there may be very many ranks.
    unneeded: int
    unfit_optimizers: set[str]


def _check_equal(directory: str, summaries: list[Summary]) -> None:
    check_arguments("accel.load", [one.arguments for one in summaries])
    if len({one.digits for one in summaries}) > 1:
        raise CheckpointError(
            f"{directory}: the ranks see different checkpoints. "
            "Load after the save is done, from a file system that all ranks see."
        )


def _check_objects(summaries: list[Summary]) -> None:
    for number, one in enumerate(summaries):
        if one.objects != summaries[0].objects:
            raise CheckpointError(
                f"accel.load: the state of rank {number} has other objects than that of rank 0, "
                "and nothing was changed. Pass the same keys on every rank."
            )
    check_engines("accel.load", [one.engines for one in summaries])


@final
class Loading:
    """One rank's part of a load.

    Args:
        state: None if only plain values are loaded.
        undo: takes functions that remove the optimizer state created here.
        convert: convert dtypes instead of reporting them as differences.
        planned: nothing will be filled, so tensors may be on the meta device.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: Any,
        undo: contextlib.ExitStack,
        *,
        convert: bool,
        planned: bool = False,
    ) -> None:
        self.directory = checkpoint.directory
        self._checkpoint = checkpoint
        self._record = checkpoint.record
        self._reader = Reader(checkpoint.directory, self._record)
        self._options = {"convert": convert, "planned": planned}
        self._undo = undo
        self._value_tensors: dict[str, torch.Tensor] = {}
        self._decoder = Decoder(checkpoint.path, lambda name: self._value_tensors[name].clone())
        #: The shards to read, each with its object.
        self._slots: list[tuple[StateObject, Shard]] = []
        #: Functions that remove the state that was created for an optimizer.
        self._restore: dict[str, Callable[[], None]] = {}
        self._unfit_optimizers: set[str] = set()
        #: Tensors of the objects that this rank does not read, by their number in the checkpoint.
        self.unneeded: dict[int, str] = {}
        self._numbers = {name: number for number, name in enumerate(self._record.tensors)}
        self.reads = state is not None or any(n.startswith(OF_VALUES) for n in self._numbers)
        matched = State({} if state is None else state)
        self._match = Match(matched, self._decoder)
        self.differences = self._match.differences
        if state is None:
            self._apply = self._match.take(self._record.values)
        else:
            self._apply = self._match.visit(matched.tree, state, self._record.values)
        for one, node in self._match.objects:
            self._find_slots(one, node)
        #: What each object takes in ``fill``.
        self._decoded: list[Any] = []

    def _find_slots(self, one: StateObject, node: Json) -> None:
        """Find the shards of an object that are read, and what doesn't fit."""
        prefix = one.name if isinstance(one, TensorObject) else f"{one.name}/"
        tensors = self._tensors_of(one, prefix)
        stored_as = {}
        if isinstance(one, ModuleObject):
            stored_as = _untie(one, tensors)
            self._compare_extra(one, node["extra"])
        if isinstance(one, OptimizerObject):
            self._restore[one.name] = one.snapshot()
            self._undo.callback(self._restore[one.name])
        needed = set()
        manifest = {name: (t.shape, BY_NAME[t.dtype]) for name, t in tensors.items()}
        for name, slot in one.slots(manifest, node):
            needed.add(name)
            here = f"{one.path}{f', {name}' if name else ''}"
            if name not in tensors:
                self.differences.missing.append(here)
            elif problem := unfit(tensors[name], slot, **self._options):
                self.differences.unfit.append(f"{here}: {problem}")
                if isinstance(one, OptimizerObject):
                    self._unfit_optimizers.add(one.name)
            else:
                slot = replace(slot, name=f"{prefix}{stored_as.get(name, name)}")
                self._slots.append((one, slot))
        for name in tensors.keys() - needed:
            number = self._numbers[f"{prefix}{stored_as.get(name, name)}"]
            self.unneeded[number] = f"{one.path}, {name}"

    def _tensors_of(self, one: StateObject, prefix: str) -> dict[str, Stored]:
        """Return the saved tensors of an object, by their names in it."""
        tensors = self._record.tensors
        if isinstance(one, TensorObject):  # a state can have very many of them
            return {"": tensors[prefix]} if prefix in tensors else {}
        return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}

    def _compare_extra(self, one: ModuleObject, saved: Iterable[str]) -> None:
        here = shard.extra_modules(one.module).keys()
        self.differences.missing.extend(f"{one.path}, {name}" for name in sorted(here - set(saved)))
        self.differences.untouched.update(f"{one.path}, {name}" for name in set(saved) - here)

    def decode(self) -> None:
        """Decode all values that are used, before anything is changed."""
        nodes = [*self._match.plain, *(node for _, node in self._match.objects)]
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
                self._checkpoint.path,
                len(left_out),
                left_out[0],
            )
        for one, node in self._match.objects:
            if isinstance(one, RankObject):
                node = {**node, "ranks": [own[node["name"]] for own in self._record.ranks]}
            self._decoded.append(one.decode(node, self._decoder))

    def summary(self, arguments: dict[str, object]) -> Summary:
        """Return what the other ranks need to know."""
        objects = [one for one, _ in self._match.objects]
        return Summary(
            arguments=arguments,
            digits=self._checkpoint.digits,
            differences=self.differences,
            objects=digest([(one.name, one.kind) for one in objects]),
            engines=engines_of(objects),
            unneeded=sum(1 << number for number in self.unneeded),
            unfit_optimizers=self._unfit_optimizers,
        )

    def leave_alone(self, names: set[str]) -> None:
        """Leave these optimizers as they are: part of the state of an optimizer is of no use."""
        pairs = zip(self._match.objects, self._decoded, strict=True)
        kept = [pair for pair in pairs if pair[0][0].name not in names]
        self._match.objects = [pair for pair, _ in kept]
        self._decoded = [values for _, values in kept]
        self._slots = [pair for pair in self._slots if pair[0].name not in names]
        for name in names:
            self._restore[name]()

    @property
    def nbytes(self) -> int:
        """The bytes of the shards."""
        return sum(one.tensor.nbytes for _, one in self._slots)

    def apply(self) -> Any:
        """Change the state. If this raises, the state is partly filled, and the error says so."""
        objects = [one for one, _ in self._match.objects]
        pairs = sorted(zip(objects, self._decoded, strict=True), key=lambda pair: _order(pair[0]))
        try:
            self._restart_guards()
            for one, values in pairs:
                if isinstance(one, StatefulObject):
                    one.fill(values)
            with torch.no_grad():
                # A weight in two models has the values of the first one.
                wanted: dict[tuple[object, ...], Shard] = {}
                for _, slot in self._slots:
                    tensor = slot.tensor
                    memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                    wanted.setdefault(memory, slot)
                self._reader.fill(wanted.values())
                # Autograd must see that tensors it saved for a backward have changed.
                torch.autograd.graph.increment_version([s.tensor for s in wanted.values()])
                for one, values in pairs:
                    if not isinstance(one, StatefulObject | RankObject):
                        one.fill(values)
            result = self._apply()
            for one, values in pairs:
                if isinstance(one, RankObject):
                    one.fill(values)
        except Exception as error:
            raise CheckpointError(f"{explain(error).rstrip('.')}; {_PARTLY}") from error
        return result

    def _restart_guards(self) -> None:
        """Forget interrupted steps of models that are loaded with all their optimizers."""
        raws = {id(vars(one).get(one.kind)) for one, _ in self._match.objects}
        for engine in {one.engine for one, _ in self._match.objects if one.engine is not None}:
            if raws.issuperset(map(id, [engine.module, *engine.optimizers])):
                engine.drift.restart()
                engine.process.order.forget()

    def filled(self) -> None:
        """Tell the engines. Collective."""
        engines = {one.engine for one, _ in self._match.objects if one.engine is not None}
        for engine in sorted(engines, key=lambda engine: engine.serial):
            engine.holdings.filled()
            engine.refresh()


def _untie(one: ModuleObject, tensors: dict[str, Stored]) -> dict[str, str]:
    """Keep the first name of each tied tensor. Return the names under which these are stored."""
    stored_as = {}
    for first, others in one.tied().items():
        for name in others:
            if name not in tensors:
                continue
            if first not in tensors:
                tensors[first], stored_as[first] = tensors[name], name
            del tensors[name]
    return stored_as


def _order(one: StateObject) -> bool:
    """Sort loaders first, because they check their state before anything is changed."""
    return not (isinstance(one, StatefulObject) and isinstance(one.value_object, LoaderHandle))


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
    directory = folder.absolute(source.weights)
    state = _state_for(directory, source.name, module)
    with contextlib.ExitStack() as undo:
        checkpoint = open_checkpoint(directory, state)
        loading = Loading(checkpoint, state, undo, convert=True, planned=True)
        report(directory, [loading.differences], loading.unneeded.values(), True, 0, "")

    def fill(handle: nn.Module) -> None:
        state = _state_for(directory, source.name, handle)
        load(directory, state, convert=True)

    return fill


def _state_for(directory: str, name: str | None, module: nn.Module) -> dict[str, Any]:
    """Return the state that has only ``module``, under its key in a checkpoint."""
    if is_weights_alone(directory):
        if name is not None:
            raise CheckpointError(
                f"{directory} has the weights of one model, without a name. Omit name={name!r}."
            )
        return {"model": module}
    name, _ = choose(directory, record.read(directory)[0], name)
    state: Any = module
    for part in reversed(name.split("/")):
        if part.startswith("["):
            raise CheckpointError(
                f"{directory}: the model {name!r} is in a list or under a key that is no string. "
                "Save it under a string key."
            )
        state = {unquote(part): state}
    return dict(state)

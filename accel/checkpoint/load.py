"""Loading: find what each rank needs, agree, and fill it in place while its checksums are compared."""

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
from ..shard import Manifest, Shard
from . import folder, record
from .background import background
from .match import Differences, Match, check_engines, check_objects, report, unfit
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


@locked
def load(
    dir: str | os.PathLike[str],
    state: dict[Any, Any] | None = None,
    *,
    strict: bool = True,
    convert: bool = False,
) -> dict[Any, Any]:
    """Fill ``state`` in place from the checkpoint in ``dir``, whatever world size and backend saved it. Collective.

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
        convert: convert tensors that were saved with another dtype; else they are differences.

    Returns:
        ``state``.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another format, or does not fit; on every rank. Checksums
            are compared while tensors are filled. If ``state`` may be partly filled, the error says so.

    Note:
        To make sure that a checkpoint is intact before anything is changed, call ``accel.verify(dir)`` first.
    """
    current()
    with folder.reporting_replacement(dir):
        checkpoint = _open(dir, state, strict, convert)
        return _load(state, strict, convert, checkpoint)


_PARTLY: Final = "the state may be partly filled: load a whole checkpoint before going on"


def _load(state: Any, strict: bool, convert: bool, checkpoint: Checkpoint) -> dict[Any, Any]:
    begin = time.monotonic()
    with contextlib.ExitStack() as undo:

        def prepare() -> tuple[Loading, Summary]:
            loading = Loading(checkpoint, state, undo, convert=convert)
            return loading, loading.summary()

        loading, told = exchange("accel.load", prepare)
        nowhere = functools.reduce(operator.and_, [one.unneeded for one in told])
        unneeded = [name for at, name in loading.unneeded.items() if nowhere >> at & 1]
        report(checkpoint.directory, [one.differences for one in told], unneeded, strict, rank())
        check_objects([one.objects for one in told])
        check_engines("accel.load", [one.engines for one in told])
        loading.leave_alone({name for one in told for name in one.unfit_optimizers})
        on_every_rank("accel.load (the values)", loading.decode)
        undo.pop_all()
        result: dict[Any, Any] = on_every_rank("accel.load", loading.apply)
    loading.filled()
    log_end(checkpoint.directory, "loaded", loading.nbytes, begin)
    return result if state is None else state


def _open(dir: str | os.PathLike[str], state: Any, strict: bool, convert: bool) -> Checkpoint:
    """The checkpoint in ``dir``, which is the same on all ranks. Collective."""

    def look() -> tuple[Checkpoint, tuple[dict[str, object], str]]:
        background.wait()
        checkpoint = open_checkpoint(folder.absolute(dir), state)
        # Before anything is made in the sizes that the record names.
        reads = state is not None or any(
            name.startswith(OF_VALUES) for name in checkpoint.record.tensors
        )
        if reads and checkpoint.record.version and rank() == 0:
            folder.check_sizes(checkpoint.directory, checkpoint.record)
        return checkpoint, ({"strict": strict, "convert": convert}, checkpoint.digits)

    checkpoint, told = exchange("accel.load (the record)", look)
    check_arguments("accel.load", [asked for asked, _ in told])
    if len({digits for _, digits in told}) > 1:
        raise CheckpointError(
            f"{checkpoint.directory}: the ranks see different checkpoints there; load after the save is done, from a file system "
            "that all of them see"
        )
    return checkpoint


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of matching a state on one rank, which the ranks exchange."""

    differences: Differences
    #: A digest of the names and kinds of the objects.
    objects: str
    #: The engine of each model by path.
    engines: dict[str, str]
    #: The numbers of ``Loading.unneeded`` as bits: there may be very many ranks.
    unneeded: int
    unfit_optimizers: set[str]


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
        self.found = checkpoint.record
        self.path = checkpoint.path
        self.reader = Reader(checkpoint.directory, self.found)
        self._options = {"convert": convert, "planned": planned}
        self._value_tensors: dict[str, torch.Tensor] = {}
        self._decoder = Decoder(self.path, lambda name: self._value_tensors[name].clone())
        #: The shards to read, each with its object.
        self._slots: list[tuple[StateObject, Shard]] = []
        #: Functions that remove the state that was created for an optimizer.
        self._restore: dict[str, Callable[[], None]] = {}
        self._unfit_optimizers: set[str] = set()
        #: Tensors of the objects that this rank does not read, by their number in the checkpoint.
        self.unneeded: dict[int, str] = {}
        self._numbers = {name: number for number, name in enumerate(self.found.tensors)}
        matched = State({} if state is None else state)
        self._match = Match(matched, self.found.values, self._decoder)
        self.differences = self._match.differences
        if state is None:
            self._apply = self._match.take(self.found.values)
        else:
            self._apply = self._match.visit(matched.tree, state, self.found.values)
        for one, node in self._match.objects:
            self._find_slots(one, node, undo)
        #: What each object takes in ``fill``.
        self._decoded: list[Any] = []

    def _find_slots(self, one: StateObject, node: Json, undo: contextlib.ExitStack) -> None:
        if isinstance(one, TensorObject):  # a state can have very many of them
            prefix = one.name
            tensors = {"": self.found.tensors[prefix]} if prefix in self.found.tensors else {}
        else:
            prefix = f"{one.name}/"
            tensors = {
                name[len(prefix) :]: t
                for name, t in self.found.tensors.items()
                if name.startswith(prefix)
            }
        stored_as = {}
        if isinstance(one, ModuleObject):
            stored_as = _untie(one, tensors)
            self._compare_extra(one, node["extra"])
        manifest: Manifest = {name: (t.shape, BY_NAME[t.dtype]) for name, t in tensors.items()}
        if isinstance(one, OptimizerObject):
            self._restore[one.name] = one.snapshot()
            undo.callback(self._restore[one.name])
        needed = set()
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
        if not isinstance(one, TensorObject):
            for name in tensors.keys() - needed:
                number = self._numbers[f"{prefix}{stored_as.get(name, name)}"]
                self.unneeded[number] = f"{one.path}, {name}"

    def _compare_extra(self, one: ModuleObject, saved: Iterable[str]) -> None:
        here = shard.extra_modules(one.module).keys()
        self.differences.missing.extend(f"{one.path}, {name}" for name in sorted(here - set(saved)))
        self.differences.untouched.update(f"{one.path}, {name}" for name in set(saved) - here)

    def summary(self) -> Summary:
        """Return what the other ranks need to know."""
        objects = [one for one, _ in self._match.objects]
        return Summary(
            differences=self.differences,
            objects=digest([(one.name, one.kind) for one in objects]),
            engines=engines_of(objects),
            unneeded=sum(1 << number for number in self.unneeded),
            unfit_optimizers=self._unfit_optimizers,
        )

    def leave_alone(self, names: set[str]) -> None:
        """Leave these optimizers as they are: part of the state of an optimizer is of no use."""
        self._match.objects = [pair for pair in self._match.objects if pair[0].name not in names]
        self._slots = [pair for pair in self._slots if pair[0].name not in names]
        for name in names:
            self._restore[name]()

    @functools.cached_property
    def _wanted(self) -> list[Shard]:
        """The shards to read. A weight that two models share is read once."""
        found: dict[tuple[Any, ...], Shard] = {}
        for _, one in self._slots:
            tensor = one.tensor
            address = id(tensor) if tensor.is_meta or not tensor.numel() else tensor.data_ptr()
            found.setdefault(
                (address, tensor.dtype, tensor.shape, tensor.stride(), one.region), one
            )
        return list(found.values())

    @property
    def nbytes(self) -> int:
        """The bytes of the shards."""
        return sum(one.tensor.nbytes for one in self._wanted)

    def decode(self) -> None:
        """Decode all values, before anything is changed."""
        nodes = [*self._match.plain, *(node for _, node in self._match.objects)]
        names = {
            name for node in nodes for name in stored_tensors(node) if name.startswith(OF_VALUES)
        }
        self._value_tensors = self.reader.read(sorted(names & self.found.tensors.keys()))
        self._match.decode()
        self._warn_of_left_out()
        for one, node in self._match.objects:
            if isinstance(one, RankObject):
                node = {**node, "ranks": [own[node["name"]] for own in self.found.ranks]}
            self._decoded.append(one.decode(node, self._decoder))

    def _warn_of_left_out(self) -> None:
        # Optimizers of torch accept a state dict without its tensors, and begin anew.
        left_out = self._match.left_out
        if left_out and rank() == 0:
            logger.warning(
                "%s: accel.load without a state returns no tensors: %d are left out of the containers in it, such as %s; "
                'give it their objects, as in accel.load(dir, {"optimizer": optimizer})',
                self.path,
                len(left_out),
                left_out[0],
            )

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
                self.reader.fill(self._wanted)
                # Autograd must see that tensors it saved for a backward have changed.
                torch.autograd.graph.increment_version([one.tensor for one in self._wanted])
                for one, values in pairs:
                    if not isinstance(one, StatefulObject | RankObject):
                        one.fill(values)
            result = self._apply()
            for one, values in pairs:
                if isinstance(one, RankObject):
                    one.fill(values)
        except Exception as error:
            raise CheckpointError(f"{explain(error)}; {_PARTLY}") from error
        return result

    def _restart_guards(self) -> None:
        """Forget interrupted steps of models that are loaded with all their optimizers."""
        raws = {id(vars(one).get(one.kind)) for one, _ in self._match.objects}
        for engine in {one.engine for one, _ in self._match.objects if one.engine is not None}:
            if raws.issuperset(map(id, [engine.module, *engine.optimizers])):
                engine.drift.restart()
                engine.process.order.forget()

    def lacking_parameters(self, module: nn.Module) -> list[str]:
        """Return the parameters of a module in the state that the checkpoint doesn't have."""
        paths = [one.path for one, _ in self._match.objects if isinstance(one, ModuleObject)]
        names = {
            f"{path}, {name}"
            for path in paths
            for name, _ in module.named_parameters(remove_duplicate=False)
        }
        return [name for name in self.differences.missing if name in names]

    def filled(self) -> None:
        """Tell the engines. Collective."""
        engines = {
            id(one.engine): one.engine for one, _ in self._match.objects if one.engine is not None
        }
        for engine in sorted(engines.values(), key=lambda e: e.serial):
            engine.holdings.filled()
            engine.refresh()


def _untie(one: ModuleObject, tensors: dict[str, Stored]) -> dict[str, str]:
    """Keep only the first name of each tied tensor in ``tensors``. Return the names under which these were stored."""
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
    """Return the sort key of an object. Loaders are first: they check their state before anything is changed."""
    return not (isinstance(one, StatefulObject) and isinstance(one.value_object, LoaderHandle))


# -- First values of a model that was built without memory, from a checkpoint or a directory of weights ---------------


_WAY_OUT: Final = (
    " (deferred_init(weights, strict=False) takes one that has more, or lacks buffers)"
)


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
        loading = Loading(whole, state, undo, convert=True, planned=True)
        if source.strict:
            report(directory, [loading.differences], loading.unneeded.values(), True, 0, _WAY_OUT)
        else:
            lacking = Differences(loading.lacking_parameters(module), loading.differences.unfit)
            report(directory, [lacking], (), True, 0, "")

    def fill(handle: nn.Module) -> None:
        load(
            directory,
            _state_for(directory, source.name, handle),
            strict=source.strict,
            convert=True,
        )

    return fill


def _state_for(directory: str, name: str | None, module: nn.Module) -> dict[str, Any]:
    """The state whose only model is ``module``, at its place in what ``directory`` holds."""
    if is_weights_alone(directory):
        if name is not None:
            raise CheckpointError(
                f"{directory} has weights of one model, without a name: leave name={name!r} out"
            )
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

"""Loading: find what each rank needs, agree, and fill it in place while its checksums are compared."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final
from urllib.parse import unquote

import torch
from torch import nn

from .. import shard
from ..data import LoaderHandle
from ..deferred import weights_of
from ..errors import CheckpointError
from ..process import current
from ..process.control import locked
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
from .reader import Reader
from .record import Stored
from .safetensors import BY_NAME
from .state import OF_VALUES, State
from .steps import check_arguments, exchange, explain, log_end, on_every_rank
from .values import Decoder, Json
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
    rank, begin = current().place.rank, time.monotonic()
    with contextlib.ExitStack() as undo:

        def prepare() -> tuple[Loading, tuple[Differences, str, dict[str, str], int]]:
            loading = Loading(checkpoint, state, undo, rank, convert=convert)
            return loading, (loading.differences, *loading.objects(), sum(1 << at for at in loading.unneeded))

        loading, told = exchange("accel.load", prepare)
        nowhere = functools.reduce(operator.and_, [places for *_, places in told])
        unneeded = [name for at, name in loading.unneeded.items() if nowhere >> at & 1]
        report(checkpoint.directory, [differences for differences, *_ in told], unneeded, strict, rank)
        check_objects([objects for _, objects, *_ in told])
        check_engines("accel.load", [engines for _, _, engines, _ in told])
        on_every_rank("accel.load (the values)", loading.decode)
        undo.pop_all()
        result: dict[Any, Any] = on_every_rank("accel.load", loading.apply)
    loading.filled()
    log_end(checkpoint.directory, "loaded", sum(one.tensor.nbytes for one in loading.needs()), begin)
    return result if state is None else state


def _open(dir: str | os.PathLike[str], state: Any, strict: bool, convert: bool) -> Checkpoint:
    """The checkpoint in ``dir``, which is the same on all ranks. Collective."""

    def look() -> tuple[Checkpoint, tuple[dict[str, object], str]]:
        background.wait()
        checkpoint = open_checkpoint(folder.absolute(dir), state)
        # Before anything is made in the sizes that the record names.
        reads = state is not None or any(name.startswith(OF_VALUES) for name in checkpoint.record.tensors)
        if reads and checkpoint.headers is None and current().place.rank == 0:
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


@final
class Loading:
    """One rank's part of a load: what is to be filled, and from where; ``state`` is None where only plain values are asked for.

    ``undo`` takes what brings back how optimizers were, once they have state to be filled. ``convert``: tensors of another dtype
    are none of the differences; ``planned``: nothing will be filled yet.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: Any,
        undo: contextlib.ExitStack,
        rank: int,
        *,
        convert: bool,
        planned: bool = False,
    ) -> None:
        self.found = checkpoint.record
        self.rank = rank
        self.path = checkpoint.path
        self.reader = Reader(checkpoint.directory, self.found, headers=checkpoint.headers)
        self._of_values: dict[str, torch.Tensor] = {}
        self._decoder = Decoder(self.path, self._fetch, checkpoint.objects)
        self._wanted: list[Shard] = []
        #: What the checkpoint has of the objects here, and this rank needs nothing of, by its place among all tensors: so that
        #: very many ranks, each with a part of a model, tell each other a bit for each, and no names.
        self.unneeded: dict[int, str] = {}
        self._places = {name: at for at, name in enumerate(self.found.tensors)}
        self._match = Match(State({} if state is None else state), self._decoder)
        self.differences = self._match.differences
        self._apply: Apply | None = None
        if state is None:
            self._match.plain.append(self.found.values)
        else:
            self._apply = self._match.visit(state, self.found.values)
        for one, node in self._match.objects:
            self._find_slots(one, node, undo, convert, planned)
        self._wanted = _without_repeats(self._wanted)

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
            stored_as = _untie(one, tensors)
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

    def _compare_extra(self, one: ModuleObject, saved: Iterable[str]) -> None:
        """What is no tensor in a module is to be there on both sides, too."""
        mine = shard.extra_modules(one.module).keys()
        self.differences.missing.extend(f"{one.path}, {name}" for name in sorted(mine - set(saved)))
        self.differences.untouched.update(f"{one.path}, {name}" for name in set(saved) - mine)

    def objects(self) -> tuple[str, dict[str, str]]:
        """What is filled: a digest of names and kinds, and by path the models with an engine."""
        objects = [one for one, _ in self._match.objects]
        return digest([(one.name, one.kind) for one in objects]), engines_of(objects)

    def needs(self) -> list[Shard]:
        """What this rank reads."""
        return self._wanted + self._whole(self._in_values)

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
        """Make sure that all values can be decoded and all headers fit, before anything is changed."""
        for need in self._wanted:
            self.reader.check_headers(need)
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
                self.reader.fill(self._wanted)
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
                engine.drift.restart()
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


def _without_repeats(wanted: Sequence[Shard]) -> list[Shard]:
    """Keep the first of several names of one tensor, such as a weight that two models share."""
    found: dict[tuple[Any, ...], Shard] = {}
    for one in wanted:
        tensor = one.tensor
        address = id(tensor) if tensor.is_meta or not tensor.numel() else tensor.data_ptr()
        found.setdefault((address, tensor.dtype, tensor.shape, tensor.stride(), one.start, one.box), one)
    return list(found.values())


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
        loading = Loading(whole, state, undo, 0, convert=True, planned=True)
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

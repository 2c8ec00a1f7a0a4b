"""Checkpoints of other libraries, written again as accel's. Pickled files are read as ``weights_only``: nothing in them runs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from ...engines import ENGINES
from ...errors import CheckpointError
from ...process import running
from ...process.turns import in_turn
from .. import folder, record
from ..background import background
from ..draft import make_draft
from ..job import Job
from ..shards import reserve
from ..together import explain, of, together
from ..weights import is_weights_alone
from . import dcp
from .adopt import adopt

logger = logging.getLogger("accel")


@in_turn
def import_checkpoint(
    source: str | os.PathLike[str], dir: str | os.PathLike[str], *, optimizer: bool = True
) -> dict[str, list[str]]:
    """Write a checkpoint of another library as one of accel's, which ``load`` takes into any backend.

    ``source`` is a file of ``torch.save``, a directory of ``torch.distributed.checkpoint``, or one that a backend's own
    library wrote (ZeRO). Models, optimizers, tensors and plain values keep their keys; a state dict alone is ``"model"``.
    The prefixes ``module.`` and ``_orig_mod.`` of wrappers are taken off. Needs no process group; on several ranks rank 0 writes,
    and all wait and see its error.

    Args:
        source: what is read. Nothing in it is run: pickled objects other than tensors and plain values are refused.
        dir: a directory without a checkpoint.
        optimizer: take optimizers' state too.

    Returns:
        The keys that were found, under ``"models"``, ``"optimizers"``, ``"values"`` and ``"left out"``; empty but on rank 0.

    Raises:
        CheckpointError: ``source`` is none of these, is damaged, or holds what cannot be taken over rightly; names it.
    """
    process = running()

    def act() -> tuple[dict[str, list[str]], None]:
        if process is not None and process.place.rank != 0:
            return {}, None
        return convert(folder.absolute(source), folder.absolute(dir), optimizer=optimizer), None

    if process is not None and process.place.world_size > 1:
        return together("accel.import_checkpoint", act)[0]
    return act()[0]


def convert(
    source: str, directory: str, *, optimizer: bool, progress: Callable[[int], Any] = lambda nbytes: None
) -> dict[str, list[str]]:
    """``import_checkpoint`` in this process; ``progress`` hears how many bytes of tensors were put together."""
    if record.exists(directory):
        raise CheckpointError(f"{directory} has a checkpoint already: import into another directory")
    background.settle()
    try:
        parent = os.path.dirname(directory)
        folder.make(parent)
        with tempfile.TemporaryDirectory(prefix=".accel-import-", dir=parent) as place:
            state, found = adopt(read(source, Scratch(place, progress)), source, optimizer=optimizer)
            _save_alone(state, directory)
    except OSError as error:
        raise CheckpointError(f"accel.import_checkpoint: {explain(error)}") from error
    return found


def read(source: str, scratch: Scratch) -> Any:
    """The state as nested dicts of tensors and values; tensors may lie in files."""
    if os.path.isfile(source):
        return load_pickled(source)
    if not os.path.isdir(source):
        raise CheckpointError(f"{source} does not exist")
    if os.path.isfile(os.path.join(source, dcp.METADATA)):
        return dcp.read(source, scratch.tensor)
    for engine in ENGINES.values():
        state = engine.holdings_type.read_foreign(source, load_pickled, scratch.tensor)
        if state is not None:
            return state
    if record.exists(source) or is_weights_alone(source):
        raise CheckpointError(f"{source} needs no import: accel.load reads it as it is")
    raise CheckpointError(
        f"{source} is no checkpoint that accel knows: expected a file of torch.save, a directory of "
        "torch.distributed.checkpoint (with .metadata), or one of a backend's own library"
    )


def load_pickled(path: str, inert: Sequence[str] = ()) -> Any:
    """What ``torch.save`` wrote, its tensors mapped from the file where they can be.

    Args:
        path: the file.
        inert: classes, by their full names, that are read as objects which hold their data and do nothing.

    Raises:
        CheckpointError: it is no such file, or holds pickled objects; names them.
    """
    zipped = zipfile.is_zipfile(path)
    allowed: list[Any] = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in inert]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True if zipped else None)
    except pickle.UnpicklingError as error:
        objects: list[str] = []
        with contextlib.suppress(Exception):
            objects = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - set(inert))
        raise CheckpointError(
            f"{path} holds pickled objects, which could run code when they are read ({', '.join(objects[:5]) or error}): save "
            "it again with tensors and plain values only"
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is no whole file of torch.save ({type(error).__name__}: {error})") from error


class Inert:
    """A pickled object of a class that is not to be used: its arguments and state, and nothing else."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


@final
class Scratch:
    """Tensors in files of a directory, so that they need not fit into memory."""

    def __init__(self, directory: str, progress: Callable[[int], Any]) -> None:
        self._directory = directory
        self._progress = progress
        self._count = 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new one, of zeros."""
        numel = math.prod(shape)
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        self._count += 1
        path = os.path.join(self._directory, str(self._count))
        self._progress(numel * dtype.itemsize)
        with of(path), open(path, "xb") as file:
            reserve(file.fileno(), numel * dtype.itemsize)  # writing to its memory on a full disk would end the process
        return torch.from_file(path, shared=True, size=numel, dtype=dtype).view(tuple(shape))


def _save_alone(state: Mapping[str, Any], directory: str) -> None:
    """``save`` by this process alone, whatever others there are."""
    draft = make_draft(state, None, 1)
    job = Job(directory, 0, 1, None)
    with contextlib.ExitStack() as resources:
        job.save = job.begin(resources)
        draft.complete([draft.message([draft.summary()], 0)])
        job.take(draft)
        try:
            written = job.write()
        except BaseException:
            job.discard()
            raise
        job.commit([written])

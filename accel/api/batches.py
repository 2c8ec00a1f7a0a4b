"""What a loop does by batches of its own: each rank's part of some items, and the largest batch that fits."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar, overload

import torch

from .. import process
from ..data.iteration import latest
from ..data.sampling import Division, fingerprint, has_parts
from ..errors import AccelError, RankMismatchError, described, text_of_error, whole_number
from ..planning import place_of
from ..process.control import agree, is_lost, locked, raise_together
from ..process.rng import rng_state
from ..process.transfer import Prints, other_values
from ..registry import registry
from ..trees import walk
from . import shut_down

logger = logging.getLogger("accel")
T = TypeVar("T")

# -- each rank's part --------------------------------------------------------------------------------------------------


@overload
def split(items: range, pad: Literal[True]) -> list[int]: ...
@overload
def split(items: T, pad: bool = False) -> T: ...
@locked
def split(items: T, pad: bool = False) -> T:
    """This rank's part of what all ranks have: neighbours stay neighbours, and the ranks' parts are in order. Collective.

    ``gather_for_metrics(rows, items)`` of what is made of the parts, tensors with a row for each or lists with ``objects=True``,
    has one for each item, in their order, also where parts are not equally long, or empty. The ranks of one data-parallel place,
    as in ``data_parallel_place``, have one part. It needs no model.

    Args:
        items: a list, tuple, range, array or tensor (by its first dimension), or nested dicts of them, equally long.
        pad: makes all parts equally long by repeating the last item, for models whose forwards communicate.

    Raises:
        RankMismatchError: the ranks have other items, as far as their tensors, texts and numbers tell; on every rank.
        AccelError: ``items`` is nothing that has parts, lengths differ, or models have other data-parallel places.
    """
    lengths: dict[str, int] = {}
    problems: list[str] = []

    def note(path: str, leaf: Any) -> Any:
        if not has_parts(leaf):
            problems.append(f"{path} is {described(leaf)}; expected a list, tuple, tensor, or dicts of them")
            return leaf
        lengths[path] = len(leaf)
        return leaf

    walk(note, items, "items", has_parts)
    meant = f"expected pad to be True or False, found {pad!r}; each rank gets its part, there is no number of parts"
    problems += [] if type(pad) is bool else [meant]
    if len(set(lengths.values())) > 1:
        problems.append(f"expected equal lengths, found {lengths}")
    places = _places()
    if len(places) > 1:
        problems.append(f"the models that are set up have the data-parallel places {places}: cut by hand")
    tensors: list[torch.Tensor] = []
    words = fingerprint(items, tensors) if process.world_size() > 1 else None
    answers = agree("accel.split", (problems[:1], (lengths, pad, words), Prints(tensors).read()))
    for number, ((problem, *_), *_) in ((n, theirs) for n, theirs in enumerate(answers) if theirs[0]):
        raise AccelError(f"split on rank {number}: {problem}")
    same = all(theirs[1] == answers[0][1] for theirs in answers)
    if not same or other_values({number: sums for number, (*_, sums) in enumerate(answers)}):
        raise RankMismatchError(
            "split: the ranks have other items: every rank gives all of them, in one order (sorted)"
        )
    ((rank, world),) = places
    division = Division(rank=rank, world=world, batch=0, even=pad, drop_last=False)
    length = next(iter(lengths.values()), 0)
    first, size, _ = division.share(length)
    latest.divisions[length, pad] = division
    latest.kept, latest.replica = None, (rank, world)  # rows that come now may be of these items, and of no batch
    return walk(lambda path, leaf: _part(leaf, first, first + size, pad), items, "items", has_parts)


def _places() -> list[tuple[int, int]]:
    registry.sweep()  # the places of what nobody holds are nobody's
    found = {(place.rank, place.world) for place in map(place_of, registry.in_order())}
    return sorted(found) or [(process.rank(), process.world_size())]


def _part(items: Any, first: int, end: int, pad: bool) -> Any:
    if not pad:
        return items[first:end]
    rows = [min(row, len(items) - 1) for row in range(first, end)]
    if isinstance(items, list | tuple | range):
        return (tuple if isinstance(items, tuple) else list)(items[row] for row in rows)
    return items[rows]


# -- the largest batch -------------------------------------------------------------------------------------------------

#: Seconds for which a rank that failed waits for the others, which may wait for it in a collective.
_PATIENCE = timedelta(seconds=2)
_MEMORY: Final = (
    "out of memory",
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
)
#: How ``fn`` ended on a rank. The largest value of all ranks decides.
_SUCCEEDED, _DISCONNECTED, _OUT_OF_MEMORY, _FAILED = range(4)


def largest_batch(fn: Callable[[int], T], start: int) -> tuple[int, T]:
    """Call ``fn(batch_size)`` with ``start``, and with half of it each time a rank runs out of memory. Collective.

    Build the model, optimizers and loaders inside ``fn``. If one rank runs out of memory, accel ends the process groups,
    tears everything down on all ranks, starts the groups again, restores the random generators and calls ``fn`` with half
    the size.

    Args:
        fn: takes the batch size of one rank. If it raises an error other than out of memory, every rank raises.
        start: the first size, at least 1.

    Returns:
        The size that fits, and the result of ``fn``.

    Raises:
        AccelError: not even 1 fits, a model is already set up, the process group was not created by accel, or ``fn``
            returns a generator or a coroutine; on every rank.
    """
    size = whole_number(start)
    problem = _wrong_call(fn, size, start)
    answers = agree("accel.largest_batch", (problem, size))
    raise_together("largest_batch", AccelError(problem) if problem else None, [text for text, _ in answers], AccelError)
    if len({theirs for _, theirs in answers}) > 1:
        sizes = ", ".join(str(theirs) for _, theirs in answers)
        raise RankMismatchError(f"largest_batch: start differs over the ranks: {sizes}")
    generators = rng_state().state_dict()
    while True:
        problem, result = _attempt(fn, size)
        if not problem:
            return size, result  # type: ignore[return-value]
        if size == 1:
            raise AccelError(f"largest_batch: not even a batch of 1 fits: {problem}")
        logger.info("largest_batch: a batch of %d does not fit: %s", size, problem)
        size //= 2
        rng_state().load_state_dict(generators)


def _wrong_call(fn: object, size: int, start: object) -> str:
    if not callable(fn):
        return f"largest_batch: expected a function of the batch size, then the first size, found {described(fn)}"
    if size < 1:
        return f"largest_batch: expected start to be an int of at least 1, found {start!r}"
    gc.collect()
    registry.sweep()
    if engines := registry.in_order():
        return (
            f"largest_batch: {engines[0].label} is already set up. Build the model inside the function, or call "
            "accel.teardown() first."
        )
    if process.current().control is not None and not process.current().owns_group:
        return (
            "largest_batch restarts the process group, but accel did not create it. Remove init_process_group from your "
            "program; accel.setup calls it."
        )
    return ""


def _attempt(fn: Callable[[int], T], size: int) -> tuple[str, T | None]:
    """Return why this size does not fit, and the result if it does."""
    result, error = None, None
    try:
        result = fn(size)
    except Exception as caught:
        error = caught
    if isinstance(result, AsyncGenerator | Coroutine | Generator):
        error = AccelError(
            f"largest_batch: fn returned a {type(result).__name__}, so nothing of it has run. Pass a function that does "
            "the work when it is called, without yield or async."
        )
    what, outcome = f"accel.largest_batch({size})", (_kind_of(error), text_of_error(error))
    answers = _agree_unless_ended(what, outcome)
    if not answers or max(answers)[0] == _OUT_OF_MEMORY:
        if outcome[0] != _FAILED:
            error = result = None  # the frames of the error hold the model
        _start_again(f"{what}: {outcome[1] or 'another rank failed'}")
        answers = agree(what, outcome)
    worst = max(answers)[0]
    texts = [text if kind == worst else "" for kind, text in answers]
    if worst == _OUT_OF_MEMORY:
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), None
    raise_together("the function of accel.largest_batch", error if outcome[0] == worst else None, texts, AccelError)
    return "", result


def _kind_of(error: BaseException | None) -> int:
    if error is None:
        return _SUCCEEDED
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if memory or (isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY)):
        return _OUT_OF_MEMORY
    cause = error.__cause__ or error.__context__
    if isinstance(error, AccelError) and cause is not None and _kind_of(cause) == _OUT_OF_MEMORY:
        return _OUT_OF_MEMORY
    return _DISCONNECTED if isinstance(error, AccelError) or is_lost(error) else _FAILED


def _agree_unless_ended(what: str, outcome: tuple[int, str]) -> list[tuple[int, str]]:
    """Return how ``fn`` ended on every rank; nothing if a rank is in a different collective, which ends the groups."""
    if process.ended():
        return []
    patience = min(_PATIENCE, process.current().timeout) if outcome[0] != _SUCCEEDED else None
    with contextlib.suppress(AccelError):
        answers = agree(what, outcome, timeout=patience)
        agree(f"{what}, by all", None)  # no rank has lost its patience in the meantime
        return answers
    return []


def _start_again(reason: str) -> None:
    """Tear everything down, free the memory and start the process groups again. Collective."""
    options = process.start_options()
    process.end_groups(reason)
    gc.collect()
    with contextlib.suppress(AccelError):  # weights that other ranks hold are lost, and nobody needs them
        shut_down()
    gc.collect()
    process.restart(options)
    for device in process.own_devices():
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()

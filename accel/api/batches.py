"""What a loop does by batches of its own: each rank's part of some items, and the largest batch that fits."""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar, overload

import torch
from torch.optim import Optimizer

from .. import data, process
from ..data.iteration import latest
from ..data.sampling import Division, fingerprint, has_parts
from ..engines.base.step import Stepper
from ..errors import AccelError, RankMismatchError, checked_call, described, text_of_error, whole_number
from ..handles import HiddenAttribute
from ..planning import place_of
from ..process.control import agree, is_lost, locked, raise_together
from ..process.rng import rng_state
from ..process.transfer import Prints, other_values
from ..registry import registry
from ..trees import walk
from . import end_all

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

#: How long a rank that failed waits for the others, who may wait for it.
_PATIENCE: Final = timedelta(seconds=2)
_MEMORY: Final = (
    "out of memory",
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
)
#: How an attempt ended on a rank, the one that decides last: well, because of another rank, by want of memory, by another error.
_WELL, _LOST, _NO_MEMORY, _FAILED = range(4)


@checked_call
def largest_batch(fn: Callable[[int], T], start: int) -> tuple[int, T]:
    """Calls ``fn(batch_size)`` with ``start``, and half of it each time a rank runs out of memory. Collective.

    ``fn`` is a step, or a whole training: build in it what it trains. Where it does not fit on one rank, all ranks begin
    again with half: those that wait for that rank in a collective are released, which takes seconds; what was set up in ``fn``
    is torn down, the memory freed, and the random generators and the loaders are put back, so that the result is that of a
    program that had called ``fn`` with this size only. What was set up before goes on; its gradients are dropped. After
    Accelerate's ``find_executable_batch_size``, which knows nothing of other ranks.

    Args:
        fn: gets the batch size of one rank. Its errors other than of memory go through, on every rank.
        start: the first size, at least 1.

    Returns:
        The size that fits, and what ``fn`` returned.

    Raises:
        AccelError: not even 1 fits; ``fn`` gives a generator or a coroutine, which has not run; or a step was cut short of an
            optimizer that was set up before, or that something outside of ``fn`` holds; on every rank.
    """
    if not callable(fn):
        raise AccelError(
            f"largest_batch: expected a function of the batch size, then the first size, found {described(fn)}"
        )
    size = whole_number(start)
    starts = agree("accel.largest_batch", repr(start) if size < 1 else f"{size}")
    if len(set(starts)) > 1:
        raise RankMismatchError(f"largest_batch: start differs over the ranks: {', '.join(starts)}")
    if size < 1:
        raise AccelError(f"largest_batch: expected start to be an int of at least 1, found {start!r}")
    states, put_back = rng_state().state_dict(), data.remember()
    while True:
        problem, result = _attempt(fn, size, put_back)
        if isinstance(result, AsyncGenerator | Coroutine | Generator):
            raise AccelError(
                f"largest_batch: fn returned a {type(result).__name__}, so that nothing of it has run: give a function without "
                "yield or async that does the work when it is called"
            )
        if not problem:
            return size, result  # type: ignore[return-value]
        if size == 1:
            raise AccelError(f"largest_batch: not even a batch of 1 fits: {problem}")
        logger.info("largest_batch: a batch of %d does not fit: %s", size, problem)
        size //= 2
        rng_state().load_state_dict(states)


def _attempt(fn: Callable[[int], T], size: int, put_back: Callable[[], list[data.LoaderState]]) -> tuple[str, T | None]:
    """Which rank has no memory for this size, or the result. After an error loaders are put back: the epochs may differ."""
    since, result, error = registry.next_serial, None, None
    step: tuple[int | None, weakref.ref[Optimizer] | None] = None, None
    with process.keeping_groups():
        try:
            result = fn(size)
        except Exception as caught:
            error, step = caught, _in_step(caught)
        kind, text = _kind_of(error), text_of_error(error)
        answers = _meet(f"accel.largest_batch({size})", (kind, text))
        worst = max(theirs for theirs, _ in answers)
        for state in put_back() if worst != _WELL else ():
            known = HiddenAttribute.get(state.raw) or {}
            HiddenAttribute.put(state.raw, {place: had for place, had in known.items() if had[0]._accel is not state})
        if worst != _NO_MEMORY:
            problems = [why if theirs == worst else "" for theirs, why in answers]
            raise_together(
                "the function of accel.largest_batch", error if kind == worst else None, problems, AccelError
            )
            return "", result
        error = result = None  # and with its frames all that it has made
        _clean_up(since, *step)
    return "; ".join(f"rank {rank}: {why}" for rank, (theirs, why) in enumerate(answers) if theirs == worst), None


def _in_step(error: BaseException) -> tuple[int | None, weakref.ref[Optimizer] | None]:
    """Where an error comes of an optimizer's step: the engine that was about to make it, or the optimizer that was in it."""
    engine = optimizer = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is Stepper._before.__code__:
            engine, optimizer = frame.f_locals["engine"].serial, None
        elif frame.f_code.co_filename == Optimizer.profile_hook_step.__code__.co_filename and "self" in frame.f_locals:
            optimizer = optimizer or weakref.ref(frame.f_locals["self"])
    return engine, optimizer


def _kind_of(error: BaseException | None) -> int:
    if error is None:
        return _WELL
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if memory or (isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY)):
        return _NO_MEMORY
    if isinstance(error, AccelError) and _kind_of(error.__cause__ or error.__context__) == _NO_MEMORY:
        return _NO_MEMORY
    return _LOST if isinstance(error, AccelError) or is_lost(error) else _FAILED


def _meet(what: str, mine: tuple[int, str]) -> list[tuple[int, str]]:
    """How the attempt ended on every rank. Where a rank is elsewhere, the groups end, which wakes it, and begin anew."""
    if not process.ended():
        with contextlib.suppress(AccelError):
            patience = min(_PATIENCE, process.current().timeout) if mine[0] else None
            answers = agree(what, mine, timeout=patience)
            agree(f"{what}, by all", None)  # none has lost its patience meanwhile
            return answers
    process.end_groups(f"{what}: {mine[1] or 'another rank failed'}")
    process.connect_anew()
    return agree(what, mine)


def _clean_up(since: int, about: int | None, cut: weakref.ref[Optimizer] | None) -> None:
    """Tear down what was set up since, and make the rest ready to go on. Collective.

    ``about`` is the serial of the engine that was about to step, ``cut`` the optimizer that was in its step.
    """
    gc.collect()
    inside = None if cut is None else cut()
    steps = {
        engine.label: (engine.drift.steps - (engine.serial == about), any(o is inside for o in engine.optimizers))
        for engine in registry.in_order()
    }
    everyone = agree("accel.largest_batch (engines)", steps)
    shared = set.intersection(*(set(theirs) for theirs in everyone))
    for engine in registry.in_order():
        engine.module.zero_grad()
        for optimizer in engine.optimizers:
            optimizer.zero_grad()
        if engine.serial < since and engine.label in shared:
            engine.rebuild()
            engine.drift.pause()
            engine.drift.restart()
    end_all(since, "memory ran out on a rank")
    gc.collect()
    for device in process.own_devices():
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
    for label in sorted(shared):
        counts = {theirs[label] for theirs in everyone}
        if len(counts) > 1 or counts.pop()[1]:
            raise AccelError(
                f"largest_batch: memory ran out on a rank while the ranks made a step of {label}, which is held outside of the "
                "function: what has stepped of it differs. Build the model and its optimizers in the function, or load them "
                "from a checkpoint and start with less"
            )

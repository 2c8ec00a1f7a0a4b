"""``split`` gives each rank its items, and ``largest_batch`` finds the batch size that fits."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, overload

import torch

from . import process
from .data.iteration import latest
from .data.sampling import Division, fingerprint, has_parts
from .errors import AccelError, RankMismatchError, described, text_of_error, whole_number
from .process.control import agree, is_lost, locked, raise_together
from .process.rng import rng_state
from .process.transfer import Prints, other_values
from .registry import registry
from .setup import place_of
from .trees import walk
from .verbs import shut_down

logger = logging.getLogger("accel")
T = TypeVar("T")

# -- split -----------------------------------------------------------------------------------------


@overload
def split(items: range, pad: Literal[True]) -> list[int]: ...
@overload
def split(items: T, pad: bool = False) -> T: ...
@locked
def split(items: T, pad: bool = False) -> T:
    """Return this rank's consecutive share of items that every rank has. Collective.

    ``gather_for_metrics(rows, items)`` brings results for the shares back into the order of
    ``items``, with one row for each item. Ranks that read the same batch, as in
    ``data_parallel_place``, get the same share. No model is needed.

    Args:
        items: a list, tuple, range, array or tensor (cut along its first dimension), or nested
            dicts of them with equal lengths.
        pad: repeat the last item so that all shares are equally long, for models whose forwards
            communicate.

    Raises:
        RankMismatchError: the ranks have different items; on every rank.
        AccelError: ``items`` can't be cut, or lengths or the models' data-parallel places differ.
    """
    lengths: dict[str, int] = {}
    problems: list[str] = []

    def measure(path: str, leaf: Any) -> Any:
        if has_parts(leaf):
            lengths[path] = len(leaf)
        else:
            problems.append(
                f"{path} is {described(leaf)}; expected a list, tuple, tensor, or dicts of them"
            )
        return leaf

    walk(measure, items, "items", has_parts)
    given: Any = pad
    if type(given) is not bool:
        problems.append(f"expected pad to be True or False, found {given!r}")
    if len(set(lengths.values())) > 1:
        problems.append(f"expected equal lengths, found {lengths}")
    registry.sweep()
    places = {(place.rank, place.world) for place in map(place_of, registry.in_order())}
    if len(places) > 1:
        problems.append(
            f"the models that are set up have different data-parallel places: {sorted(places)}"
        )
    problem = f"accel.split: {problems[0]}" if problems else ""
    tensors: list[torch.Tensor] = []
    words = fingerprint(items, tensors) if process.world_size() > 1 else None
    answers = agree("accel.split", (problem, (lengths, pad, words), Prints(tensors).read()))
    raise_together(
        "accel.split",
        AccelError(problem) if problem else None,
        [text for text, *_ in answers],
        AccelError,
    )
    same = all(facts == answers[0][1] for _, facts, _ in answers)
    if not same or other_values({number: sums for number, (*_, sums) in enumerate(answers)}):
        raise RankMismatchError(
            "accel.split: the ranks have other items. Pass the same items in the same order on every rank."
        )
    rank, world = places.pop() if places else (process.rank(), process.world_size())
    division = Division(rank=rank, world=world, batch=0, even=pad, drop_last=False)
    length = next(iter(lengths.values()), 0)
    first, size, _ = division.share(length)
    latest.divisions[length, pad] = division
    # Rows that are gathered without a loader may be of these items now.
    latest.rows, latest.replica = None, (rank, world)
    return walk(lambda path, leaf: _rows(leaf, first, first + size, pad), items, "items", has_parts)


def _rows(items: Any, first: int, end: int, pad: bool) -> Any:
    if not pad:
        return items[first:end]
    rows = [min(row, len(items) - 1) for row in range(first, end)]
    if isinstance(items, list | tuple | range):
        return (tuple if isinstance(items, tuple) else list)(items[row] for row in rows)
    return items[rows]


# -- largest_batch ---------------------------------------------------------------------------------

#: In the texts of RuntimeErrors of torch, cuBLAS and cuDNN.
_MEMORY_TEXTS: Final = (
    "out of memory",
    "DefaultCPUAllocator",
    "STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
)
#: Why ``fn`` did not succeed on a rank. The largest value of all ranks decides.
_DISCONNECTED, _OUT_OF_MEMORY, _FAILED = range(3)


def largest_batch(fn: Callable[[int], T], start: int) -> tuple[int, T]:
    """Call ``fn(batch_size)`` with half the size each time a rank runs out of memory. Collective.

    Build the model, optimizers and loaders inside ``fn``. If ``fn`` raises on a rank, accel ends
    the process groups, tears everything down on all ranks and starts the groups again. If the rank
    ran out of memory, accel restores the random generators and calls ``fn`` with half the size.

    Args:
        fn: takes the batch size of one rank. If it raises an error other than out of memory, every
            rank raises.
        start: the first size, at least 1.

    Returns:
        The size that fits, and the result of ``fn``.

    Raises:
        AccelError: not even 1 fits, a model is already set up, or the process group isn't accel's.
    """
    size = whole_number(start)
    problem = _problem(fn, size, start)
    problems = agree(f"accel.largest_batch(start={size})", problem)
    raise_together("largest_batch", AccelError(problem) if problem else None, problems, AccelError)
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


def _problem(fn: object, size: int, start: object) -> str:
    if not callable(fn):
        return f"largest_batch: expected a function of the batch size, then the first size, found {described(fn)}"
    if size < 1:
        return f"largest_batch: expected start to be an int of at least 1, found {start!r}"
    gc.collect()
    registry.sweep()
    if engines := registry.in_order():
        return (
            f"largest_batch: {engines[0].label} is already set up. Build the model inside the "
            "function, or call accel.teardown() first."
        )
    if process.current().control is not None and not process.current().owns_group:
        return (
            "largest_batch restarts the process group, but accel did not create it. Remove "
            "init_process_group from your program; accel.setup calls it."
        )
    return ""


def _attempt(fn: Callable[[int], T], size: int) -> tuple[str, T | None]:
    """Return why this size does not fit, and the result if it does."""
    call = f"accel.largest_batch({size})"
    try:
        result = fn(size)
        agree(call, None)
        return "", result
    except Exception as caught:
        error: Exception | None = caught
        outcome, text = _outcome(caught), text_of_error(caught)
    result = None  # type: ignore[assignment]  # it may hold the model, like the frames of the error
    _start_again(f"{call}: {text}")
    answers = agree(call, (outcome, text))
    worst = max(kind for kind, _ in answers)
    texts = [text if kind == worst else "" for kind, text in answers]
    if worst != _OUT_OF_MEMORY:
        raise_together(
            "the function of accel.largest_batch",
            error if outcome == worst else None,
            texts,
            AccelError,
        )
    error = None
    _free_memory()
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), None


def _outcome(error: BaseException) -> int:
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if memory or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_TEXTS)
    ):
        return _OUT_OF_MEMORY
    cause = error.__cause__ or error.__context__
    if isinstance(error, AccelError) and cause is not None and _outcome(cause) == _OUT_OF_MEMORY:
        return _OUT_OF_MEMORY
    return _DISCONNECTED if isinstance(error, AccelError) or is_lost(error) else _FAILED


def _start_again(reason: str) -> None:
    """Tear everything down and start the process groups again. Collective."""
    options = process.start_options()
    process.end_groups(reason)
    with contextlib.suppress(
        AccelError
    ):  # weights that other ranks hold are lost, and nobody needs them
        shut_down()
    process.restart(options)


def _free_memory() -> None:
    gc.collect()
    for device in process.own_devices():
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()

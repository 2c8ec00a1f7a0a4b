"""Split items across ranks, and find the largest batch that fits."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, overload

import torch

from . import process
from .data.iteration import Rows, latest
from .data.sampling import Division, first_sample, has_parts
from .errors import AccelError, RankMismatchError, described, text_of_error, whole_number
from .process.control import agree, is_lost, raise_together
from .process.rng import rng_state
from .registry import registry
from .trees import walk
from .verbs import shut_down

logger = logging.getLogger("accel")
T = TypeVar("T")


@overload
def split(items: range, pad: Literal[True]) -> list[int]: ...
@overload
def split(items: T, pad: bool = False) -> T: ...
def split(items: T, pad: bool = False) -> T:
    """Return this rank's consecutive share of the items. Collective.

    ``gather_for_metrics(rows, items)`` returns results in the order of
    ``items``. Ranks that read the same batch get the same share.

    Args:
        items: a list, tuple, range, array or tensor, or nested dicts of them
            with equal lengths, the same on every rank.
        pad: repeat the last item so that all shares are equally long, for
            models that communicate in ``forward``.

    Raises:
        RankMismatchError: the ranks have different items.
        AccelError: ``items`` can't be split, or your models split data differently.
    """
    leaves: dict[str, Any] = {}
    walk(lambda path, leaf: leaves.setdefault(path, leaf), items, "items", has_parts)
    problem, lengths = "", {}
    for path, leaf in leaves.items():
        if has_parts(leaf):
            lengths[path] = len(leaf)
        else:
            problem = f"{path} is {described(leaf)}. Pass a list, tuple, or tensor."
    # list(set_of_strings) has a different order in each process, so ranks compare first items.
    first_items = list(map(first_sample, leaves.values()))
    if not problem and len(set(lengths.values())) > 1:
        problem = f"items have different lengths: {lengths}."
    registry.sweep()
    places = {e.replica(e.options, e.process) for e in registry.in_order()}
    if len(places) > 1:
        problem = f"the models have different data-parallel places: {sorted(places)}."
    error = AccelError(f"accel.split: {problem}") if problem else None
    answers = agree("accel.split", (text_of_error(error), lengths, first_items, pad))
    raise_together("accel.split", error, [answer[0] for answer in answers], AccelError)
    if answers.count(answers[0]) < len(answers):
        raise RankMismatchError(
            "accel.split got different items on different ranks. "
            "Pass the same items in the same order."
        )
    rank, world = places.pop() if places else (process.rank(), process.world_size())
    division = Division(rank=rank, world=world, batch=0, even=pad, drop_last=False)
    length = next(iter(lengths.values()), 0)
    share = division.share(length)
    latest.split[length, share.size] = Rows(share, rank, world)
    # gather_for_metrics(rows) must not mistake these rows for the loader's last batch.
    latest.rows = None
    first, end = share.offset, share.offset + share.size
    return walk(lambda path, leaf: _rows(leaf, first, end, pad), items, "items", has_parts)


def _rows(items: Any, first: int, end: int, pad: bool) -> Any:
    if not pad:
        return items[first:end]
    rows = [min(row, len(items) - 1) for row in range(first, end)]
    if not isinstance(items, list | tuple | range):
        return items[rows]
    padded = [items[row] for row in rows]
    return tuple(padded) if isinstance(items, tuple) else padded


#: Fragments of the RuntimeErrors that torch, cuBLAS and cuDNN raise if memory runs out.
_MEMORY_TEXTS: Final = (
    "out of memory",
    "DefaultCPUAllocator",
    "STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
)


def largest_batch(fn: Callable[[int], T], start: int) -> tuple[int, T]:
    """Call ``fn(batch_size)``, halving the size until it fits. Collective.

    Build the model, optimizers and loaders inside ``fn``. Before each new
    attempt, accel tears everything down on all ranks, restarts the process
    groups and restores the random generators.

    Args:
        fn: takes the batch size per rank, and may run out of memory.
        start: the first size, at least 1.

    Returns:
        The size that fits, and the result of ``fn``.

    Raises:
        AccelError: 1 doesn't fit, or something is set up outside ``fn``.
    """
    size, running = whole_number(start), process.current()
    registry.sweep()
    problem = ""
    if size < 1:
        problem = f"start={start!r} isn't a batch size of at least 1."
    elif registry.engines:
        label = registry.in_order()[0].label
        problem = f"{label} is already set up. Build the model inside the function."
    elif running.control is not None and not running.owns_group:
        problem = "accel can't restart your process group. Leave out init_process_group."
    error = AccelError(f"largest_batch: {problem}") if problem else None
    problems = agree(f"accel.largest_batch(start={size})", text_of_error(error))
    raise_together("largest_batch", error, problems, AccelError)
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


def _attempt(fn: Callable[[int], T], size: int) -> tuple[str, T | None]:
    """Return the ranks' memory errors and the result. Collective."""
    call = f"accel.largest_batch({size})"
    before = process.current()
    try:
        result = fn(size)
        agree(call, None)
        return "", result
    except Exception as caught:
        error: Exception | None = caught
        is_memory, text = _is_out_of_memory(caught), text_of_error(caught)
    # Drop the result now and the error below: both may hold the model and its memory.
    result = None  # type: ignore[assignment]
    process.end_groups(f"{call}: {text}")
    # The error says that shards of other ranks are lost, but the next attempt needs no weights.
    with contextlib.suppress(AccelError):
        shut_down()
    process.init(process_group=before.requested, timeout=before.timeout, devices=before.request)
    # A lost connection only follows from another rank's error, so report that error alone.
    if not is_memory and (isinstance(error, AccelError) or is_lost(error)):
        text = ""
    texts, causes = [], []
    for rank, (is_full, cause) in enumerate(agree(call, (is_memory, text))):
        causes.append(cause)
        if is_full:
            texts.append(f"rank {rank}: {cause}")
    if not texts:
        own = None if any(causes) and not causes[process.rank()] else error
        raise_together("the function of accel.largest_batch", own, causes, AccelError)
    error = None
    gc.collect()
    for device in process.own_devices():
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
    return "; ".join(texts), None


def _is_out_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, AccelError):
        # An accel error may wrap an out-of-memory error, for example one inside setup.
        return _is_out_of_memory(error.__cause__ or error.__context__)
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _MEMORY_TEXTS)

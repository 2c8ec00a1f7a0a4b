"""The functions that a training loop calls on handles, and the end of engines."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from . import data, process
from .data import LoaderHandle
from .engines import Engine
from .engines.base.sequence import prepared
from .errors import (
    AccelError,
    BackendError,
    LoaderError,
    PrecisionError,
    described,
    text_of_error,
    whole_number,
)
from .handles import Model, ModelHandle, loader_state, raw
from .process import current, ended, running
from .process.control import agree, locked, raise_together
from .registry import registry, resolve_module
from .trees import all_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader

logger = logging.getLogger("accel")
Batch = TypeVar("Batch")


# -- a step of the loop ----------------------------------------------------------------------------


def backward(
    loss: torch.Tensor,
    gradient: torch.Tensor | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Call ``loss.backward()`` with the same arguments.

    Under "16-mixed" the loss is scaled first, and gradients are unscaled before this returns.

    Raises:
        PrecisionError: a "16-mixed" model has gradients of a plain ``loss.backward()``, or
            ``create_graph`` would put the scale into the graph.
    """
    if not registry.scaled:
        loss.backward(gradient, retain_graph, create_graph, inputs)
        return
    if create_graph:
        raise PrecisionError(
            "accel.backward(create_graph=True) would put the loss scale of '16-mixed' into the "
            "graph. Use torch.autograd.grad(loss, inputs, create_graph=True)."
        )
    scaled: list[Engine] = []
    holders: list[Any] = []
    for engine in registry.in_order():
        holders += engine.gradients.holders()
        if engine.precision.scaled:
            engine.gradients.refuse_plain(zeros=False)
            scaled.append(engine)
    holders += dict(all_tensors([inputs])).values()
    options = {"gradient": gradient, "retain_graph": retain_graph, "inputs": inputs}
    registry.loss_scale.backward(loss, holders, **options)
    for engine in scaled:
        engine.gradients.plain = False


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Accumulate gradients without synchronization in the forwards inside. Can be nested.

    The last backward pass may be inside too, because ``optimizer.step()`` synchronizes.
    """
    return registry.find_engine(model).no_sync()


def accumulate(loader: DataLoader[Batch], n: int) -> data.Accumulation[Batch]:
    """Group a loader's batches for gradient accumulation, ``n`` batches for each optimizer step.

    ::

        for group in accel.accumulate(loader, n):
            for x, y in group:
                (loss_fn(model(x), y) / len(group)).backward()
            optimizer.step()
            optimizer.zero_grad()

    The last group of an epoch may be smaller. If it saves communication, gradients are only reduced
    in the last backward of a group. A ``break`` drops the rest of a group.

    Args:
        loader: a loader's handle. The batches of an iterable dataset are read one group ahead.
        n: batches of each rank for one step.

    Raises:
        LoaderError: ``loader`` isn't a handle, or ``n`` isn't a positive number.
        RankMismatchError: the ranks have different numbers of batches, or a different ``n``.
    """
    handle: Any = loader  # to a type checker a handle is its loader
    if type(handle) is not LoaderHandle or whole_number(n) < 1:
        raise LoaderError(
            "accel.accumulate() takes the loader that accel.setup returned and a number of "
            f"batches, found {described(loader)} and {n!r}."
        )
    serials = loader_state(handle).engines

    def set_accumulating(accumulating: bool) -> None:
        for engine in registry.in_order():
            if engine.serial in serials and engine.gradients.spares:
                engine.gradients.accumulate(accumulating)

    return data.Accumulation(handle, whole_number(n), set_accumulating)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the model's gradients by their global norm, on every backend. Collective.

    Args:
        model: a handle or its raw module.
        max_norm: the largest norm that the gradients may have afterwards.
        norm_type: the order of the norm. ``float("inf")`` is the largest absolute value.
        error_if_nonfinite: raise instead of clipping if the norm is inf or nan.

    Returns:
        The norm before clipping, a 0-dim tensor that is the same on every rank.

    Raises:
        RuntimeError: the norm is inf or nan, and ``error_if_nonfinite`` is True.
        BackendError: gradients are sharded, and ``norm_type`` is not above 0.
    """
    parameters = registry.find_engine(model).parameters
    # Torch's function leads to `gradients/clip.py` while an engine on several ranks lives.
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


def refresh_trainable(model: nn.Module) -> None:
    """Apply a change of ``requires_grad`` now. Needed only with ``auto_refresh=False``. Collective.

    Raises:
        RankMismatchError: the ranks changed different parameters.
        BackendError: inside of ``no_sync``, while gradients are not synchronized.
    """
    registry.find_engine(model).refresh()


def join(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Allow ranks to have different numbers of batches (``torch.distributed.algorithms.Join``)."""
    engine = registry.find_engine(model)
    if engine.sequence is not None:
        raise BackendError(
            "accel.join() doesn't work with sequence_parallel, because attention needs all ranks."
        )
    return engine.join()


# -- the model -------------------------------------------------------------------------------------


def unwrap(model: Model) -> Model:
    """Return the raw module of a handle or of a ``torch.compile`` wrapper, or the module itself."""
    handle: Any = model  # to a type checker a handle is its module
    module: Any = raw(handle) if type(handle) is ModelHandle else resolve_module(handle)[0]
    return module  # type: ignore[no-any-return]


@locked
def full_state_dict(model_or_optimizer: Any, *, rank0_only: bool = False) -> dict[str, Any]:
    """Return the ``state_dict()`` of the raw object, as in a single process. Collective.

    Sharded tensors come to the CPU, because a device may be too small for all of them.

    Args:
        model_or_optimizer: a model or optimizer that is set up.
        rank0_only: return ``{}`` on the other ranks, which then need no memory for the state.
    """
    keep = not rank0_only or process.is_main()
    optimizer: Optimizer | None = None
    if isinstance(model_or_optimizer, Optimizer):
        optimizer = model_or_optimizer
        engine = registry.find_engine_of(optimizer)
        if engine is None:
            kind = type(optimizer).__name__
            raise AccelError(f"This {kind} isn't set up. Call accel.setup(model, optimizer) first.")
    else:
        engine = registry.find_engine(model_or_optimizer)
    state: dict[str, Any] = engine.holdings.full_state_dict(optimizer, keep=keep)
    return state if keep else {}


class DataParallelPlace(NamedTuple):
    """The index of a process among the processes with different batches, and their number."""

    rank: int
    world_size: int


def data_parallel_place(model: nn.Module) -> DataParallelPlace:
    """Return this process's data-parallel place. Processes that share a batch have the same."""
    engine = registry.find_engine(model)
    return DataParallelPlace(*engine.replica(engine.options, engine.process))


def mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the device mesh of a model, or None. Its axes are "replicate", "shard" and "tensor".

    After ``accel.teardown()`` and a new start, the names end in the number of the start.
    """
    return registry.find_engine(model).mesh


def shard_sequence(model: nn.Module, batch: Batch, dim: int = 1) -> Batch:
    """Return this rank's shard of a batch for a model with ``sequence_parallel``. Collective.

    Tensors as long along ``dim`` as ``input_ids``, ``inputs_embeds`` or else the first tensor are
    cut. For models of transformers, ``position_ids`` and ``shift_labels`` of the full sequence are
    added, and an ``attention_mask`` without padding is removed. Other models get the batch itself.

    Args:
        model: a handle or its raw module.
        batch: tensors in nested dicts, lists and tuples, the same on all ranks of a sequence.
        dim: the dimension of the sequence.

    Raises:
        BackendError: the sequence can't be divided, or ``attention_mask`` has padding.
        RankMismatchError: ranks of one sequence have different batches.
    """
    engine = registry.find_engine(model)
    if engine.sequence is None:
        return prepared(engine.module, batch)  # type: ignore[no-any-return]
    return engine.sequence.shard(batch, dim)  # type: ignore[no-any-return]


@contextlib.contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Give a model with ``sequence_parallel`` whole sequences, as in ``generate``, on each rank."""
    sequence = registry.find_engine(model).sequence
    if sequence is None:
        yield
        return
    before, sequence.whole = sequence.whole, True
    try:
        yield
    finally:
        sequence.whole = before


# -- the end ---------------------------------------------------------------------------------------


@overload
def teardown(model: Model) -> Model: ...
@overload
def teardown() -> None: ...
@locked
def teardown(model: Any = None) -> Any:
    """Undo ``setup`` and return the raw module with its full trained weights. Collective.

    The optimizers work again as before ``setup``. Without a model, tear down every engine and
    accel's own process group, and return None.

    Raises:
        RankMismatchError: the ranks tear down different models, or a sharded one after different
            numbers of steps. Nothing has changed.
        AccelError: sharded weights could not be gathered, for example because a rank has dropped
            the model. They are NaN, and the engines have ended.
    """
    process.refuse_fork()
    if model is None:
        shut_down()
        return None
    engine = registry.find_engine(model)
    if engine.distributed and engine.placements.partial and not engine.ended:
        engine.compare(f"accel.teardown after {engine.drift.progress}")
    registry.remove(engine)
    engine.teardown()
    return engine.module


@locked
def shut_down(how: str = process.TORN_DOWN) -> None:
    """End every engine and accel's process group. Ranks that wait for this one hear ``how``."""
    save = sys.modules.get("accel.checkpoint.background")
    if save is not None:
        # A background save uses the groups.
        save.background.wait()
    try:
        end_all()
    finally:
        process.shutdown(how)
        data.latest.forget()


def end_all() -> None:
    """End every engine, together with the other ranks. Collective if an engine is sharded.

    An error is raised after all engines have ended.
    """
    registry.sweep()
    engines = registry.in_order()
    together = bool(registry.divided) and running() is not None
    reasons: dict[int, str] = {}
    problem: Exception | None = None
    if together:
        try:
            reasons = _reasons_to_end_alone(engines)
        except AccelError as error:
            problem, together = error, False
            reasons = {engine.serial: str(error) for engine in engines}
    for engine in engines:
        registry.remove(engine)
        try:
            engine.teardown(reasons.get(engine.serial, ""))
        except Exception as error:
            if ended() and isinstance(error, AccelError):
                # An earlier error has ended the groups.
                logger.error("%s", error)
            else:
                problem = problem or error
    registry.divided.clear()
    registry.scaled.clear()
    if together and running() is not None:
        problems = agree("accel.teardown (the end)", text_of_error(problem))
        raise_together("accel.teardown", problem, problems)
    if problem is not None:
        raise problem


def _reasons_to_end_alone(engines: list[Engine]) -> dict[int, str]:
    """Return the reasons to end engines without the other ranks, by serial. Collective."""
    # A rank that tears down after an error must not wait long for ranks that wait elsewhere.
    after_error = sys.exc_info()[0] is not None
    limit = min(current().timeout, timedelta(seconds=60)) if after_error else None
    progress: dict[int, str] = {}
    for engine in engines:
        progress[engine.serial] = engine.drift.progress if engine.placements.partial else ""
    progress_by_rank = agree("accel.teardown", progress, timeout=limit)
    reasons = {}
    for engine in engines:
        texts = [others.get(engine.serial, "dropped") for others in progress_by_rank]
        if len(set(texts)) > 1:
            states = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
            reasons[engine.serial] = f"the model is not the same on all ranks: {states}"
    return reasons

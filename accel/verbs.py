"""Functions for the training loop, and teardown."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from torch import Tensor, nn
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
from .facts import first_difference
from .handles import Model, ModelHandle, loader_state, raw
from .process import current, ended, running
from .process.control import agree, raise_together
from .registry import registry, resolve_module
from .trees import all_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader

logger = logging.getLogger("accel")
Batch = TypeVar("Batch")


# -- a step of the loop ----------------------------------------------------------------------------


def backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Call ``loss.backward()`` with the same arguments.

    With "16-mixed", accel scales the loss first and unscales gradients after.

    Raises:
        PrecisionError: a "16-mixed" model has gradients from ``loss.backward()``,
            or ``create_graph`` would put the scale into the graph.
    """
    if not registry.scaled:
        loss.backward(gradient, retain_graph, create_graph, inputs)
        return
    if create_graph:
        raise PrecisionError(
            "create_graph=True would put the loss scale of '16-mixed' into the "
            "graph. Use torch.autograd.grad(loss, inputs, create_graph=True)."
        )
    scaled = []
    holders: list[Any] = [tensor for _, tensor in all_tensors([inputs])]
    for engine in registry.in_order():
        holders += engine.gradients.holders()
        if engine.precision.scaled:
            engine.gradients.refuse_plain(zeros=False)
            scaled.append(engine.gradients)
    options = {"gradient": gradient, "retain_graph": retain_graph, "inputs": inputs}
    registry.loss_scale.backward(loss, holders, **options)
    for gradients in scaled:
        gradients.plain = False


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Accumulate gradients without synchronization. Can be nested.

    The last backward pass may be inside too: ``optimizer.step()`` synchronizes.
    """
    return registry.find_engine(model).no_sync()


def accumulate(loader: DataLoader[Batch], n: int) -> data.Accumulation[Batch]:
    """Group a loader's batches for gradient accumulation, ``n`` per step.

    ::

        for group in accel.accumulate(loader, n):
            for x, y in group:
                (loss_fn(model(x), y) / len(group)).backward()
            optimizer.step()
            optimizer.zero_grad()

    The last group of an epoch may be smaller. If the backend allows it, gradients
    are reduced only in a group's last backward. A ``break`` skips its rest.

    Args:
        loader: a loader from ``setup``. An iterable dataset is read a group ahead.
        n: the number of batches per rank and step.

    Raises:
        LoaderError: ``loader`` isn't from ``setup``, or ``n`` isn't positive.
    """
    # To type checkers, setup returns the DataLoader itself.
    handle: Any = loader
    if type(handle) is not LoaderHandle or whole_number(n) < 1:
        raise LoaderError(
            "accel.accumulate() takes the loader that accel.setup returned and a number of "
            f"batches, not {described(loader)} and {n!r}."
        )
    serials = loader_state(handle).engines

    def set_accumulating(accumulating: bool) -> None:
        for engine in registry.in_order():
            gradients = engine.gradients
            if engine.serial in serials and gradients.spares:
                gradients.accumulate(accumulating)

    return data.Accumulation(handle, whole_number(n), set_accumulating)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the model's gradients by their global norm. Collective.

    Args:
        model: a wrapped model or its raw module.
        max_norm: the maximum norm after clipping.
        norm_type: the order of the norm, including ``float("inf")``.
        error_if_nonfinite: raise RuntimeError if the norm is inf or nan.

    Returns:
        The norm before clipping, as a 0-dim tensor that is equal on every rank.

    Raises:
        BackendError: gradients are sharded, and ``norm_type`` is not above 0.
    """
    parameters = registry.find_engine(model).parameters
    # accel patches torch's function (gradients/clip.py), so both ways give the same result.
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


def refresh_trainable(model: nn.Module) -> None:
    """Apply changes of ``requires_grad`` if ``auto_refresh=False``. Collective.

    Raises:
        RankMismatchError: the ranks changed different parameters.
        BackendError: gradients from ``no_sync`` are pending.
    """
    registry.find_engine(model).refresh()


def join(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let ranks have different numbers of batches, like torch's ``Join``."""
    engine = registry.find_engine(model)
    if engine.sequence is not None:
        raise BackendError("accel.join() needs a model without sequence_parallel.")
    return engine.join()


# -- the model -------------------------------------------------------------------------------------


def unwrap(model: Model) -> Model:
    """Return the raw module of a wrapped, compiled or raw model."""
    # To type checkers, setup returns the module itself.
    handle: Any = model
    if type(handle) is ModelHandle:
        return raw(handle)  # type: ignore[no-any-return]
    return resolve_module(handle)[0]  # type: ignore[return-value]


def full_state_dict(model_or_optimizer: Any, *, rank0_only: bool = False) -> dict[str, Any]:
    """Return the raw object's full ``state_dict()``. Collective.

    Sharded tensors are gathered on the CPU, in case they don't fit on a device.

    Args:
        model_or_optimizer: a model or optimizer after ``setup``.
        rank0_only: return ``{}`` on all other ranks, to save memory.
    """
    keep = not rank0_only or process.is_main()
    optimizer: Optimizer | None = None
    if isinstance(model_or_optimizer, Optimizer):
        optimizer = model_or_optimizer
        engine = registry.find_engine_of(optimizer)
        if engine is None:
            raise AccelError("The optimizer isn't set up. Call accel.setup(model, optimizer).")
    else:
        engine = registry.find_engine(model_or_optimizer)
    state: dict[str, Any] = engine.holdings.full_state_dict(optimizer, keep=keep)
    return state if keep else {}


class DataParallelPlace(NamedTuple):
    """A rank's index among ranks with different batches, and their number."""

    rank: int
    world_size: int


def data_parallel_place(model: nn.Module) -> DataParallelPlace:
    """Return this rank's place. Ranks that share a batch have the same place."""
    engine = registry.find_engine(model)
    return DataParallelPlace(*engine.replica(engine.options, engine.process))


def mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh with axes "replicate", "shard" and "tensor", or None."""
    return registry.find_engine(model).mesh


def shard_sequence(model: nn.Module, batch: Batch, dim: int = 1) -> Batch:
    """Return this rank's shard of a batch with ``sequence_parallel``. Collective.

    Tensors are cut if their size in ``dim`` is that of ``input_ids`` or
    ``inputs_embeds``, or else of the first tensor. For transformers, accel adds
    ``position_ids`` and ``shift_labels`` of the full sequence, and removes an
    ``attention_mask`` without padding. Without ``sequence_parallel``, nothing is cut.

    Args:
        model: a wrapped model or its raw module.
        batch: nested tensors, equal on all ranks that share a sequence.
        dim: the dimension of the sequence.

    Raises:
        BackendError: the sequence can't be cut, or its mask has padding.
        RankMismatchError: ranks that share a sequence have different batches.
    """
    engine = registry.find_engine(model)
    if engine.sequence is None:
        return prepared(engine.module, batch)  # type: ignore[no-any-return]
    return engine.sequence.shard(batch, dim)  # type: ignore[no-any-return]


@contextlib.contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Run the model on full sequences on each rank, for example to generate."""
    sequence = registry.find_engine(model).sequence
    if sequence is None:
        yield
        return
    before, sequence.whole = sequence.whole, True
    try:
        yield
    finally:
        sequence.whole = before


# -- teardown --------------------------------------------------------------------------------------


@overload
def teardown(model: Model) -> Model: ...
@overload
def teardown() -> None: ...
def teardown(model: Any = None) -> Any:
    """Undo ``setup`` and return the raw module with full weights. Collective.

    The optimizers work again as before ``setup``. Without a model, tear down
    every model and accel's own process group, and return None.

    Raises:
        RankMismatchError: the ranks tear down different models, or a sharded
            model after different numbers of steps. Nothing has changed.
        AccelError: sharded weights could not be gathered, for example because
            a rank has deleted the model. They are now NaN.
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


def shut_down(how: str = process.TORN_DOWN) -> None:
    """Tear everything down. Errors on ranks that still wait show ``how``."""
    saving = sys.modules.get("accel.checkpoint.background")
    if saving is not None:
        # A background save still uses the process groups.
        saving.background.wait()
    try:
        end_all()
    finally:
        process.shutdown(how)
        data.latest.rows = None
        data.latest.split.clear()


def end_all() -> None:
    """Tear down all engines, then raise. Collective if one is sharded."""
    registry.sweep()
    engines = registry.in_order()
    together = registry.divided and running() is not None
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
            # The process groups ended with an earlier error, which caused this one.
            if ended() and isinstance(error, AccelError):
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
    """Return why engines are torn down alone, by serial. Collective."""
    limit = None
    if sys.exc_info()[0] is not None:
        # After an error this rank must not wait long for ranks that wait elsewhere.
        limit = min(current().timeout, timedelta(seconds=60))
    progress = {}
    for engine in engines:
        partial = engine.placements.partial
        progress[engine.serial] = engine.drift.progress if partial else ""
    answers = agree("accel.teardown", progress, timeout=limit)
    reasons = {}
    for engine in engines:
        serial = engine.serial
        texts = [{"the model": answer.get(serial, "dropped")} for answer in answers]
        reasons[serial] = first_difference(texts)
    return reasons

"""The verbs that a loop calls, and what all ranks do together in ``setup`` and ``teardown``."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from .. import data, planning, process
from ..data import LoaderHandle, LoaderOptions, LoaderPlace
from ..deferred import materialize, weights_of, without_setup
from ..engines import Context, Engine, Options
from ..engines.base.activations import checkpointed
from ..engines.base.sequence import prepared
from ..engines.base.step import take_added_groups
from ..errors import (
    AccelError,
    BackendError,
    LoaderError,
    PrecisionError,
    RankMismatchError,
    described,
    text_of_error,
    whole_number,
)
from ..handles import Dataloaders, Handles, HiddenAttribute, Model, ModelHandle, Optimizers, engine_behind, raw
from ..planning import Plan, known_handles, known_loader, known_optimizer, make_plan, options_of, place_for, place_of
from ..precision import convert_module, convert_optimizer, here
from ..process import Process, current, ended, running
from ..process.control import Waiting, agree, locked, raise_together
from ..registry import registry, resolve_module
from ..shard import parameters_of
from ..trees import map_leaves

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader

logger = logging.getLogger("accel")
Batch = TypeVar("Batch")


@locked
def setup(
    model: Model,
    optimizers: Optimizers = None,  # type: ignore[assignment]
    dataloaders: Dataloaders = None,  # type: ignore[assignment]
    *more: Any,
    backend: str | Options = "auto",
    precision: str = "auto",
    devices: Any = "auto",
    loader_options: LoaderOptions | None = None,
) -> Handles[Model, Optimizers, Dataloaders]:
    """Give ``model`` its one engine and return handles for the unchanged loop.

    Calling it again with the same objects returns the same handles; a later call may add optimizers and dataloaders.
    All ranks call it with the same things; they start from rank 0's weights and buffers.

    Args:
        model: a module, its handle, or its ``torch.compile`` wrapper; None for dataloaders alone, as in an evaluation without
            training, which the process divides until ``accel.teardown()``.
        optimizers: an optimizer, or a list, tuple or dict of them, over ``model``'s parameters.
        dataloaders: a ``DataLoader``, or a list, tuple or dict of them.
        more: nothing. A second dataloader here raises LoaderError, because all of them go into ``dataloaders``.
        backend: a backend's name or options (``accel.DDP(...)``); "auto" is the live engine's, else ``ACCEL_BACKEND``,
            else "ddp" at world size > 1, "dp" in a notebook with several accelerators, "single" otherwise.
        precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true" or "16-true"; "auto" is the live engine's, else
            ``ACCEL_PRECISION``, else "32-true".
        devices: as in the page on environments and devices; "auto" is ``ACCEL_DEVICES``, else all accelerators, else the CPU.
        loader_options: how these dataloaders are distributed; None is ``LoaderOptions()``, or what a known loader has.

    Returns:
        ``Handles(model, optimizers, dataloaders)``, each in the form of its argument.

    Raises:
        AlreadySetUpError: the model's engine has another backend, precision or options.
        SharedParametersError: parameters of the model belong to another live engine.
        RankMismatchError: the ranks' models or arguments differ; raised on every rank.
        CheckpointError: the weights of a deferred model do not fit it.
        OptimizerError, LoaderError, BackendError, PrecisionError, DeviceError: an argument that cannot work.
    """
    process.refuse_fork()
    if more:
        raise LoaderError(
            "accel.setup() takes all DataLoaders in one argument. Pass a tuple: "
            "accel.setup(model, optimizer, (train_loader, eval_loader))."
        )
    wanted = (backend, precision, devices)
    handles = known_handles(model, optimizers, dataloaders, wanted, loader_options)
    if handles is not None:
        return handles
    plan = make_plan(model, optimizers, dataloaders, wanted, loader_options)
    if plan.error is None and plan.engine is None and weights_of(plan.module) is not None:
        from ..checkpoint.load import first_values  # with all that checkpoints need

        try:
            plan.fill = first_values(plan.module)
        except AccelError as error:
            plan.error = error
    return execute(plan)


@overload
def teardown(model: Model) -> Model: ...
@overload
def teardown() -> None: ...
@locked
def teardown(model: Any = None) -> Any:
    """End the model's engine: its raw module has its trained weights, its raw optimizers work by themselves again.

    Without a model, ends every engine and the process group that accel made, and returns None. Collective. A model that some
    ranks have let go of ends on the others by itself: what every rank holds of it is as in the end of any other, and
    weights of which each rank held a part are nan.

    Raises:
        RankMismatchError: the ranks end different models, or a divided one after different steps (accel.load of a checkpoint on
            every rank makes it one again); nothing has changed.
        OptimizerError: an optimizer was given parameters that are not of the model; nothing has changed.
        AccelError: weights were lost, since the process groups were ended, or other ranks had let go of the model or were
            interrupted in another step. Everything has ended all the same; where the groups had not, all ranks raise.
    """
    process.refuse_fork()
    if model is not None:
        engine = registry.of_handle(model)
        if engine.distributed and engine.gradients.partial and not engine.ended:
            engine.compare(f"accel.teardown after {engine.drift.progress}")
        for optimizer in engine.optimizers:
            take_added_groups(engine, optimizer)
        registry.remove(engine)
        engine.teardown()
        return engine.module
    shut_down()
    return None


@locked
def shut_down(how: str = process.TORN_DOWN) -> None:
    """End every engine and the process group that accel made; ranks that wait for this one hear ``how``. Collective."""
    if save := sys.modules.get("accel.checkpoint.background"):
        save.background.wait()  # it uses the groups
    try:
        end_all()
    finally:
        process.shutdown(how)
        data.forget()


def unwrap(model: Model) -> Model:
    """The raw module of a handle or of a compile wrapper, or the module itself."""
    given: Any = model  # a handle has the type of its module
    module: Any = raw(given) if type(given) is ModelHandle else resolve_module(given)[0]
    unwrapped: Model = module
    return unwrapped


def backward(
    loss: torch.Tensor,
    gradient: torch.Tensor | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """``loss.backward()`` with its arguments; under "16-mixed" the loss is scaled first.

    Raises:
        PrecisionError: gradients of a "16-mixed" model came from a plain ``loss.backward()`` before; or their own graph
            is asked for, which would hold the scale.
    """
    if not isinstance(loss, torch.Tensor):
        raise AccelError(f"accel.backward expects the loss as a tensor, got {described(loss)}")
    if any(e.precision.scaled and e.gradients.plain for e in registry.engines):
        registry.sweep()
    if create_graph and registry.scales:  # maybe for a model that is gone
        registry.sweep()
        if registry.scaled:
            registry.agree_on_living(agree("accel.backward(create_graph=True)", registry.living()))
    if not registry.scales:
        loss.backward(gradient, retain_graph, create_graph, inputs)
        return
    if create_graph:
        raise PrecisionError(
            "accel.backward(create_graph=True) under '16-mixed' would give gradients whose graph holds the loss scale: use "
            "torch.autograd.grad(loss, inputs, create_graph=True), which scales nothing, and accel.backward for the sum"
        )
    scaled = [e for e in registry.in_order() if e.precision.scaled]
    for engine in scaled:
        engine.gradients.refuse_plain(zeros=False)
    holders = [p for e in registry.in_order() for p in e.gradients.holders()]
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else inputs or ()
    holders += [i for i in wanted if isinstance(i, torch.Tensor)]
    registry.loss_scale.backward(loss, holders, gradient, retain_graph, inputs)
    for engine in scaled:
        engine.gradients.plain = False


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context: the backward passes of the forwards inside accumulate without reduction. Nests; restores what was there."""
    return registry.of_handle(model).no_sync()


def accumulate(loader: DataLoader[Batch], n: int) -> data.Accumulation[Batch]:
    """The batches of ``loader`` in groups of ``n``, each of one optimizer step; the last group of an epoch may be smaller.

    ``for group in accel.accumulate(loader, n)``, in it ``for batch in group`` with the backward of ``loss / len(group)``, after
    that loop the step. ``len(group)`` is the real number of its batches, so that the last step too is the mean over what
    it saw; ``len(accel.accumulate(loader, n))`` is the number of steps, rounded up. Batches come one at a time; what a
    ``break`` leaves of a group is left out. Where ``ddp`` would reduce gradients after each batch it does so in the last
    backward of a group alone, as with ``no_sync``. After ``itertools.batched``.

    Args:
        loader: a loader's handle. Of an iterable dataset, which alone knows its end, a group is read ahead on the host.
        n: batches of each rank for one step.

    Raises:
        LoaderError: not a handle, or not a number of batches.
        RankMismatchError: in the loop, on every rank: the ranks have other numbers of batches, or another ``n``.
    """
    handle: Any = loader  # it has the type of its loader
    if type(handle) is not LoaderHandle:
        raise LoaderError(f"accel.accumulate: expected the loader that accel.setup returned, found {described(loader)}")
    if (number := whole_number(n)) < 1:
        raise LoaderError(f"accel.accumulate(loader, {n!r}): expected a number of batches, at least 1")
    engines = handle._accel.engines

    def set_accumulating(accumulating: bool) -> None:
        for engine in registry.in_order():
            if engine.serial in engines and engine.gradients.spares:
                engine.gradients.accumulate(accumulating)

    return data.Accumulation(handle, number, set_accumulating)


class DataParallelPlace(NamedTuple):
    """A process's place among those that have batches of their own, from 0, and how many of them there are."""

    rank: int
    world_size: int


def data_parallel_place(model: nn.Module) -> DataParallelPlace:
    """This process's data-parallel place: that of the process, but where several hold parts of one model and read one batch."""
    place = place_of(registry.of_handle(model))
    return DataParallelPlace(place.rank, place.world)


def mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh that a model lies on, with the axes "replicate", "shard" and "tensor" as far as it has them; None without one.

    In a process that has begun anew after ``accel.teardown()``, the names of its axes end in the number of the start.
    """
    return registry.of_handle(model).holdings.mesh


def shard_sequence(model: nn.Module, batch: Batch, dim: int = 1) -> Batch:
    """This rank's part of a batch's sequences, for a model with ``sequence_parallel``; else the batch. Collective.

    Every tensor that has the sequence along ``dim`` is cut: all that are as long there as ``input_ids``, ``inputs_embeds`` or
    else the first tensor. The others stay whole. For models of transformers it adds ``position_ids`` and ``shift_labels``
    of the full sequence if they are missing, and removes an ``attention_mask`` without padding.

    Args:
        model: a handle, or its raw module.
        batch: a tensor, or nested dicts, lists and tuples of them, the same on all ranks of a sequence.
        dim: along which the sequence lies.

    Raises:
        BackendError: the sequence does not divide, no tensor has such a dimension, or ``attention_mask`` has padding.
        RankMismatchError: ranks of one sequence have different batches.
    """
    engine = registry.of_handle(model)
    part: Batch = prepared(engine.module, batch) if engine.sequence is None else engine.sequence.shard(batch, dim)
    return part


@contextlib.contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Context: a model with ``sequence_parallel`` is given whole sequences, as in ``generate``; each rank computes by itself."""
    if (sequence := registry.of_handle(model).sequence) is None:
        yield
        return
    before, sequence.whole = sequence.whole, True
    try:
        yield
    finally:
        sequence.whole = before


def join(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context for ranks with different numbers of batches (``torch.distributed.algorithms.Join``)."""
    engine = registry.of_handle(model)
    if engine.sequence is not None:
        raise BackendError(
            "accel.join with sequence_parallel: ranks that have run out of inputs would miss in attention"
        )
    return engine.join()


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the model's gradients by their global norm, on every backend. Collective.

    Args:
        model: a handle or its raw module.
        max_norm: the largest norm that the gradients may have afterwards.
        norm_type: the order of the norm; ``float("inf")`` is the largest absolute value.
        error_if_nonfinite: raise instead of clipping if the norm is inf or nan.

    Returns:
        The norm before clipping, a 0-dim tensor that is the same on every rank.

    Raises:
        RuntimeError: the norm is inf or nan, and ``error_if_nonfinite`` is True.
        BackendError: gradients are sharded, and ``norm_type`` is not above 0.
    """
    return registry.of_handle(model).gradients.clip(max_norm, norm_type, error_if_nonfinite)


def refresh_trainable(model: nn.Module) -> None:
    """Apply a change of ``requires_grad`` now. Collective; needed only with the option ``auto_refresh=False``.

    Raises:
        RankMismatchError: the ranks changed different parameters.
        BackendError: inside of ``no_sync``, whose gradients wait.
    """
    registry.of_handle(model).refresh()


@locked
def full_state_dict(model_or_optimizer: Any, *, rank0_only: bool = False) -> dict[str, Any]:
    """What the raw object's ``state_dict()`` would hold in one process, on every rank. Collective.

    The tensors of what is divided over the ranks lie on the host, since a device may be too small for all of it.

    Args:
        model_or_optimizer: a handle or its raw object.
        rank0_only: give the other ranks ``{}``, which then need no memory for it.
    """
    keep = not rank0_only or process.is_main()
    if isinstance(model_or_optimizer, Optimizer):
        handle = registry.optimizer_handle(model_or_optimizer)
        engine = None if handle is None else engine_behind(handle)
        if handle is None or engine is None:
            kind = type(model_or_optimizer).__name__
            raise AccelError(f"this {kind} has no live engine: call accel.setup(model, optimizer) first")
        state = engine.holdings.full_state_dict(raw(handle), keep=keep)
    else:
        state = registry.of_handle(model_or_optimizer).holdings.full_state_dict(None, keep=keep)
    return state if keep else {}


# -- setup: agree on the plan, build, start from rank 0's weights ------------------------------------------------------


def describe(plan: Plan) -> dict[str, str]:
    """What must be equal on all ranks, as text by name."""
    facts = {
        "dataloaders alone": str(plan.modelless),
        "backend": "" if plan.modelless else plan.engine_type.name,
        "precision": plan.precision.name if plan.precision else "",
        "values from a directory": str(plan.fill is not None),
        "set up before": str(plan.engine is not None),
        "number of new optimizers": str(len(plan.new_optimizers)),
        "number of new dataloaders": str(len(plan.new_loaders)),
    }
    for option in () if plan.modelless else dataclasses.fields(plan.options):
        facts[f"{option.name} of accel.{type(plan.options).__name__}"] = _plain(getattr(plan.options, option.name))
    for name, p in plan.module.named_parameters():
        facts[f"parameter {name}"] = f"{tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
    for name, b in plan.module.named_buffers():
        facts[f"buffer {name}"] = f"{tuple(b.shape)} {b.dtype}"
    names = {id(p): n for n, p in plan.module.named_parameters()}
    for i, optimizer in enumerate(plan.new_optimizers):
        facts[f"optimizer {i}"] = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            place = f"group {g} of optimizer {i}"
            facts |= {f"{key} of {place}": _plain(value) for key, value in group.items() if key != "params"}
            facts |= {f"params[{n}] of {place}": names.get(id(p), "?") for n, p in enumerate(group["params"])}
        # In the groups' order: that in which state came may differ, where each rank stepped some of the parameters.
        for p in [p for p in parameters_of(optimizer) if p in optimizer.state]:
            entries = sorted(optimizer.state[p].items(), key=lambda entry: str(entry[0]))
            place = f"the state of {names.get(id(p), '?')} in optimizer {i}"
            facts |= {f"{key} of {place}": _plain(value) for key, value in entries}
    for i, loader in enumerate(plan.new_loaders):
        described = data.describe(loader, plan.loader_options)
        facts |= {f"{key} of dataloader {i}": f"{value}" for key, value in described.items()}
    return facts


def _plain(value: Any) -> str:
    """A value as text that is the same on every rank: tensors by what they hold, objects by their class."""
    if isinstance(value, torch.Tensor):
        held = value.detach().double().sum().item() if here(value) is value else "in parts"
        return f"tensor {tuple(value.shape)} {held}"
    if isinstance(value, (list, tuple)):
        return str([_plain(v) for v in value])
    if isinstance(value, (set, frozenset)):  # in an order of this process's own
        return f"{type(value).__name__} {sorted(map(_plain, value))}"
    if isinstance(value, dict):
        return str({_plain(k): _plain(v) for k, v in value.items()})
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _agree_on(plan: Plan) -> list[int]:
    """All ranks want the same, or all raise. Returns the seeds of rank 0's dataloaders; settles the serial and the loss scale."""
    facts = describe(plan) if plan.error is None else {}
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    seeds = _seeds(plan) if plan.error is None else []
    error = text_of_error(plan.error)
    mine = digest, error, seeds, registry.next_serial, registry.loss_scale.state(), registry.living()
    values = agree("accel.setup", mine)
    plan.serial = max(serial for *_, serial, _, _ in values)
    registry.next_serial = plan.serial + (plan.engine is None)
    try:
        raise_together("accel.setup", plan.error, [error for _, error, *_ in values])
    finally:
        plan.error = None  # as in raise_together
    if any(other != digest for other, *_ in values):
        everyone = agree("accel.setup (comparing the models)", facts)
        raise RankMismatchError(f"accel.setup: the ranks differ: {_difference(everyone)}")
    _, _, loaders, _, scale, _ = values[0]
    for number, firsts in enumerate(zip(*([first for _, first in theirs] for _, _, theirs, *_ in values), strict=True)):
        whose = None if plan.modelless else plan.serial if plan.engine is None else plan.engine.serial
        if len(set(firsts)) > 1 and current().place.rank == 0 and registry.first(_OTHER_DATA, number, whose):
            logger.warning(_OTHER_DATA, number)
    if plan.precision is not None and plan.precision.scaled:
        registry.loss_scale.restore(*scale)
    registry.agree_on_living([living for *_, living in values])
    return [seed for seed, _ in loaders]


_OTHER_DATA: Final = (
    "dataloader %d has other data on other ranks, and each rank reads its part of what it has, so that most is never read: make "
    "the data alike on all ranks (accel.seed(0) before random data), or, where each rank has its own part, use "
    "accel.LoaderOptions(shard=False)"
)


def _seeds(plan: Plan) -> list[tuple[int, str]]:
    """The seed of each dataloader, and for the ranks to compare what a new one has first."""
    place = place_for(plan.engine_type, plan.options, current())
    loaders: list[Any] = []
    map_leaves(lambda loader, path: loaders.append(loader), plan.dataloaders, "dataloaders")
    asked = [options_of(loader, plan.loader_options, place).seed for loader in loaders]
    several, found = current().place.world_size > 1, []
    for number, (loader, seed) in enumerate(zip(map(data.raw_loader, loaders), asked, strict=True)):
        compared = several and options_of(loader, plan.loader_options, place).shard
        first = data.first_sample(loader.dataset) if compared and loader in plan.new_loaders else ""
        found.append((data.loader_seed(loader, seed, number), first))
    return found


def _difference(everyone: list[dict[str, str]]) -> str:
    keys = dict.fromkeys(k for facts in everyone for k in facts)
    # The model first: what else differs often follows from it.
    for key in sorted(keys, key=lambda k: not k.startswith(("parameter", "buffer"))):
        values = [facts.get(key, "absent") for facts in everyone]
        if len(set(values)) > 1:
            ranks = {v: [str(r) for r, other in enumerate(values) if other == v] for v in dict.fromkeys(values)}
            told = (f"{v} on rank{'s' * (len(r) > 1)} {', '.join(r)}" for v, r in ranks.items())
            return f"{key} is " + "; ".join(told)
    return "in the order of their parameters"


def execute(plan: Plan) -> Handles[Any, Any, Any]:
    """Agree, build, agree that all have built, then start from rank 0's weights."""
    seeds = enumerate(_agree_on(plan))
    process = current()
    engine = None if plan.modelless else _engine(plan, process)
    place = place_for(plan.engine_type, plan.options, process)
    serial = planning.MODELLESS if engine is None else engine.serial
    handles = Handles(
        None if engine is None else engine.handle,
        map_leaves(lambda o, path: known_optimizer(o, engine) if engine else None, plan.optimizers, "optimizers"),
        map_leaves(
            lambda d, path: _loader_handle(d, plan.loader_options, place, serial, *next(seeds)),
            plan.dataloaders,
            "dataloaders",
        ),
    )
    if process.place.rank == 0:
        _tell(plan, engine, place, process)
        _warn_of_early_scheduler(plan, place)
    return handles


def _engine(plan: Plan, process: Process) -> Engine:
    """The model's engine, with the new optimizers, on all ranks or on none."""
    error: Exception | None = None
    # A setup inside torch.inference_mode must not make tensors that no backward can use.
    with contextlib.ExitStack() as undo, torch.inference_mode(False):
        if plan.engine is None:
            undo.callback(without_setup(plan.module))
        try:
            engine = _build(plan, process, undo)
        except Exception as caught:
            error = caught
        try:
            raise_together("accel.setup", error, agree("accel.setup (building)", text_of_error(error)))
        finally:
            error = None  # as in raise_together
        if plan.engine is None or plan.new_optimizers:
            with Waiting(process, "accel.setup"):
                engine.start(plan.new_optimizers)
        if plan.engine is None:
            registry.add(engine)
            if plan.fill is not None:
                undo.callback(registry.remove, engine)
                plan.fill(engine.handle)
                engine.reads = False
        undo.pop_all()
    return engine


def _tell(plan: Plan, engine: Engine | None, place: LoaderPlace, process: Process) -> None:
    world, places = process.place.world_size, place.world
    if plan.engine is None and engine is not None:
        kind, precision = engine.kind, engine.precision.name
        logger.info("%s: backend %s, %s, %d x %s", kind, engine.name, precision, world, process.device.type)
    what = "ranks" if places == world else "data-parallel places"
    for loader in plan.new_loaders:
        with contextlib.suppress(LoaderError):
            size = data.effective_batch_size(known_loader(loader, None, place))
            logger.info("effective batch size: %d x %d %s = %d", size // places, places, what, size)


def _warn_of_early_scheduler(plan: Plan, place: LoaderPlace) -> None:
    """Warn if a learning rate scheduler may count on the length that a loader had before setup."""
    optimizers: list[Any] = []
    map_leaves(lambda optimizer, path: optimizers.append(optimizer), plan.optimizers, "optimizers")
    scheduled = [o for o in optimizers if any("initial_lr" in group for group in o.param_groups)]
    for loader in plan.new_loaders if scheduled else ():
        before, after = data.length_of(loader), data.length_of(known_loader(loader, None, place))
        if before != after:
            logger.warning(
                "accel.setup shortened a DataLoader from %s to %s batches, and %s already has a learning rate scheduler. "
                "If you computed its number of steps from len(loader), build it after accel.setup().",
                before,
                after,
                type(scheduled[0]).__name__,
            )
            return


def _give_memory(plan: Plan, process: Process, undo: contextlib.ExitStack) -> None:
    """To parameters that have none; with first values, where these are not read later."""
    alone, kind = process.place.world_size == 1, plan.engine_type.holdings_type
    if alone or not kind.materializes:
        host = plan.fill is not None and not alone and kind.divides_from_host(plan.options)
        materialize(plan.module, torch.device("cpu") if host else process.device, undo)


def _build(plan: Plan, process: Process, undo: contextlib.ExitStack) -> Engine:
    assert plan.precision is not None
    engine = plan.engine
    if engine is None:
        reads = plan.fill is not None
        if not reads:
            _give_memory(plan, process, undo)
        dtypes = convert_module(plan.module, process.device, plan.precision.storage, undo)
        if reads:  # at once in the dtypes that they are to have
            _give_memory(plan, process, undo)
        changes = checkpointed(plan.module, plan.options)
        undo.push(changes)
        context = Context(process, plan.precision, registry.loss_scale, plan.options, plan.serial, reads)
        engine = plan.engine_type(plan.module, plan.entry, context)
        undo.callback(engine.teardown)
        engine.dtypes, engine.undo = dtypes, changes
        engine.wrap()
    for optimizer in plan.new_optimizers:
        convert_optimizer(optimizer, undo)
        engine.attach(optimizer)
        if plan.engine is not None:
            undo.callback(engine.detach, optimizer)
    return engine


def _loader_handle(
    loader: Any, options: LoaderOptions | None, place: LoaderPlace, serial: int, number: int, seed: int
) -> LoaderHandle:
    process = current()
    in_place = process.place.world_size == 1
    try:
        handle = known_loader(loader, options, place)
    except LookupError:
        options = options or LoaderOptions()
        handle = data.distribute(
            loader,
            options,
            place,
            seed=seed,
            in_place=in_place and options.seed is None,
            name=f"{process.rounds} {number}",
        )
        living = {key: value for key, value in (HiddenAttribute.get(loader) or {}).items() if key.process is process}
        HiddenAttribute.put(loader, {**living, place: (handle, options)})
    state = handle._accel
    if loader is state.raw and state.engines and state.engines <= registry.ended:
        # Its engines were torn down: this is a setup like the first.
        state.begin_anew(seed, in_place and state.options.seed is None)
        state.engines.clear()
    state.engines.add(serial)
    return handle


# -- teardown of everything --------------------------------------------------------------------------------------------


def end_all() -> None:
    """End every engine: those that live on all ranks together, in order, any other one by itself.

    What lives on a rank is up to its garbage collector, and to what its program still holds. Collective where an engine
    had parts of a model on several ranks, since the last such end. An engine's error comes once all have ended; on every rank
    where it is collective.
    """
    registry.sweep()
    engines = registry.in_order()
    together = bool(registry.divided) and running() is not None
    alone, problem = _alone(engines) if together else ({}, None)
    together = together and problem is None
    for engine in engines:
        registry.remove(engine)
        try:
            engine.teardown(alone.get(engine.serial, ""))
        except Exception as error:
            if ended() and isinstance(error, AccelError):
                logger.error("%s", error)  # an earlier error told of the end of the groups
            else:
                problem = problem or error
    registry.divided.clear()
    registry.scaled.clear()
    if together and running() is not None:
        raise_together("accel.teardown", problem, agree("accel.teardown (the end)", text_of_error(problem)))
    if problem is not None:
        raise problem


def _alone(engines: list[Engine]) -> tuple[dict[int, str], Exception | None]:
    """By serial, why engines cannot end together with the other ranks; and what went wrong in asking them. Collective.

    Parts of one model after different steps are none.
    """
    # A rank that comes here with an error must not wait for long for ranks that wait for it elsewhere.
    limit = None if sys.exc_info()[0] is None else min(current().timeout, timedelta(seconds=60))
    try:
        come = {e.serial: e.drift.progress if e.gradients.partial else "" for e in engines}
        everyone = agree("accel.teardown", come, timeout=limit)
    except AccelError as error:
        return {engine.serial: str(error) for engine in engines}, error
    gone = {e.serial: [str(rank) for rank, theirs in enumerate(everyone) if e.serial not in theirs] for e in engines}
    alone = {serial: f"rank {', '.join(ranks)} let go of the model" for serial, ranks in gone.items() if ranks}
    for serial in come.keys() - alone.keys():
        if len({theirs[serial] for theirs in everyone}) > 1:
            steps = ", ".join(f"after {theirs[serial]} on rank {rank}" for rank, theirs in enumerate(everyone))
            alone[serial] = f"the model is {steps}, so that they are no parts of one model"
    return alone, None

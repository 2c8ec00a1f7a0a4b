"""``accel.setup``: plan on each rank, agree on the plan, build the engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from . import data, engines, process
from .data import LoaderHandle, LoaderOptions, LoaderPlace, raw_loader
from .deferred import check_deferred, materialize, weights_of
from .engines import Context, Engine, Options
from .engines.base.activations import checkpointed
from .engines.base.refusals import check_parameters
from .errors import (
    AccelError,
    AlreadySetUpError,
    BackendError,
    LoaderError,
    OptimizerError,
    RankMismatchError,
    described,
    text_of_error,
)
from .facts import comparable_text, first_difference
from .handles import Dataloaders, Handles, HiddenAttribute, Model, Optimizers, loader_state
from .precision import Precision, convert_module, convert_optimizer
from .process import Process, current, running, use_devices
from .process.control import Waiting, agree, raise_together
from .registry import registry, resolve_module
from .shard import parameters_of
from .trees import map_leaves

logger = logging.getLogger("accel")


def setup(
    model: Model,
    optimizers: Optimizers = None,  # type: ignore[assignment]
    dataloaders: Dataloaders = None,  # type: ignore[assignment]
    *,
    backend: str | Options = "auto",
    precision: str = "auto",
    devices: Any = "auto",
    loader_options: LoaderOptions | None = None,
) -> Handles[Model, Optimizers, Dataloaders]:
    """Distribute a model, its optimizers and dataloaders for an unchanged loop.

    Call it with the same arguments on every rank. All ranks start from rank 0's
    weights and buffers. A second call may add optimizers and dataloaders.

    Args:
        model: a module, a wrapped model, or a ``torch.compile`` wrapper. None
            distributes only dataloaders, for example for an evaluation.
        optimizers: an optimizer of the model, or a list, tuple or dict of them.
        dataloaders: a ``DataLoader``, or a list, tuple or dict of them.
        backend: a name or options such as ``accel.DDP(...)``. "auto" is
            ``ACCEL_BACKEND``, else "ddp" on several ranks, "dp" in a notebook
            with several accelerators, and "single" otherwise.
        precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true".
            "auto" is ``ACCEL_PRECISION``, else "32-true".
        devices: see docs/launch.md. "auto" is ``ACCEL_DEVICES``, else all.
        loader_options: options of new dataloaders.

    Returns:
        ``Handles(model, optimizers, dataloaders)``, structured as the arguments.

    Raises:
        AlreadySetUpError: the model or a loader has different options already.
        SharedParametersError: a different model shares parameters with this one.
        RankMismatchError: the ranks have different models or arguments.
        CheckpointError: the weights of a deferred model don't fit it.
        OptimizerError, LoaderError, BackendError, PrecisionError, DeviceError.
    """
    process.refuse_fork()
    # The first call starts the process. Later calls check in make_plan, so that all ranks raise.
    if running() is None:
        use_devices(devices)
    plan = Plan(current(), optimizers, dataloaders)
    error: Exception | None = None
    try:
        make_plan(plan, model, backend, precision, devices, loader_options)
    except Exception as caught:
        # The other ranks wait in agree_on_plan, so this rank reports its error there.
        error = caught
    if error or plan.builds or plan.new_optimizers or plan.new_loaders:
        seeds = agree_on_plan(plan, error)
        if plan.module is not None:
            build_engine(plan)
        distribute_loaders(plan, seeds)
        if plan.process.place.rank == 0:
            log_setup(plan)
    return handles_of(plan)


# -- Plan: local, and nothing changes --------------------------------------------------------------


@dataclass(slots=True)
class Plan:
    """The objects of a ``setup`` call on this rank, and how to set them up."""

    process: Process
    optimizers: Any
    dataloaders: Any
    loader_options: LoaderOptions = LoaderOptions()
    #: The module, and the object to call. None for dataloaders alone.
    module: nn.Module | None = None
    entry: Any = None
    #: The module's engine. None until it is built.
    engine: Engine | None = None
    engine_type: type[Engine] = Engine  # type: ignore[type-abstract]
    options: Any = None
    precision: Precision | None = None
    #: This rank's place among the ranks that read different data.
    place: LoaderPlace = LoaderPlace(0, 1, torch.device("cpu"))
    new_optimizers: list[Optimizer] = field(default_factory=list)
    new_loaders: list[DataLoader[Any]] = field(default_factory=list)
    #: True if this call builds an engine.
    builds: bool = False
    #: Fills a deferred model from a directory of weights.
    fill: Callable[[nn.Module], None] | None = None


def make_plan(
    plan: Plan, model: Any, backend: Any, precision: Any, devices: Any, options: Any
) -> None:
    """Find and check the objects for ``setup`` to distribute."""
    if isinstance(options, LoaderOptions):
        plan.loader_options = options
    elif options is not None:
        raise LoaderError(f"loader_options is {described(options)}. Pass accel.LoaderOptions().")
    use_devices(devices)
    if model is not None:
        plan.module, plan.entry = resolve_module(model)
        plan.engine = registry.engine(plan.module)
    elif plan.optimizers is not None or plan.dataloaders is None:
        raise AccelError("accel.setup(None) takes dataloaders only. Pass the model first.")
    if plan.engine is not None:
        _take_engine(plan, plan.engine, backend, precision)
    elif plan.module is not None:
        _choose_engine(plan, plan.module, backend, precision)
    process, kind = plan.process, plan.engine_type
    replica = kind.replica(plan.options, process)
    plan.place = LoaderPlace(*replica, process.device, process)
    map_leaves(partial(_plan_optimizer, plan), plan.optimizers, "optimizers")
    map_leaves(partial(_plan_loader, plan, options), plan.dataloaders, "dataloaders")
    world_size = process.place.world_size
    if plan.new_optimizers and world_size > 1 and not kind.synchronizes:
        raise BackendError(
            f"backend={kind.name!r} can't train on {world_size} ranks, because each "
            "rank would train a separate model. Use a distributed backend."
        )


def _take_engine(plan: Plan, engine: Engine, backend: Any, precision: Any) -> None:
    """Reuse backend, options and precision of the model's engine."""
    plan.engine_type, plan.options = type(engine), engine.options
    plan.precision, before = engine.precision, engine.precision.name
    options = plan.options if backend == "auto" else engines.resolve(backend)[1]
    conflict = ""
    if options != plan.options:
        conflict = f"{plan.options}, not {options}"
    elif precision not in ("auto", before):
        conflict = f"precision {before!r}, not {precision!r}"
    if conflict:
        raise AlreadySetUpError(
            f"{engine.kind} is already set up with {conflict}. "
            "To change it, call raw = accel.teardown(model) first."
        )


def _choose_engine(plan: Plan, module: nn.Module, backend: Any, precision: Any) -> None:
    """Choose backend, options and precision of a new engine."""
    # A model that a notebook cell has replaced must not count as set up.
    registry.sweep()
    registry.check_new(module)
    check_deferred(module)
    process = plan.process
    if precision == "auto":
        precision = os.environ.get("ACCEL_PRECISION") or "32-true"
    plan.precision = Precision(precision, process.device)
    plan.precision.check(module)
    if backend == "auto":
        backend = os.environ.get("ACCEL_BACKEND") or engines.default(process)
    plan.engine_type, plan.options = engines.resolve(backend)
    if process.place.world_size > 1:
        engines.check_torch(plan.engine_type.name)
    plan.engine_type.check(module, plan.options, process)
    plan.builds = True
    if weights_of(module) is not None:
        # Import it only here, because it imports everything that checkpoints need.
        from .checkpoint.load import first_values

        plan.fill = first_values(module)


def _plan_optimizer(plan: Plan, optimizer: Any, path: str) -> None:
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"{path} is {described(optimizer)}. Pass a torch.optim.Optimizer.")
    engine, module = plan.engine, plan.module
    assert module is not None
    is_known = engine is not None and engine is registry.find_engine_of(optimizer)
    if is_known or optimizer in plan.new_optimizers:
        return
    title, kind = f"{path} ({type(optimizer).__name__})", type(module).__name__
    known: Any = engine.known if engine else set(map(id, module.parameters()))
    parameters = parameters_of(optimizer)
    if not any(id(p) in known for p in parameters):
        raise OptimizerError(
            f"{title} holds no parameter of this {kind}. Build it from model.parameters()."
        )
    for other in registry.owners_of(parameters):
        if other is not engine:
            raise OptimizerError(
                f"{title} holds parameters of two models, {kind} and {other.kind}. "
                "Set up both: accel.setup(nn.ModuleDict({...}), optimizer)."
            )
    if plan.process.place.world_size > 1:
        check_parameters(optimizer, known, module, path)
    plan.new_optimizers.append(optimizer)


def _plan_loader(plan: Plan, options: LoaderOptions | None, loader: Any, path: str) -> None:
    if not isinstance(loader, LoaderHandle | DataLoader):
        raise LoaderError(f"{path} is {described(loader)}. Pass a torch.utils.data.DataLoader.")
    loader = raw_loader(loader)
    handle = find_handle(loader, plan.place)
    if handle is not None:
        before = loader_state(handle).options
        if options not in (None, before):
            raise AlreadySetUpError(f"{path} is already set up with {before}, not {options}.")
    elif loader not in plan.new_loaders:
        data.check(loader, plan.loader_options, plan.place.world)
        plan.new_loaders.append(loader)


# -- Agree: every rank has the same plan, or all raise ---------------------------------------------


def agree_on_plan(plan: Plan, error: Exception | None) -> list[int]:
    """Compare the plans, and return rank 0's seeds for new loaders. Collective."""
    options = plan.loader_options
    compared = options.shard and plan.process.place.world_size > 1
    facts = describe(plan) if error is None else {}
    seeds, samples = [], []
    for number, loader in enumerate(plan.new_loaders if error is None else ()):
        seeds.append(data.loader_seed(loader, options.seed, number))
        samples.append(data.first_sample(loader.dataset) if compared else "")
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    answers = agree("accel.setup", (digest, text_of_error(error), (seeds, samples)))
    digests, texts, loaders = zip(*answers, strict=True)
    raise_together("accel.setup", error, texts)
    if len(set(digests)) > 1:
        difference = first_difference(agree("accel.setup (comparing the models)", facts))
        difference = difference or "their parameters are in different orders"
        raise RankMismatchError(f"accel.setup got different arguments: {difference}.")
    for number, sample in enumerate(samples):
        differs = any(others[number] != sample for _, others in loaders)
        if differs and plan.process.place.rank == 0:
            logger.warning(
                "dataloader %d has different data on different ranks, so most of it "
                "isn't read. Build the same data, or use LoaderOptions(shard=False).",
                number,
            )
    return list(loaders[0][0])


def describe(plan: Plan) -> dict[str, str]:
    """Return all facts to compare between the ranks, as text by name."""
    facts = {}
    names: dict[int, str] = {}
    # Parameters first: the error shows the first difference, and others often follow from it.
    if plan.module is not None:
        for name, p in plan.module.named_parameters():
            names[id(p)] = name
            trainable = "trainable" if p.requires_grad else "frozen"
            facts[f"parameter {name}"] = f"{tuple(p.shape)} {p.dtype} {trainable}"
        for name, buffer in plan.module.named_buffers():
            facts[f"buffer {name}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    facts |= {
        "backend": plan.engine_type.name if plan.module is not None else "absent",
        "precision": plan.precision.name if plan.precision is not None else "absent",
        "values from a directory": str(plan.fill is not None),
        "set up before": str(plan.engine is not None),
        "number of new optimizers": str(len(plan.new_optimizers)),
    }
    if plan.module is not None:
        kind = type(plan.options).__name__
        for option in dataclasses.fields(plan.options):
            value = getattr(plan.options, option.name)
            facts[f"{option.name} of accel.{kind}"] = comparable_text(value)
    for number, optimizer in enumerate(plan.new_optimizers):
        facts |= _optimizer_facts(optimizer, f"optimizer {number}", names)
    for number, loader in enumerate(plan.new_loaders):
        for key, value in data.describe(loader, plan.loader_options).items():
            facts[f"{key} of dataloader {number}"] = str(value)
    return facts


def _optimizer_facts(optimizer: Optimizer, label: str, names: dict[int, str]) -> dict[str, str]:
    facts = {label: type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        place = f"group {index} of {label}"
        for key, value in group.items():
            if key != "params":
                facts[f"{key} of {place}"] = comparable_text(value)
        for position, p in enumerate(group["params"]):
            name = names.get(id(p), "?")
            facts[f"params[{position}] of {place}"] = name
            # The program may have loaded a checkpoint into the optimizer on one rank only.
            state = optimizer.state.get(p, {})
            for key in sorted(state, key=str):
                facts[f"{key} of the state of {name} in {label}"] = comparable_text(state[key])
    return facts


# -- Build: on every rank, or on none --------------------------------------------------------------


def build_engine(plan: Plan) -> None:
    """Build the engine or add optimizers, on all ranks or on none. Collective."""
    # Tensors that are created in torch.inference_mode can't be used in a backward.
    with ExitStack() as undo, torch.inference_mode(False):
        error: Exception | None = None
        serial = next(registry.serials) if plan.builds else 0
        try:
            engine = plan.engine or _new_engine(plan, serial, undo)
            for optimizer in plan.new_optimizers:
                convert_optimizer(optimizer, undo)
                engine.attach(optimizer)
                if not plan.builds:
                    undo.callback(engine.detach, optimizer)
        except Exception as caught:
            error = caught
        problems = agree("accel.setup (building)", text_of_error(error))
        raise_together("accel.setup", error, problems)
        if plan.builds or plan.new_optimizers:
            with Waiting(plan.process, "accel.setup"):
                engine.start(plan.new_optimizers)
        if plan.builds:
            registry.add(engine)
        if plan.fill is not None:
            undo.callback(registry.remove, engine)
            plan.fill(engine.handle)
            engine.reads = False
        undo.pop_all()
    plan.engine = engine


def _new_engine(plan: Plan, serial: int, undo: ExitStack) -> Engine:
    """Convert the module and wrap it in an engine. Local."""
    module, precision, process = plan.module, plan.precision, plan.process
    assert module is not None
    assert precision is not None
    reads = plan.fill is not None
    if not reads:
        _materialize(plan, module, undo)
    convert_module(module, process.device, precision.storage, undo)
    if reads:
        # After convert_module, so that parameters are allocated in their final dtypes.
        _materialize(plan, module, undo)
    changes = checkpointed(module, plan.options)
    undo.push(changes)
    context = Context(process, precision, registry.loss_scale, plan.options, serial, reads)
    engine = plan.engine_type(module, plan.entry, context)
    undo.callback(engine.teardown)
    engine.undo = changes
    engine.wrap()
    return engine


def _materialize(plan: Plan, module: nn.Module, undo: ExitStack) -> None:
    """Allocate deferred parameters, unless the backend does it."""
    device, holdings_type = plan.process.device, plan.engine_type.holdings_type
    if plan.process.place.world_size > 1:
        if holdings_type.materializes:
            return
        if plan.fill is not None and holdings_type.divides_from_host(plan.options):
            device = torch.device("cpu")
    materialize(module, device, undo)


# -- Loaders and handles ---------------------------------------------------------------------------


def find_handle(loader: DataLoader[Any], place: LoaderPlace) -> LoaderHandle | None:
    """Return the handle that a loader has for this place, or None."""
    handle: LoaderHandle | None = HiddenAttribute.get(loader)
    if handle is None:
        return None
    state = loader_state(handle)
    # After the teardown of its models, a loader starts at its first epoch with a new handle.
    ended = state.engines and state.engines <= registry.ended
    return None if ended or state.place != place else handle


def distribute_loaders(plan: Plan, seeds: list[int]) -> None:
    """Create the handles of new loaders. Local."""
    place, options = plan.place, plan.loader_options
    in_place = plan.process.place.world_size == 1 and options.seed is None
    for loader, seed in zip(plan.new_loaders, seeds, strict=True):
        handle = LoaderHandle(data.LoaderState(loader, options, place, seed, in_place))
        HiddenAttribute.put(loader, handle)


def handles_of(plan: Plan) -> Handles[Any, Any, Any]:
    """Return the result of ``setup``, after the plan was carried out."""
    # No engine has the serial -1, so a loader without a model keeps its handle after teardowns.
    model, serial = None, -1
    if plan.engine is not None:
        model, serial = plan.engine.handle, plan.engine.serial

    def handle_of_loader(loader: Any, path: str) -> LoaderHandle:
        handle = find_handle(raw_loader(loader), plan.place)
        assert handle is not None
        loader_state(handle).engines.add(serial)
        return handle

    loaders = map_leaves(handle_of_loader, plan.dataloaders, "dataloaders")
    return Handles(model, plan.optimizers, loaders)


def log_setup(plan: Plan) -> None:
    """Log the engine and batch sizes, and warn about early schedulers. Local."""
    engine, places = plan.engine, plan.place.world
    optimizers = () if engine is None else engine.optimizers
    is_scheduled = any("initial_lr" in o.param_groups[0] for o in optimizers)
    if engine is not None and plan.builds:
        ranks = f"{plan.process.place.world_size} x {plan.process.device.type}"
        facts = engine.kind, engine.name, engine.precision.name
        logger.info("%s: backend %s, %s, %s", *facts, ranks)
    for loader in plan.new_loaders:
        handle: Any = find_handle(loader, plan.place)
        # A loader with a custom batch sampler may have no batch size.
        with suppress(LoaderError):
            size = data.effective_batch_size(handle)
            text = "effective batch size: %d x %d ranks = %d"
            logger.info(text, size // places, places, size)
        lengths = data.length_of(loader), data.length_of(handle)
        if is_scheduled and lengths[0] != lengths[1]:
            # A OneCycleLR for len(loader) * epochs steps would end early, perhaps in its warm-up.
            logger.warning(
                "accel.setup shortened a DataLoader from %s to %s batches, but a "
                "learning rate scheduler already exists. Build it after "
                "accel.setup() if it uses len(loader).",
                *lengths,
            )
            return

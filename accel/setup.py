"""``accel.setup``: plan a call on each rank, agree on the plan, then build and start the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from . import data, engines, process
from .data import LoaderHandle, LoaderOptions, LoaderPlace
from .deferred import check_deferred, materialize, weights_of
from .engines import Context, Engine, Options
from .engines.base.activations import checkpointed
from .engines.base.gradients import check_parameters
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
from .handles import Dataloaders, Handles, HiddenAttribute, Model, Optimizers, engine_behind
from .precision import Precision, convert_module, convert_optimizer
from .process import Process, current, running, use_devices
from .process.control import Waiting, agree, locked, raise_together
from .registry import hint, registry, resolve_module
from .shard import parameters_of
from .trees import map_leaves

logger = logging.getLogger("accel")

#: Loaders that are set up without a model have this number instead of an engine's serial.
WITHOUT_MODEL: Final = -1
_OTHER_DATA: Final = (
    "dataloader %d has different data on different ranks, so most of it will not be read. Build "
    "the same data on every rank, for example by accel.seed(0). If each rank has its own data, "
    "use accel.LoaderOptions(shard=False)."
)


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
    """Distribute a model, its optimizers and dataloaders, and return handles for the same loop.

    Call it with the same arguments on every rank. All ranks start from rank 0's weights and
    buffers. A second call with the same objects returns the same handles. A later call may add
    optimizers and dataloaders.

    Args:
        model: a module, its handle, or its ``torch.compile`` wrapper. None distributes dataloaders
            alone, for example to evaluate a model that is not trained.
        optimizers: an optimizer of ``model``'s parameters, or a list, tuple or dict of them.
        dataloaders: a ``DataLoader``, or a list, tuple or dict of them.
        more: nothing. Pass several dataloaders as a tuple.
        backend: the name of a backend or its options, such as ``accel.DDP(...)``. "auto" is the
            backend of the model's engine if it has one, else ``ACCEL_BACKEND``, else "ddp" at world
            size > 1, "dp" in a notebook with several accelerators, and "single" otherwise.
        precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true" or "16-true". "auto" is the
            precision of the model's engine if it has one, else ``ACCEL_PRECISION``, else "32-true".
        devices: see docs/environments.md. "auto" is ``ACCEL_DEVICES``, else all accelerators.
        loader_options: how these dataloaders are distributed. None keeps those of known loaders.

    Returns:
        ``Handles(model, optimizers, dataloaders)``, each in the form of its argument.

    Raises:
        AlreadySetUpError: the model's engine has a different backend, precision or options.
        SharedParametersError: the model shares parameters with a model that is already set up.
        RankMismatchError: the ranks have different models or arguments; raised on every rank.
        CheckpointError: the weights of a deferred model don't fit it.
        OptimizerError, LoaderError, BackendError, PrecisionError, DeviceError: wrong arguments.
    """
    process.refuse_fork()
    _refuse_more(more)
    if running() is None:
        use_devices(devices)
    plan = Plan(current(), optimizers, dataloaders, backend, precision, devices, loader_options)
    try:
        make_plan(plan, model)
    except AccelError as error:
        # The other ranks wait in agree_on_plan, so this rank reports its error there.
        plan.error = error
    if plan.error is None and not plan.changes_anything:
        return handles_of(plan)
    agreement = agree_on_plan(plan)
    if plan.module is not None:
        plan.engine = build_engine(plan, agreement.serial)
    distribute_loaders(plan, agreement)
    if plan.process.place.rank == 0:
        log_setup(plan)
    return handles_of(plan)


def _refuse_more(more: tuple[Any, ...]) -> None:
    if more:
        raise LoaderError(
            "accel.setup() takes all DataLoaders in one argument. Pass a tuple: "
            "accel.setup(model, optimizer, (train_loader, eval_loader))."
        )


# -- Plan: local, and nothing changes --------------------------------------------------------------


@dataclass(slots=True)
class Plan:
    """The arguments of one call of ``setup`` on this rank, and what they ask for."""

    process: Process
    optimizers: Any
    dataloaders: Any
    backend: Any
    precision_name: Any
    devices: Any
    loader_options: LoaderOptions | None
    #: The module, and the object that a forward calls. None for dataloaders alone.
    module: nn.Module | None = None
    entry: nn.Module | None = None
    #: The module's engine. None until it is built.
    engine: Engine | None = None
    engine_type: type[Engine] = Engine  # type: ignore[type-abstract]
    options: Any = None
    precision: Precision | None = None
    #: The place for which dataloaders are divided.
    place: LoaderPlace = LoaderPlace(0, 1, torch.device("cpu"))
    new_optimizers: list[Optimizer] = field(default_factory=list)
    #: By their numbers in the call.
    new_loaders: dict[int, DataLoader[Any]] = field(default_factory=dict)
    #: True if this call builds an engine.
    builds: bool = False
    #: Fills a deferred model from a directory of weights.
    fill: Callable[[nn.Module], None] | None = None
    error: AccelError | None = None

    @property
    def changes_anything(self) -> bool:
        return bool(self.builds or self.new_optimizers or self.new_loaders)


def make_plan(plan: Plan, model: Any) -> None:
    """Find the objects that are not set up yet, and check that they can be.

    Raises:
        AccelError: the call can't work.
    """
    if plan.loader_options is not None:
        data.check_options(plan.loader_options)
    if model is None:
        _plan_without_model(plan)
    else:
        plan.module, plan.entry = resolve_module(model)
        plan.engine = registry.engine(plan.module)
        if plan.engine is None:
            _plan_engine(plan, plan.module)
        else:
            _plan_known_engine(plan, plan.engine)
    plan.place = loader_place(plan.engine_type, plan.options, plan.process)
    map_leaves(partial(_plan_optimizer, plan), plan.optimizers, "optimizers")
    map_leaves(partial(_plan_loader, plan, itertools.count()), plan.dataloaders, "dataloaders")
    world_size = plan.process.place.world_size
    if plan.new_optimizers and world_size > 1 and not plan.engine_type.synchronizes:
        with _from_environment("ACCEL_BACKEND", plan.backend):
            raise BackendError(
                f"backend={plan.engine_type.name!r} can't train on {world_size} ranks, because "
                "each process would train a model of its own. Use a distributed backend."
            )
    if plan.builds and plan.module is not None and weights_of(plan.module) is not None:
        from .checkpoint.load import first_values  # imports everything that checkpoints need

        plan.fill = first_values(plan.module)


def _plan_without_model(plan: Plan) -> None:
    if plan.optimizers is not None:
        raise OptimizerError("accel.setup(None, optimizers) lacks the model. Pass it first.")
    if plan.dataloaders is None:
        raise AccelError("accel.setup(None) has nothing to set up. Pass a model or dataloaders=...")
    if (plan.backend, plan.precision_name) != ("auto", "auto"):
        raise AccelError("accel.setup(None, ...) takes no backend and no precision.")
    use_devices(plan.devices)


def _plan_known_engine(plan: Plan, engine: Engine) -> None:
    plan.engine_type, plan.options, plan.precision = type(engine), engine.options, engine.precision
    if plan.backend != "auto":
        _, options = engines.resolve(plan.backend)
        if options != engine.options:
            _raise_conflict(engine, f"backend {engine.options}", f"{options}")
    if plan.precision_name not in ("auto", engine.precision.name):
        _raise_conflict(engine, f"precision {engine.precision.name!r}", f"{plan.precision_name!r}")
    if plan.devices != "auto":
        use_devices(plan.devices)


def _raise_conflict(engine: Engine, current_value: str, asked: str) -> None:
    raise AlreadySetUpError(
        f"{engine.kind} is already set up with {current_value}, not {asked}. "
        "To change it, call raw = accel.teardown(model) first."
    )


def _plan_engine(plan: Plan, module: nn.Module) -> None:
    """Choose backend, options and precision of the engine that this call builds."""
    registry.sweep()  # a model that was dropped must not count as set up, or keep its memory
    registry.check_new(module)
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise AccelError(
                f"{name} is lazy and has no shape. Run one forward before accel.setup()."
            )
    check_deferred(module)
    use_devices(plan.devices)
    process = plan.process
    with _from_environment("ACCEL_PRECISION", plan.precision_name, "32-true") as name:
        plan.precision = Precision(name, process.device)
        plan.precision.check(module)
    with _from_environment("ACCEL_BACKEND", plan.backend, engines.default(process)) as backend:
        plan.engine_type, plan.options = engines.resolve(backend)
        if process.place.world_size > 1:
            engines.check_torch(plan.engine_type.name)
        plan.engine_type.check(module, plan.options, process)
        # It raises if the options don't fit the number of ranks.
        plan.engine_type.replica(plan.options, process)
    if plan.engine_type.gradients_type.reduced and process.place.world_size > 1:
        _refuse_max_norm(module)
    plan.builds = True


def _refuse_max_norm(module: nn.Module) -> None:
    embeddings = nn.Embedding | nn.EmbeddingBag
    for name, child in module.named_modules():
        if isinstance(child, embeddings) and child.max_norm is not None:
            raise BackendError(
                f"max_norm of {name or type(child).__name__} changes weights in forward, so ranks "
                "would diverge. Set max_norm=None, and renormalize after optimizer.step()."
            )


@contextlib.contextmanager
def _from_environment(variable: str, argument: Any, default: Any = None) -> Iterator[Any]:
    """Give the argument, or the variable if it is "auto", or the default. Errors name it."""
    value = os.environ.get(variable) if argument == "auto" else None
    if value in (None, "", "auto"):
        yield default if argument == "auto" else argument
        return
    try:
        yield value
    except AccelError as error:
        raise type(error)(f"{variable}={value!r}: {error}") from None


def _plan_optimizer(plan: Plan, optimizer: Any, path: str) -> None:
    # Every step calls these hooks. An optimizer that doesn't call torch's constructor has none.
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if not isinstance(optimizer, Optimizer) or not isinstance(hooks, OrderedDict):
        found = f"{path} is {described(optimizer)}"
        raise OptimizerError(f"{found}; expected a torch.optim.Optimizer. {hint(optimizer)}")
    kind = type(optimizer).__name__
    model_kind = type(plan.module).__name__ if plan.engine is None else plan.engine.kind
    handle = registry.optimizer_handle(optimizer)
    if handle is not None:
        engine = engine_behind(handle)
        if engine is not plan.engine or engine is None:
            owner = "a model that was torn down" if engine is None else f"the model {engine.kind}"
            raise OptimizerError(f"{path} ({kind}) belongs to {owner}. Pass it with its own model.")
        return
    if any(optimizer is other for other in plan.new_optimizers):
        return
    assert plan.module is not None
    known = {id(p) for p in plan.module.parameters()} if plan.engine is None else plan.engine.known
    parameters = parameters_of(optimizer)
    if not any(id(p) in known for p in parameters):
        raise OptimizerError(
            f"{path} ({kind}) holds no parameter of this {model_kind}. Build it from the model's parameters()."
        )
    other = registry.other_owner(parameters, plan.engine)
    if other is not None:
        raise OptimizerError(
            f"{path} ({kind}) holds parameters of two models, {model_kind} and {other.kind}. "
            "Set up one model that contains both: accel.setup(nn.ModuleDict({...}), optimizer)."
        )
    if plan.precision is not None:
        plan.precision.check_optimizer(optimizer, path)
    if plan.process.place.world_size > 1:
        check_parameters(optimizer, known, plan.module, path)
    plan.new_optimizers.append(optimizer)


def _plan_loader(plan: Plan, numbers: Iterator[int], loader: Any, path: str) -> None:
    number = next(numbers)
    if not isinstance(loader, LoaderHandle) and not isinstance(loader, DataLoader):
        found = f"{path} is {described(loader)}"
        raise LoaderError(f"{found}; expected a torch.utils.data.DataLoader. {hint(loader)}")
    handle = loader_handle(loader, plan.place)
    if handle is not None:
        options = handle._accel.options
        if plan.loader_options not in (options, None):
            asked = plan.loader_options
            raise AlreadySetUpError(f"{path} is already set up with {options}, not {asked}.")
        return
    if isinstance(loader, LoaderHandle):
        place = loader._accel.place
        raise LoaderError(
            f"{path} was divided for rank {place.rank} of {place.world} on {place.device} by an "
            f"earlier setup, and this one needs rank {plan.place.rank} of {plan.place.world} on "
            f"{plan.place.device}. Pass the original DataLoader."
        )
    if not any(loader is other for other in plan.new_loaders.values()):
        data.check(loader, plan.loader_options or LoaderOptions(), plan.place.world)
        plan.new_loaders[number] = loader


# -- Agree: every rank has the same plan, or all raise ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposal:
    """A rank's message to the others about its plan."""

    digest: str
    error: str
    #: The serial that this rank would give the new engine.
    serial: int
    loss_scale: tuple[float, int]
    #: The serials of the engines with 16-mixed that live on this rank.
    scaled_engines: frozenset[int]
    #: By the number of a new loader.
    loader_seeds: dict[int, int]
    first_samples: dict[int, str]


def agree_on_plan(plan: Plan) -> Proposal:
    """Compare the ranks' plans, and return rank 0's proposal. Collective.

    Raises:
        AccelError: this rank's plan failed.
        RankMismatchError: a different rank's plan failed, or the plans differ.
    """
    facts = describe(plan) if plan.error is None else {}
    proposals: list[Proposal] = agree("accel.setup", _proposal(plan, facts))
    serial = max(proposal.serial for proposal in proposals)
    registry.next_serial = serial + plan.builds
    try:
        raise_together("accel.setup", plan.error, [proposal.error for proposal in proposals])
    finally:
        plan.error = None  # its traceback holds this frame
    if len({proposal.digest for proposal in proposals}) > 1:
        facts_by_rank = agree("accel.setup (comparing the models)", facts)
        # Parameters come first, because other differences often follow from them.
        difference = first_difference(facts_by_rank, _is_no_tensor)
        difference = difference or "their parameters come in a different order"
        raise RankMismatchError(
            f"accel.setup got different arguments on different ranks: {difference}."
        )
    for number in plan.new_loaders:
        samples = {proposal.first_samples[number] for proposal in proposals}
        model = serial if plan.builds else plan.engine and plan.engine.serial
        if len(samples) > 1 and plan.process.place.rank == 0 and registry.first(number, model):
            logger.warning(_OTHER_DATA, number)
    scaled_by_rank = [proposal.scaled_engines for proposal in proposals]
    registry.agree_on_scaling(scaled_by_rank, proposals[0].loss_scale)
    return dataclasses.replace(proposals[0], serial=serial)


def _is_no_tensor(name: str) -> bool:
    return not name.startswith(("parameter", "buffer"))


def _proposal(plan: Plan, facts: dict[str, str]) -> Proposal:
    options = plan.loader_options or LoaderOptions()
    seeds, samples = {}, {}
    for number, loader in plan.new_loaders.items() if plan.error is None else ():
        seeds[number] = data.loader_seed(loader, options.seed, number)
        compared = options.shard and plan.process.place.world_size > 1
        samples[number] = data.first_sample(loader.dataset) if compared else ""
    return Proposal(
        digest=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        error=text_of_error(plan.error),
        serial=registry.next_serial,
        loss_scale=registry.loss_scale.state(),
        scaled_engines=registry.scaled_engines(),
        loader_seeds=seeds,
        first_samples=samples,
    )


def describe(plan: Plan) -> dict[str, str]:
    """Return everything that must be equal on all ranks, as text by name."""
    facts = {
        "backend": plan.engine_type.name if plan.module is not None else "absent",
        "precision": plan.precision.name if plan.precision is not None else "absent",
        "values from a directory": str(plan.fill is not None),
        "set up before": str(plan.engine is not None),
        "number of new optimizers": str(len(plan.new_optimizers)),
        "numbers of new dataloaders": str(list(plan.new_loaders)),
    }
    if plan.module is not None:
        for option in dataclasses.fields(plan.options):
            value = getattr(plan.options, option.name)
            facts[f"{option.name} of accel.{type(plan.options).__name__}"] = comparable_text(value)
        for name, parameter in plan.module.named_parameters():
            trainable = "trainable" if parameter.requires_grad else "frozen"
            facts[f"parameter {name}"] = f"{tuple(parameter.shape)} {parameter.dtype} {trainable}"
        for name, buffer in plan.module.named_buffers():
            facts[f"buffer {name}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
        names = {id(parameter): name for name, parameter in plan.module.named_parameters()}
        for number, optimizer in enumerate(plan.new_optimizers):
            facts |= _describe_optimizer(optimizer, f"optimizer {number}", names)
    for number, loader in plan.new_loaders.items():
        for key, value in data.describe(loader, plan.loader_options).items():
            facts[f"{key} of dataloader {number}"] = f"{value}"
    return facts


def _describe_optimizer(optimizer: Optimizer, label: str, names: dict[int, str]) -> dict[str, str]:
    facts = {label: type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                facts[f"{key} of group {index} of {label}"] = comparable_text(value)
        for position, parameter in enumerate(group["params"]):
            facts[f"params[{position}] of group {index} of {label}"] = names.get(id(parameter), "?")
    # In the order of the groups, because the order of optimizer.state depends on the gradients.
    for parameter in parameters_of(optimizer):
        state, name = optimizer.state.get(parameter, {}), names.get(id(parameter), "?")
        for key in sorted(state, key=str):
            facts[f"{key} of the state of {name} in {label}"] = comparable_text(state[key])
    return facts


# -- Build: on every rank, or on none --------------------------------------------------------------


def build_engine(plan: Plan, serial: int) -> Engine:
    """Build the engine or add the optimizers to it, on all ranks or on none. Collective."""
    # In torch.inference_mode an engine would create tensors that no backward can use.
    with contextlib.ExitStack() as undo, torch.inference_mode(False):
        with _failing_together("accel.setup"):
            engine = plan.engine or _new_engine(plan, serial, undo)
            for optimizer in plan.new_optimizers:
                convert_optimizer(optimizer, undo)
                engine.attach(optimizer)
                if not plan.builds:
                    undo.callback(engine.detach, optimizer)
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
    return engine


@contextlib.contextmanager
def _failing_together(what: str) -> Iterator[None]:
    """Raise on every rank if the body raises on one. Collective at the end of the body."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    try:
        raise_together(what, error, agree(f"{what} (building)", text_of_error(error)))
    finally:
        del error  # its traceback holds this frame


def _new_engine(plan: Plan, serial: int, undo: contextlib.ExitStack) -> Engine:
    """Convert the module and wrap it in an engine. Local."""
    module, precision = plan.module, plan.precision
    assert module is not None
    assert plan.entry is not None
    assert precision is not None
    reads = plan.fill is not None
    if not reads:
        _materialize(plan, module, undo)
    dtypes = convert_module(module, plan.process.device, precision.storage, undo)
    if reads:  # only now, so that the memory has its final dtypes
        _materialize(plan, module, undo)
    changes = checkpointed(module, plan.options)
    undo.push(changes)
    context = Context(plan.process, precision, registry.loss_scale, plan.options, serial, reads)
    engine = plan.engine_type(module, plan.entry, context)
    undo.callback(engine.teardown)
    engine.dtypes, engine.undo = dtypes, changes
    engine.wrap()
    return engine


def _materialize(plan: Plan, module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Give memory to deferred parameters, unless the backend does that block by block."""
    alone, holdings_type = plan.process.place.world_size == 1, plan.engine_type.holdings_type
    if alone or not holdings_type.materializes:
        reads = plan.fill is not None and not alone
        from_host = reads and holdings_type.divides_from_host(plan.options)
        materialize(module, torch.device("cpu") if from_host else plan.process.device, undo)


# -- Loaders and handles ---------------------------------------------------------------------------


def loader_place(engine_type: type[Engine], options: Any, process: Process) -> LoaderPlace:
    """Return the data-parallel place for which the loaders of such an engine are divided."""
    rank, size = engine_type.replica(options, process)
    return LoaderPlace(rank, size, process.device, process)


def place_of(engine: Engine) -> LoaderPlace:
    """Return the data-parallel place for which an engine's loaders are divided."""
    return loader_place(type(engine), engine.options, engine.process)


def loader_handle(loader: Any, place: LoaderPlace) -> LoaderHandle | None:
    """Return the handle of a loader (or of a handle) for a place, or None if there is none."""
    if type(loader) is LoaderHandle:
        return loader if loader._accel.place == place else None
    handles: dict[LoaderPlace, LoaderHandle] = HiddenAttribute.get(loader) or {}
    handle = handles.get(place)
    if handle is not None and handle._accel.engines and handle._accel.engines <= registry.ended:
        return None  # after teardown a loader starts from its first epoch again
    return handle


def distribute_loaders(plan: Plan, agreement: Proposal) -> None:
    """Create the handles of new loaders. Local."""
    options = plan.loader_options or LoaderOptions()
    in_place = plan.process.place.world_size == 1 and options.seed is None
    for number, loader in plan.new_loaders.items():
        handle = data.distribute(
            loader,
            options,
            plan.place,
            seed=agreement.loader_seeds[number],
            in_place=in_place,
        )
        handles = HiddenAttribute.get(loader) or {}
        living = {place: other for place, other in handles.items() if place.process is plan.process}
        HiddenAttribute.put(loader, {**living, plan.place: handle})


def handles_of(plan: Plan) -> Handles[Any, Any, Any]:
    """Return the handles of everything in the plan, which is set up by now."""
    serial = WITHOUT_MODEL if plan.engine is None else plan.engine.serial

    def handle_of_loader(loader: Any, path: str) -> LoaderHandle:
        handle = loader_handle(loader, plan.place)
        assert handle is not None
        handle._accel.engines.add(serial)
        return handle

    return Handles(
        None if plan.engine is None else plan.engine.handle,
        map_leaves(lambda o, path: registry.optimizer_handle(o), plan.optimizers, "optimizers"),
        map_leaves(handle_of_loader, plan.dataloaders, "dataloaders"),
    )


def log_setup(plan: Plan) -> None:
    """Log the engine and batch sizes, and warn of a scheduler built before a loader. Local."""
    world, engine = plan.process.place.world_size, plan.engine
    if plan.builds and engine is not None:
        device, precision = plan.process.device.type, engine.precision.name
        facts = (engine.kind, engine.name, precision, world, device)
        logger.info("%s: backend %s, %s, %d x %s", *facts)
    optimizers: list[Optimizer] = []
    map_leaves(lambda optimizer, path: optimizers.append(optimizer), plan.optimizers, "optimizers")
    scheduled = [o for o in optimizers if any("initial_lr" in group for group in o.param_groups)]
    places = plan.place.world
    for loader in plan.new_loaders.values():
        handle: Any = loader_handle(loader, plan.place)
        with contextlib.suppress(LoaderError):  # the loader doesn't tell its batch size
            size = data.effective_batch_size(handle)
            unit = "ranks" if places == world else "data-parallel places"
            logger.info("effective batch size: %d x %d %s = %d", size // places, places, unit, size)
        before, after = data.length_of(loader), data.length_of(handle)
        if scheduled and before != after:
            logger.warning(
                "accel.setup shortened a DataLoader from %s to %s batches, and %s already has a "
                "learning rate scheduler. If you computed its number of steps from len(loader), "
                "build it after accel.setup().",
                before,
                after,
                type(scheduled[0]).__name__,
            )
            scheduled = []

"""What a call of ``setup`` will do, decided locally; starts the process where it does not run, and changes nothing else."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from . import data, engines
from .data import LoaderHandle, LoaderOptions, LoaderPlace
from .deferred import check_deferred
from .engines import Engine
from .engines.base.gradients import check_parameters
from .errors import AccelError, AlreadySetUpError, BackendError, LoaderError, OptimizerError, described
from .handles import Handles, HiddenAttribute, OptimizerHandle, engine_behind, raw
from .precision import Precision
from .process import Process, current, running, use_devices
from .registry import registry, resolve_module
from .shard import parameters_of
from .trees import map_leaves

Wanted = tuple[Any, Any, Any]
#: In the place of an engine's serial: of loaders that were set up without a model.
MODELLESS: Final = -1


@dataclass(slots=True)
class Plan:
    """What one rank wants, or why it cannot have it."""

    wanted: Wanted
    loader_options: LoaderOptions | None
    #: There are dataloaders alone.
    modelless: bool = False
    module: nn.Module = field(default_factory=nn.Module)
    entry: nn.Module = field(default_factory=nn.Module)
    engine: Engine | None = None
    #: Of the engine that will be made; the ranks agree on it.
    serial: int = 0
    engine_type: type[Engine] = Engine  # type: ignore[type-abstract]
    options: Any = None
    precision: Precision | None = None
    optimizers: Any = None
    dataloaders: Any = None
    new_optimizers: list[Optimizer] = field(default_factory=list)
    new_loaders: list[DataLoader[Any]] = field(default_factory=list)
    #: Reads first values into the handle, once there is one.
    fill: Callable[[nn.Module], None] | None = None
    error: AccelError | None = None


# -- what is there already --------------------------------------------------------------------------------------------


def known_handles(
    model: Any, optimizers: Any, dataloaders: Any, wanted: Wanted, loaders: LoaderOptions | None
) -> Handles[Any, Any, Any] | None:
    """The handles of a repeated call, at the price of a few look-ups; None where there is anything to do or to refuse."""
    try:
        module, _ = resolve_module(model)
        engine = registry.engine(module)
        if engine is None:
            return None
        if wanted != ("auto", "auto", "auto"):
            _check_live(engine, wanted)
        return Handles(
            engine.handle,
            map_leaves(lambda o, path: known_optimizer(o, engine), optimizers, "optimizers"),
            map_leaves(lambda d, path: known_loader(d, loaders, place_of(engine)), dataloaders, "dataloaders"),
        )
    except (AccelError, LookupError):
        return None


def known_optimizer(optimizer: Any, engine: Engine) -> OptimizerHandle:
    """The handle of an optimizer of ``engine``; LookupError without one."""
    handle = registry.optimizer_handle(optimizer)
    if handle is None or engine_behind(handle) is not engine:
        raise LookupError
    return handle


def place_of(engine: Engine) -> LoaderPlace:
    """For whom an engine's loaders are divided."""
    return place_for(type(engine), engine.options, engine.process)


def place_for(engine_type: type[Engine], options: Any, process: Process) -> LoaderPlace:
    """For whom the loaders of such an engine are divided."""
    return LoaderPlace(*engine_type.replica(options, process), process.device, process)


def known_loader(loader: Any, options: LoaderOptions | None, place: LoaderPlace) -> LoaderHandle:
    """The handle of a dataloader; LookupError without one, or where it was made with other options or divided otherwise."""
    handle, made_with = _made(loader, place)
    if handle is None or options not in (made_with, None):
        raise LookupError
    return handle


def _made(loader: Any, place: LoaderPlace) -> tuple[LoaderHandle | None, LoaderOptions | None]:
    """The handle for a place of a loader, or of a handle's, and the options that were asked for; None twice without one."""
    handle, made_with = (HiddenAttribute.get(data.raw_loader(loader)) or {}).get(place, (None, None))
    if type(loader) is LoaderHandle and loader is not handle:
        return (loader, loader._accel.options) if loader._accel.place == place else (None, None)
    return handle, made_with


def options_of(loader: Any, asked: LoaderOptions | None, place: LoaderPlace) -> LoaderOptions:
    """How a loader of a setup is distributed: as asked for, or as it is already."""
    return asked or _made(loader, place)[1] or LoaderOptions()


def _check_live(engine: Engine, wanted: Wanted) -> None:
    backend, precision, devices = wanted
    asked = engines.resolve(backend)[1] if backend != "auto" else engine.options
    if asked != engine.options:
        _conflict(engine, f"backend {asked}", f"{engine.options}")
    if precision not in ("auto", engine.precision.name):
        _conflict(engine, f"precision {precision!r}", f"{engine.precision.name!r}")
    use_devices(devices)


def _conflict(engine: Engine, asked: str, live: str) -> None:
    raise AlreadySetUpError(
        f"this {engine.kind} is already set up with {live}; asked for {asked}: "
        "call raw = accel.teardown(model) first, then accel.setup(raw, ...)"
    )


# -- the local part ---------------------------------------------------------------------------------------------------


def make_plan(
    model: Any, optimizers: Any, dataloaders: Any, wanted: Wanted, loader_options: LoaderOptions | None
) -> Plan:
    """What this rank wants. An error is kept, so that all ranks learn of it."""
    if running() is None:
        use_devices(wanted[2])
    process = current()
    plan = Plan(wanted, loader_options, optimizers=optimizers, dataloaders=dataloaders)
    try:
        data.check_options(loader_options or LoaderOptions())
        if model is None:
            _plan_modelless(plan)
        else:
            _plan_model(plan, model, process)
        map_leaves(lambda o, path: _plan_optimizer(plan, o, path), optimizers, "optimizers")
        map_leaves(lambda d, path: _plan_loader(plan, d, path, process), dataloaders, "dataloaders")
        world = process.place.world_size
        if plan.new_optimizers and world > 1 and not plan.engine_type.synchronizes:
            with _from_environment("ACCEL_BACKEND", wanted[0]):
                raise BackendError(
                    f"backend {plan.engine_type.name!r} with an optimizer at world size {world}: each process would train a "
                    "model of its own; choose a backend that trains one model on all ranks"
                )
    except AccelError as error:
        plan.error = error
    return plan


def _plan_modelless(plan: Plan) -> None:
    if plan.optimizers is not None:
        raise OptimizerError("accel.setup(None, optimizers): optimizers need their model; give it in the place of None")
    if plan.dataloaders is None:
        raise AccelError("accel.setup(None) has nothing to set up: give it the model, or dataloaders=...")
    if plan.wanted[:2] != ("auto", "auto"):
        raise AccelError("accel.setup(None, dataloaders=...): backend and precision are a model's; leave them out")
    use_devices(plan.wanted[2])
    plan.modelless = True


def _plan_model(plan: Plan, model: Any, process: Process) -> None:
    plan.module, plan.entry = resolve_module(model)
    engine = plan.engine = registry.engine(plan.module)
    registry.sweep(engine)  # what follows asks which other models there are
    if engine is None:
        _plan_engine(plan, process)
        return
    _check_live(engine, plan.wanted)
    plan.engine_type, plan.options, plan.precision = type(engine), engine.options, engine.precision


def _plan_engine(plan: Plan, process: Process) -> None:
    backend, precision, devices = plan.wanted
    registry.check_new(plan.module)
    lazy = [n for n, p in plan.module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise AccelError(
            f"lazy parameters have no shape yet: {', '.join(lazy[:5])}; run one forward before accel.setup"
        )
    check_deferred(plan.module)
    use_devices(devices)
    with _from_environment("ACCEL_BACKEND", backend, engines.default(process)) as asked:
        plan.engine_type, plan.options = engines.resolve(asked)
    with _from_environment("ACCEL_PRECISION", precision, "32-true") as asked:
        plan.precision = Precision(asked, process.device)
        plan.precision.check(plan.module)
    if process.place.world_size > 1:
        engines.check_torch(plan.engine_type.name)
    with _from_environment("ACCEL_BACKEND", backend):
        plan.engine_type.check(plan.module, plan.options, process)
        plan.engine_type.replica(plan.options, process)  # whether the ranks divide so
    if plan.engine_type.gradients_type.reduced and process.place.world_size > 1:
        _refuse_max_norm(plan.module)


def _refuse_max_norm(module: nn.Module) -> None:
    """Each rank's forward would shrink other rows, those of its own batch, and the ranks would drift apart."""
    kinds = nn.Embedding | nn.EmbeddingBag
    names = [n or "it" for n, m in module.named_modules() if isinstance(m, kinds) and m.max_norm is not None]
    if names:
        raise BackendError(
            f"max_norm of {', '.join(names[:5])} changes weights in forward, on each rank those of its own batch: set it to "
            "None, and shrink the rows after each step on every rank (with torch.no_grad(): "
            "weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1)))"
        )


@contextlib.contextmanager
def _from_environment(variable: str, asked: Any, default: Any = None) -> Iterator[Any]:
    """Context: the call's value; where it says nothing, the environment's, whose errors name the variable; else the default."""
    value = os.environ.get(variable) if asked == "auto" else None
    if value in (None, "", "auto"):
        yield default if asked == "auto" else asked
        return
    try:
        yield value
    except AccelError as error:
        raise type(error)(f"{variable}={value!r}: {error}") from None


def _plan_optimizer(plan: Plan, optimizer: Any, path: str) -> None:
    if not (isinstance(optimizer, Optimizer) and isinstance(getattr(optimizer, _HOOKS, None), OrderedDict)):
        raise OptimizerError(
            f"{path} is {described(optimizer)}; expected a torch.optim.Optimizer: {_instead_of_optimizer(optimizer)}"
        )
    if (handle := registry.optimizer_handle(optimizer)) is not None:
        _check_known(plan, handle, path)
        return
    names = plan.engine.known if plan.engine is not None else {id(p) for p in plan.module.parameters()}
    held = parameters_of(optimizer)
    if not any(id(p) in names for p in held):
        shapes = ", ".join(str(tuple(p.shape)) for p in held[:3]) + (", ..." if len(held) > 3 else "")
        found = f"its {len(held)} parameters ({shapes}) are another model's" if held else "its groups are empty"
        kind = type(plan.module).__name__ if plan.engine is None else plan.engine.kind
        raise OptimizerError(
            f"{path} ({type(optimizer).__name__}) holds no parameter of this {kind}: {found}; build it from this model's "
            "parameters()"
        )
    for engine in registry.engines:
        if engine is not plan.engine and any(id(p) in engine.known for p in held):
            raise OptimizerError(
                f"{path} ({type(optimizer).__name__}) holds parameters of two models, {type(plan.module).__name__} and "
                f"{engine.kind}. Set up one model that contains both: accel.setup(nn.ModuleDict({{...}}), optimizer)."
            )
    if plan.precision is not None:
        plan.precision.check_optimizer(optimizer, path)
    if current().place.world_size > 1:
        check_parameters(optimizer, names, plan.module, path)
    if not any(optimizer is o for o in plan.new_optimizers):
        plan.new_optimizers.append(optimizer)


def _check_known(plan: Plan, handle: OptimizerHandle, path: str) -> None:
    engine, kind = engine_behind(handle), type(raw(handle)).__name__
    if engine is not plan.engine or engine is None:
        owner = "a torn-down engine" if engine is None else f"the engine of a {engine.kind}"
        raise OptimizerError(f"{path} ({kind}) belongs to {owner}, not to this model")


def _plan_loader(plan: Plan, loader: Any, path: str, process: Process) -> None:
    place = place_for(plan.engine_type, plan.options, process)
    if type(loader) is LoaderHandle:
        if loader._accel.place != place:
            who = "accel.setup(None, ...)" if plan.modelless else f"backend {plan.engine_type.name!r}"
            raise LoaderError(
                f"{path} is a handle that gives the part of rank {loader._accel.place.rank} of {loader._accel.place.world}, on "
                f"{loader._accel.place.device}, of an earlier setup; {who} needs that of rank "
                f"{place.rank} of {place.world}, on {place.device}: give accel.setup the raw DataLoader"
            )
    elif not isinstance(loader, DataLoader):
        raise LoaderError(
            f"{path} is {described(loader)}; expected a torch.utils.data.DataLoader: {_instead_of_loader(loader)}"
        )
    handle, made_with = _made(loader, place)
    if handle is not None or type(loader) is LoaderHandle:
        if plan.loader_options not in (made_with, None):
            raise AlreadySetUpError(f"{path} is already set up with {made_with}; asked for {plan.loader_options}")
        return
    data.check(loader, plan.loader_options or LoaderOptions(), place.world)
    plan.new_loaders.append(loader)


_ORDER: Final = "the order is accel.setup(model, optimizers, dataloaders)"


#: What every step of an optimizer calls, so that its gradients are final before it.
_HOOKS: Final = "_optimizer_step_pre_hooks"


def _instead_of_optimizer(other: object) -> str:
    if isinstance(other, Optimizer):
        return "give the one that this wraps, or call super().__init__(): without that of torch its steps call no hooks"
    if isinstance(other, type) and issubclass(other, Optimizer):
        return f"make one, {other.__name__}(model.parameters(), ...)"
    if isinstance(other, functools.partial):
        return "call it, partial(model.parameters())"
    if isinstance(getattr(other, "optimizer", None), Optimizer):
        return (
            f"give the optimizer that this {type(other).__name__} schedules; the scheduler stays as it is in the loop"
        )
    if isinstance(other, Iterator | Tensor):
        return "give what steps them, as torch.optim.AdamW(model.parameters())"
    loss = "a loss stays as it is in the loop, and each model has a call of accel.setup"
    return loss if isinstance(other, nn.Module) else _ORDER


def _instead_of_loader(other: object) -> str:
    if isinstance(other, type) and issubclass(other, DataLoader):
        return "make one, DataLoader(dataset, batch_size=...)"
    if isinstance(getattr(other, "optimizer", None), Optimizer):
        return "a scheduler stays as it is in the loop"
    if isinstance(other, Dataset):
        return "wrap the dataset, DataLoader(dataset, batch_size=...)"
    if isinstance(other, Iterable) and not isinstance(other, nn.Module | Optimizer):
        return (
            "give the DataLoader itself, not what iterates over it; batches of another kind stay as they are, and accel.rank() "
            "tells whose they are"
        )
    return _ORDER

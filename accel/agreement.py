"""What all ranks do together in ``setup``: agree on the plan, build, start from rank 0's weights; and in ``teardown()``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
from datetime import timedelta
from typing import Any

import torch

from . import data, planning
from .data import LoaderHandle, LoaderOptions
from .deferred import materialize
from .engines import Context, Engine
from .errors import AccelError, LoaderError, RankMismatchError
from .handles import Handles, Slot
from .planning import Plan, home_for, home_of, known_loader, known_optimizer, map_leaves, options_of
from .precision import convert_module, convert_optimizer
from .process import Process, current, ended, running
from .process.control import Waiting, agree
from .registry import registry

logger = logging.getLogger("accel")


def describe(plan: Plan) -> dict[str, str]:
    """What must be equal on all ranks, as text by name."""
    facts = {
        "backend": f"{plan.options}",
        "precision": plan.precision.name if plan.precision else "",
        "values from a directory": str(plan.fill is not None),
        "set up before": str(plan.engine is not None),
        "scale_lr": str(plan.scale_lr),
        "number of new optimizers": str(len(plan.new_optimizers)),
        "number of new dataloaders": str(len(plan.new_loaders)),
    }
    for name, p in plan.module.named_parameters():
        facts[f"parameter {name}"] = f"{tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
    for name, b in plan.module.named_buffers():
        facts[f"buffer {name}"] = f"{tuple(b.shape)} {b.dtype}"
    names = {id(p): n for n, p in plan.module.named_parameters()}
    for i, optimizer in enumerate(plan.new_optimizers):
        facts[f"optimizer {i}"] = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            values = {k: _plain(v) for k, v in group.items() if k != "params"}
            facts[f"optimizer {i} group {g}"] = f"{[names.get(id(p), '?') for p in group['params']]}, {values}"
        # In the groups' order: that in which state came may differ, where each rank stepped some of the parameters.
        for p in (p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state):
            entries = sorted(optimizer.state[p].items(), key=lambda entry: str(entry[0]))
            facts[f"optimizer {i} state of {names.get(id(p), '?')}"] = str({key: _plain(v) for key, v in entries})
    for i, loader in enumerate(plan.new_loaders):
        facts[f"dataloader {i}"] = data.describe(loader, plan.loader_options)
    return facts


def _plain(value: Any) -> str:
    """A value as text that is the same on every rank: tensors by what they hold, objects by their class."""
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.detach().double().sum().item()}"
    if isinstance(value, (list, tuple)):
        return str([_plain(v) for v in value])
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _agree_on(plan: Plan) -> list[int]:
    """All ranks want the same, or all raise. Returns the seeds of rank 0's dataloaders; settles the serial and the loss scale."""
    facts = describe(plan) if plan.error is None else {}
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    seeds = _seeds(plan) if plan.error is None else []
    values = agree("accel.setup", (digest, _text(plan.error), seeds, registry.next_serial, registry.loss_scale.state()))
    plan.serial = max(serial for *_, serial, _ in values)
    registry.next_serial = plan.serial + (plan.engine is None)
    _raise_together("accel.setup", plan.error, [error for _, error, *_ in values])
    if any(other != digest for other, *_ in values):
        everyone = agree("accel.setup (comparing the models)", facts)
        raise RankMismatchError(f"accel.setup: the ranks differ: {_difference(everyone)}")
    _, _, agreed, _, scale = values[0]
    if plan.precision is not None and plan.precision.scaled:
        registry.loss_scale.restore(*scale)
    return list(agreed)


def _seeds(plan: Plan) -> list[int]:
    """A seed for each dataloader, which nothing decides but the call and the program's seed."""
    home = home_for(plan.engine_type, current())
    loaders: list[Any] = []
    map_leaves(plan.dataloaders, lambda loader, path: loaders.append(loader), "dataloaders")
    asked = [options_of(loader, plan.loader_options, home).seed for loader in loaders]
    raw = map(data.raw_loader, loaders)
    return [data.loader_seed(loader, seed, i) for i, (loader, seed) in enumerate(zip(raw, asked, strict=True))]


def _text(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _raise_together(what: str, own: BaseException | None, errors: list[str]) -> None:
    if own is not None:
        raise own
    for rank, text in enumerate(errors):
        if text:
            raise RankMismatchError(f"{what} failed on rank {rank}, so on every rank: {text}")


def _difference(everyone: list[dict[str, str]]) -> str:
    keys = dict.fromkeys(k for facts in everyone for k in facts)
    # The model first: what else differs often follows from it.
    for key in sorted(keys, key=lambda k: not k.startswith(("parameter", "buffer"))):
        values = [facts.get(key, "absent") for facts in everyone]
        if len(set(values)) > 1:
            ranks = {v: [r for r, other in enumerate(values) if other == v] for v in dict.fromkeys(values)}
            return f"{key} is " + "; ".join(f"{v} on ranks {r}" for v, r in ranks.items())
    return "in the order of their parameters"


def execute(plan: Plan) -> Handles:
    """Agree, build, agree that all have built, then start from rank 0's weights."""
    seeds = enumerate(_agree_on(plan))
    process = current()
    error: Exception | None = None
    # A setup inside torch.inference_mode must not make tensors that no backward can use.
    with contextlib.ExitStack() as undo, torch.inference_mode(False):
        try:
            engine = _build(plan, process, undo)
        except Exception as caught:
            error = caught
        _raise_together("accel.setup", error, agree("accel.setup (building)", _text(error)))
        if plan.engine is None or plan.new_optimizers:
            with Waiting(process, "accel.setup"):
                engine.start(plan.new_optimizers)
        if plan.engine is None:
            registry.add(engine)
            if plan.fill is not None:
                undo.callback(registry.remove, engine)
                plan.fill(engine.handle)
        undo.pop_all()
    handles = Handles(
        engine.handle,
        map_leaves(plan.optimizers, lambda o, path: known_optimizer(o, engine), "optimizers"),
        map_leaves(
            plan.dataloaders,
            lambda d, path: _loader_handle(d, plan.loader_options, engine, *next(seeds)),
            "dataloaders",
        ),
    )
    if process.place.rank == 0:
        _tell(plan, engine, process)
    return handles


def _tell(plan: Plan, engine: Engine, process: Process) -> None:
    """Once, on one rank: what was set up."""
    world = process.place.world_size
    if plan.engine is None:
        kind, precision = type(engine.module).__name__, engine.precision.name
        logger.info("%s: backend %s, %s, %d x %s", kind, engine.name, precision, world, process.device.type)
    for loader in plan.new_loaders:
        with contextlib.suppress(LoaderError):
            size = data.effective_batch_size(loader)
            logger.info("effective batch size: %d x %d ranks = %d", size // world, world, size)


def _build(plan: Plan, process: Process, undo: contextlib.ExitStack) -> Engine:
    assert plan.precision is not None
    engine = plan.engine
    if engine is None:
        if process.place.world_size == 1 or not plan.engine_type.materializes:
            materialize(plan.module, process.device, undo)
        dtypes = convert_module(plan.module, process.device, plan.precision.storage, undo)
        context = Context(process, plan.precision, registry.loss_scale, plan.options, plan.serial)
        engine = plan.engine_type(plan.module, plan.entry, context)
        undo.callback(engine.teardown)
        engine.dtypes = dtypes
        engine.wrap()
    for optimizer in plan.new_optimizers:
        convert_optimizer(optimizer, undo)
        if plan.scale_lr:
            planning.scale(optimizer, engine.replica(engine.process)[1], undo)
        engine.attach(optimizer)
        if plan.engine is not None:
            undo.callback(engine.detach, optimizer)
    return engine


def _loader_handle(loader: Any, options: LoaderOptions | None, engine: Engine, place: int, seed: int) -> LoaderHandle:
    home, process = home_of(engine), engine.process
    in_place = process.place.world_size == 1
    try:
        handle = known_loader(loader, options, home)
    except LookupError:
        options = options or LoaderOptions()
        handle = data.distribute(
            loader,
            options,
            rank=home.rank,
            world_size=home.world,
            device=home.device,
            seed=seed,
            in_place=in_place and options.seed is None,
            process=process,
            name=f"{process.rounds} {place}",
        )
        living = {key: value for key, value in (Slot.get(loader) or {}).items() if key.process is process}
        Slot.put(loader, {**living, home: (handle, options)})
    state = handle._accel
    if loader is state.raw and state.engines and state.engines <= registry.ended:
        # Its engines were torn down: this is a setup like the first.
        state.begin_anew(seed, in_place and state.options.seed is None)
        state.engines.clear()
    state.engines.add(engine.serial)
    return handle


# -- the end ----------------------------------------------------------------------------------------------------------


def end_all() -> None:
    """End every engine: those that live on all ranks together, in the order of their serials, any other one by itself.

    What lives on a rank is up to its garbage collector, and to what its program still holds. Collective where an engine
    had parts of a model on several ranks, since the last such end.

    Raises:
        AccelError: the engines do not end well; on every rank where it is collective.
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
    if together and running() is not None:
        _raise_together("accel.teardown", problem, agree("accel.teardown (the end)", _text(problem)))
    if problem is not None:
        raise problem


def _alone(engines: list[Engine]) -> tuple[dict[int, str], Exception | None]:
    """By serial, why engines cannot end together with the other ranks; and what went wrong in asking them. Collective."""
    # A rank that comes here with an error must not wait for long for ranks that wait for it elsewhere.
    limit = None if sys.exc_info()[0] is None else min(current().timeout, timedelta(seconds=60))
    try:
        everyone = agree("accel.teardown", [engine.serial for engine in engines], timeout=limit)
    except AccelError as error:
        return {engine.serial: str(error) for engine in engines}, error
    gone = {e.serial: [str(rank) for rank, theirs in enumerate(everyone) if e.serial not in theirs] for e in engines}
    return {serial: f"rank {', '.join(ranks)} let go of the model" for serial, ranks in gone.items() if ranks}, None

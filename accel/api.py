"""The verbs that a loop calls."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import process
from .agreement import end_all, execute
from .data import LoaderOptions
from .deferred import weights_of
from .engines import Engine
from .errors import AccelError, PrecisionError
from .handles import Handles, ModelHandle, OptimizerHandle
from .planning import known_handles, make_plan
from .process.turns import in_turn
from .registry import registry, resolve_module


@in_turn
def setup(
    model: nn.Module,
    optimizers: Any = None,
    dataloaders: Any = None,
    *,
    backend: Any = "auto",
    precision: str = "auto",
    devices: Any = "auto",
    loader_options: LoaderOptions | None = None,
    scale_lr: bool = False,
) -> Handles:
    """Give ``model`` its one engine and return handles for the unchanged loop.

    Calling it again with the same objects returns the same handles; a later call may add optimizers and dataloaders.
    All ranks call it with the same things; they start from rank 0's weights and buffers.

    Args:
        model: a module, its handle, or its ``torch.compile`` wrapper.
        optimizers: an optimizer, or a list, tuple or dict of them, over ``model``'s parameters.
        dataloaders: a ``DataLoader``, or a list, tuple or dict of them.
        backend: a backend's name or options (``accel.DDP(...)``); "auto" is the live engine's, else ``ACCEL_BACKEND``,
            else "ddp" at world size > 1, "dp" in a notebook with several accelerators, "single" otherwise.
        precision: "32-true", "bf16-mixed", "16-mixed" or "bf16-true"; "auto" is the live engine's, else
            ``ACCEL_PRECISION``, else "32-true".
        devices: as in the page on environments and devices; "auto" is ``ACCEL_DEVICES``, else all accelerators, else the CPU.
        loader_options: how these dataloaders are distributed; None is ``LoaderOptions()``, or what a known loader has.
        scale_lr: multiply the learning rates of these optimizers, which no scheduler has yet, by the number of replicas,
            since a step sees as many more samples (Goyal et al., arXiv 1706.02677).

    Returns:
        ``Handles(model, optimizers, dataloaders)``, each in the form of its argument.

    Raises:
        AlreadySetUpError: the model's engine has another backend, precision or options.
        SharedParametersError: parameters of the model belong to another live engine.
        RankMismatchError: the ranks' models or arguments differ; raised on every rank.
        CheckpointError: the weights of a deferred model do not fit it.
        OptimizerError, LoaderError, BackendError, PrecisionError, DeviceError: an argument that cannot work.
    """
    wanted = (backend, precision, devices)
    handles = known_handles(model, optimizers, dataloaders, wanted, loader_options, scale_lr)
    if handles is not None:
        return handles
    plan = make_plan(model, optimizers, dataloaders, wanted, loader_options, scale_lr)
    if plan.error is None and plan.engine is None and weights_of(plan.module) is not None:
        from .checkpoint.load import first_values  # with all that checkpoints need

        try:
            plan.fill = first_values(plan.module)
        except AccelError as error:
            plan.error = error
    return execute(plan)


@in_turn
def teardown(model: Any = None) -> nn.Module | None:
    """End the model's engine: its raw module has its trained weights, its raw optimizers work by themselves again.

    Without a model, ends every engine and the process group that accel made, and returns None. Collective. A model that some
    ranks have let go of ends on the others by itself: what every rank holds of it is as in the end of any other, and
    weights of which each rank held a part are nan.

    Raises:
        RankMismatchError: the ranks end different models; nothing has changed.
        AccelError: weights were lost, since the process groups were ended, or other ranks had let go of the model. Everything
            has ended all the same; where other ranks had let go, all ranks raise.
    """
    if model is not None:
        engine = registry.of_handle(model)
        engine.meet("accel.teardown")
        registry.remove(engine)
        engine.teardown()
        return engine.module
    try:
        end_all()
    finally:
        process.shutdown()
    return None


def unwrap(model: nn.Module) -> nn.Module:
    """The raw module of a handle or of a compile wrapper, or the module itself."""
    if type(model) is ModelHandle:
        module: nn.Module = object.__getattribute__(model, "_accel_raw")
        return module
    return resolve_module(model)[0]


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
        raise AccelError(f"accel.backward expects the loss as a tensor, got a {type(loss).__name__}")
    if any(e.precision.scaled and e.log.plain for e in registry.engines):
        registry.sweep()
    scaled = [e for e in registry.in_order() if e.precision.scaled]
    if not scaled:
        loss.backward(gradient, retain_graph, create_graph, inputs)
        return
    if create_graph:
        raise PrecisionError(
            "accel.backward(create_graph=True) under '16-mixed' would give gradients whose graph holds the loss scale: use "
            "torch.autograd.grad(loss, inputs, create_graph=True), which scales nothing, and accel.backward for the sum"
        )
    for engine in scaled:
        engine.refuse_plain_gradients(zeros=False)
    holders = [p for e in registry.in_order() for p in e.accumulators()]
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else inputs or ()
    holders += [i for i in wanted if isinstance(i, torch.Tensor)]
    registry.loss_scale.backward(loss, holders, gradient, retain_graph, inputs)
    for engine in scaled:
        engine.log.accept()


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context: the backward passes of the forwards inside accumulate without reduction. Nests; restores what was there."""
    return registry.of_handle(model).no_sync()


def join(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context for ranks with different numbers of batches (``torch.distributed.algorithms.Join``)."""
    return registry.of_handle(model).join()


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the model's gradients by their global norm, on every backend; returns the norm before clipping (0-dim)."""
    return registry.of_handle(model).clip_grad_norm_(max_norm, norm_type)


def refresh_trainable(model: nn.Module) -> None:
    """Apply a change of ``requires_grad`` now. Collective; needed only with the option ``auto_refresh=False``.

    Raises:
        RankMismatchError: the ranks changed different parameters.
        BackendError: unreduced gradients are pending.
    """
    registry.of_handle(model).refresh()


@in_turn
def full_state_dict(model_or_optimizer: Any, *, rank0_only: bool = False) -> dict[str, Any]:
    """What the raw object's ``state_dict()`` would hold in one process, on every rank. Collective.

    Args:
        model_or_optimizer: a handle or its raw object.
        rank0_only: give the other ranks ``{}``.
    """
    engine: Engine
    if isinstance(model_or_optimizer, Optimizer):
        handle = model_or_optimizer
        if type(handle) is not OptimizerHandle:
            found = registry.optimizer_handle(handle)
            if found is None:
                raise AccelError(
                    f"this {type(handle).__name__} has no live engine: call accel.setup(model, optimizer) first"
                )
            handle = found
        engine = object.__getattribute__(handle, "_accel_engine")
        state = engine.holdings.full_state_dict(object.__getattribute__(handle, "_accel_raw"))
    else:
        state = registry.of_handle(model_or_optimizer).holdings.full_state_dict(None)
    return {} if rank0_only and not process.is_main() else state

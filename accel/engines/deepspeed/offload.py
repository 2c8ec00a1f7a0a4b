"""What may step fragments, and where these lie: on the device, in the host's memory, where DeepSpeed's Adam computes, in files.

Files are ordinary memory of the host, which the kernel writes out and reads again. DeepSpeed's op ``async_io`` reads what its own
optimizers are about to step into buffers, and there are no tensors between steps. A raw loop's optimizer and its state may be
looked at, saved and changed at any time, so that they are tensors at any time here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError
from ...gradients.patches import Patch, around
from ..base.local import ELEMENTWISE, elementwise
from .library import library

if TYPE_CHECKING:
    from .config import Configuration

logger = logging.getLogger("accel")

#: DeepSpeed's own of this kind: those that step weights in the memory of the host, and those that step them on a device.
_ON_HOST: Final = frozenset({"DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"})
_ON_DEVICE: Final = frozenset({"FusedAdam", "FusedLion"})


def _of_deepspeed(optimizer: Optimizer, names: Set[str]) -> bool:
    return type(optimizer).__name__ in names and type(optimizer).__module__.startswith("deepspeed.ops.")


def refuse_optimizer(optimizer: Optimizer, settings: Configuration, device: torch.device) -> None:
    """Refuse (OptimizerError) one that would take a part for a parameter, or cannot step where the parts lie."""
    name, offloads = type(optimizer).__name__, settings.offload_optimizer
    if device.type != "cpu" and _of_deepspeed(optimizer, _ON_DEVICE if offloads else _ON_HOST):
        where = (
            f"{'in CPU memory' if offloads else f'on {device}'}, where DeepSpeed(offload_optimizer={offloads}) has them"
        )
        raise OptimizerError(f"{name} cannot step weights {where}: use the other value, or torch's AdamW")
    fits = type(optimizer) in ELEMENTWISE or elementwise(optimizer) or _of_deepspeed(optimizer, _ON_HOST | _ON_DEVICE)
    if not fits and not settings.any_optimizer:
        raise OptimizerError(
            f"{name} with DeepSpeed stage {settings.stage}: each rank steps its part of each parameter as a flat tensor, which "
            "is exact for elementwise optimizers of torch (SGD, Adam, ...) and DeepSpeed (DeepSpeedCPUAdam, FusedAdam, ...); "
            "use stage 0, or, if this one is elementwise too, config={'zero_allow_untested_optimizer': True}"
        )


def level_steps(
    optimizer: Optimizer,
    groups: Iterable[Iterable[Any]] | None = None,
    over_ranks: Callable[[list[int]], list[list[int]]] = lambda mine: [mine],
) -> None:
    """Where an optimizer counts the steps of a group in its last parameter, let all of them know: another may be last later.

    ``groups`` has the state of each parameter, None or empty where there is none; else it is the optimizer's own.
    """
    if not _of_deepspeed(optimizer, _ON_DEVICE):
        return
    if groups is None:
        groups = (map(optimizer.state.get, group["params"]) for group in optimizer.param_groups)
    held = [[state for state in states if state] for states in groups]
    mine = [max((state["step"] for state in states), default=0) for states in held]
    for states, *counts in zip(held, *over_ranks(mine), strict=True):
        for state in states:
            state["step"] = max(counts)


# -- DeepSpeed's Adam on the CPU ---------------------------------------------------------------------------------------

#: The attribute by which a tensor that it steps has the op, and the op's numbers for itself, by whether decay is decoupled.
_MARK: Final = "_accel_cpu_adam"
_NUMBERS: Final = {False: -2, True: -1}


def is_compiled(op: str) -> bool:
    """Whether one of DeepSpeed's ops was compiled on this machine, by an earlier use or with DeepSpeed's installation.

    One that was compiled from another place, as of another environment, is compiled again.
    """
    if library("deepspeed.git_version_info").installed_ops.get(op):
        return True
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or library("torch.utils.cpp_extension").get_default_build_root()
    sources = f"{Path(library('deepspeed').__file__).parent}{os.sep}"
    found = (made.with_name("build.ninja") for made in Path(root).glob(f"**/{op}/{op}.so"))
    return any(plan.exists() and sources in plan.read_text() for plan in found)


def describe_adam() -> str:
    """Whether its op is compiled, or could be."""
    if is_compiled("cpu_adam"):
        return "with DeepSpeed's CPU Adam, which is compiled"
    missing = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    how = f"cannot be compiled without {' and '.join(missing)}" if missing else "is not compiled yet"
    return f"where weights are offloaded with torch's Adam: DeepSpeed's own {how}"


@functools.cache
def cpu_adam(compiles: bool) -> Any:
    """Its op; None, which is said once, where it cannot be compiled, or is not and ``compiles`` does not ask for that."""
    if not compiles and not is_compiled("cpu_adam"):
        logger.warning(
            "DeepSpeed's CPU Adam is not compiled on this machine: torch's own steps the offloaded weights. "
            "config={'zero_force_ds_cpu_optimizer': True} compiles it at the first use, which takes minutes"
        )
        return None
    try:
        op = library("deepspeed.ops.op_builder").CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # whatever compilers say
        what = "DeepSpeed's CPU Adam cannot be built (%s: %s): torch's own steps the offloaded weights"
        logger.warning(what, type(error).__name__, error)
        return None
    for decoupled, number in _NUMBERS.items():
        op.create_adam(number, 1e-3, 0.9, 0.999, 1e-8, 0.0, decoupled, False)
    return op


def choose_adam(optimizers: Iterable[Optimizer], weights: Iterable[Any], user: Any, compiles: bool) -> None:
    """As DeepSpeed does under offload: let its Adam compute for these weights what torch's would. Local."""
    names = {type(o).__name__ for o in optimizers if type(o) in (torch.optim.Adam, torch.optim.AdamW)}
    if not names or (op := cpu_adam(compiles)) is None:
        return
    for tensor in weights:
        setattr(tensor, _MARK, op)
    _arithmetic().need(user)
    if dist.get_rank() == 0:
        what = "DeepSpeed's CPU Adam computes the steps of %s on offloaded weights; all else stays the optimizer's own"
        logger.info(
            f"{what} (config={{'zero_force_ds_cpu_optimizer': False}} keeps torch's)", " and ".join(sorted(names))
        )


@functools.cache
def _arithmetic() -> Patch:
    return around(vars(library("torch.optim.adam")), "adam", _adam)


def _adam(plain: Any, params: Any, *lists: Any, **group: Any) -> None:
    op = getattr(params[0], _MARK, None) if params else None
    special = any(group.get(name) for name in ("amsgrad", "maximize", "capturable", "differentiable", "fused"))
    if op is None or special or any(p.dtype is not torch.float32 for p in params):
        plain(params, *lists, **group)
        return
    grads, means, squares, _, steps = lists
    number = _NUMBERS[group["decoupled_weight_decay"]]
    values = [float(group[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
    torch._foreach_add_(steps, 1)
    for weights, grad, mean, square, step in zip(params, grads, means, squares, steps, strict=True):
        op.adam_update(number, int(step), *values, True, weights, grad, mean, square)


# -- Tensors in files, for offload to NVMe ------------------------------------------------------------------------------

#: Bytes below which a tensor stays in memory, as in DeepSpeed.
_LEAST: Final = 2**20
_PREFIX: Final = "accel-offload-"


def room(tensor: torch.Tensor, folder: str | None) -> torch.Tensor:
    """As much memory as a tensor has, in a file without a name; the tensor itself where it is small, is there, or need not be."""
    size = tensor.numel() * tensor.element_size()
    if folder is None or size < _LEAST or _PREFIX in (tensor.untyped_storage().filename or ""):
        return tensor
    try:
        with tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=folder) as file:
            # A write to memory for which the disk has no room later would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, size)
            found = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except (OSError, RuntimeError) as error:
        raise BackendError(f"offload of {size} bytes to 'nvme_path' {folder!r}: {error}") from error
    return found.view(tensor.shape)


def stored(tensor: torch.Tensor, folder: str | None) -> torch.Tensor:
    """The same values, in a file where they are many."""
    found = room(tensor, folder)
    return tensor if found is tensor else found.copy_(tensor)


def check_folder(folder: str) -> None:
    """Refuse (BackendError) a folder in which nothing can be written."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BackendError(
            f"DeepSpeed configuration: 'nvme_path' is {folder!r}, but nothing can be written: {error}"
        ) from error


def new_state(weights: Iterable[torch.Tensor], folder: str) -> contextlib.AbstractContextManager[None]:
    """Inside, what an optimizer makes like one of its weights is in a file: all of its state at once may be more than memory."""
    stepped = {id(tensor) for tensor in weights}

    def zeros_like(plain: Callable[..., Any], like: Any, *args: Any, **options: Any) -> Any:
        made = plain(like, *args, **options)
        return room(made, folder) if id(like) in stepped else made

    return around(vars(torch), "zeros_like", zeros_like)


def store_state(states: Iterable[dict[str, Any]], folder: str) -> None:
    """What an optimizer has made or replaced otherwise."""
    for state in states:
        state.update({k: stored(v, folder) for k, v in state.items() if isinstance(v, torch.Tensor)})

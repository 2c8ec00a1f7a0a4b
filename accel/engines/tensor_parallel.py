"""``tensor_parallel``: parts of each layer on neighbouring ranks, by torch's ``parallelize_module``; copies of these average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from ..errors import BackendError
from .base.activations import Choice
from .base.engine import LayerOptions
from .fsdp import FSDPEngine
from .fsdp.plan import Plan, Planned, check_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TensorParallel(Planned, LayerOptions):
    """Options of ``tensor_parallel``; it is ``accel.FSDP(tensor_parallel=...)`` without a division of the parts.

    Args:
        size: so many neighbouring ranks have a part of each layer that the plan names, and compute on the same batches. None:
            all of them; else the others have copies, and batches of their own.
        plan: as of ``accel.FSDP``.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """

    size: int | None = None
    plan: Plan = None
    auto_refresh: bool = True

    # What it leaves of the options of fsdp.
    wrap: ClassVar[Choice] = None
    reshard_after_forward: ClassVar[bool] = True
    cpu_offload: ClassVar[bool] = False
    mesh: ClassVar[DeviceMesh | None] = None
    param_dtype: ClassVar[torch.dtype | None] = None
    reduce_dtype: ClassVar[torch.dtype | None] = None

    def check_values(self) -> None:
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise BackendError(
                f"TensorParallel(size={self.size!r}): expected a number of ranks, or None for all of them"
            )
        check_plan(self.plan)

    def axes(self, world_size: int) -> dict[str, int]:
        size = world_size if self.size is None else self.size
        if world_size % size:
            raise BackendError(
                f"TensorParallel(size={size}): {world_size} processes do not divide into groups of {size}"
            )
        return {"replicate": world_size // size, "shard": 1, "tensor": size}


@final
class TensorParallelEngine(FSDPEngine):
    """The engine of fsdp, whose shards are whole."""

    name = "tensor_parallel"
    options_type = TensorParallel

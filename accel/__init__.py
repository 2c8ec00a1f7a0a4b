"""One call, ``accel.setup(model, optimizer, loader)``, turns a raw PyTorch loop into a distributed one."""

from typing import TYPE_CHECKING, Any

from .api import (
    backward,
    clip_grad_norm_,
    full_state_dict,
    join,
    no_sync,
    refresh_trainable,
    setup,
    teardown,
    unwrap,
)
from .checkpoint import export, import_checkpoint, latest, link, load, save, verify
from .collectives import all_gather, all_reduce, broadcast
from .control import any_rank, barrier, main_first
from .data import LoaderOptions, effective_batch_size, gather_for_metrics
from .deferred import deferred_init
from .engines import OPTIONS
from .errors import (
    AccelError,
    AlreadySetUpError,
    BackendError,
    CheckpointError,
    DeviceError,
    LaunchError,
    LoaderError,
    OptimizerError,
    PrecisionError,
    RankMismatchError,
    SharedParametersError,
    TimeoutError,
)
from .handles import Handles
from .launch import launch
from .memory import memory_report
from .pickling import check_picklable
from .process import device, init, is_main, local_rank, print, rank, world_size
from .rng import rng_state, seed
from .summary import summary

__version__ = "0.1.0"

# The option classes of the backends, found in `engines`: a new backend brings its own.
globals().update(OPTIONS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [
    "AccelError",
    "AlreadySetUpError",
    "BackendError",
    "CheckpointError",
    "DeviceError",
    "Handles",
    "LaunchError",
    "LoaderError",
    "LoaderOptions",
    "OptimizerError",
    "PrecisionError",
    "RankMismatchError",
    "SharedParametersError",
    "TimeoutError",
    "all_gather",
    "all_reduce",
    "any_rank",
    "backward",
    "barrier",
    "broadcast",
    "check_picklable",
    "clip_grad_norm_",
    "deferred_init",
    "device",
    "effective_batch_size",
    "export",
    "full_state_dict",
    "gather_for_metrics",
    "import_checkpoint",
    "init",
    "is_main",
    "join",
    "launch",
    "latest",
    "link",
    "load",
    "local_rank",
    "main_first",
    "memory_report",
    "no_sync",
    "print",
    "rank",
    "refresh_trainable",
    "rng_state",
    "save",
    "seed",
    "setup",
    "summary",
    "teardown",
    "unwrap",
    "verify",
    "world_size",
]
__all__ += sorted(OPTIONS)

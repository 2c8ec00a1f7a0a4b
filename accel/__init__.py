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
from .collectives import all_gather, all_reduce, broadcast
from .control import barrier, main_first
from .data import LoaderOptions, gather_for_metrics
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
from .process import device, init, is_main, local_rank, print, rank, world_size
from .rng import seed

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
    "backward",
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "deferred_init",
    "device",
    "full_state_dict",
    "gather_for_metrics",
    "init",
    "is_main",
    "join",
    "local_rank",
    "main_first",
    "no_sync",
    "print",
    "rank",
    "refresh_trainable",
    "seed",
    "setup",
    "teardown",
    "unwrap",
    "world_size",
]
__all__ += sorted(OPTIONS)

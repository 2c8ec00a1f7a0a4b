"""One call, ``accel.setup(model, optimizer, loader)``, turns a raw PyTorch loop into a distributed one."""

import importlib
from typing import TYPE_CHECKING, Any, Final

from . import engines
from .api import (
    accumulate,
    backward,
    clip_grad_norm_,
    data_parallel_place,
    full_state_dict,
    join,
    mesh,
    no_sync,
    refresh_trainable,
    setup,
    shard_sequence,
    teardown,
    unwrap,
    whole_sequences,
)
from .api.batches import largest_batch, split
from .data import LoaderOptions, effective_batch_size, gather_for_metrics
from .deferred import deferred_init
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
from .gradients.average import mean_loss
from .handles import Handles
from .launch import launch
from .launch.pickling import check_picklable
from .memory import memory_report, summary
from .process import device, init, is_main, local_rank, print, rank, world_size
from .process.collectives import all_gather, all_reduce, broadcast
from .process.control import any_rank, barrier, main_first
from .process.rng import rng_state, seed

if TYPE_CHECKING:
    from .checkpoint import import_checkpoint, latest, link
    from .checkpoint.export import export
    from .checkpoint.load import load
    from .checkpoint.save import save
    from .checkpoint.verify import verify
    from .engines._option_classes import *  # noqa: F403

__version__ = "0.1.0"

# What a loop may never ask for loads when it does, so that `import accel` stays light.
_CHECKPOINTS: Final = ("export", "import_checkpoint", "latest", "link", "load", "save", "verify")


if not TYPE_CHECKING:  # to a type checker any name would be there

    def __getattr__(name: str) -> Any:
        value: Any
        if name == "__all__":
            value = [*_NAMES, *engines.option_names()]
        elif name in _CHECKPOINTS:
            value = getattr(importlib.import_module(".checkpoint", __name__), name)
        else:  # the option classes of the backends: a new backend brings its own
            value = engines.option_class(name)
        if value is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


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
    "accumulate",
    "all_gather",
    "all_reduce",
    "any_rank",
    "backward",
    "barrier",
    "broadcast",
    "check_picklable",
    "clip_grad_norm_",
    "data_parallel_place",
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
    "largest_batch",
    "launch",
    "latest",
    "link",
    "load",
    "local_rank",
    "main_first",
    "mean_loss",
    "memory_report",
    "mesh",
    "no_sync",
    "print",
    "rank",
    "refresh_trainable",
    "rng_state",
    "save",
    "seed",
    "setup",
    "shard_sequence",
    "split",
    "summary",
    "teardown",
    "unwrap",
    "verify",
    "whole_sequences",
    "world_size",
]
# With the names of the option classes, `__getattr__` makes the whole list: that imports all backends.
_NAMES: list[str] = __all__
if not TYPE_CHECKING:
    del __all__

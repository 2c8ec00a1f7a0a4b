"""Distribute a raw PyTorch loop: ``accel.setup(model, optimizer, loader)``."""

import importlib
from typing import TYPE_CHECKING, Any, Final

from . import engines
from .batches import largest_batch as largest_batch
from .batches import split as split
from .data import LoaderOptions as LoaderOptions
from .data import effective_batch_size as effective_batch_size
from .data import gather_for_metrics as gather_for_metrics
from .deferred import deferred_init as deferred_init
from .errors import AccelError as AccelError
from .errors import AlreadySetUpError as AlreadySetUpError
from .errors import BackendError as BackendError
from .errors import CheckpointError as CheckpointError
from .errors import DeviceError as DeviceError
from .errors import LaunchError as LaunchError
from .errors import LoaderError as LoaderError
from .errors import OptimizerError as OptimizerError
from .errors import PrecisionError as PrecisionError
from .errors import RankMismatchError as RankMismatchError
from .errors import SharedParametersError as SharedParametersError
from .errors import TimeoutError as TimeoutError
from .gradients.totals import mean_loss as mean_loss
from .handles import Handles as Handles
from .launch import launch as launch
from .memory import memory_report as memory_report
from .memory import summary as summary
from .pickling import check_picklable as check_picklable
from .process import device as device
from .process import init as init
from .process import is_main as is_main
from .process import local_rank as local_rank
from .process import print as print
from .process import rank as rank
from .process import world_size as world_size
from .process.collectives import all_gather as all_gather
from .process.collectives import all_reduce as all_reduce
from .process.collectives import broadcast as broadcast
from .process.control import any_rank as any_rank
from .process.control import barrier as barrier
from .process.control import main_first as main_first
from .process.rng import rng_state as rng_state
from .process.rng import seed as seed
from .setup import setup as setup
from .verbs import accumulate as accumulate
from .verbs import backward as backward
from .verbs import clip_grad_norm_ as clip_grad_norm_
from .verbs import data_parallel_place as data_parallel_place
from .verbs import full_state_dict as full_state_dict
from .verbs import join as join
from .verbs import mesh as mesh
from .verbs import no_sync as no_sync
from .verbs import refresh_trainable as refresh_trainable
from .verbs import shard_sequence as shard_sequence
from .verbs import teardown as teardown
from .verbs import unwrap as unwrap
from .verbs import whole_sequences as whole_sequences

if TYPE_CHECKING:
    from .checkpoint import latest as latest
    from .checkpoint import link as link
    from .checkpoint.folder import verify as verify
    from .checkpoint.load import load as load
    from .checkpoint.save import save as save
    from .checkpoint.weights import export as export
    from .engines._option_classes import *  # noqa: F403

__version__ = "0.1.0"

# These are imported on first use, so a program without checkpoints starts faster.
_CHECKPOINTS: Final = ("export", "latest", "link", "load", "save", "verify")
_OWN = {name for name, v in globals().items() if getattr(v, "__module__", "").startswith("accel.")}

if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name: str) -> Any:
        value: Any
        if name == "__all__":  # imports all backends
            value = [*_OWN, *_CHECKPOINTS, *engines.option_names()]
        elif name in _CHECKPOINTS:
            value = getattr(importlib.import_module(".checkpoint", __name__), name)
        else:
            value = engines.option_class(name)
        if value is None:
            raise AttributeError(
                f"accel has no {name!r}. See docs/migrating.md for names of other libraries."
            )
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})

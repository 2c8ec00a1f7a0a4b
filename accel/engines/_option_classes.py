"""The option classes of all engines, for editors and type checkers only: at run time each is imported when it is asked for."""

from .ddp import DDP
from .ddp2 import DDP2
from .deepspeed import DeepSpeed
from .dp import DP
from .fsdp import FSDP
from .horovod import Horovod
from .pipeline import Pipeline
from .sharded import Sharded
from .single import Single
from .tensor_parallel import TensorParallel
from .xla import XLA

__all__ = [
    "DDP",
    "DDP2",
    "DP",
    "FSDP",
    "XLA",
    "DeepSpeed",
    "Horovod",
    "Pipeline",
    "Sharded",
    "Single",
    "TensorParallel",
]

"""Option classes of all engines, for editors and type checkers. First use imports them."""

from .ddp import DDP as DDP
from .ddp2 import DDP2 as DDP2
from .deepspeed import DeepSpeed as DeepSpeed
from .dp import DP as DP
from .fsdp import FSDP as FSDP
from .horovod import Horovod as Horovod
from .pipeline import Pipeline as Pipeline
from .sharded import Sharded as Sharded
from .single import Single as Single
from .xla import XLA as XLA

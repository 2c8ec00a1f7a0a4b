"""Dataloaders: each rank gets its share of every epoch, and the position is saved.

Imports: metrics, groups (accumulate) > handle > iteration > streams > readers > checks >
sampling. Readers are stand-ins for a loader's sampler or dataset.
"""

from .checks import LoaderOptions as LoaderOptions
from .checks import LoaderPlace as LoaderPlace
from .checks import check as check
from .checks import describe as describe
from .groups import Accumulation as Accumulation
from .handle import LoaderHandle as LoaderHandle
from .handle import effective_batch_size as effective_batch_size
from .handle import raw_loader as raw_loader
from .iteration import LoaderState as LoaderState
from .iteration import latest as latest
from .metrics import gather_for_metrics as gather_for_metrics
from .sampling import first_sample as first_sample
from .sampling import length_of as length_of
from .sampling import loader_seed as loader_seed

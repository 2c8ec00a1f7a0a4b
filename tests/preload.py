"""What the workers of ``tests/distributed.py`` have from the start: imported once, in the process they are forked from."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

# deepspeed looks for a GPU when it is imported: not by the CUDA runtime, which no process forked from here could use then.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
NAMES = (
    *("torch._dynamo", "torch.distributed.fsdp", "accel", "fairscale", "deepspeed", "safetensors.torch"),
    *(
        "pytest.__main__",
        "hypothesis",
        "numpy",
        "tests.backends",
        "tests.distributed",
    ),  # __main__: a worker imports its parent's
)
for name in NAMES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
# A worker collects after each call: not what all these modules are made of.
gc.collect()
gc.freeze()

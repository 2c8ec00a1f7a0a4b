"""What the workers of ``tests/distributed.py`` have from the start: imported once, in the process they are forked from."""

from __future__ import annotations

import contextlib
import gc
import importlib

for name in ("torch._dynamo", "torch.distributed.fsdp", "accel", "fairscale", "deepspeed", "tests.distributed"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
# A worker collects after each call: not what all these modules are made of.
gc.collect()
gc.freeze()

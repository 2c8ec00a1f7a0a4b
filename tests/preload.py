"""What the workers of ``tests/distributed.py`` have from the start: imported once, in the process they are forked from."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from tests import interpreters

# deepspeed looks for a GPU when it is imported: not by the CUDA runtime, which no process forked from here could use then.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def _import(*names: str) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _code(name: str) -> CodeType | None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return SourceFileLoader(name, spec.origin).get_code(name)


def _rewrite_asserts() -> None:
    """Let a failed assert of a test module show its values on a rank too, as pytest does in its own process."""
    from _pytest.config import _prepareconfig

    # "tests" itself is imported already, of which pytest would warn.
    _prepareconfig(["-s", "-p", "no:xdist", "--noconftest", "-W", "ignore::pytest.PytestAssertRewriteWarning"])
    hook: Any = next(finder for finder in sys.meta_path if type(finder).__name__ == "AssertionRewritingHook")
    hook.mark_rewrite("tests")
    # A worker of `python -m tests.generated` asks the hook for the code of that module.
    hook.get_code = _code


_import("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api", "numpy")
gc.collect()
gc.freeze()
interpreters.serve()
_rewrite_asserts()
_import("fairscale", "deepspeed", "safetensors.torch", "xxhash")
_import("accel.checkpoint.load", "accel.checkpoint.save", "accel.engines.fsdp.shard")
_import(
    "pytest.__main__", "hypothesis", "tests.backends", "tests.distributed"
)  # __main__: a worker imports its parent's
# A worker collects after each call: not what all these modules are made of.
gc.collect()
gc.freeze()

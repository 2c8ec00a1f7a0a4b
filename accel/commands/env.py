"""The command env."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..engines import ENGINES, resolve
from ..errors import AccelError
from ..process.environments import available, detect
from . import Command

_PACKAGES = ("cloudpickle", "fsspec", "matplotlib", "numpy", "safetensors", "torchao", "tqdm", "transformers", "xxhash")
_PREFIXES = ("ACCEL_", "CUDA_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "TORCH")
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def run(args: argparse.Namespace) -> int:
    """Print versions and devices of this machine, and which backends run here, for a report of a bug."""
    rows = [*_versions(), *_machine(), *_backends(), *_environment()]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name.ljust(width)}  {text}")
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, HIP {torch.version.hip or 'none'}"
    yield "accel", sys.modules[__name__.partition(".")[0]].__version__
    packages = {re.split("[<=>]", package)[0] for engine in ENGINES.values() for package in engine.requires.values()}
    for package in [*_PACKAGES, *sorted(packages)]:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


def _machine() -> Iterator[tuple[str, str]]:
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    kind, count = available()
    yield "devices", f"{count} x {kind}" if count else "no accelerator, only cpu"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        yield f"  cuda:{index}", f"{properties.name}, {properties.total_memory >> 20} MiB, capability {capability}"
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    known = [name for name in ("gloo", "mpi", "ucc") if dist.is_backend_available(name)] + ["nccl"] * nccl
    yield "process groups", ", ".join(known)
    if nccl:
        yield "  nccl", ".".join(map(str, torch.cuda.nccl.version()))


def _backends() -> Iterator[tuple[str, str]]:
    for name in ENGINES:
        try:
            limits = resolve(name)[0].probe()
        except AccelError as error:
            yield f"backend {name}", f"cannot run: {error}"
        except Exception as error:  # whatever an import raises
            first = str(error).strip().partition("\n")[0]
            yield f"backend {name}", f"cannot run: its import fails: {type(error).__name__}: {first}"
        else:
            yield f"backend {name}", f"can run{f', {limits}' if limits else ''}"


def _environment() -> Iterator[tuple[str, str]]:
    try:
        place = detect(os.environ)
        yield "launcher", f"{place.launcher}, rank {place.rank} of {place.world_size}"
    except AccelError as error:
        yield "launcher", f"cannot be told: {error}"
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES) or name in _PLACE:
            yield name, os.environ[name]


COMMANDS = {"env": Command(run)}

"""The commands for machines and processes: env, memory and run."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import pkgutil
import platform
import re
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.reader import cores
from ..engines import ENGINES, resolve
from ..errors import AccelError, LaunchError
from ..memory import memory_report
from ..process.devices import available
from ..process.launchers import detect
from . import Command


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")


def _positives(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


# -- env -------------------------------------------------------------------------------------------

_PACKAGES = ["cloudpickle", "fsspec", "matplotlib", "numpy", "safetensors", "torchao"]
_PACKAGES += ["transformers", "xxhash"]
_VARIABLES = re.compile(
    r"(ACCEL_|CUDA_|GLOO_|MASTER_|NCCL_|OMP_|TORCH).*|(LOCAL_)?(RANK|WORLD_SIZE)"
)


def env(args: argparse.Namespace) -> int:
    """Print versions, devices and the backends that can run here. Add this to bug reports."""
    rows = {**_machine(), **_packages(), **_backends()}
    rows |= {name: text for name, text in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name.ljust(width)}  {text}")
    return 0


def _machine() -> dict[str, str]:
    kind, count = available()
    groups = filter(dist.is_backend_available, ("gloo", "mpi", "nccl", "ucc"))
    rows = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()}, {cores()} of {os.cpu_count()} cores",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        "accel": sys.modules[__name__.partition(".")[0]].__version__,
        "devices": f"{count} x {kind}" if count else "no accelerator, only cpu",
        "process groups": ", ".join(groups),
    }
    for index in range(torch.cuda.device_count()):
        rows[f"  cuda:{index}"] = str(torch.cuda.get_device_properties(index))
    try:
        place = detect(os.environ)
        rows["launcher"] = f"{place.launcher}, rank {place.rank} of {place.world_size}"
    except AccelError as error:
        rows["launcher"] = f"unknown: {error}"
    return rows


def _packages() -> dict[str, str]:
    names = list(_PACKAGES)
    for engine in ENGINES.values():
        names += [re.split("[<=>]", requirement)[0] for requirement in engine.requires.values()]
    rows = dict.fromkeys(names, "not installed")
    for name in rows:
        try:
            rows[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return rows


def _backends() -> dict[str, str]:
    rows = {}
    for name in ENGINES:
        try:
            limits = resolve(name)[0].probe()
            text = f"can run, {limits}" if limits else "can run"
        except Exception as error:  # the import of a library can raise anything
            kind = "" if isinstance(error, AccelError) else f"{type(error).__name__}: "
            text = f"cannot run: {kind}{str(error).strip().splitlines()[0]}"
        rows[f"backend {name}"] = text
    return rows


# -- memory ----------------------------------------------------------------------------------------


def _memory_arguments(parser: argparse.ArgumentParser) -> None:
    add, factory = parser.add_argument, "a function without arguments that returns the model"
    add("model", help=factory, metavar="module:factory")
    add("--ranks", help="numbers of ranks (%(default)s)", type=_positives, default="1,2,4,8,64")
    add("--optimizer", help="a class of torch.optim, or none (%(default)s)", default="adamw")
    add("--plot", help="file for the bar chart (%(default)s)", metavar="PATH", default="memory.png")
    add("--no-plot", help="print the table only", action="store_true")


def memory(args: argparse.Namespace) -> int:
    """Predict the memory per rank of a model with every backend.

    The model is built on the meta device, so its parameters use no memory.
    """
    sys.path.insert(0, os.getcwd())
    try:
        factory: Any = pkgutil.resolve_name(args.model)
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        raise AccelError(
            f"{args.model} raised {type(error).__name__} on the meta device: {error}. "
            "Expected module:factory, where factory() returns the model."
        ) from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise AccelError(f"{args.model} returned a {kind}. Expected a torch.nn.Module.")
    report = memory_report(model, _optimizer(args.optimizer, model), ranks=args.ranks)
    print(report)
    if not args.no_plot:
        print(f"picture: {report.save_plot(args.plot)}")
    return 0


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """Return an optimizer of torch.optim by its case-insensitive name."""
    if name == "none":
        return None
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and kind.__name__.lower() == name.lower():
            optimizer: torch.optim.Optimizer = kind(model.parameters())
            return optimizer
    raise AccelError(f"--optimizer {name}: torch.optim has no such class. Use adamw, sgd or none.")


# -- run -------------------------------------------------------------------------------------------


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, max(1, available()[1])
    text = "processes on each node (one per accelerator, or 1)"
    add("-n", "--processes", "--num-processes", type=_positive, default=count, help=text)
    add("--hosts", help="all nodes, separated by commas; ranks connect to the first")
    text = "a free port of the first node (%(default)s)"
    add("--port", type=_positive, default=29400, help=text)
    add("--backend", help="sets ACCEL_BACKEND: a name, or name:option=value,option=value")
    add("--max-restarts", type=int, default=0, help="restarts after a failure (%(default)s)")
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("script", help="a Python file")
    add("args", nargs=argparse.REMAINDER, help="arguments of the script").required = False


def run(args: argparse.Namespace) -> int:
    """Start a script in several processes with torchrun.

    On several nodes, run the same command on each of them. If a process fails, all are terminated.
    """
    if not args.module and not os.path.isfile(args.script):
        raise LaunchError(f"there is no file {args.script} in {os.getcwd()}")
    if args.backend is not None:
        resolve(args.backend)
        os.environ["ACCEL_BACKEND"] = args.backend
    # Otherwise torchrun limits each process to a single thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // args.processes)))
    # torchrun's store keeps the addresses of dead processes, which restarted processes would use.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    hosts = args.hosts.split(",") if args.hosts else []
    options = ["--standalone"]
    if len(hosts) > 1:
        options = ["--nnodes", str(len(hosts)), "--rdzv-backend", "c10d", "--rdzv-id", "accel"]
        options += ["--rdzv-endpoint", f"{hosts[0].strip()}:{args.port}"]
    options += ["--nproc-per-node", str(args.processes), "--max-restarts", str(args.max_restarts)]
    options += ["--module"] if args.module else []
    importlib.import_module("torch.distributed.run").main([*options, args.script, *args.args])
    return 0


COMMANDS = {
    "env": Command(env, ""),
    "memory": Command(memory, "mymodels:gpt --ranks 8,64 --optimizer sgd", _memory_arguments),
    "run": Command(run, "--processes 4 train.py --lr 0.1", _run_arguments),
}

"""The commands on a machine and its processes: env, memory and run."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import inspect
import os
import platform
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..engines import ENGINES, resolve
from ..errors import AccelError, LaunchError
from ..memory import memory_report
from ..process.environments import available, detect
from . import Command, whole_number

# -- env ---------------------------------------------------------------------------------------------------------------

_PACKAGES = ("cloudpickle", "fsspec", "matplotlib", "numpy", "safetensors", "torchao", "transformers", "xxhash")
_PREFIXES = ("ACCEL_", "CUDA_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "TORCH")
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def env(args: argparse.Namespace) -> int:
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


# -- memory ------------------------------------------------------------------------------------------------------------

_OPTIMIZERS = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
}


def _memory_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="module:factory",
        help="a module that can be imported from here, and in it a callable without arguments that gives the model",
    )
    parser.add_argument("--ranks", default="1,2,4,8,64", help="numbers of processes, by commas; %(default)s")
    parser.add_argument(
        "--optimizer",
        default="adamw",
        help="of torch.optim, with arguments if need be: 'sgd(momentum=0.9)'; or none; %(default)s",
    )
    parser.add_argument("--plot", default="memory.png", metavar="PATH", help="where the picture goes; %(default)s")
    parser.add_argument("--no-plot", action="store_true", help="print the table only")


def memory(args: argparse.Namespace) -> int:
    """Predict the memory that every backend needs on each rank.

    The model is built on the meta device, where a parameter has a shape and no memory. So a model of any size is measured
    on any machine, in seconds.
    """
    ranks = _parse_ranks(args.ranks)
    kind, arguments = _parse_optimizer(args.optimizer)
    model = _build(args.model)
    if kind is not None and next(model.parameters(), None) is None:
        raise AccelError(f"{args.model!r} gave a {type(model).__name__} without parameters: say --optimizer none")
    try:
        optimizer = None if kind is None else kind(model.parameters(), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        known = list(inspect.signature(kind).parameters)[1:] if kind is not None else []
        unknown = [f"no argument {name!r}; it has {', '.join(known)}" for name in arguments if name not in known]
        raise AccelError(f"--optimizer {args.optimizer}: {unknown[0] if unknown else error}") from error
    report = memory_report(model, optimizer, ranks=ranks)
    print(report)
    if not args.no_plot:
        print(f"picture: {report.save_plot(Path(args.plot))}")
    return 0


def _parse_ranks(text: str) -> list[int]:
    """``"1,2,8"`` as numbers."""
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        ranks = [0]
    if min(ranks) < 1:
        raise AccelError(f"--ranks {text}: expected numbers above 0 by commas, such as 1,2,8")
    return ranks


def _parse_optimizer(text: str) -> tuple[Any, dict[str, Any]]:
    """``"sgd(momentum=0.9)"`` as a class and its keyword arguments; ``"none"`` as None."""
    name, arguments = text, {}
    if "(" in text:
        try:
            call = ast.parse(text, mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError
            name, arguments = call.func.id, {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        except (SyntaxError, ValueError):
            raise AccelError(
                f"--optimizer {text}: expected a name, or a name with plain keyword arguments: 'sgd(momentum=0.9)'"
            ) from None
    if name.lower() == "none":
        return None, {}
    if name.lower() not in _OPTIMIZERS:
        known = ", ".join(sorted(_OPTIMIZERS))
        raise AccelError(f"--optimizer {text}: torch.optim has no {name!r}; it has {known}; or say none")
    return _OPTIMIZERS[name.lower()], arguments


def _build(target: str) -> nn.Module:
    """The model that ``module:factory`` gives on the meta device."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise AccelError(f"{target!r}: expected module:factory, such as mymodels:gpt or package.models:GPT.large")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise AccelError(
            f"{module_name} cannot be imported from {os.getcwd()}: {type(error).__name__}: {error}"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise AccelError(f"{target!r}: {getattr(found, '__name__', found)} has no {name!r}")
        found = getattr(found, name)
    if not callable(found):
        raise AccelError(f"{target!r} is a {type(found).__name__}; expected a callable that gives the model")
    with contextlib.suppress(ValueError):  # of what tells no signature
        needed = [p.name for p in inspect.signature(found).parameters.values() if p.default is p.empty and p.kind <= 1]
        if needed:
            raise AccelError(
                f"{target!r} needs {', '.join(needed)}; expected a callable without arguments, such as a function"
            )
    try:
        with torch.device("meta"):
            model = found()
    except Exception as error:
        raise AccelError(
            f"{target!r} raised {type(error).__name__} on the meta device, where tensors have no values: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise AccelError(f"{target!r} gave a {type(model).__name__}; expected a torch.nn.Module")
    return model


# -- run ---------------------------------------------------------------------------------------------------------------

#: Seconds; a cluster may make the name of a host known after the host has started.
_KNOWN_WITHIN = 30.0


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        "--processes",
        "--num-processes",
        type=whole_number,
        help="processes on each host; by default one for each accelerator, or one",
    )
    parser.add_argument("--hosts", help="all hosts, with commas; the ranks meet at the first of them")
    parser.add_argument("--port", type=whole_number, default=29400, help="a port that is free there (%(default)s)")
    parser.add_argument("--backend", help="sets ACCEL_BACKEND: a name, or name:option=value,option=value")
    parser.add_argument("--max-restarts", type=whole_number, default=0, help="starts after a failure (%(default)s)")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script").required = False


def run(args: argparse.Namespace) -> int:
    """Start a script in several processes, on this host or on several; a thin front of torchrun.

    On several hosts give the same command on each of them. Where a process fails, all are ended, and started again as often
    as --max-restarts says.
    """
    processes = args.processes if args.processes is not None else max(1, available()[1])
    if processes < 1:
        raise LaunchError(f"--processes {processes}: expected at least 1")
    if args.max_restarts < 0:
        raise LaunchError(f"--max-restarts {args.max_restarts}: expected at least 0")
    if not 0 < args.port < 65536:
        raise LaunchError(f"--port {args.port}: expected a port from 1 to 65535")
    if not args.module and not os.path.isfile(args.script):
        raise LaunchError(f"there is no file {args.script} in {os.getcwd()}")
    if args.backend is not None:
        resolve(args.backend)
        os.environ["ACCEL_BACKEND"] = args.backend
    # A threaded library in each process would otherwise take all cores, or torchrun would leave it one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    # torchrun's own store keeps the addresses of processes that have ended, which restarted ones would try.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    torchrun = importlib.import_module("torch.distributed.run")
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    signals = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous")
    try:
        torchrun.run(torchrun.get_args_parser().parse_args(_for_torchrun(args, processes)))
    except rendezvous.RendezvousError as error:
        raise LaunchError(
            f"the hosts {args.hosts} did not meet at port {args.port} of the first one ({type(error).__name__}: {error}): "
            "start the same command on all of them, with a port that is free and open there"
        ) from error
    except signals.SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise LaunchError(f"ended by {signal.Signals(error.sigval).name}, and so were all processes") from error
    except errors.ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        how = f"was ended by {failure.signal_name()}" if status < 0 else f"ended with exit status {status}"
        others = ". The others were ended" if processes > 1 or args.hosts else ""
        raise LaunchError(f"rank {rank} {how}; its own error is above{others}") from error
    return 0


def _for_torchrun(args: argparse.Namespace, processes: int) -> list[str]:
    hosts = [host.strip() for host in args.hosts.split(",")] if args.hosts else []
    if hosts and (not all(hosts) or len(set(hosts)) < len(hosts)):
        raise LaunchError(f"--hosts {args.hosts}: expected different names with commas between them, as node1,node2")
    rendezvous_arguments = ["--standalone"]
    if len(hosts) > 1:
        _look_up(hosts[0], args.port)
        endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0]}:{args.port}", "--rdzv-id", "accel"]
        rendezvous_arguments = ["--nnodes", str(len(hosts)), *endpoint]
    module = ["--module"] if args.module else []
    counts = ["--nproc-per-node", str(processes), "--max-restarts", str(args.max_restarts)]
    return [*rendezvous_arguments, *counts, *module, args.script, *args.args]


def _look_up(host: str, port: int) -> None:
    """Wait until a host's name is known; torchrun would wait for an hour, and not say so."""
    deadline = time.monotonic() + _KNOWN_WITHIN
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"--hosts: no address is known for {host!r}, at which the others would meet ({error}): give one "
                    "that all of them can reach"
                ) from error
        time.sleep(min(1.0, _KNOWN_WITHIN / 4))


COMMANDS = {"env": Command(env), "memory": Command(memory, _memory_arguments), "run": Command(run, _run_arguments)}

"""The command run."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import socket
import time

from ..engines import resolve
from ..errors import LaunchError
from ..process.environments import available
from . import Command, whole_number

#: Seconds; a cluster may make the name of a host known after the host has started.
_KNOWN_WITHIN = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command understands; all that follows the script is the script's."""
    parser.add_argument(
        "-n",
        "--processes",
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
        torchrun.run(torchrun.get_args_parser().parse_args(_arguments(args, processes)))
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


def _arguments(args: argparse.Namespace, processes: int) -> list[str]:
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


COMMANDS = {"run": Command(run, add_arguments)}

"""The command line, ``python -m accel``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence

from . import commands
from .errors import AccelError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or print help if there is none.

    Returns:
        The exit status: 1 on AccelError, 130 on Ctrl-C, 141 on a closed pipe.
    """
    program = "accel" if os.path.basename(sys.argv[0]) == "accel" else "python -m accel"
    description = "Inspect checkpoints, start scripts, predict memory."
    parser = argparse.ArgumentParser(prog=program, description=description)
    version = sys.modules[str(__package__)].__version__
    parser.add_argument("--version", action="version", version=f"accel {version}")
    known: dict[str, commands.Command] = {}
    for info in pkgutil.iter_modules(commands.__path__):
        known |= importlib.import_module(f"{commands.__name__}.{info.name}").COMMANDS
    subparsers = parser.add_subparsers(dest="command")
    for name, command in sorted(known.items()):
        text = inspect.getdoc(command.run) or ""
        subparser = subparsers.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            epilog=f"example: {program} {name} {command.example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status = known[args.command].run(args)
        sys.stdout.flush()
    except AccelError as error:
        print(f"accel {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # `| head` closed the pipe. At exit Python flushes the buffer, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(main())

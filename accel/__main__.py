"""The command line, ``python -m accel``: finds the commands, and runs the one that is asked for."""

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
    """Run a command, or print help without one.

    Returns its exit status: 0; 1 after an error of accel's, which is printed; 130 after Ctrl-C; 141 after a closed pipe.
    """
    name = os.path.basename(sys.argv[0])
    program = name if name == "accel" else "python -m accel"
    parser = argparse.ArgumentParser(prog=program, description="Tools beside the library.")
    version = sys.modules[str(__package__)].__version__
    parser.add_argument("--version", action="version", version=f"accel {version}")
    parsers = parser.add_subparsers(dest="command")
    known: dict[str, commands.Command] = {}
    for info in pkgutil.iter_modules(commands.__path__):
        known |= importlib.import_module(f"{commands.__name__}.{info.name}").COMMANDS
    each = {}
    for name, command in sorted(known.items()):
        text = inspect.getdoc(command.run) or ""
        each[name] = parsers.add_parser(name, help=text.partition("\n")[0], description=text)
        command.add_arguments(each[name])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        each.get(args.command, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status = known[args.command].run(args)
        sys.stdout.flush()
    except AccelError as error:
        text = str(error).removeprefix(f"accel.{args.command}: ")
        print(f"accel {args.command}: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"accel {args.command}: ended by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever reads the output (`| head`) has enough; what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(main())

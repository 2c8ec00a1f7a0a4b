"""The command memory."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import AccelError
from ..memory import memory_report
from . import Command

_OPTIMIZERS = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command is told."""
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


def run(args: argparse.Namespace) -> int:
    """Predict the memory that every backend needs on each rank.

    The model is built on the meta device, where a parameter has a shape and no memory. So a model of any size is measured
    on any machine, in seconds.
    """
    ranks = parse_ranks(args.ranks)
    kind, arguments = parse_optimizer(args.optimizer)
    model = build(args.model)
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


def parse_ranks(text: str) -> list[int]:
    """``"1,2,8"`` as numbers."""
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        ranks = [0]
    if min(ranks) < 1:
        raise AccelError(f"--ranks {text}: expected numbers above 0 by commas, such as 1,2,8")
    return ranks


def parse_optimizer(text: str) -> tuple[Any, dict[str, Any]]:
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


def build(target: str) -> nn.Module:
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


COMMANDS = {"memory": Command(run, add_arguments)}

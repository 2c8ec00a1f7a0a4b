"""What was given in another's place, and what to write instead: the ends of errors about arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from .handles import UNPACK, Handles, LoaderHandle, OptimizerHandle

_ORDER: Final = "the order is accel.setup(model, optimizers, dataloaders)"


def described(other: object) -> str:
    """What something is, by its class."""
    if other is None:
        return "None"
    kind, what = (other, "the class") if isinstance(other, type) else (type(other), "")
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{what or ('an' if name[0] in 'aeiou' else 'a')} {name}"


def for_model(other: object) -> str:
    """Instead of something that is no model; begins with a colon, or is empty."""
    if type(other) is Handles:
        return f": {UNPACK}"
    if type(other) is OptimizerHandle or isinstance(other, Optimizer | DataLoader | LoaderHandle):
        return ": give the model; in accel.setup it comes before its optimizers and dataloaders"
    if isinstance(other, type) and issubclass(other, nn.Module):
        return f": make one, {other.__name__}(...)"
    some = other.values() if isinstance(other, dict) else other if isinstance(other, list | tuple) else ()
    if isinstance(other, Iterator) or any(isinstance(item, Tensor) for item in some):
        return ": give the model itself, not its parameters or its state"
    return (
        ": each model has a call of accel.setup of its own" if any(isinstance(item, nn.Module) for item in some) else ""
    )


def for_optimizer(other: object) -> str:
    """Instead of something that is no optimizer."""
    if isinstance(other, type) and issubclass(other, Optimizer):
        return f"make one, {other.__name__}(model.parameters(), ...)"
    if isinstance(other, functools.partial):
        return "call it, partial(model.parameters())"
    if isinstance(getattr(other, "optimizer", None), Optimizer):
        return (
            f"give the optimizer that this {type(other).__name__} schedules; the scheduler stays as it is in the loop"
        )
    if isinstance(other, Iterator | Tensor):
        return "give what steps them, as torch.optim.AdamW(model.parameters())"
    if isinstance(other, nn.Module):
        return "a loss stays as it is in the loop, and each model has a call of accel.setup"
    return _ORDER


def for_loader(other: object) -> str:
    """Instead of something that is no dataloader."""
    if isinstance(other, type) and issubclass(other, DataLoader):
        return "make one, DataLoader(dataset, batch_size=...)"
    if isinstance(getattr(other, "optimizer", None), Optimizer):
        return "a scheduler stays as it is in the loop"
    if isinstance(other, Dataset):
        return "wrap the dataset, DataLoader(dataset, batch_size=...)"
    if isinstance(other, Iterable) and not isinstance(other, nn.Module | Optimizer):
        return (
            "give the DataLoader itself, not what iterates over it; batches of another kind stay as they are, and accel.rank() "
            "tells whose they are"
        )
    return _ORDER

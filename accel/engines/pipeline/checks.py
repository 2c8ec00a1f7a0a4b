"""What a pipeline refuses, and how its ranks see that all do the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from ...errors import BackendError, RankMismatchError
from ...process.control import agree
from ..base.memory import is_sequence
from .stages import Named


def check_sequential(module: nn.Module, stages: int) -> None:
    """Refuse (BackendError) a module that has no sequence of children, or too few of them."""
    if not is_sequence(module):
        raise BackendError(
            f"a pipeline needs a torch.nn.Sequential, whose children are its layers; this {type(module).__name__} has a "
            "forward of its own: write the model as one Sequential, or use a backend that does not cut it"
        )
    if len(module._modules) < stages:
        raise BackendError(
            f"a pipeline of {stages} stages needs at least as many children; this Sequential has {len(module._modules)}: "
            "flatten nested Sequentials, or use fewer processes"
        )


def check_balance(balance: tuple[int, ...], children: int, stages: int, fixed: bool) -> None:
    """Refuse (BackendError) a balance that does not give each stage its children."""
    if fixed and len(balance) != stages:
        raise BackendError(
            f"Pipeline(balance={list(balance)}) is for {len(balance)} stages; there are {stages} devices"
        )
    if sum(balance) != children:
        raise BackendError(
            f"Pipeline(balance={list(balance)}) is for {sum(balance)} children; this Sequential has {children}"
        )


def check_layers(module: nn.Module) -> None:
    """Refuse (BackendError) layers that would wait for ranks that never call them."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise BackendError(f"{name} is a SyncBatchNorm, but a stage runs on one rank only: use BatchNorm")


def check_tied(stages: Sequence[Sequence[Named]]) -> None:
    """Refuse (BackendError) a tensor that two stages hold: each would train its own."""
    holder: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for prefix, child in stage:
            for name, tensor in chain(child.named_parameters(prefix), child.named_buffers(prefix)):
                other, first = holder.setdefault(id(tensor), (number, name))
                if other != number:
                    raise BackendError(
                        f"{first} and {name} are one tensor, but lie in stages {other} and {number} of the pipeline: give "
                        "Pipeline(balance=[...]) that puts them into one stage, or untie them"
                    )


def check_forward(module: nn.Module, children: Sequence[Named], batchnorms: Sequence[Named], chunks: int) -> None:
    """Refuse (BackendError) what changed since setup, and a forward that would not be the module's."""
    now = list(module._modules.items())
    if len(now) != len(children) or any(a[1] is not b[1] for a, b in zip(now, children, strict=True)):
        raise BackendError(
            "children of this Sequential were added, removed or replaced after accel.setup: call "
            "raw = accel.teardown(model) and set it up again"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise BackendError(
            "a pipeline calls the children of the Sequential, so hooks on it never run: put them on a child"
        )
    training = [name for name, layer in batchnorms if layer.training] if chunks > 1 else []
    if training:
        raise BackendError(
            f"{', '.join(training[:5])} would normalise each micro-batch by itself, which is not BatchNorm of the batch: use "
            "Pipeline(chunks=1), GroupNorm or LayerNorm, or put it in eval()"
        )


def batchnorms_of(module: nn.Module) -> list[Named]:
    """The BatchNorms, by name."""
    return [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]


# -- the ranks do the same --------------------------------------------------------------------------------------------


def crc(value: object) -> int:
    """A short number that is the same for equal values on all ranks."""
    return zlib.crc32(repr(value).encode())


def meet(what: str, facts: dict[str, Any], advice: str) -> None:
    """All ranks do ``what`` with equal facts, or each raises (RankMismatchError) the first difference. Collective."""
    answers = agree(what, list(facts.values()))
    for rank, theirs in enumerate(answers):
        for name, first, other in zip(facts, answers[0], theirs, strict=True):
            if first != other:
                raise RankMismatchError(f"{what}: {name} differs between rank 0 and rank {rank}: {advice}")

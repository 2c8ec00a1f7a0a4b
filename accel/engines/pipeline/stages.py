"""The stages of a pipeline: which children they have, and how a stage runs a micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import BackendError
from ...process.packing import is_dense
from ...trees import TensorPlace, map_tensors, put_back, walk
from ..base.activations import run_again

Balance = Sequence[int] | str

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# -- micro-batches --------------------------------------------------------------------------------


def flatten(value: Any, name: str) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors of a nested value, and the value with a ``TensorPlace`` for each tensor.

    Raises:
        BackendError: the value contains something that can't be sent to another rank.
    """
    tensors: list[torch.Tensor] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and is_dense(leaf):
            tensors.append(leaf)
            return TensorPlace(len(tensors) - 1)
        if isinstance(leaf, _PLAIN):
            return leaf
        # The gradients of tensors inside of an object, or of a sparse tensor, would be lost.
        raise BackendError(
            f"A pipeline can't send {path} ({type(leaf).__name__}) to other ranks. "
            "Pass dense tensors and plain values in dicts, lists or tuples."
        )

    return tensors, walk(visit, value, name)


def sizes_of(tensors: Sequence[torch.Tensor], chunks: int) -> list[int]:
    """Return the sizes of at most ``chunks`` micro-batches. They differ by at most 1."""
    rows = {len(t) for t in tensors if t.dim()}
    if chunks > 1 and len(rows) != 1:
        raise BackendError(
            f"Pipeline(chunks={chunks}) splits inputs along dim 0, but their sizes there are "
            f"{sorted(rows)}. Give all inputs the batch as dim 0, or use chunks=1."
        )
    size = max(rows, default=1)
    count = max(1, min(chunks, size))
    ends = [size * number // count for number in range(count + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def micro_batches(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[Sequence[torch.Tensor]]:
    """Return the tensors of each micro-batch. A tensor without dimensions is in all of them."""
    if len(sizes) == 1:
        return [tensors]
    columns = [t.split(list(sizes)) if t.dim() else [t] * len(sizes) for t in tensors]
    return list(zip(*columns, strict=True))


def concatenate(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the output for the batch, given the outputs for its micro-batches."""
    if len(outputs) == 1:
        return outputs[0]
    rows: list[list[torch.Tensor]] = []
    form = None
    for output, size in zip(outputs, sizes, strict=True):
        tensors, form = flatten(output, "output")
        rows.append(tensors)
        if any(t.dim() == 0 or len(t) != size for t in tensors):
            raise BackendError(
                f"Pipeline(chunks > 1) needs an output with {size} rows for {size} samples, "
                f"but shapes are {[tuple(t.shape) for t in tensors]}. Use chunks=1."
            )
    return put_back(form, [torch.cat(column) for column in zip(*rows, strict=True)])


# -- stages ---------------------------------------------------------------------------------------


@final
class Stage:
    """Neighboring children of a Sequential, on one rank."""

    def __init__(self, children: Mapping[str, nn.Module]) -> None:
        self.name = list(children)[-1]
        self._children = list(children.values())
        modules = itertools.chain.from_iterable(child.modules() for child in self._children)
        self._modules = list(dict.fromkeys(modules))

    def run(self, value: Any, keep: bool) -> Any:
        """Return the output for a micro-batch. Backward recomputes activations unless ``keep``."""
        if keep or not torch.is_grad_enabled():
            return self._forward(value)
        return run_again(self._forward_of_copy, self._modules, (value,), {})

    def _forward_of_copy(self, value: Any) -> Any:
        # nn.ReLU(inplace=True) as the first child would change the input of the second run.
        return self._forward(map_tensors(torch.clone, value, others=True))

    def _forward(self, value: Any) -> Any:
        for child in self._children:
            value = child(value)
        return value


def balanced(weights: Sequence[float], count: int) -> list[int]:
    """Return the sizes of ``count`` groups of neighbors that are about equally heavy."""
    totals = list(itertools.accumulate(weights))
    ends = [0]
    for number in range(1, count):
        share = totals[-1] * number / count
        # Each of the other groups needs a member too.
        choices = range(ends[-1] + 1, len(weights) - count + number + 1)
        distances = {abs(totals[end - 1] - share): end for end in reversed(choices)}
        ends.append(distances[min(distances)])
    ends.append(len(weights))
    return [end - start for start, end in itertools.pairwise(ends)]


def stages_of(module: nn.Module, balance: Balance, world_size: int) -> dict[str, int]:
    """Return the stage of each child. "size" balances the bytes of parameters and buffers."""
    if isinstance(balance, str):
        weights: list[int] = []
        children: Any = module._modules.values()
        # children() would skip an activation that the Sequential has twice.
        for child in children:
            weights.append(sum(t.nbytes for t in (*child.parameters(), *child.buffers())))
        balance = balanced(weights, world_size)
    names = iter(module._modules)
    stage_of: dict[str, int] = {}
    for number, count in enumerate(balance):
        stage_of.update(dict.fromkeys(itertools.islice(names, count), number))
    return stage_of


# -- what can't be a pipeline ---------------------------------------------------------------------


def check_module(module: nn.Module, balance: Balance, world_size: int) -> None:
    """Raise BackendError if the module can't be split into stages."""
    # A subclass may have its own forward, for example to return features too.
    if getattr(type(module), "forward", None) is not nn.Sequential.forward:
        raise BackendError(
            f"A pipeline needs an nn.Sequential, but {type(module).__name__} has its own forward. "
            'Write the model as nn.Sequential, or use backend="fsdp".'
        )
    if world_size == 1:
        return
    count = len(module._modules)
    fits = count >= world_size
    if not isinstance(balance, str):
        fits = len(balance) == world_size and sum(balance) == count
    if not fits:
        raise BackendError(
            f"Pipeline(balance={balance!r}) doesn't fit {count} children and {world_size} ranks. "
            "Give the number of children on each rank, or flatten nested Sequentials."
        )
    # Language models tie the embedding and the head, which would be trained apart.
    seen: dict[int, tuple[int, str]] = {}
    stage_of = stages_of(module, balance, world_size)
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *module.named_buffers(remove_duplicate=False)):
        number = stage_of.get(name.partition(".")[0], 0)
        other, first = seen.setdefault(id(tensor), (number, name))
        if other != number:
            raise BackendError(
                f"{first} and {name} are one tensor in stages {other} and {number}. "
                "Put them into one stage by Pipeline(balance=[...]), or untie them."
            )


def check_batchnorm(module: nn.Module) -> None:
    """Raise BackendError if BatchNorm in training would see micro-batches."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            raise BackendError(
                f"{name} would normalize each micro-batch separately. "
                "Use Pipeline(chunks=1), or nn.GroupNorm, or call eval() on it."
            )

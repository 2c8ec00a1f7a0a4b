"""The stages of a pipeline: which children they have, and how a stage runs a micro-batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import BackendError
from ...process.packing import is_dense
from ...trees import TensorPlace, map_tensors, put_back, walk
from ..base.activations import run_again
from ..base.memory import MemoryUse, TensorSize, add_uses

Named = tuple[str, nn.Module]
Balance = Sequence[int] | str
#: The rows of each micro-batch. None is the full batch.
Rows = list[slice | None]

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# -- micro-batches ---------------------------------------------------------------------------------


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
        kind = f"{leaf.layout} tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        raise BackendError(
            f"A pipeline can't send {path} to other ranks, because it is a {kind}. "
            "Pass dense tensors and plain values in dicts, lists or tuples."
        )

    return tensors, walk(visit, value, name)


def split_rows(tensors: Sequence[torch.Tensor], chunks: int) -> Rows:
    """Return the rows of at most ``chunks`` micro-batches, whose sizes differ by at most 1."""
    if chunks == 1:
        return [None]
    sizes = {len(t) for t in tensors if t.dim()}
    if len(sizes) != 1:
        raise BackendError(
            f"Pipeline(chunks={chunks}) splits inputs along dim 0, but their sizes there are "
            f"{sorted(sizes)}. Give all inputs the batch as dim 0, or use chunks=1."
        )
    (size,) = sizes
    count = min(chunks, size)
    if count < 2:
        return [None]
    ends = [size * i // count for i in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def micro_batches(tensors: Sequence[torch.Tensor], rows: Rows) -> list[list[torch.Tensor]]:
    """Return the tensors of each micro-batch. A tensor without dimensions is in all of them."""
    return [[t if part is None or t.dim() == 0 else t[part] for t in tensors] for part in rows]


def concatenate(outputs: Sequence[Any], rows: Rows) -> Any:
    """Return the output for the batch, given the outputs for its micro-batches."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [flatten(output, "output") for output in outputs]
    form = flat[0][1]
    sizes = [part.stop - part.start for part in rows if part is not None]
    for (tensors, other), size in zip(flat, sizes, strict=True):
        if other != form or any(t.dim() == 0 or len(t) != size for t in tensors):
            shapes = [tuple(t.shape) for t in tensors]
            raise BackendError(
                f"The output for {size} samples has shapes {shapes}, but Pipeline(chunks > 1) "
                "needs one row for each sample. Use chunks=1."
            )
    columns = zip(*(tensors for tensors, _ in flat), strict=True)
    return put_back(form, [torch.cat(column) for column in columns])


# -- one stage -------------------------------------------------------------------------------------


@final
class Stage:
    """Neighboring children of a Sequential, on one rank."""

    def __init__(self, children: Sequence[Named]) -> None:
        self.name = children[-1][0]
        self._children = [child for _, child in children]
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


def run_all(
    stages: Sequence[Stage],
    tensors: Sequence[torch.Tensor],
    form: Any,
    rows: Rows,
    keep: Sequence[bool],
) -> Any:
    """Return the output of all stages in one process. ``keep`` is for each micro-batch."""
    values = [put_back(form, batch) for batch in micro_batches(tensors, rows)]
    for stage in stages:
        values = [stage.run(value, kept) for value, kept in zip(values, keep, strict=True)]
    return concatenate(values, rows)


# -- which children are in which stage -------------------------------------------------------------


def balanced(weights: Sequence[float], count: int) -> list[int]:
    """Return the sizes of ``count`` groups of neighbors whose heaviest group is lightest."""
    totals = [0.0, *itertools.accumulate(weights)]

    @functools.cache
    def best(first: int, groups: int) -> tuple[float, float, tuple[int, ...]]:
        """Return the heaviest weight, the sum of squares, and the sizes."""
        if groups == 1:
            weight = totals[-1] - totals[first]
            return weight, weight**2, (len(weights) - first,)
        options = []
        for end in range(first + 1, len(weights) - groups + 2):
            weight = totals[end] - totals[first]
            heaviest, squares, sizes = best(end, groups - 1)
            options.append((max(weight, heaviest), weight**2 + squares, (end - first, *sizes)))
        return min(options)

    return list(best(0, count)[2])


def split(module: nn.Module, balance: Balance, world_size: int) -> list[list[Named]]:
    """Return the children of each stage.

    "size" makes a stage for each rank, and balances the bytes of parameters and buffers.
    """
    children: list[Named] = list(module._modules.items())  # type: ignore[arg-type]
    counts: Sequence[int]
    if isinstance(balance, str):
        tensors = [(*child.parameters(), *child.buffers()) for _, child in children]
        counts = balanced([sum(t.nbytes for t in group) for group in tensors], world_size)
    else:
        counts = balance
    rest = iter(children)
    return [list(itertools.islice(rest, count)) for count in counts]


def predict(
    module: nn.Module, tensors: Sequence[TensorSize], balance: Balance, world_size: int
) -> MemoryUse | None:
    """Return the bytes of the largest stage, or None if there are fewer children than ranks."""
    count = len(module._modules)
    if not is_sequential(module) or count < world_size:
        return None
    if isinstance(balance, str) or len(balance) != world_size or sum(balance) != count:
        balance = "size"
    uses = []
    for stage in split(module, balance, world_size):
        names = {name for name, _ in stage}
        own = (t.use() for t in tensors if t.name.partition(".")[0] in names)
        uses.append(add_uses(own))
    return max(uses, key=lambda use: use.total)


# -- what can't be a pipeline ----------------------------------------------------------------------


def is_sequential(module: nn.Module) -> bool:
    """True if the module only calls its children in order."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def check_module(module: nn.Module, balance: Balance, world_size: int) -> None:
    """Raise BackendError if the module can't be split into stages."""
    kind = type(module).__name__
    if not is_sequential(module):
        raise BackendError(
            f"A pipeline needs an nn.Sequential, but {kind} has its own forward. "
            'Write the model as nn.Sequential, or use backend="fsdp".'
        )
    count = len(module._modules)
    # A single process may run any number of stages.
    stages = world_size if isinstance(balance, str) or world_size == 1 else len(balance)
    if stages != world_size or (not isinstance(balance, str) and sum(balance) != count):
        raise BackendError(
            f"Pipeline(balance={balance}) doesn't fit {count} children and {world_size} ranks. "
            f"Give one number for each rank, so that the sum is {count}."
        )
    if count < world_size:
        raise BackendError(
            f"{kind} has {count} children for {world_size} ranks. "
            "Flatten nested Sequentials into one, or start fewer ranks with torchrun."
        )
    if world_size > 1:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):  # It would wait for ranks that never call it.
                text = f"{name} is a SyncBatchNorm, but a stage runs on one rank. Use BatchNorm."
                raise BackendError(text)
        _check_tied(split(module, balance, world_size))


def _check_tied(stages: Sequence[Sequence[Named]]) -> None:
    """Raise BackendError if two stages share a parameter or buffer, as tied embeddings do."""
    seen: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for prefix, child in stage:
            for name, tensor in (*child.named_parameters(prefix), *child.named_buffers(prefix)):
                other, first = seen.setdefault(id(tensor), (number, name))
                if other != number:
                    raise BackendError(
                        f"{first} and {name} are one tensor in stages {other} and {number}. Use "
                        "Pipeline(balance=[...]) to put them into one stage, or untie them."
                    )


def check_batchnorm(module: nn.Module) -> None:
    """Raise BackendError if BatchNorm in training would see micro-batches."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            raise BackendError(
                f"{name} would normalize each micro-batch separately. "
                "Use Pipeline(chunks=1), or nn.GroupNorm, or call eval() on it."
            )

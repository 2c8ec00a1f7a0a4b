"""A pipeline's stages: how a batch is cut into micro-batches, and one stage's forward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn

from ...errors import BackendError
from ...process import Process
from ...trees import TensorPlace, map_tensors, put_back, walk
from ..base.activations import run_again
from ..base.memory import MemoryUse, TensorSize, add_uses

Named = tuple[str, nn.Module]

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def flatten(value: Any, name: str) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a nested value, and the value with places in their stead; BackendError of what is no plain value."""
    tensors: list[torch.Tensor] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            tensors.append(leaf)
            return TensorPlace(len(tensors) - 1)
        if isinstance(leaf, _PLAIN):
            return leaf
        kind = f"{leaf.layout} tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__qualname__
        raise BackendError(
            f"a pipeline passes dense tensors, plain values, and dicts, lists and tuples of them; {path} is a {kind}"
        )

    return tensors, walk(visit, value, name)


# -- micro-batches ----------------------------------------------------------------------------------------------------

#: For each micro-batch its part of the batch along the first dimension; None is the whole batch.
Cut = list[slice | None]


def cut(tensors: Sequence[torch.Tensor], chunks: int) -> Cut:
    """Where to cut a batch into at most ``chunks`` micro-batches of sizes that differ by one; BackendError without one size."""
    if chunks == 1:
        return [None]
    sizes = {len(t) for t in tensors if t.dim()}
    if len(sizes) != 1:
        raise BackendError(
            f"Pipeline(chunks={chunks}) cuts the batch along dim 0, and the tensors of the input have "
            f"{sorted(sizes) or 'no dimensions'} there: give every tensor the batch as its dim 0, or use chunks=1"
        )
    (rows,) = sizes
    count = min(chunks, rows)
    if count < 2:
        return [None]
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def pieces(tensors: Sequence[torch.Tensor], where: Cut) -> list[list[torch.Tensor]]:
    """The tensors of each micro-batch; one without dimensions goes to all."""
    return [[t if s is None or t.dim() == 0 else t[s] for t in tensors] for s in where]


def put_together(outputs: Sequence[Any], where: Cut) -> Any:
    """The whole batch's output from its micro-batches'; BackendError where one has no row for each sample."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [flatten(output, "output") for output in outputs]
    form = flat[0][1]
    rows = [s.stop - s.start for s in where if s is not None]
    for (tensors, other), n in zip(flat, rows, strict=True):
        bad = [tuple(t.shape) for t in tensors if t.dim() == 0 or len(t) != n]
        if bad or other != form:
            raise BackendError(
                f"a micro-batch of {n} samples gave {f'a tensor of shape {bad[0]}' if bad else 'another structure'}: with "
                "Pipeline(chunks > 1) the output needs one row for each sample along dim 0; use chunks=1"
            )
    return put_back(form, [torch.cat(parts) for parts in zip(*(tensors for tensors, _ in flat), strict=True)])


# -- one stage --------------------------------------------------------------------------------------------------------


@final
class Stage:
    """Neighbouring children of a Sequential, on one device."""

    def __init__(self, children: Sequence[Named]) -> None:
        self.names = [name for name, _ in children]
        self._children = [child for _, child in children]
        self.modules = list(dict.fromkeys(m for child in self._children for m in child.modules()))
        self.parameters = list(dict.fromkeys(p for child in self._children for p in child.parameters()))
        modules = [(name, m) for prefix, child in children for name, m in child.named_modules(prefix=prefix)]
        #: Those that are saved: the others are caches, as a rule.
        self._buffers = [(n, m, key) for n, m in modules for key in m._buffers.keys() - m._non_persistent_buffers_set]

    def run(self, value: Any, keep: bool, alone: bool) -> Any:
        """The forward of a micro-batch, or of the batch ``alone``; without ``keep`` its activations are computed again later.

        BackendError where a micro-batch changes a buffer, which a batch would change once.
        """
        if alone:
            return self._run(value, keep)
        before = self._seen()
        out = self._run(value, keep)
        for (name, _, key), then, now in zip(self._buffers, before, self._seen(), strict=True):
            if then[0] is not now[0] or then[1] != now[1]:
                raise BackendError(
                    f"{name}.{key} is changed by the forward, once for each micro-batch, where one process changes it once for "
                    "the batch: use Pipeline(chunks=1), put that layer into eval(), or register the buffer with persistent=False "
                    "where it is a cache"
                )
        return out

    def _seen(self) -> list[tuple[torch.Tensor | None, int]]:
        found = [module._buffers.get(key) for _, module, key in self._buffers]
        return [(b, 0 if b is None or b.is_inference() else b._version) for b in found]

    def _run(self, value: Any, keep: bool) -> Any:
        if keep or not torch.is_grad_enabled():
            return self._forward(value)
        return run_again(self._forward_of_copy, self.modules, (value,), {})

    def _forward_of_copy(self, value: Any) -> Any:
        # A module that works in place would else spoil the input of the second computation.
        return self._forward(map_tensors(torch.clone, value, others=True))

    def _forward(self, value: Any) -> Any:
        for child in self._children:
            value = child(value)
        return value


def run_here(stages: Sequence[Stage], tensors: list[torch.Tensor], form: Any, where: Cut, keep: list[bool]) -> Any:
    """Return the output of all stages of this process. ``keep`` is for each micro-batch."""
    values = [put_back(form, piece) for piece in pieces(tensors, where)]
    alone = len(values) == 1
    for stage in stages:
        values = [stage.run(value, kept, alone) for value, kept in zip(values, keep, strict=True)]
    return put_together(values, where)


@contextlib.contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """The tensors' gradient hooks do not run: they run once, on the sum over the micro-batches."""
    tables: list[Any] = [tensor._backward_hooks for tensor in tensors if tensor._backward_hooks]
    hidden = [(hooks, dict(hooks)) for hooks in tables]
    for hooks in tables:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in hidden:
            hooks.update(own)


# -- Which children of a Sequential make which stage -------------------------------------------------------------------

Balance = Sequence[int] | str


def balanced(weights: Sequence[float], count: int) -> list[int]:
    """How many neighbours each of ``count`` groups gets, so that the heaviest group is as light as can be."""
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    best: list[tuple[float, float, tuple[int, ...]]] = [(total[i], total[i] ** 2, (i,)) for i in range(len(total))]
    for groups in range(2, count + 1):
        following = []
        for end in range(len(total)):
            options = [
                (max(best[at][0], last := total[end] - total[at]), best[at][1] + last**2, (*best[at][2], end - at))
                for at in range(groups - 1, end)
            ]
            following.append(min(options, default=(float("inf"), 0.0, ())))
        best = following
    return list(best[-1][2])


def count_stages(balance: Balance, process: Process) -> int:
    """Return one stage for each rank. One process has as many as the balance lists."""
    if process.place.world_size > 1:
        return process.place.world_size
    return 1 if isinstance(balance, str) else len(balance)


def listed(balance: Balance, children: Sequence[Named], stages: int) -> list[int]:
    """The number of children of each stage, where it is not given by the bytes of their parameters and buffers."""
    if not isinstance(balance, str):
        return list(balance)
    return balanced([sum(t.nbytes for t in (*child.parameters(), *child.buffers())) for _, child in children], stages)


def split(children: Sequence[Named], balance: Sequence[int]) -> list[list[Named]]:
    """The children of each stage."""
    rest = iter(children)
    return [[next(rest) for _ in range(count)] for count in balance]


def predict(module: nn.Module, tensors: Sequence[TensorSize], balance: Balance, world_size: int) -> MemoryUse | None:
    """Return the bytes of the stage that needs the most; None unless there is a child per rank."""
    number = len(module._modules)
    if not is_sequence(module) or number < world_size:
        return None
    uses: dict[str, list[MemoryUse]] = {name: [] for name in module._modules}
    for tensor in tensors:
        uses[tensor.name.partition(".")[0]].append(tensor.use())
    children = [add_uses(child) for child in uses.values()]
    counts: Sequence[int] = () if isinstance(balance, str) else balance
    if len(counts) != world_size or sum(counts) != number:
        counts = balanced([use.parameters + use.buffers for use in children], world_size)
    rest = iter(children)
    stages = [add_uses(itertools.islice(rest, count)) for count in counts]
    return max(stages, key=lambda use: use.total)


def is_sequence(module: nn.Module) -> bool:
    """Return True if the module only calls its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


# -- what cannot be cut -----------------------------------------------------------------------------------------------


def check_module(module: nn.Module, balance: Balance, process: Process) -> None:
    """Refuse (BackendError) what cannot be cut into stages."""
    stages, distributed = count_stages(balance, process), process.place.world_size > 1
    if not is_sequence(module):
        raise BackendError(
            f"a pipeline needs a torch.nn.Sequential, whose children are its layers; this {type(module).__name__} has a "
            "forward of its own: write the model as one Sequential, or use a backend that does not cut it"
        )
    children: list[Named] = list(module._modules.items())  # type: ignore[arg-type]
    if len(children) < stages:
        raise BackendError(
            f"a pipeline of {stages} stages needs at least as many children; this Sequential has {len(children)}: "
            "flatten nested Sequentials, or use fewer processes"
        )
    for name, layer in module.named_modules() if distributed else ():
        if isinstance(layer, nn.SyncBatchNorm):  # which would wait for ranks that never call it
            raise BackendError(f"{name} is a SyncBatchNorm, but a stage runs on one rank only: use BatchNorm")
    if not isinstance(balance, str):
        what = f"Pipeline(balance={list(balance)}) is for"
        if distributed and len(balance) != stages:
            raise BackendError(f"{what} {len(balance)} stages; there are {stages} ranks")
        if sum(balance) != len(children):
            raise BackendError(f"{what} {sum(balance)} children; this Sequential has {len(children)}")
    _check_tied(split(children, listed(balance, children, stages)))


def _check_tied(stages: Sequence[Sequence[Named]]) -> None:
    """Refuse (BackendError) a tensor that two stages hold: each would train its own."""
    holder: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for prefix, child in stage:
            for name, tensor in (*child.named_parameters(prefix), *child.named_buffers(prefix)):
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

"""``pipeline``: an nn.Sequential in stages, with micro-batches and activation checkpointing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, final

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from ...errors import BackendError, OptimizerError, PrecisionError
from ...precision import convert_module
from ...process import Process
from ...shard import Shard, StateEntry
from ..base.absent import OF_ITSELF, Absent, blank, bring_back, name_of, take_away
from ..base.engine import Context, Engine, lost_weights
from ..base.gather import Item
from ..base.gradients import Gradients, refuse_overlaps
from ..base.holdings import Holdings
from ..base.memory import MemoryUse, TensorSize
from ..base.options import Options
from ..base.placement import Placement, Placements
from .passes import SAME_BATCH, Channel, Pass
from .stages import (
    Named,
    Rows,
    Stage,
    check_batchnorm,
    check_module,
    flatten,
    predict,
    run_all,
    split,
    split_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Options):
    """Options of ``pipeline``.

    Args:
        balance: the number of children in each stage, or "size" to give the stages about equally
            many bytes of parameters. None is "size".
        chunks: the number of micro-batches, which are split along dim 0, so that stages work at the
            same time. Smaller batches have fewer.
        checkpoint: the micro-batches whose activations are computed again in backward.
    """

    balance: Sequence[int] | Literal["size"] | None = None
    chunks: int = 1
    checkpoint: Literal["always", "except_last", "never"] = "except_last"

    choices = {"checkpoint": ("always", "except_last", "never")}

    def check_values(self) -> None:
        balance: Any = "size" if self.balance is None else self.balance
        if isinstance(balance, list | tuple):
            balance = tuple(balance)
        numbers = balance if isinstance(balance, tuple) else ()
        if balance != "size" and (not numbers or any(type(n) is not int or n < 1 for n in numbers)):
            raise BackendError(
                f"Pipeline(balance={self.balance!r}) needs the number of children in each stage. "
                'Use a list of positive ints, or "size".'
            )
        object.__setattr__(self, "balance", balance)


# -- parameters and optimizer state ---------------------------------------------------------------


class Elsewhere(Absent, nn.Parameter):
    """A parameter in another rank's stage. It has a name and a shape, but no values."""

    plain = OF_ITSELF
    place: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # model.to(device) writes p.data = p, if the device is the same.
        sets_data = func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
        if sets_data and args[1] is args[0]:
            return None
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self.place}, shape={tuple(self.shape)})"

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} needs {self.place}. Read weights with "
            "accel.full_state_dict(model), and write them with model.load_state_dict()."
        )


@final
class PipelineHoldings(Holdings):
    """The weights and optimizer state of this rank's stage."""

    engine: PipelineEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._rank = engine.process.place.rank
        #: The stage of each child. Empty while every rank holds all children.
        self._stage_of: dict[str, int] = {}

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        return True

    @property
    def divided(self) -> bool:
        return bool(self._stage_of)

    def has(self, name: str) -> bool:
        """True if the parameter or buffer is on this rank."""
        return not self.divided or self._owner(name) == self._rank

    def _owner(self, name: str) -> int:
        """Return the rank of a child's tensor. Tensors of the Sequential itself are on rank 0."""
        return self._stage_of.get(name.partition(".")[0], 0)

    def partial(self, optimizer: Optimizer | None) -> bool:
        return self.divided

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        return super().part(name, tensor, key) if self.has(name) else None

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        return [entry for entry in super().entries(optimizer) if self.has(entry.name)]

    def gradients(self) -> Iterator[Item]:
        return (item for item in super().gradients() if self.has(item[0]))

    def divide(self, stages: Sequence[Sequence[Named]]) -> None:
        """Keep this rank's stage, and free the memory of the other stages."""
        self._stage_of = {name: number for number, stage in enumerate(stages) for name, _ in stage}
        for name, tensor in self._others().items():
            tensor.grad = None
            if isinstance(tensor, nn.Parameter):
                place = f"{name}, which is on rank {self._owner(name)} of the pipeline"
                take_away(tensor, Elsewhere, place=place)
            else:
                tensor.data = blank(tensor)
        for optimizer in self.engine.optimizers:
            self.keep_stage(optimizer)

    def _others(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of other ranks."""
        module = self.engine.module
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {name: tensor for name, tensor in tensors.items() if not self.has(name)}

    def keep_stage(self, optimizer: Optimizer) -> None:
        """Drop the optimizer's state of other stages."""
        self.drop_others(optimizer)

    def end(self) -> None:
        """Gather all stages on every rank, unless the other ranks take no part. Collective."""
        others = self._others()
        for tensor in others.values():
            if isinstance(tensor, nn.Parameter):
                bring_back(tensor)
        if not self.engine.ended:
            self._gather(others)
        self._stage_of = {}

    def _gather(self, others: dict[str, torch.Tensor]) -> None:
        module, what = self.engine.module, "the end of a pipeline"
        parameters = dict(module.named_parameters())
        held: list[Item] = [(name, "", p.data) for name, p in parameters.items()]
        held += [(name, "", buffer) for name, buffer in module.named_buffers()]
        held += [(name, "extra", value) for name, value in self.values(None).items()]
        full = self.gather(what, [*held, *self.gradients()])
        for name, tensor in others.items():
            tensor.data = full[name, ""]
            tensor.grad = full.get((name, "grad"))
        extra = {name: value for (name, key), value in full.items() if key == "extra"}
        self.fill(None, {name: value for name, value in extra.items() if not self.has(name)})


# -- gradients and forwards -----------------------------------------------------------------------


@final
class PipelineGradients(Gradients):
    """Gradients that are final after backward, on the rank of their stage."""

    engine: PipelineEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.channel = Channel(engine.process)

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        # Autograd would skip Recv, and the previous rank would wait for its message.
        if self.engine.distributed:
            raise BackendError(
                "A pipeline can't compute gradients for some parameters only. "
                "Use loss.backward() instead of torch.autograd.grad or backward(inputs=...)."
            )
        return parameter

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        if outermost:
            self.channel.end()
        super().backward_ends(completed, outermost)

    def parts(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [p.grad for p in parameters if p.grad is not None], []

    def before_step(self, optimizer: Optimizer) -> None:
        if self.engine.holdings.divided and getattr(optimizer, "found_inf", None) is not None:
            raise PrecisionError(
                "GradScaler sees the overflows of a single pipeline stage on each rank. "
                'Use precision="16-mixed" and accel.backward(loss).'
            )


@final
class PipelineEngine(Engine):
    """Runs one stage on each rank. A single process runs all stages on its device."""

    name = "pipeline"
    options_type = Pipeline
    placements = Placements(Placement.BY_PARAMETER, Placement.BY_PARAMETER, Placement.BY_PARAMETER)
    gradients_type = PipelineGradients
    gradients: PipelineGradients
    holdings_type = PipelineHoldings
    holdings: PipelineHoldings
    options: Pipeline

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        #: This rank's stage, or all stages of a single process.
        self._stages: list[Stage] = []
        self._num_forwards = 0

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        if len(process.devices) > 1 and process.request != "auto":
            raise BackendError(
                f"A pipeline uses one device per rank, but this process has {len(process.devices)}. "
                "Start one process per device: torchrun --nproc-per-node=N train.py"
            )
        check_module(module, options.balance, process.place.world_size)
        if process.place.world_size > 1:
            refuse_overlaps(module, cls.name)

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse | None:
        return predict(module, tensors, options.balance, world_size)

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """All ranks hold one model together."""
        return 0, 1

    def wrap(self) -> None:
        if self.entry is not self.module or self.module._compiled_call_impl is not None:
            self.compile()

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise BackendError(
            "A pipeline calls the children of an nn.Sequential, so compiling it has no effect. "
            "Compile the children: for child in model: child.compile()"
        )

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Take rank 0's weights, and keep the own stage. Collective."""
        super().start(optimizers)
        if self.holdings.divided:
            for optimizer in optimizers:
                self.holdings.keep_stage(optimizer)
        elif not self._stages:
            place = self.process.place
            stages = split(self.module, self.options.balance or "size", place.world_size)
            if self.distributed:
                self.holdings.divide(stages)
                stages = [stages[place.rank]]
                for _, child in stages[0] if self.reads else ():
                    convert_module(child, self.process.device, None, ExitStack())
            self._stages = [Stage(children) for children in stages]

    def attach(self, optimizer: Optimizer) -> None:
        if self.distributed and isinstance(optimizer, LBFGS):
            raise OptimizerError(
                "LBFGS needs all parameters, but each rank of a pipeline has those of its stage. "
                "Use an optimizer that treats parameters independently, such as AdamW."
            )
        super().attach(optimizer)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        self._stages = []
        if self.holdings.divided:
            self.holdings.end()
            if self.ended:
                raise lost_weights(self)

    def run(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if function is not self.entry:
            return function(*args, **kwargs)
        if len(args) != 1 or kwargs:
            raise TypeError(
                f"nn.Sequential takes one input, but got {len(args)} and {list(kwargs)}"
            )
        tensors, form = flatten(args[0], "input")
        rows = split_rows(tensors, self.options.chunks)
        if len(rows) > 1:
            check_batchnorm(self.module)
        number_kept = {"always": 0, "except_last": 1, "never": len(rows)}[self.options.checkpoint]
        keep = [number >= len(rows) - number_kept for number in range(len(rows))]
        if self.distributed:
            return self._run_over_ranks(tensors, form, rows, keep)
        return run_all(self._stages, tensors, form, rows, keep)

    def _run_over_ranks(
        self, tensors: list[torch.Tensor], form: Any, rows: Rows, keep: list[bool]
    ) -> Any:
        mask = self.mask.now()
        self._num_forwards += 1
        what = f"forward {self._num_forwards} of a pipeline ({self.label})"
        shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        facts = {
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "the structure of the batch": _crc((form, shapes)),
            "requires_grad of the parameters": _crc(mask),
            "train() or eval() of a layer": _crc([m.training for m in self.module.modules()]),
        }
        kind = "training" if torch.is_grad_enabled() else "evaluation"
        channel = self.gradients.channel
        channel.compare(what, facts, kind, tensors, SAME_BATCH)
        self.mask.known = mask
        run = Pass(channel, self._stages[0], what, self._num_forwards, rows, keep)
        return run.run(tensors, form)


def _crc(value: object) -> int:
    """Return a number that is the same for equal values on all ranks."""
    return zlib.crc32(repr(value).encode())

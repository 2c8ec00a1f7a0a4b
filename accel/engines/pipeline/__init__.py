"""``pipeline``: an nn.Sequential in stages, with micro-batches and activation checkpointing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from ...errors import BackendError, OptimizerError, PrecisionError
from ...precision import convert_module
from ...process import Process
from ...shard import Shard, StateEntry
from ...trees import put_back
from ..base.absent import OF_ITSELF, Absent, blank, bring_back, name_of, take_away
from ..base.engine import Engine, lost_weights
from ..base.gather import Item
from ..base.gradients import Gradients, refuse_overlaps
from ..base.holdings import Holdings
from ..base.memory import MemoryUse, TensorSize, add_uses
from ..base.options import Options
from ..base.placement import Placement, Placements
from .passes import Channel, forward
from .stages import (
    Stage,
    check_batchnorm,
    check_module,
    concatenate,
    flatten,
    micro_batches,
    sizes_of,
    stages_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Options):
    """Options of ``pipeline``.

    Args:
        balance: the number of children in each stage, or "size" to give the stages about equally
            many bytes of parameters.
        chunks: the number of micro-batches, which are split along dim 0, so that stages work at the
            same time. Smaller batches have fewer.
        checkpoint: the micro-batches whose activations are computed again in backward.
    """

    balance: Sequence[int] | Literal["size"] = "size"
    chunks: int = 1
    checkpoint: Literal["always", "except_last", "never"] = "except_last"

    choices = {"checkpoint": ("always", "except_last", "never")}

    def check_values(self) -> None:
        if isinstance(self.balance, list):
            object.__setattr__(self, "balance", tuple(self.balance))
        counts: Any = self.balance if isinstance(self.balance, tuple) else ()
        valid = all(type(count) is int and count > 0 for count in counts)
        valid &= self.balance == "size" or bool(counts)
        self.expect("balance", valid, 'the number of children in each stage, or "size"')


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

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} needs {self.place}. Read weights with "
            "accel.full_state_dict(model), and write them with model.load_state_dict()."
        )


@final
class PipelineHoldings(Holdings):
    """The weights and optimizer state of this rank's stage.

    A rank keeps the names and shapes of the other stages, because loops list all parameters.
    """

    engine: PipelineEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._rank = engine.process.place.rank
        #: The stage of each child. Empty while every rank holds all children.
        self.stage_of: dict[str, int] = {}

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        return True

    def has(self, name: str) -> bool:
        return not self.stage_of or self._owner(name) == self._rank

    def _owner(self, name: str) -> int:
        # Parameters of the Sequential itself are on rank 0.
        return self.stage_of.get(name.partition(".")[0], 0)

    def partial(self, optimizer: Optimizer | None) -> bool:
        return bool(self.stage_of)

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        return super().part(name, tensor, key) if self.has(name) else None

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        return [entry for entry in super().entries(optimizer) if self.has(entry.name)]

    def _tensors(self) -> dict[str, torch.Tensor]:
        module = self.engine.module
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def divide(self, stage_of: dict[str, int]) -> None:
        """Keep this rank's stage, and free the memory of the other stages. Local."""
        self.stage_of = stage_of
        for name, tensor in self._tensors().items():
            if self.has(name):
                continue
            tensor.grad = None
            if isinstance(tensor, nn.Parameter):
                place = f"{name}, which is on rank {self._owner(name)} of the pipeline"
                take_away(tensor, Elsewhere, place=place)
            else:
                tensor.data = blank(tensor)

    def gather_stages(self) -> None:
        """Give every rank all stages, unless the other ranks take no part. Collective."""
        tensors = self._tensors()
        others = {name: t for name, t in tensors.items() if not self.has(name)}
        for tensor in others.values():
            if isinstance(tensor, nn.Parameter):
                bring_back(tensor)
        if not self.engine.ended:
            items: list[Item] = [(name, "", tensor.data) for name, tensor in tensors.items()]
            items += [(name, "extra", value) for name, value in self.values(None).items()]
            full = self.gather("the end of a pipeline", [*items, *self.gradients()])
            for name, tensor in others.items():
                tensor.data = full[name, ""]
                tensor.grad = full.get((name, "grad"))
            extra: dict[str, Any] = {}
            for (name, key), value in full.items():
                if key == "extra" and not self.has(name):
                    extra[name] = value
            self.fill(None, extra)
        self.stage_of = {}


# -- gradients and forwards -----------------------------------------------------------------------


@final
class PipelineGradients(Gradients):
    """Gradients that are final after backward, on the rank of their stage."""

    engine: PipelineEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.channel = Channel(engine.process, engine.label)

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        if outermost:
            if self.channel.in_backward and not completed:
                self.channel.fail("backward")
            self.channel.in_backward = False
        super().backward_ends(completed, outermost)

    def parts(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [p.grad for p in parameters if p.grad is not None], []

    def before_step(self, optimizer: Optimizer) -> None:
        # The usual loop with a GradScaler would skip the step on some ranks only.
        if self.engine.distributed and getattr(optimizer, "found_inf", None) is not None:
            raise PrecisionError(
                "GradScaler sees the overflows of a single pipeline stage on each rank. "
                'Use precision="16-mixed" and accel.backward(loss).'
            )


@final
class PipelineEngine(Engine):
    """Runs one stage on each rank. A single process runs all children."""

    name = "pipeline"
    options_type = Pipeline
    placements = Placements(Placement.BY_PARAMETER, Placement.BY_PARAMETER, Placement.BY_PARAMETER)
    gradients_type = PipelineGradients
    gradients: PipelineGradients
    holdings_type = PipelineHoldings
    holdings: PipelineHoldings
    options: Pipeline

    #: This rank's stage.
    stage: Stage | None = None

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        check_module(module, options.balance, process.place.world_size)
        if process.place.world_size > 1:
            refuse_overlaps(module, cls.name)

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse | None:
        """Return the bytes of the largest stage."""
        try:
            check_module(module, options.balance, world_size)
        except BackendError:
            return None
        if world_size == 1:
            return super().predict(module, tensors, options, world_size)
        stage_of = stages_of(module, options.balance, world_size)
        uses = defaultdict[int, list[MemoryUse]](list)
        for tensor in tensors:
            child = tensor.name.partition(".")[0]
            uses[stage_of.get(child, 0)].append(tensor.use())
        return max(map(add_uses, uses.values()), key=lambda use: use.total, default=MemoryUse())

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """All ranks hold one model together."""
        return 0, 1

    def attach(self, optimizer: Optimizer) -> None:
        # PyTorch's time_sequence_prediction example trains with LBFGS.
        if self.distributed and isinstance(optimizer, LBFGS):
            raise OptimizerError(
                "LBFGS needs all parameters, but a rank of a pipeline has those of its stage. "
                "Use an optimizer that treats parameters independently, such as AdamW."
            )
        super().attach(optimizer)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Take rank 0's weights, and keep this rank's stage. Collective."""
        super().start(optimizers)
        if self.stage is None:
            children: Any = dict(self.module._modules)
            if self.distributed:
                # From here on a checkpoint, state_dict() and teardown() gather the stages.
                place = self.process.place
                stage_of = stages_of(self.module, self.options.balance, place.world_size)
                self.holdings.divide(stage_of)
                children = {n: c for n, c in children.items() if stage_of[n] == place.rank}
                for child in children.values() if self.reads else ():
                    convert_module(child, self.process.device, None, ExitStack())
            self.stage = Stage(children)
        for optimizer in self.optimizers:
            self.holdings.drop_others(optimizer)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        self.stage = None
        if self.holdings.stage_of:
            self.holdings.gather_stages()
            if self.ended:
                raise lost_weights(self)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return (self._forward if function is self.entry else function)(*args, **kwargs)

    def _forward(self, input: Any) -> Any:
        assert self.stage is not None
        tensors, form = flatten(input, "input")
        sizes = sizes_of(tensors, self.options.chunks)
        count = len(sizes)
        if count > 1:
            check_batchnorm(self.module)
        first_kept = {"always": count, "except_last": count - 1, "never": 0}
        keep = [number >= first_kept[self.options.checkpoint] for number in range(count)]
        if not self.distributed:
            values = [put_back(form, batch) for batch in micro_batches(tensors, sizes)]
            return concatenate(list(map(self.stage.run, values, keep)), sizes)
        channel = self.gradients.channel
        # Evaluation may have a different loader, so its first batches are compared too.
        kind = "" if torch.is_grad_enabled() else "forward"
        channel.same.call(lambda: None, (tensors,), {}, kind)
        try:
            return forward(channel, self.stage, tensors, form, sizes, keep)
        except BaseException:
            channel.fail("forward")
            raise

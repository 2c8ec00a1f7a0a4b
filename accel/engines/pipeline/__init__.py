"""``pipeline``: an nn.Sequential in stages, with micro-batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ...errors import BackendError
from ...precision import convert_module
from ...process import Process
from ...shard import Shard, StateEntry
from ..base.absent import OF_ITSELF, Absent, blank, bring_back, name_of, take_away
from ..base.engine import Engine, lost_weights
from ..base.gather import Item
from ..base.holdings import Holdings
from ..base.memory import MemoryUse, TensorSize, add_uses
from ..base.options import Options
from ..base.placement import Placement, Placements
from ..base.raw_objects import Args, Function, Kwargs
from ..base.refusals import refuse_overlaps
from .passes import PipelineGradients, forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Options):
    """Options of ``pipeline``.

    Args:
        balance: the number of children in each stage, or "size" to give all
            stages about the same number of bytes.
        chunks: the number of micro-batches. A batch is split along dim 0, so that
            stages work at the same time. A small batch has fewer.
        checkpoint: the micro-batches that recompute activations in backward.
    """

    balance: Sequence[int] | Literal["size"] = "size"
    chunks: int = 1
    checkpoint: Literal["always", "except_last", "never"] = "except_last"

    choices = {"checkpoint": ("always", "except_last", "never")}

    def check_values(self) -> None:
        if isinstance(self.balance, list):
            object.__setattr__(self, "balance", tuple(self.balance))
        counts: Any = self.balance
        valid = counts == "size"
        if isinstance(counts, tuple) and counts:
            valid = all(type(count) is int and count > 0 for count in counts)
        self.expect("balance", valid, 'the number of children in each stage, or "size"')


# -- stages ---------------------------------------------------------------------------------------


def stages_by_weight(weights: Sequence[float], count: int) -> list[int]:
    """Return a stage for each child. Stages weigh about the same."""
    stages: list[int] = []
    total = sum(weights) or 1
    before, last = 0.0, -1
    for number, weight in enumerate(weights):
        middle = (before + weight / 2) / total
        stage = min(max(int(count * middle), last), last + 1, count - 1)
        # Each later stage needs at least one child.
        last = max(stage, count - len(weights) + number)
        stages.append(last)
        before += weight
    return stages


def stages_of(module: nn.Module, balance: Any, world_size: int) -> dict[str, int]:
    """Return the stage of each child. "size" balances their bytes."""
    # children() would skip the second use of a module, for example of one nn.ReLU.
    children: Any = module._modules
    stages: list[int] = []
    if isinstance(balance, str) or world_size == 1:
        weights: list[int] = []
        for child in children.values():
            weights.append(sum(t.nbytes for t in (*child.parameters(), *child.buffers())))
        stages = stages_by_weight(weights, world_size)
    else:
        for number, size in enumerate(balance):
            stages += [number] * size
    return dict(zip(children, stages, strict=True))


def owner(name: str, stage_of: Mapping[str, int]) -> int:
    """Return a tensor's rank. The Sequential's own are on rank 0."""
    return stage_of.get(name.partition(".")[0], 0)


def check_module(module: nn.Module, balance: Any, world_size: int) -> None:
    """Raise BackendError if the module can't be split into stages."""
    # A subclass may have its own forward, for example to return features too.
    if getattr(type(module), "forward", None) is not nn.Sequential.forward:
        raise BackendError(
            f"A pipeline needs an nn.Sequential, but {type(module).__name__} "
            'has its own forward. Rewrite it, or use backend="fsdp".'
        )
    if world_size == 1:
        return
    count = len(module._modules)
    fits = count >= world_size
    if not isinstance(balance, str):
        fits = len(balance) == world_size and sum(balance) == count
    if not fits:
        raise BackendError(
            f"Pipeline(balance={balance!r}) doesn't fit {count} children and "
            f"{world_size} ranks. Give the number of children on each rank."
        )
    # Two stages would train a language model's tied embedding and head separately.
    first_names: dict[int, str] = {}
    stage_of = stages_of(module, balance, world_size)
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    for name, tensor in (*parameters, *buffers):
        first = first_names.setdefault(id(tensor), name)
        if owner(first, stage_of) != owner(name, stage_of):
            raise BackendError(
                f"{first} and {name} are one tensor in two stages. "
                "Put them into one stage with balance=[...], or untie them."
            )


def check_batchnorm(module: nn.Module) -> None:
    """Raise BackendError for BatchNorm in training mode."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            raise BackendError(
                f"{name} would normalize each micro-batch separately. "
                "Use Pipeline(chunks=1), or nn.GroupNorm, or call eval() on it."
            )


# -- parameters and optimizer state ---------------------------------------------------------------


class Elsewhere(Absent, nn.Parameter):
    """A parameter of another stage, with a name and shape, but no values."""

    plain = OF_ITSELF
    place: str

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} needs {self.place}. Use "
            "accel.full_state_dict(model) or model.load_state_dict()."
        )


@final
class PipelineHoldings(Holdings):
    """This rank's stage, and names and shapes of the other stages."""

    engine: PipelineEngine
    #: The stage of each child. Empty while every rank holds all children.
    stage_of: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        return True

    def has(self, name: str) -> bool:
        rank = self.engine.process.place.rank
        return not self.stage_of or owner(name, self.stage_of) == rank

    def partial(self, optimizer: Optimizer | None) -> bool:
        return bool(self.stage_of)

    def part(self, name: str, tensor: Tensor, key: Any = "") -> Shard | None:
        return super().part(name, tensor, key) if self.has(name) else None

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        return list(filter(lambda entry: self.has(entry.name), super().entries(optimizer)))

    def _tensors(self) -> dict[str, Tensor]:
        return self.engine.named | dict(self.engine.module.named_buffers())

    def divide(self, stage_of: dict[str, int]) -> None:
        """Keep this rank's stage, and free other stages' memory. Local."""
        self.stage_of = stage_of
        for name, tensor in self._tensors().items():
            if self.has(name):
                continue
            tensor.grad = None
            if isinstance(tensor, nn.Parameter):
                place = f"{name}, which is on rank {owner(name, stage_of)} of the pipeline"
                take_away(tensor, Elsewhere, place=place)
            else:
                tensor.data = blank(tensor)

    def gather_stages(self) -> None:
        """Gather all stages, unless process groups ended. Collective."""
        items: list[Item] = list(self.gradients())
        for name, value in self.values(None).items():
            items.append((name, "extra", value))
        others: dict[str, Tensor] = {}
        for name, tensor in self._tensors().items():
            if not self.has(name):
                others[name] = tensor
                if isinstance(tensor, nn.Parameter):
                    bring_back(tensor)
            items.append((name, "data", tensor.data))
        full = {} if self.engine.ended else self.gather("the end of a pipeline", items)
        for (name, key), value in full.items():
            if key == "extra":
                self.fill(None, {name: value})
            elif name in others:
                setattr(others[name], key, value)
        self.stage_of = {}


# -- the engine -----------------------------------------------------------------------------------


@final
class PipelineEngine(Engine):
    """Runs a stage on each rank."""

    name = "pipeline"
    options_type = Pipeline
    placements = Placements(*[Placement.BY_PARAMETER] * 3)
    gradients_type = PipelineGradients
    gradients: PipelineGradients
    holdings_type = PipelineHoldings
    holdings: PipelineHoldings
    options: Pipeline

    #: This rank's children, or None if a single process runs the whole module.
    stage: nn.Sequential | None = None

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
        uses: list[list[MemoryUse]] = [[] for _ in range(world_size)]
        stage_of = stages_of(module, options.balance, world_size)
        for tensor in tensors:
            uses[owner(tensor.name, stage_of)].append(tensor.use())
        return max(map(add_uses, uses), key=lambda use: use.total)

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """Return one place, because ranks share a model."""
        return 0, 1

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Take rank 0's weights and keep this rank's stage. Collective."""
        super().start(optimizers)
        if self.distributed and self.stage is None:
            place = self.process.place
            stage_of = stages_of(self.module, self.options.balance, place.world_size)
            # From now on, checkpoints, state_dict() and teardown() gather the stages.
            self.holdings.divide(stage_of)
            own: OrderedDict[str, nn.Module] = OrderedDict()
            for name, stage in stage_of.items():
                if stage == place.rank:
                    own[name] = self.module.get_submodule(name)
            self.stage = nn.Sequential(own)
            if self.reads:
                convert_module(self.stage, self.process.device, None, ExitStack())
        for optimizer in self.optimizers:
            self.holdings.drop_others(optimizer)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        self.stage = None
        if self.holdings.stage_of:
            self.holdings.gather_stages()
            if self.ended:
                raise lost_weights(self)

    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        if self.stage is None or function is not self.entry:
            return function(*args, **kwargs)
        if self.options.chunks > 1:
            check_batchnorm(self.module)
        return forward(self.gradients, self.stage, self.options, *args, **kwargs)

"""``pipeline``: a Sequential cut into stages, with micro-batches and activation checkpointing."""

from __future__ import annotations

import functools
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
from ..base.absent import OF_ITSELF, Absent, blank, bring_back, name_of, plainly, take_away
from ..base.engine import Context, Engine, Options, lost_weights
from ..base.gather import Item
from ..base.gradients import Gradients, refuse_overlaps
from ..base.holdings import Holdings
from ..base.memory import MemoryUse, TensorSize
from ..base.raw_objects import refuse_call
from ..base.step import refuse_steps
from .passes import SAME_BATCH, Channel, Pass, crc, meet
from .stages import (
    Named,
    Stage,
    check_forward,
    check_module,
    count_stages,
    cut,
    flatten,
    listed,
    predict,
    run_here,
    split,
)

# -- what of a model lies on which rank ---------------------------------------------------------------------------------


class Elsewhere(Absent, nn.Parameter):
    """A parameter of another rank's stage."""

    # Asked for its gradient, autograd would find no way to it: with `allow_unused` there were none, without a word.
    plain = OF_ITSELF - {torch.autograd.grad}
    extra = ("place",)
    place: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What ``model.to(...)`` does with each parameter, it may do with one that is away too."""
        setting = getattr(func, "__name__", "") == "__set__"  # of its data, which may be a property of accel's own
        if setting and getattr(args[0], "place", "") == getattr(args[1], "place", None):
            return plainly(func)(*args)
        return super().__torch_function__(func, types, args, kwargs)

    def converted(self, made: torch.Tensor) -> nn.Parameter:
        there = nn.Parameter(blank(made.detach()), self.requires_grad)
        vars(there)["place"] = self.place
        there.__class__ = Elsewhere
        return there

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)}: {self.place}"

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} uses {self.place}: a loss may use the pipeline's output, not its parameters; read weights by "
            "accel.full_state_dict(model), and set them by load_state_dict of the model's handle, on every rank"
        )


@final
class PipelineHoldings(Holdings):
    """This rank's stage, once the stages are apart: the others' tensors hold no memory here, and reading them is an error."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._rank = engine.process.place.rank
        #: Of each child; empty while every rank holds everything.
        self._stage_of: dict[str, int] = {}
        self._hooks = ExitStack()
        #: The parameters of other ranks.
        self.away: list[tuple[str, nn.Parameter]] = []

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        return True

    @property
    def divided(self) -> bool:
        return bool(self._stage_of)

    def owner(self, name: str) -> int:
        """The rank that owns what has this name; what is in no child is the first rank's."""
        return self._stage_of.get(name.partition(".")[0], 0)

    def has(self, name: str) -> bool:
        return not self.divided or self.owner(name) == self._rank

    def partial(self, optimizer: Optimizer | None) -> bool:
        return self.divided

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        return super().part(name, tensor, key) if self.has(name) else None

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        return [entry for entry in super().entries(optimizer) if self.has(entry.name)]

    def gradients(self) -> Iterator[Item]:
        return ((name, key, value) for name, key, value in super().gradients() if self.has(name))

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        return [] if self.divided else super().replicas()

    def divide(self, stages: Sequence[Sequence[Named]]) -> None:
        """Keep this rank's stage, and free the memory of the others."""
        module: nn.Module = self.engine.module
        self._stage_of = {name: number for number, stage in enumerate(stages) for name, _ in stage}
        own = [child for _, child in stages[self._rank]]
        for number, stage in enumerate(stages):
            for name, child in stage:
                if not any(child is mine for mine in own):  # an activation, say, may stand in several stages
                    text = f"child {name!r} of this pipeline lies on rank {number}: call the handle, on all ranks"
                    refuse = functools.partial(refuse_call, BackendError, text)
                    self._hooks.callback(child.register_forward_pre_hook(refuse).remove)
        here = {id(part) for child in own for part in child.modules()}
        self.guard.watch_modules(module, lambda part: id(part) not in here)
        self.away = [(name, p) for name, p in module.named_parameters() if not self.has(name)]
        for name, tensor in self._elsewhere().items():
            tensor.grad = None
            if isinstance(tensor, nn.Parameter):
                place = f"{name}, which lies on rank {self.owner(name)} of this pipeline"
                take_away(tensor, Elsewhere, place=place)
            else:
                tensor.data = blank(tensor)
        for optimizer in self.engine.optimizers:
            self.keep_stage(optimizer)

    def _elsewhere(self) -> dict[str, torch.Tensor]:
        module: nn.Module = self.engine.module
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {name: tensor for name, tensor in tensors.items() if not self.has(name)}

    def keep_stage(self, optimizer: Optimizer) -> None:
        self.drop_others(optimizer)
        self.guard.watch(optimizer)

    def end(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the children be called and copied again, and give every rank everything, unless it is alone. Collective."""
        self.guard.release_modules()
        self._hooks.close()
        for _, parameter in self.away:
            bring_back(parameter)
        if not self.engine.ended:
            self._unite(optimizers)
        self._stage_of, self.away = {}, []

    def _unite(self, optimizers: Sequence[Optimizer]) -> None:
        names = dict(self.engine.module.named_parameters())
        for optimizer in optimizers:
            self.drop_others(optimizer)
            self.give_back("the end of a pipeline", optimizer, names)
        held = [(name, "", tensor.data) for name, tensor in [*names.items(), *self.engine.module.named_buffers()]]
        extra = [(name, "extra", value) for name, value in self.values(None).items()]
        whole = self.gather("the end of a pipeline", [*held, *self.gradients(), *extra])
        for name, tensor in self._elsewhere().items():
            tensor.data = whole[name, ""]
            tensor.grad = whole.get((name, "grad"))
        self.fill(None, {n: value for (n, key), value in whole.items() if key == "extra" and not self.has(n)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Options):
    """Options of ``pipeline``.

    Args:
        balance: the number of children of each stage; "size" makes the stages' bytes of parameters as equal as can be; None is
            "size".
        chunks: micro-batches that each batch is cut into along dim 0, so that the stages work at the same time; fewer
            where the batch has fewer samples.
        checkpoint: which micro-batches keep no activations and compute them again in backward.
    """

    balance: Sequence[int] | Literal["size"] | None = None
    chunks: int = 1
    checkpoint: Literal["always", "except_last", "never"] = "except_last"

    def check_values(self) -> None:
        balance: Any = "size" if self.balance is None else self.balance
        if isinstance(balance, Sequence) and not isinstance(balance, str):
            balance = tuple(balance)
            if not balance or any(type(n) is not int or n < 1 for n in balance):
                raise BackendError(f"Pipeline(balance={self.balance!r}): expected at least one child for each stage")
        elif balance != "size":
            raise BackendError(f"Pipeline(balance={balance!r}): expected a list of ints or 'size'")
        object.__setattr__(self, "balance", balance)


@final
class PipelineGradients(Gradients):
    """Final after backward, on the rank of their stage, which steps them."""

    spread = partial = True
    engine: PipelineEngine

    @property
    def in_parts(self) -> bool:
        return self.engine.distributed

    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [p.grad for p in parameters if p.grad is not None], []

    def steps_part(self, optimizer: Optimizer) -> bool:
        return self.engine.holdings.divided

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse gradients of what lies on other ranks, and a scaler that looked at this stage alone."""
        holdings = self.engine.holdings
        if away := [name for name, parameter in holdings.away if parameter.grad is not None]:
            raise BackendError(
                f"{', '.join(away[:5])} has a gradient on rank {self.process.place.rank}, but lies on rank "
                f"{holdings.owner(away[0])}: a loss may use the pipeline's output, not its parameters"
            )
        if holdings.divided and getattr(optimizer, "found_inf", None) is not None:
            raise PrecisionError(
                "a GradScaler sees the overflow of one stage only, on each rank of a pipeline: use accel.backward(loss)"
            )


@final
class PipelineEngine(Engine):
    """Over several ranks each one runs, and holds, its stage; in one process all stages run on its device."""

    name = "pipeline"
    options_type = Pipeline
    gradients_type = PipelineGradients
    holdings_type = PipelineHoldings
    holdings: PipelineHoldings
    options: Pipeline

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self._balance = self.options.balance or "size"
        self._children: list[Named] = list(module._modules.items())  # type: ignore[arg-type]
        self._batchnorms = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._stages: list[Stage] = []
        self._channel = Channel(context.process)
        self._num_forwards = 0

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        if len(process.devices) > 1 and process.request != "auto":
            raise BackendError(
                f"A pipeline uses one device per rank, but this process has {len(process.devices)}. Start one process per "
                "device: torchrun --nproc-per-node=N train.py"
            )
        check_module(module, options.balance, process)
        if process.place.world_size > 1:
            refuse_overlaps(module, cls.name)

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse | None:
        """Balance by size, unless ``balance`` is a list for so many ranks."""
        return predict(module, tensors, options.balance or "size", world_size)

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """All ranks hold one model together."""
        return 0, 1

    def wrap(self) -> None:
        if self.entry is not self.module or self.module._compiled_call_impl is not None:
            self.compile()
        if not self.distributed:
            balance = listed(self._balance, self._children, count_stages(self._balance, self.process))
            self._stages = [Stage(children) for children in split(self._children, balance)]

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise BackendError(
            "a pipeline calls the children of the Sequential, so a torch.compile of the whole never runs: compile "
            "the children instead (child.compile())"
        )

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Rank 0's weights, then each rank keeps its own stage of them."""
        super().start(optimizers)
        if self.holdings.divided:
            for optimizer in optimizers:
                self.holdings.keep_stage(optimizer)
        elif self.distributed:
            self._divide(listed(self._balance, self._children, self.process.place.world_size))

    def _divide(self, balance: Sequence[int]) -> None:
        stages = split(self._children, balance)
        self.holdings.divide(stages)
        for _, child in stages[self._channel.rank] if self.reads else ():
            convert_module(child, self.process.device, None, ExitStack())
        self._stages = [Stage(stages[self._channel.rank])]

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is not self.entry:
            return function(*args, **kwargs)
        if len(args) != 1 or kwargs:
            raise TypeError(f"a Sequential takes one input; got {len(args)} and {sorted(kwargs)}")
        tensors, form = flatten(args[0], "input")
        where = cut(tensors, self.options.chunks)
        count = len(where)
        check_forward(self.module, self._children, self._batchnorms, count)
        kept = {"always": 0, "except_last": 1, "never": count}[self.options.checkpoint]
        keep = [number >= count - kept for number in range(count)]
        if self.distributed:
            return self._run_over_ranks(tensors, form, where, keep)
        return run_here(self._stages, tensors, form, where, keep)

    def _run_over_ranks(
        self, tensors: list[torch.Tensor], form: Any, where: list[slice | None], keep: list[bool]
    ) -> Any:
        mask, what = self.mask.now(), f"forward {self._num_forwards} of a pipeline ({self.label})"
        self._num_forwards += 1
        facts = {
            "whether gradients are on": torch.is_grad_enabled(),
            "the form of the batch": crc((repr(form), [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors])),
            "requires_grad of the parameters": crc(mask),
            "train() or eval() of a layer": crc([m.training for m in self.module.modules()]),
        }
        meet(what, facts, SAME_BATCH)
        self.mask.known = mask
        grad = torch.is_grad_enabled() and (any(mask) or any(t.requires_grad for t in tensors))
        return Pass(self._channel, self._stages[0], what, where, keep, grad).run(tensors, form)

    def attach(self, optimizer: Optimizer) -> None:
        if self.distributed and isinstance(optimizer, LBFGS):
            raise OptimizerError(
                f"{type(optimizer).__name__} looks at all parameters together, but each rank of a pipeline has those of its "
                "stage: use an optimizer that treats each parameter by itself"
            )
        super().attach(optimizer)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        if self.holdings.divided:
            self.holdings.end(optimizers)
            if self.ended:
                for optimizer in optimizers:
                    refuse_steps(optimizer, self.ended)
                raise lost_weights(self)
        self._stages = []

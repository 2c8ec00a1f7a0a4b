"""What of a model that DeepSpeed divides lies on this rank: fragments of parameters, and of their optimizers' state."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...deferred import without_values
from ...errors import CheckpointError, OptimizerError
from ...precision import convert_optimizer
from ...shard import Shard, StateEntry
from ..base.absent import plainly
from ..base.gather import Item
from ..base.holdings import Holdings
from ..base.step import refuse_steps, take_added_groups
from .config import Configuration
from .library import without_groups
from .offload import level_steps, room
from .partitions import Fragment, Partitions

if TYPE_CHECKING:
    from . import DeepSpeedEngine

# -- checkpoints that DeepSpeed wrote ----------------------------------------------------------------------------------
# Checkpoints that DeepSpeed's own ``save_checkpoint`` wrote: whole tensors out of the ranks' partitions, under their names.

#: Classes whose objects are in these files; only their data is looked at.
_INERT: Final = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: Of DeepSpeed itself; what else is there is the user's ``client_state``.
_OWN: Final = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
     "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
     "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "mp_rank", "num_experts"}
)  # fmt: skip
Load = Callable[..., Any]
NewTensor = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def read(path: str, load: Load, new: NewTensor) -> dict[str, Any] | None:
    """The model, the optimizer and the user's values; None if it is no such checkpoint, CheckpointError if it is broken."""
    directory = _tagged(path)
    names = sorted(os.listdir(directory))
    models = [n for n in names if _MODEL.fullmatch(n)]
    if not models:
        return None
    layers = [n for n in names if n.startswith("layer_")]
    if layers or any(int(_MODEL.fullmatch(n)[2]) for n in models):  # type: ignore[index]
        raise CheckpointError(
            f"{directory} is of a tensor- or pipeline-parallel model ({(layers or models)[-1]}): not supported"
        )
    optimizers = [n for n in names if _OPTIMIZER.fullmatch(n)]
    try:
        saved = _ZeroCheckpoint(directory, models, optimizers, load, new)
        first = saved.models[0]
        state: dict[str, Any] = {"model": dict(saved.weights())}
        optimizer = saved.optimizer()
        if optimizer is not None:
            state["optimizer"] = optimizer
        return state | {k: v for k, v in first.items() if k not in _OWN and v is not None}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{directory} is not as DeepSpeed's save_checkpoint leaves it ({type(error).__name__}: {error})"
        ) from error


def _tagged(path: str) -> str:
    latest = os.path.join(path, "latest")
    if not os.path.isfile(latest):
        return path
    with open(latest, encoding="utf-8", errors="replace") as file:
        tag = file.read(300).strip()
    if not _TAG.fullmatch(tag) or not os.path.isdir(os.path.join(path, tag)):
        raise CheckpointError(f"{latest} names {tag!r}, which is not a directory beside it")
    return os.path.join(path, tag)


#: Where elements of a tensor lie: a rank, from where on in its part of a group; the first of them, and how many.
_Range = tuple[int, int, int, int]
#: The parts of one quantity: by group of the optimizer, by rank.
_Parts = list[list[torch.Tensor]]


@final
class _ZeroCheckpoint:
    def __init__(self, directory: str, models: list[str], optimizers: list[str], load: Load, new: NewTensor) -> None:
        self._new = new
        self.models = [load(os.path.join(directory, name), _INERT) for name in _by_rank(models, _MODEL)]
        first = self.models[0]
        world = first["dp_world_size"]
        self._ranks: list[dict[str, Any]] = []
        if optimizers:
            found = _by_rank(optimizers, _OPTIMIZER)
            if len(found) != world:
                raise CheckpointError(f"{directory} has the parts of {len(found)} ranks, and {world} saved")
            self._ranks = [load(os.path.join(directory, n), _INERT)["optimizer_state_dict"] for n in found]
        self._world = world
        self._whole = bool(self._ranks) and "fp32_flat_groups" in self._ranks[0]
        shapes = first["param_shapes"] if self._ranks else []
        self._groups: list[dict[str, torch.Size]] = [dict(group) for group in shapes]
        if self._whole and len(self.models) != world:
            raise CheckpointError(f"{directory} has the weights of {len(self.models)} ranks, and {world} saved")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's state dict; trained parameters in full precision."""
        first = self.models[0]
        module, shared = first["module"], first.get("shared_params") or {}
        masters = {}
        if self._ranks:
            key = "fp32_flat_groups" if self._whole else "single_partition_of_fp32_groups"
            parts = [[r[key][g] for r in self._ranks] for g in range(len(self._ranks[0][key]))]
            masters = dict(self._named(parts))
        frozen = first.get("frozen_param_shapes") or {} if self._whole else {}
        for name, value in module.items():
            if name in masters:
                yield name, masters[name]
            elif name in frozen:
                fragments = [m["frozen_param_fragments"][name] for m in self.models]
                yield name, self._assemble(frozen[name], fragments, self._cut(math.prod(frozen[name]), 0))
            elif name not in shared:
                if self._whole and name not in first["buffer_names"]:
                    raise ValueError(f"nothing is known of the parameter {name}")
                yield name, value
        if absent := masters.keys() - module.keys():
            raise ValueError(f"the module has no {min(absent)}")

    def optimizer(self) -> dict[str, Any] | None:
        """As a torch optimizer's state dict, with names for parameters where they are known."""
        if not self._ranks:
            state: dict[str, Any] | None = self.models[0].get("optimizer")
            return state
        key = "optimizer_state_dict" if self._whole else "base_optimizer_state"
        bases = [rank[key] for rank in self._ranks]
        if not isinstance(bases[0], Mapping):
            # It lacks the groups. Where the optimizer is wanted, this is refused by name; else it is left out.
            return {"state": {"partitions of an elastic checkpoint": {}}, "param_groups": [{"params": []}]}
        named_groups = zip(bases[0]["param_groups"], self._groups, strict=True)
        groups = [{**group, "params": list(names)} for group, names in named_groups]
        named: dict[str, dict[str, Any]] = {name: {} for group in self._groups for name in group}
        states = [[base["state"][i] for base in bases] for i in sorted(bases[0]["state"])]
        for entry in states[0][0] if states else ():
            values = [[state[entry] for state in ranks] for ranks in states]
            if isinstance(values[0][0], torch.Tensor) and values[0][0].dim():
                for name, whole in self._named(values):
                    named[name][entry] = whole
            else:
                for number, group in enumerate(self._groups):
                    for name in group:
                        named[name][entry] = values[0 if self._whole else number][0]
        return {"state": named if states else {}, "param_groups": groups}

    def _named(self, parts: _Parts) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of a quantity, by the parameters' names."""
        if self._whole:
            # The pieces of all parameters follow one another on each rank, through all groups.
            lines = [torch.cat([group[rank] for group in parts]) for rank in range(self._world)]
            at = 0
            for name, shape in (item for group in self._groups for item in group.items()):
                places = self._cut(math.prod(shape), at)
                yield name, self._assemble(shape, lines, places)
                at += -(-math.prod(shape) // self._world)
            if any(at != line.numel() for line in lines):
                raise ValueError(f"the parameters have {at} elements on a rank, and its part {lines[0].numel()}")
            return
        for number, (group, shapes) in enumerate(zip(parts, self._groups, strict=True)):
            at = 0
            for name, shape in shapes.items():
                places = self._overlaps(group, at, math.prod(shape))
                self._compare(number, name, places)
                yield name, self._assemble(shape, group, places)
                at += math.prod(shape)

    def _cut(self, numel: int, at: int) -> list[_Range]:
        """Every rank has an equal piece, the last ones padded."""
        size = -(-numel // self._world)
        having = [rank for rank in range(self._world) if rank * size < numel]
        return [(rank, at, rank * size, min(size, numel - rank * size)) for rank in having]

    @staticmethod
    def _overlaps(parts: Sequence[torch.Tensor], at: int, numel: int) -> list[_Range]:
        """Parameters follow one another through the ranks' parts."""
        found, begin = [], 0
        for rank, part in enumerate(parts):
            low, high = max(at, begin), min(at + numel, begin + part.numel())
            if low < high:
                found.append((rank, low - begin, low - at, high - low))
            begin += part.numel()
        return found

    def _compare(self, group: int, name: str, places: Sequence[_Range]) -> None:
        """DeepSpeed's own table of what lies where must say the same, where it is saved."""
        for rank, saved in enumerate(self._ranks):
            if "param_slice_mappings" not in saved:
                continue
            told = saved["param_slice_mappings"][group].get(name)
            mine = next(({"numel": count, "start": at} for holder, at, _, count in places if holder == rank), None)
            if mine != (None if told is None else dict(told.state)):
                raise ValueError(f"{name} lies elsewhere in the part of rank {rank} than its place in the groups says")

    def _assemble(self, shape: Sequence[int], parts: Sequence[torch.Tensor], places: Sequence[_Range]) -> torch.Tensor:
        whole = self._new(shape, parts[0].dtype)
        if sum(count for *_, count in places) != whole.numel():
            raise ValueError("a part of a tensor is missing")
        flat = whole.view(-1)
        for rank, at, start, count in places:
            flat[start : start + count].copy_(parts[rank].view(-1)[at : at + count])
        return whole


def _by_rank(names: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    ranks = {int(match[1] or 0): name for name in names if (match := pattern.fullmatch(name))}
    if sorted(ranks) != list(range(len(ranks))):
        raise CheckpointError(f"the file of a rank is missing: there are {', '.join(names)}")
    return [ranks[i] for i in range(len(ranks))]


logger = logging.getLogger("accel")


@final
class DeepSpeedHoldings(Holdings):
    """Fragments of what is divided; while the engine's ``zero`` is None, everything is whole."""

    engine: DeepSpeedEngine
    offloads = True
    packages = ("accel.", "deepspeed.runtime.zero.parameter_offload.")

    def added(self, owner: nn.Module | nn.Parameter) -> set[str]:
        zero = self.engine.zero
        return super().added(owner) | (set() if zero is None else zero.snapshot.added(owner))

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        return Configuration(options).stage == 3

    def partial(self, optimizer: Optimizer | None) -> bool:
        """The optimizers' state always; the model where it does not hold what they step."""
        zero = self.engine.zero
        return zero is not None and (optimizer is not None or zero.divides_weights or zero.masters)

    def prepare(self, *, writing: bool) -> None:
        """What the loop has written is taken over, or refused."""
        if not writing:
            self.engine.take_edits()

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        found: list[Shard] = plainly(super().shards)(optimizer)
        return found

    def without_effect(self, optimizer: Optimizer) -> list[int]:
        """The parameters under which its state has something, put there or only looked for, as in one process. Local.

        State of what is in none of its groups any more is kept as it is.
        """
        zero, state = self.engine.zero, optimizer.state
        if zero is None or zero.numbers.keys().isdisjoint(map(id, state)):  # each step comes here
            return []
        keys = set(map(id, state))
        return [i for i in self.engine.indices(optimizer) if id(self.engine.parameters[i]) in keys]

    def refuse_state(self, optimizer: Optimizer) -> None:
        """Refuse (OptimizerError) state that would have no effect."""
        if found := self.without_effect(optimizer):
            names = ", ".join(self.engine.names[i] for i in found[:5])
            raise OptimizerError(
                f"optimizer.state[parameter] of {names}: DeepSpeed stage {self.engine.stage} steps fragments, which are the "
                "keys of their state, so that nothing is there and what is put there has no effect: change or drop state "
                "through optimizer.state.values(), or by accel.full_state_dict(optimizer) and optimizer.load_state_dict"
            )

    def _fragment(self, name: str) -> tuple[bool, Fragment | None]:
        """Whether a parameter is divided, and this rank's part of it."""
        if (zero := self.engine.zero) is None or name not in zero.by_name:
            return False, None
        return True, zero.fragments.get(zero.by_name[name])

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        divided, fragment = self._fragment(name)
        if not divided:
            return super().part(name, tensor, key)
        shape = tuple(self.shapes[name])
        if not key:
            if fragment is None:  # of a parameter without elements no rank has one
                return None if torch.Size(shape).numel() else super().part(name, tensor)
            return Shard(name, shape, fragment.start, fragment.weights)
        if fragment is None or tensor.shape != fragment.weights.shape or (key == "step" and tensor.numel() == 1):
            return super().part(name, tensor, key)
        return Shard(f"{name}/{key}", shape, fragment.start, tensor)

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        if (zero := self.engine.zero) is None:
            return super().entries(optimizer)
        take_added_groups(self.engine, optimizer)
        self.refuse_state(optimizer)
        found = []
        for index in self.engine.indices(optimizer):
            if (fragment := zero.fragments.get(index)) is not None:
                name, state = self.engine.names[index], optimizer.state.get(fragment.weights, {})
                found.append(StateEntry(name, tuple(zero.shapes[index]), fragment.weights, state))
        return found

    def take(self, optimizer: Optimizer, whole: Mapping[str, Mapping[Any, Any]]) -> None:
        groups, copies = self.groups(optimizer), {name: dict(state) for name, state in whole.items()}
        states = ([s for name, s in copies.items() if groups.get(name) is g] for g in optimizer.param_groups)
        level_steps(optimizer, states)
        super().take(optimizer, copies)

    def new_state(self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        divided, _ = self._fragment(entry.name)
        shape = tuple(entry.parameter.shape) if divided and shape == entry.shape else shape
        made = super().new_state(entry, key, shape, dtype)
        return room(made, self.engine.configuration.state_folder) if divided else made

    @classmethod
    def read_foreign(cls, path: str, load: Any, new: Any) -> dict[str, Any] | None:
        return read(path, load, new)

    def gradients(self) -> Iterator[Item]:
        assert self.engine.zero is not None  # it is called by `restore`
        for index, fragment in self.engine.zero.fragments.items():
            if fragment.grad is not None:
                yield self.engine.names[index], "grad", fragment.grad

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        return [] if self.engine.zero is not None and self.engine.zero.divides_weights else super().replicas()

    def filled(self) -> None:
        if self.engine.zero is not None:
            self.engine.gradients.level_steps(self.engine.zero)
            self.engine.gradients.publish(self.engine.zero)

    def restore(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """Whole weights, gradients and optimizer state in the user's own objects. Collective."""
        engine, what = self.engine, "the end of a divided model"
        if lost := zero.take_edits():
            logger.warning("%s changed in place, which is lost", ", ".join(engine.names[i] for i in lost[:5]))
        named = engine.named
        held = [*((name, "", p) for name, p in named.items()), *self.gradients()]
        whole = self.gather(what, held, device=torch.device("cpu"))
        for optimizer in optimizers:
            self._drop_without_effect(optimizer)
            self.give_back(what, optimizer, named)
        # What accel made half becomes whole again from its fp32 copy.
        ours, device = {id(tensor) for tensor, _ in engine.dtypes}, engine.process.device
        dtypes = [None if id(p) in ours else p.dtype for p in named.values()]
        zero.end([whole.pop((name, "")) for name in named])
        for (name, parameter), dtype in zip(named.items(), dtypes, strict=True):  # the parts have gone, to make room
            parameter.data = parameter.data.to(device, dtype)
            if (name, "grad") in whole:
                parameter.grad = whole.pop((name, "grad")).to(device, parameter.dtype)
        with contextlib.ExitStack() as for_good:
            for optimizer in optimizers:
                convert_optimizer(optimizer, for_good)
            for_good.pop_all()

    def _drop_without_effect(self, optimizer: Optimizer) -> None:
        """With a warning, unless it was only looked for."""
        engine = self.engine
        found = {engine.names[i]: optimizer.state.pop(engine.parameters[i]) for i in self.without_effect(optimizer)}
        if lost := [name for name, state in found.items() if state]:
            logger.warning("optimizer.state[parameter] of %s, which had no effect, is lost", ", ".join(lost[:5]))

    def leave(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """The same without the other ranks: weights that this rank has a part of are nan, and its optimizers do not step."""
        for optimizer in optimizers:
            for fragment in zero.fragments.values():
                optimizer.state.pop(fragment.weights, None)
            refuse_steps(optimizer, self.engine.ended)
        with without_groups():
            divided = zero.divides_weights
            zero.end([without_values(p, p.device) if divided else p.detach().clone() for p in self.engine.parameters])

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's, and the fragments'; weights that only the optimizer has count as its state."""
        zero = self.engine.zero
        fragments = [] if zero is None else list(zero.fragments.values())
        again = (getattr(p, "ds_secondary_tensor", None) for p in self.engine.parameters)
        yield from (("parameters", part) for part in (*(f.home for f in fragments), *again) if part is not None)
        yield from super().storages()
        yield from (("gradients", fragment.grad) for fragment in fragments if fragment.grad is not None)
        yield from (("optimizer_state", fragment.weights) for fragment in fragments)
        yield from (("buckets", bucket) for bucket in ([] if zero is None else zero.buckets()))

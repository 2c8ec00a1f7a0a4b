"""Raw torch, accel, Accelerate and Fabric, each as its own documentation shows it."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accel

from .steps import Step
from .workloads import Workload

#: Packages of the rivals, by the names that the tables give them.
RIVALS = {"Accelerate": "accelerate", "Fabric": "lightning_fabric"}


def installed_rivals() -> list[str]:
    return [name for name, package in RIVALS.items() if importlib.util.find_spec(package) is not None]


class Counter:
    """A part of a loop's state that is neither model nor optimizer."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


State = dict[str, Any]


class Torch:
    """Plain torch on one process or several. ``sharded`` asks for FSDP2."""

    backward: Callable[..., Any] = staticmethod(torch.Tensor.backward)

    def __init__(self, sharded: bool = False) -> None:
        self.sharded = sharded

    def setup(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        if self.sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data_parallel",))
            model = _shard(model, mesh)
            return model, type(optimizer)(model.parameters(), lr=optimizer.defaults["lr"])
        return (DistributedDataParallel(model) if dist.is_initialized() else model), optimizer

    def evaluation(self, model: Any) -> Any:
        return model

    def save(self, folder: Path, state: State) -> None:
        torch.save({name: each.state_dict() for name, each in state.items()}, folder / "state.ckpt")

    def load(self, folder: Path, state: State) -> None:
        saved = torch.load(folder / "state.ckpt", weights_only=True)
        for name, each in state.items():
            each.load_state_dict(saved[name])


class Accel(Torch):
    def setup(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        backend = accel.FSDP(wrap=(nn.Linear,)) if self.sharded else "auto"
        return accel.setup(model, optimizer, backend=backend, devices="cpu")[:2]

    def evaluation(self, model: Any) -> Any:
        return accel.setup(model, devices="cpu").model

    def save(self, folder: Path, state: State) -> None:
        accel.save(state, folder)

    def load(self, folder: Path, state: State) -> None:
        accel.load(folder, state)


class Accelerate(Torch):
    def __init__(self, sharded: bool = False) -> None:
        from accelerate import Accelerator

        if sharded:
            raise NotImplementedError("Accelerate has no FSDP on CPU: given its plugin, it silently takes DDP")
        self.library = Accelerator(cpu=True)
        self.library.register_for_checkpointing(Counter())
        self.backward, self.setup = self.library.backward, self.library.prepare

    def evaluation(self, model: Any) -> Any:
        return self.library.prepare_model(model, evaluation_mode=True)

    def save(self, folder: Path, state: State) -> None:
        self.library.save_state(str(folder))

    def load(self, folder: Path, state: State) -> None:
        self.library.load_state(str(folder))


class Fabric(Torch):
    def __init__(self, sharded: bool = False) -> None:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import ModelParallelStrategy

        super().__init__(sharded)
        world = dist.get_world_size() if dist.is_initialized() else 1
        strategy: Any = "ddp" if world > 1 else "auto"
        if sharded:
            strategy = ModelParallelStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.library = Fabric(accelerator="cpu", devices=world, strategy=strategy)
            self.library.launch()
        self.backward, self.evaluation = self.library.backward, self.library.setup

    def setup(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        if not self.sharded:
            return self.library.setup(model, optimizer)
        # FSDP2 replaces the parameters. Its documentation makes the optimizer afterwards.
        model = self.library.setup(model)
        optimizer = type(optimizer)(model.parameters(), lr=optimizer.defaults["lr"])
        return model, self.library.setup_optimizers(optimizer)

    def save(self, folder: Path, state: State) -> None:
        self.library.save(folder / "state.ckpt", state)

    def load(self, folder: Path, state: State) -> None:
        self.library.load(folder / "state.ckpt", state)


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in [child for child in model.children() if isinstance(child, nn.Linear)]:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


LIBRARIES: dict[str, type[Any]] = {"accel": Accel, "raw torch": Torch, "Accelerate": Accelerate, "Fabric": Fabric}


def plain_step(workload: Workload, model: Any, optimizer: Any, backward: Callable[[Any], Any] = Torch.backward) -> Step:
    # Ranks with the same data would make accel warn.
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    inputs, targets = workload.batch()
    loss_of = workload.loss

    def step() -> None:
        optimizer.zero_grad()
        backward(loss_of(model(inputs), targets))
        optimizer.step()

    return step


def by_library(name: str, workload: Workload) -> Step:
    library = LIBRARIES[name]()
    return plain_step(workload, *library.setup(*workload.build()), library.backward)


def by_accel(workload: Workload, backend: Any) -> tuple[Any, Any]:
    handles = accel.setup(*workload.build(), backend=backend, devices="cpu")
    return handles.model, handles.optimizers

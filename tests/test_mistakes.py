"""Common slips in a call, each by the whole text of its error."""

from __future__ import annotations

import collections
import functools
import gc
import logging
import os
import re
import signal
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.__main__ import main
from accel.engines import resolve
from accel.registry import registry
from tests.backends import need
from tests.distributed import run


def net() -> nn.Module:
    return nn.Linear(2, 2)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(net().parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(4, 2)), 2)


def step(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


HOOKS = [name for name in vars(sgd()) if name.endswith("_hooks")]


class Wrapper(torch.optim.Optimizer):
    """As they are written where torch's own ``__init__`` is not called; some give it what it would have made."""

    def __init__(self, optimizer: torch.optim.Optimizer, hooks: Callable[[], object] | None = None) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        if hooks is not None:
            vars(self).update({name: hooks() for name in HOOKS})

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def wrapped(hooks: Callable[[], object] | None = None) -> Any:
    raw = net()
    return accel.setup(raw, Wrapper(torch.optim.SGD(raw.parameters(), lr=0.1), hooks))


def test_a_wrapper_that_has_what_torch_would_have_made_is_taken() -> None:
    model, optimizer, _ = wrapped(collections.OrderedDict)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor([torch.ones(1)], layout=torch.strided)


def given(act: Callable[[accel.Handles[Any, Any, Any]], object]) -> Callable[[], object]:
    """Does it with what ``setup`` returned."""

    def call() -> object:
        raw = net()
        return act(accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1)))

    return call


ANY: Any = accel
OPTIMIZER = "; expected a torch.optim.Optimizer: "
LOADER = "; expected a torch.utils.data.DataLoader: "
MODEL = "expected a torch.nn.Module as the model, got "
ORDER = "the order is accel.setup(model, optimizers, dataloaders)"
FIRST = ": give the model; in accel.setup it comes before its optimizers and dataloaders"
ITSELF = (
    "give the DataLoader itself, not what iterates over it; batches of another kind stay as they are, and accel.rank() "
    "tells whose they are"
)
WHOLE = ": give the model itself, not its parameters or its state"
UNPACK = (
    "accel.setup gives all three: model, optimizer, loader = accel.setup(model, optimizer, loader), or .model of it"
)
SWAPPED = (
    "expected the path of a directory, found a dict: the order is accel.save(state, dir) and accel.load(dir, state)"
)
NO_DICT = (
    "expected the state as a dict, found a Linear: a dict names what is in it, as in "
    'accel.save({"model": model, "optimizer": optimizer}, dir)'
)
BY_POSITION = "rguments of {0} go by position, or as functools.partial({0}, {1}=...)"
MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a scheduler": (
        lambda: ANY.setup(net(), step(sgd())),
        accel.OptimizerError,
        f"optimizers is a torch.optim.lr_scheduler.StepLR{OPTIMIZER}give the optimizer that this StepLR schedules; the "
        "scheduler stays as it is in the loop",
    ),
    "a wrapper of an optimizer that torch did not make": (
        wrapped,
        accel.OptimizerError,
        f"optimizers is a tests.test_mistakes.Wrapper{OPTIMIZER}give the one that this wraps, or call super().__init__(): "
        "without that of torch its steps call no hooks",
    ),
    "one with other hooks than torch makes": (
        lambda: wrapped(dict),
        accel.OptimizerError,
        f"optimizers is a tests.test_mistakes.Wrapper{OPTIMIZER}give the one that this wraps, or call super().__init__(): "
        "without that of torch its steps call no hooks",
    ),
    "a scheduler among optimizers": (
        lambda: ANY.setup(net(), {"all": step(sgd())}),
        accel.OptimizerError,
        f'optimizers["all"] is a torch.optim.lr_scheduler.StepLR{OPTIMIZER}give the optimizer that this StepLR schedules; '
        "the scheduler stays as it is in the loop",
    ),
    "parameters": (
        lambda: ANY.setup(net(), net().parameters()),
        accel.OptimizerError,
        f"optimizers is a generator{OPTIMIZER}give what steps them, as torch.optim.AdamW(model.parameters())",
    ),
    "parameters in a list": (
        lambda: ANY.setup(net(), list(net().parameters())),
        accel.OptimizerError,
        f"optimizers[0] is a torch.nn.parameter.Parameter{OPTIMIZER}give what steps them, as "
        "torch.optim.AdamW(model.parameters())",
    ),
    "a class of optimizers": (
        lambda: ANY.setup(net(), torch.optim.SGD),
        accel.OptimizerError,
        f"optimizers is the class torch.optim.sgd.SGD{OPTIMIZER}make one, SGD(model.parameters(), ...)",
    ),
    "a partial": (
        lambda: ANY.setup(net(), functools.partial(torch.optim.SGD, lr=0.1)),
        accel.OptimizerError,
        f"optimizers is a functools.partial{OPTIMIZER}call it, partial(model.parameters())",
    ),
    "a loss": (
        lambda: ANY.setup(net(), nn.MSELoss()),
        accel.OptimizerError,
        f"optimizers is a torch.nn.modules.loss.MSELoss{OPTIMIZER}a loss stays as it is in the loop, and each model has a "
        "call of accel.setup",
    ),
    "a loader in the optimizer's place": (
        lambda: ANY.setup(net(), loader()),
        accel.OptimizerError,
        f"optimizers is a torch.utils.data.dataloader.DataLoader{OPTIMIZER}{ORDER}",
    ),
    "a name": (lambda: ANY.setup(net(), "adam"), accel.OptimizerError, f"optimizers is a str{OPTIMIZER}{ORDER}"),
    "a scheduler in the loader's place": (
        lambda: ANY.setup(net(), None, step(sgd())),
        accel.LoaderError,
        f"dataloaders is a torch.optim.lr_scheduler.StepLR{LOADER}a scheduler stays as it is in the loop",
    ),
    "a dataset": (
        lambda: ANY.setup(net(), None, loader().dataset),
        accel.LoaderError,
        f"dataloaders is a torch.utils.data.dataset.TensorDataset{LOADER}wrap the dataset, DataLoader(dataset, "
        "batch_size=...)",
    ),
    "an iterator": (
        lambda: ANY.setup(net(), None, enumerate(loader())),
        accel.LoaderError,
        f"dataloaders is an enumerate{LOADER}{ITSELF}",
    ),
    "batches": (
        lambda: ANY.setup(net(), None, [torch.zeros(2, 2)]),
        accel.LoaderError,
        f"dataloaders[0] is a torch.Tensor{LOADER}{ITSELF}",
    ),
    "a class of loaders": (
        lambda: ANY.setup(net(), None, DataLoader),
        accel.LoaderError,
        f"dataloaders is the class torch.utils.data.dataloader.DataLoader{LOADER}make one, DataLoader(dataset, "
        "batch_size=...)",
    ),
    "an optimizer in the loader's place": (
        lambda: ANY.setup(net(), None, sgd()),
        accel.LoaderError,
        f"dataloaders is a torch.optim.sgd.SGD{LOADER}{ORDER}",
    ),
    "a class of modules": (
        lambda: ANY.setup(nn.Linear),
        accel.AccelError,
        f"{MODEL}the class torch.nn.modules.linear.Linear: make one, Linear(...)",
    ),
    "an optimizer in the model's place": (
        lambda: ANY.setup(sgd(), net()),
        accel.AccelError,
        f"{MODEL}a torch.optim.sgd.SGD{FIRST}",
    ),
    "several models": (
        lambda: ANY.setup([net(), net()]),
        accel.AccelError,
        f"{MODEL}a list: each model has a call of accel.setup of its own",
    ),
    "two dataloaders": (
        lambda: ANY.setup(net(), sgd(), [], []),
        accel.LoaderError,
        "accel.setup() takes all DataLoaders in one argument. Pass a tuple: "
        "accel.setup(model, optimizer, (train_loader, eval_loader)).",
    ),
    "a state dict": (
        lambda: ANY.setup(net().state_dict()),
        accel.AccelError,
        f"{MODEL}a collections.OrderedDict{WHOLE}",
    ),
    "a model's name": (lambda: ANY.setup("gpt2"), accel.AccelError, f"{MODEL}a str"),
    "clipping parameters": (
        lambda: ANY.clip_grad_norm_(net().parameters(), 1.0),
        accel.AccelError,
        f"{MODEL}a generator{WHOLE}",
    ),
    "no_sync of an optimizer": (
        given(lambda handles: ANY.no_sync(handles.optimizers)),
        accel.AccelError,
        f"{MODEL}an accel.handles.OptimizerHandle{FIRST}",
    ),
    "all handles for the model": (
        given(lambda handles: ANY.unwrap(handles)),
        accel.AccelError,
        f"{MODEL}an accel.handles.Handles: {UNPACK}",
    ),
    "a call of all handles": (
        given(lambda handles: ANY.setup(handles.model)(torch.ones(1, 2))),
        accel.AccelError,
        f"a Handles is no model: {UNPACK}",
    ),
    "an attribute of all handles": (
        given(lambda handles: handles.train()),  # type: ignore[attr-defined]
        AttributeError,
        f"'Handles' object has no attribute 'train': {UNPACK}",
    ),
    "what another wrapper has": (
        given(lambda handles: handles.model.module),
        AttributeError,
        "'Linear' object has no attribute 'module': a handle has the model's own attributes, methods and names; the model "
        "itself is accel.unwrap(model)",
    ),
    "what another library has": (
        lambda: ANY.prepare(net(), sgd()),
        AttributeError,
        "module 'accel' has no attribute 'prepare': the page docs/migrating.md tells what Accelerate's and Fabric's names "
        "are here",
    ),
    "a class of options": (
        lambda: ANY.setup(net(), backend=accel.FSDP),
        accel.BackendError,
        "backend=FSDP is the class of its options: accel.FSDP()",
    ),
    "an option that there is not": (
        lambda: ANY.DDP(find_unused=True),
        accel.BackendError,
        "DDP(find_unused=...): there is no such option; did you mean find_unused_parameters?",
    ),
    "an option like none": (
        lambda: ANY.Single(xyz=1),
        accel.BackendError,
        "Single(xyz=...): there is no such option; its options are drift_check, activation_checkpointing",
    ),
    "an option without its name": (
        lambda: ANY.Single(True),
        accel.BackendError,
        "Single(True): options go by their names: drift_check, activation_checkpointing",
    ),
    "an option outside, without its name": (
        lambda: accel.setup(net(), backend="ddp:4"),
        accel.BackendError,
        "backend 'ddp:4': '4' names no option; expected name=value",
    ),
    "an option twice": (
        lambda: accel.setup(net(), backend="fsdp:replicas=2,replicas=1"),
        accel.BackendError,
        "backend 'fsdp:replicas=2,replicas=1': replicas is there twice",
    ),
    "options as in a call": (
        lambda: accel.setup(net(), backend="ddp(bucket_cap_mb=5)"),
        accel.BackendError,
        "backend 'ddp(bucket_cap_mb=5)': options in a text follow a colon, as name:option=value,option=value",
    ),
    "a process group": (
        lambda: accel.setup(net(), backend="nccl"),
        accel.BackendError,
        "'nccl' is no backend of accel but a process group: accel.init(process_group='nccl')",
    ),
    "an argument of the function": (
        lambda: accel.launch(print, epochs=5),
        accel.LaunchError,
        f"accel.launch has no option 'epochs': a{BY_POSITION.format('print', 'epochs')}",
    ),
    "an argument of a lambda": (
        lambda: accel.launch(lambda epochs: epochs, epochs=5),
        accel.LaunchError,
        f"accel.launch has no option 'epochs': a{BY_POSITION.format('fn', 'epochs')}",
    ),
    "another launcher's option": (
        lambda: accel.launch(print, nprocs=2),
        accel.LaunchError,
        f"accel.launch has no option 'nprocs': did you mean num_processes? A{BY_POSITION.format('print', 'nprocs')}",
    ),
    "a script to launch": (
        lambda: ANY.launch("train.py"),
        accel.LaunchError,
        "accel.launch expects a function; a script is started by python -m accel run train.py",
    ),
    "a part of a model": (
        lambda: ANY.no_sync(accel.setup(nn.Sequential(net())).model[0]),
        accel.AccelError,
        "this Linear is a part of a Sequential that was set up: give that one",
    ),
    "a handle's class": (
        given(lambda handles: nn.utils.parametrizations.weight_norm(handles.model)),
        accel.AccelError,
        "ParametrizedModelHandle: a model that accel.setup returned keeps its class: change the model before accel.setup, or "
        "raw = accel.teardown(model) first",
    ),
    "an option of another loader": (
        lambda: ANY.LoaderOptions(sed=1),
        accel.LoaderError,
        "LoaderOptions(sed=...): there is no such option; did you mean seed?",
    ),
    "Accelerate's option of a loader": (
        lambda: ANY.LoaderOptions(dispatch_batches=True),
        accel.LoaderError,
        "LoaderOptions(dispatch_batches=...): there is no such option; did you mean dispatch?",
    ),
    "options of loaders as a dict": (
        lambda: ANY.setup(None, dataloaders=loader(), loader_options={"shard": False}),
        accel.LoaderError,
        "loader_options: expected accel.LoaderOptions(...), found a dict",
    ),
    "groups of a raw loader": (
        lambda: ANY.accumulate(iter(loader()), 2),
        accel.LoaderError,
        "accel.accumulate: expected the loader that accel.setup returned, found a "
        "torch.utils.data.dataloader._SingleProcessDataLoaderIter",
    ),
    "a size before its function": (
        lambda: ANY.largest_batch(4, print),
        accel.AccelError,
        "largest_batch: expected a function of the batch size, then the first size, found an int",
    ),
    "a number of ranks": (
        lambda: ANY.memory_report(net(), ranks=2),
        accel.AccelError,
        "ranks=2: expected numbers of processes above 0, such as (1, 2, 8)",
    ),
    "weights in the place of their path": (
        lambda: ANY.deferred_init(net().state_dict()).__enter__(),
        accel.CheckpointError,
        "deferred_init(weights=...): expected a path, found a collections.OrderedDict",
    ),
    "a nested tensor": (
        lambda: ANY.all_reduce(nested()),
        accel.AccelError,
        "all_reduce(op='sum') on rank 0: data is a nested tensor on cpu; expected a dense one with values",
    ),
    "a name for a filter": (
        lambda: ANY.save({"model": net()}, "here", filter="model"),
        accel.CheckpointError,
        "filter='model': expected a function of a tensor's name, as lambda name: name.startswith('model/')",
    ),
    "a raw dataloader in a state": (
        lambda: ANY.save({"loader": loader()}, "here"),
        accel.CheckpointError,
        'state["loader"] is a raw DataLoader, which knows no position: give the one that accel.setup returned',
    ),
    "save of a model": (lambda: ANY.save(net(), "here"), accel.CheckpointError, NO_DICT),
    "save, swapped, with a large state": (
        lambda: ANY.save("here", {f"layer {i}": torch.zeros(9) for i in range(1000)}),
        accel.CheckpointError,
        SWAPPED,
    ),
    "save, swapped": (lambda: ANY.save("here", {"model": net()}), accel.CheckpointError, SWAPPED),
    "load, swapped": (lambda: ANY.load({"model": net()}, "here"), accel.CheckpointError, SWAPPED),
}


@pytest.mark.parametrize("which", MISTAKES)
def test_a_slip_is_told(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, error, text = MISTAKES[which]
    with pytest.raises(error) as caught:
        act()
    assert str(caught.value) == text
    assert type(caught.value) is error
    assert not list(tmp_path.iterdir())


def numbers(kind: Callable[[int], Any]) -> list[object]:
    """What calls do that take a whole number."""
    accel.seed(kind(3))
    batches = accel.setup(net(), None, loader()).dataloaders
    ANY.setup(None, None, batches).dataloaders.set_epoch(kind(5))
    groups = [len(group) for group in accel.accumulate(batches, kind(3))]
    ANY.setup(None, None, batches).dataloaders.skip(kind(1))
    rest = len([*batches])
    return [torch.initial_seed(), groups, rest, batches.state_dict(), accel.largest_batch(float, kind(3))]  # type: ignore[attr-defined]


def test_numbers_of_numpy_are_numbers() -> None:
    assert numbers(np.int64) == numbers(np.uint8) == numbers(int)
    assert accel.launch(accel.world_size, num_processes=np.int64(1)) == 1  # type: ignore[arg-type]


BACKENDS = (
    "'auto', one of 'ddp', 'ddp2', 'deepspeed', 'dp', 'fsdp', 'horovod', 'pipeline', 'sharded', 'single', "
    "'xla', or options: accel.DDP(...), accel.DDP2(...), accel.DP(...), accel.DeepSpeed(...), "
    "accel.FSDP(...), accel.Horovod(...), accel.Pipeline(...), accel.Sharded(...), accel.Single(...), "
    "accel.XLA(...)"
)


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        ("fdsp", "'fdsp' (did you mean 'fsdp'?)"),
        ("fdsp:replicas=2", "'fdsp:replicas=2' (did you mean 'fsdp'?)"),
        ({"name": "ddp"}, "{'name': 'ddp'}"),
        (None, "None"),
    ],
)
def test_a_backend_that_there_is_not(backend: Any, named: str) -> None:
    with pytest.raises(accel.BackendError) as caught:
        accel.setup(net(), backend=backend)
    assert str(caught.value) == f"unknown backend {named}; expected {BACKENDS}".replace("?;", "?; ").replace(
        ";  ", "; "
    )


def test_files_in_the_places_of_directories(tmp_path: Path) -> None:
    raw, file = net(), tmp_path / "model.pt"
    torch.save(raw.state_dict(), file)
    with pytest.raises(accel.CheckpointError) as caught:
        accel.save({"model": raw}, file)
    said = f"accel.save (the directory): File exists: {file}"
    assert str(caught.value) == said
    with pytest.raises(accel.CheckpointError) as caught:
        accel.save({"model": raw}, file / "step1")
    said = f"accel.save (the directory): Not a directory: {file}/step1"
    assert str(caught.value) == said
    with pytest.raises(accel.CheckpointError) as caught:
        accel.load(file, {"model": raw})
    assert str(caught.value) == f"{file} is a file; expected the directory of a checkpoint that accel.save wrote"
    accel.save({"model": raw}, tmp_path / "saved")
    with pytest.raises(accel.CheckpointError, match="accel.json is a file; expected the directory of a checkpoint"):
        accel.load(tmp_path / "saved" / "accel.json", {"model": raw})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ddp", accel.DDP()),
        ("deepspeed:3", accel.DeepSpeed(stage=3)),
        ("deepspeed:1, auto_refresh=false", accel.DeepSpeed(stage=1, auto_refresh=False)),
        ("fsdp:replicas=2,reshard_after_forward=False", accel.FSDP(replicas=2, reshard_after_forward=False)),
        ("ddp:comm_hook=bf16,bucket_cap_mb=2.5", accel.DDP(comm_hook="bf16", bucket_cap_mb=2.5)),
        ("pipeline:checkpoint=never,chunks=4", accel.Pipeline(checkpoint="never", chunks=4)),
    ],
)
def test_options_of_a_backend_in_a_text(text: str, expected: Any) -> None:
    need(expected)
    assert resolve(text)[1] == expected


def test_options_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_BACKEND", "fsdp:replicas=2")
    assert accel.setup(net()).model(torch.ones(1, 2)).shape == (1, 2)
    accel.teardown()
    monkeypatch.setenv("ACCEL_BACKEND", "fsdp:replica=2")
    with pytest.raises(accel.BackendError) as caught:
        accel.setup(net())
    said = "ACCEL_BACKEND='fsdp:replica=2': FSDP(replica=...): there is no such option; did you mean replicas?"
    assert str(caught.value) == said
    monkeypatch.setenv("ACCEL_BACKEND", "fsdp:param_dtype=float16")
    with pytest.raises(accel.BackendError) as caught:
        accel.setup(net())
    assert str(caught.value).endswith("FSDP(param_dtype=torch.float16): expected None or torch.bfloat16")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("fsdp:param_dtype=bfloat16, replicas=2", accel.FSDP(param_dtype=torch.bfloat16, replicas=2)),
        ("fsdp:reduce_dtype=torch.float32", accel.FSDP(reduce_dtype=torch.float32)),
        ("pipeline:balance=[1,1],chunks=2", accel.Pipeline(balance=[1, 1], chunks=2)),
        ("deepspeed:3,offload_optimizer=true", accel.DeepSpeed(stage=3, offload_optimizer=True)),
    ],
)
def test_options_in_a_text_are_those_of_the_call(text: str, options: Any) -> None:
    assert resolve(text)[1] == options


NO_DEVICE = (
    "'some' is no device; this machine has no accelerator, only cpu. Ask for a number of devices (2, -1 for all), a list "
    "([0, 1]), their numbers ('0, 1'), 'free:2', 'cpu' or 'auto'"
)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the message lists accelerators")
def test_devices_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_DEVICES", "some")
    with pytest.raises(accel.DeviceError) as caught:
        accel.setup(net())
    assert str(caught.value) == f"ACCEL_DEVICES='some': devices='some': {NO_DEVICE}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("bf16", "unknown precision 'bf16'; known: 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true"),
        (
            "16-mixed",
            "precision '16-mixed' trains fp32 parameters, but 2 of this Linear are not: weight (float16), bias (float16); call "
            "model.float() first or ask for 'bf16-true'",
        ),
    ],
)
def test_a_precision_from_outside(value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_PRECISION", value)
    with pytest.raises(accel.PrecisionError) as caught:
        accel.setup(net().half())
    assert str(caught.value) == f"ACCEL_PRECISION={value!r}: {said}"


# -- on several ranks --------------------------------------------------------------------------------------------------


def differing() -> dict[str, str]:
    second = accel.rank() == 1
    said: dict[str, str] = {}

    def attempt(name: str, lr: float = 0.1, batch: int = 2, reverse: bool = False, **kwargs: Any) -> None:
        raw = net()
        optimizer = torch.optim.SGD(list(raw.parameters())[:: -1 if reverse else 1], lr=lr)
        optimizer.state[raw.weight]["count"] = 2 if name == "state" and second else 1
        with pytest.raises(accel.AccelError) as caught:
            accel.setup(raw, optimizer, DataLoader(loader().dataset, batch), **kwargs)
        said[name] = f"{type(caught.value).__name__}: {caught.value}"

    attempt("lr", lr=0.2 if second else 0.1)
    attempt("order", reverse=second)
    attempt("state")
    attempt("batch", batch=2 + second)
    attempt("backend", backend=accel.FSDP() if second else "ddp")
    attempt("option", backend=accel.DDP(find_unused_parameters=second))
    os.environ["ACCEL_BACKEND"] = "single"
    try:
        attempt("outside")
    finally:
        del os.environ["ACCEL_BACKEND"]
    said["forked"] = in_a_fork()
    return said


def in_a_fork() -> str:
    """What a setup says in a child, as in a worker of a DataLoader, and a teardown too, which would tell the other ranks."""
    accel.init()
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        signal.alarm(60)
        said = []
        for call in (lambda: accel.setup(net()), accel.teardown):
            try:
                call()
            except BaseException as error:
                said.append(str(error))
        os.write(theirs, "; ".join(dict.fromkeys(said) if len(said) == 2 else said[1:]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with open(ours) as answer:
        return answer.read()


def test_what_differs_is_told_by_its_name_on_every_rank() -> None:
    differs = "RankMismatchError: accel.setup: the ranks differ: "
    for rank, said in enumerate(run(2, differing)):
        assert said == {
            "lr": f"{differs}lr of group 0 of optimizer 0 is 0.1 on rank 0; 0.2 on rank 1",
            "order": f"{differs}params[0] of group 0 of optimizer 0 is weight on rank 0; bias on rank 1",
            "state": f"{differs}count of the state of weight in optimizer 0 is 1 on rank 0; 2 on rank 1",
            "batch": f"{differs}batch size of dataloader 0 is 2 on rank 0; 3 on rank 1",
            "backend": f"{differs}backend is ddp on rank 0; fsdp on rank 1",
            "option": f"{differs}find_unused_parameters of accel.DDP is False on rank 0; True on rank 1",
            "outside": "BackendError: ACCEL_BACKEND='single': backend 'single' with an optimizer at world size 2: each process "
            "would train a model of its own; choose a backend that trains one model on all ranks",
            "forked": f"This process was forked from rank {rank}, as DataLoader workers are, and can't use its connections to "
            "other ranks. Call accel in the process that called accel.setup.",
        }


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trained(batches: Any, backend: Any, **options: Any) -> tuple[list[str], bool]:
    """What was said in training on some batches, and whether forwards are as at first."""
    raw = net()
    logger, records = logging.getLogger("accel"), Records()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    logger.addHandler(records)
    if isinstance(batches, DataLoader):
        _, _, batches = accel.setup(model, optimizer, batches, **options)
    try:
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    finally:
        logger.removeHandler(records)
    as_before = "run" not in vars(registry.engine(raw))
    accel.teardown(model)
    return records.texts, as_before


def same_inputs(backend: Any) -> list[tuple[list[str], bool]]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 2, generator=generator)
    raw = DataLoader(TensorDataset(data), 2)
    mine = data + accel.rank()
    return [
        trained([*raw], backend),  # a loader that was never set up
        trained(raw, backend),
        trained([(x,) for x in mine.split(2)], backend),
        trained([(data[:2],), *((x,) for x in mine.split(2))], backend),  # the same at first, as an environment may be
        trained([(data[:2].to_sparse(),)] * 20, backend),  # has no bits to read
        trained(DataLoader(TensorDataset(mine), 2), backend),  # each rank's own, and divided once more
    ]


SAME = (
    r"Linear #\d+ is given the same inputs on all 2 ranks, so every rank computes the same gradients\. Pass the loader to "
    r"accel\.setup, or choose different data by accel\.rank\(\)\. If you mean it, ignore this warning\."
)


@pytest.mark.parametrize("backend", [accel.DDP(), accel.Sharded()])
def test_a_loader_that_was_never_set_up_is_told_once(backend: Any) -> None:
    need(backend)
    for rank, (never, *others, own) in enumerate(run(2, same_inputs, backend)):
        texts, as_before = never
        assert as_before
        assert len(texts) == (rank == 0)
        assert all(re.fullmatch(SAME, text) for text in texts)
        assert others == [([], True)] * 4
        assert [re.match("dataloader 0 has other data on other ranks", text) is not None for text in own[0]] == [
            True
        ] * (rank == 0)


def rollouts() -> list[str]:
    """Each with a loader of its own samples, as in reinforcement learning."""
    raw, logger, records = net(), logging.getLogger("accel"), Records()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    logger.addHandler(records)
    for number in range(3):
        samples = torch.full((8, 2), float(10 * number + accel.rank()))
        accel.setup(raw, optimizer, DataLoader(TensorDataset(samples), 2), backend="ddp")
    logger.removeHandler(records)
    return records.texts


def test_other_data_on_other_ranks_is_told_once_for_a_model() -> None:
    first, second = run(2, rollouts)
    assert len(first) == 1
    assert "accel.LoaderOptions(shard=False)" in first[0]
    assert not second


def beside(backend: Any) -> list[str]:
    """A criterion with parameters and an optimizer of its own, which were not given to setup; and an image that is trained."""
    torch.manual_seed(0)
    raw, criterion, image = net(), nn.Linear(2, 1), torch.zeros(2, 2, requires_grad=True)
    logger, records = logging.getLogger("accel"), Records()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    every = [optimizer, *(torch.optim.Adam(given) for given in (criterion.parameters(), [image], model.parameters()))]
    logger.addHandler(records)
    for _ in range(2):
        criterion(model(image + accel.rank())).sum().backward()
        for each in [*every, torch.optim.Adam(criterion.parameters())]:  # as a new one for each sample
            each.step()
    logger.removeHandler(records)
    return records.texts


def test_parameters_that_are_in_no_model_are_told_once() -> None:
    for texts in run(2, beside, "ddp"):
        assert texts == [
            "Adam steps 2 parameters that are in no model of accel.setup, the first of shape (1, 2): each rank trains its own. "
            "Give their module and this optimizer to accel.setup, unless the ranks are meant to differ"
        ]


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_lines_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"accel {accel.__version__}\n"
    assert main(["run", "--backend", "fdsp", __file__]) == 1
    assert capsys.readouterr().err == f"accel run: unknown backend 'fdsp' (did you mean 'fsdp'?); expected {BACKENDS}\n"
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m accel [-h] [--version]\n")


def checkpoints() -> None:
    """Some of each kind, in this directory."""
    raw = net()
    for name in ("one", "two", "damaged"):
        accel.save({"model": raw}, name)
    (file,) = Path("damaged").glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    Path("file").write_text("x")
    accel.export("one", "weights")


COMMANDS = {
    "verify one damaged nowhere two": (
        "accel verify: {here}/damaged/{file} is damaged between bytes 256 and 280, in model/weight, model/bias; load another "
        "checkpoint (accel.latest), or copy this one again from where it is whole\n"
        "accel verify: {here}/nowhere does not exist; expected the directory of a checkpoint that accel.save wrote"
    ),
    "export one file": "accel export: File exists: {here}/file",
    "export one weights": "accel export: {here}/weights has weights already (model.safetensors); overwrite=True replaces them",
    "export one new --dtype x": "accel export: dtype='x': expected a floating-point dtype such as 'bfloat16'",
    "export one new --max-shard-size x": (
        "accel export: max_shard_size='x': expected a number of bytes, or text such as '5GB'"
    ),
    "inspect xx://bucket/run": (
        "accel inspect: xx://bucket/run: Protocol not known: xx (pip install it: s3fs for s3://, gcsfs for gs://, adlfs for az://)"
    ),
    "memory torch.nn:Linear": (
        "accel memory: 'torch.nn:Linear' needs in_features, out_features; expected a callable without arguments, such as a "
        "function"
    ),
    "memory torch.nn:ReLU": "accel memory: 'torch.nn:ReLU' gave a ReLU without parameters: say --optimizer none",
    "memory leaves:model": "accel memory: leaves cannot be imported from {here}: SystemExit: 3",
    "memory builds:model --optimizer sgd(rate=1)": (
        "accel memory: --optimizer sgd(rate=1): no argument 'rate'; it has lr, momentum, dampening, weight_decay, "
        "nesterov, maximize, foreach, differentiable, fused"
    ),
    "run nowhere.py": "accel run: there is no file nowhere.py in {here}",
}
USAGES = {
    "run -n x train.py": "argument -n/--processes/--num-processes: expected a whole number, found 'x'",
    "run --port x train.py": "argument --port: expected a whole number, found 'x'",
    "run": "the following arguments are required: script",
}


def test_commands_say_what_is_wrong_in_their_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints()
    Path("leaves.py").write_text("raise SystemExit(3)")
    Path("builds.py").write_text("import torch\ndef model(): return torch.nn.Linear(2, 2)")
    (file,) = Path("damaged").glob("*.safetensors")
    for command, said in COMMANDS.items():
        assert main(command.split()) == 1
        assert capsys.readouterr().err == f"{said.format(here=tmp_path, file=file.name)}\n", command
    for command, said in USAGES.items():
        with pytest.raises(SystemExit):
            main(command.split())
        assert capsys.readouterr().err.partition(" error: ")[2] == f"{said}\n", command
    assert main(["verify", "one", "two"]) == 0
    assert capsys.readouterr().out == "one: every byte is as it was written\ntwo: every byte is as it was written\n"


def test_a_command_ends_by_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("waits.py").write_text("raise KeyboardInterrupt")
    assert main(["memory", "waits:model"]) == 130
    assert capsys.readouterr().err == "accel memory: ended by Ctrl-C\n"


def refused_and_gone() -> None:
    """What the loop held is free at once: a garbage collection comes at another moment on each rank."""

    def attempt(options: dict[str, Any]) -> weakref.ref[nn.Module]:
        model = nn.Linear(4, 4)
        with pytest.raises(accel.AccelError):
            accel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        return weakref.ref(model)

    refusals: list[dict[str, Any]] = [{"precision": "16"}, {"backend": accel.DDP(activation_checkpointing=True)}]
    gc.collect()
    gc.disable()
    try:
        assert [attempt(options)() for options in refusals] == [None, None]
    finally:
        gc.enable()


def test_a_refused_setup_keeps_nothing() -> None:
    run(2, refused_and_gone)

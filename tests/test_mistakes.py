"""Common slips in a call, each by the class of its error and the words that lead on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel
from accel.engines import resolve
from accel.registry import registry
from tests.backends import need
from tests.distributed import refusals, run
from tests.models import logged


def net() -> nn.Module:
    return nn.Linear(2, 2)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(net().parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(4, 2)), 2)


def replicated() -> DataLoader[Any]:
    return DataLoader(loader().dataset, sampler=DistributedSampler(range(4), 2, 0))


def handles() -> Any:
    raw = net()
    return accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))


ANY: Any = accel
#: What stands in the optimizer's place, and words of the OptimizerError.
OPTIMIZER = [
    (
        lambda: {"all": torch.optim.lr_scheduler.StepLR(sgd(), 1)},
        'optimizers["all"] is a torch.optim.lr_scheduler.StepLR',
    ),
    (lambda: net().parameters(), "Pass a torch.optim.Optimizer"),
    (lambda: torch.optim.SGD, "optimizers is the class torch.optim.sgd.SGD"),
    (loader, "optimizers is a torch.utils.data.dataloader.DataLoader"),
]
LOADER = [
    (lambda: loader().dataset, "Pass a torch.utils.data.DataLoader"),
    (lambda: [torch.zeros(2, 2)], "dataloaders[0] is a torch.Tensor"),
    (sgd, "dataloaders is a torch.optim.sgd.SGD"),
]
MODEL = [
    (lambda: nn.Linear, "The model is the class torch.nn.modules.linear.Linear"),
    (sgd, "The model is a torch.optim.sgd.SGD"),
    (lambda: [net(), net()], "The model is a list"),
    (handles, "The model is an accel.handles.Handles"),
]
OTHERS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ANY.clip_grad_norm_(net().parameters(), 1.0), accel.AccelError, "Pass a torch.nn.Module"),
    (lambda: ANY.no_sync(handles().optimizers), accel.AccelError, "a torch.optim.sgd.SGD"),
    (lambda: ANY.no_sync(ANY.setup(nn.Sequential(net())).model[0]), accel.AccelError, "is a part of a Sequential"),
    (lambda: ANY.prepare(net(), sgd()), AttributeError, "docs/migrating.md"),
    (lambda: ANY.setup(None, sgd()), accel.AccelError, "Pass the model first"),
    (lambda: ANY.setup(net(), sgd()), accel.OptimizerError, "no parameter of this Linear"),
    (lambda: ANY.setup(net(), None, replicated()), accel.LoaderError, "istributed"),
    (lambda: ANY.setup(net().half(), precision="bf16-mixed"), accel.PrecisionError, "trains fp32 parameters"),
    (lambda: ANY.setup(net().to("meta")), accel.BackendError, "meta device"),
    (lambda: ANY.setup(net(), backend=accel.DDP(comm_hook="zip")), accel.BackendError, "comm_hook"),
    (lambda: ANY.setup(net(), backend=accel.FSDP), accel.BackendError, "accel.FSDP()"),
    (lambda: ANY.DDP(find_unused=True), TypeError, "unexpected keyword argument 'find_unused'"),
    (lambda: ANY.DDP(find_unused_parameters="no"), accel.BackendError, "='no') is invalid. Use True or False."),
    (lambda: ANY.DDP(drift_check=-1), accel.BackendError, "Use a number of steps, 0 or None"),
    (lambda: ANY.setup(net(), backend="fdsp"), accel.BackendError, "'fdsp'. Did you mean 'fsdp'?"),
    (lambda: ANY.setup(net(), backend={"name": "ddp"}), accel.BackendError, "an options object"),
    (lambda: ANY.setup(net(), backend="ddp:4"), accel.BackendError, "name:option=value"),
    (lambda: ANY.setup(net(), backend="fsdp:replicas=2,replicas=1"), accel.BackendError, "at 'replicas=1'"),
    (lambda: ANY.setup(net(), backend="nccl"), accel.BackendError, "accel.init(process_group='nccl')"),
    (lambda: ANY.launch("train.py"), accel.LaunchError, "use python -m accel run"),
    (lambda: ANY.setup(net(), None, loader(), loader_options={}), accel.LoaderError, "loader_options is a dict"),
    (lambda: ANY.accumulate(iter(loader()), 2), accel.LoaderError, "takes the loader that accel.setup returned"),
    (lambda: ANY.save({"loader": loader()}, "here"), accel.CheckpointError, 'state["loader"] is a torch.utils.data'),
    (lambda: ANY.save(net(), "here"), accel.CheckpointError, "Expected the state as a dict, found a Linear"),
    (lambda: ANY.save("here", {"model": net()}), accel.CheckpointError, "accel.save(state, dir)"),
    (lambda: ANY.load({"model": net()}, "here"), accel.CheckpointError, "accel.load(dir, state)"),
]
SLIPS = [
    *((lambda make=make: ANY.setup(net(), make()), accel.OptimizerError, words) for make, words in OPTIMIZER),
    *((lambda make=make: ANY.setup(net(), None, make()), accel.LoaderError, words) for make, words in LOADER),
    *((lambda make=make: ANY.setup(make()), accel.AccelError, words) for make, words in MODEL),
    *OTHERS,
]


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call, error, words in SLIPS:
        with pytest.raises(error, match=re.escape(words)) as caught:
            call()
        assert type(caught.value) is error, words
        accel.teardown()
    assert not list(tmp_path.iterdir())


def test_options_in_a_text() -> None:
    for text, expected in {
        "ddp": accel.DDP(),
        "deepspeed:3,offload_optimizer=true": accel.DeepSpeed(stage=3, offload_optimizer=True),
        "fsdp:param_dtype=bfloat16, replicas=2": accel.FSDP(param_dtype=torch.bfloat16, replicas=2),
        "fsdp:reduce_dtype=torch.float32": accel.FSDP(reduce_dtype=torch.float32),
        "ddp:comm_hook=bf16,bucket_cap_mb=2.5": accel.DDP(comm_hook="bf16", bucket_cap_mb=2.5),
        "pipeline:balance=[1,1],chunks=2": accel.Pipeline(balance=[1, 1], chunks=2),
    }.items():
        need(expected)
        assert resolve(text)[1] == expected


def test_wrong_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, error, words in (
        ("ACCEL_BACKEND", "fsdp:replica=2", accel.BackendError, "with the options drift_check,"),
        ("ACCEL_BACKEND", "fsdp:param_dtype=float16", accel.BackendError, "is invalid. Use None or torch.bfloat16"),
        ("ACCEL_DEVICES", "some", accel.DeviceError, "'some' is not a device"),
        ("ACCEL_PRECISION", "bf16", accel.PrecisionError, "Use one of 32-true, bf16-mixed"),
    ):
        accel.teardown()
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(error, match=re.escape(words)):
                accel.setup(net())


# -- on several ranks --------------------------------------------------------------------------------------------------


def differ(change: str) -> None:
    """Call setup with something different on rank 1."""
    second = change if accel.rank() == 1 else ""
    raw = nn.Sequential(nn.Linear(2, 3 if second == "shape" else 2))
    if second == "dtype":
        raw.double()
    if second == "mask":
        raw[0].weight.requires_grad_(False)
    parameters = list(raw.parameters())[:: -1 if second == "order" else 1]
    optimizer = torch.optim.SGD(parameters, lr=0.2 if second == "lr" else 0.1)
    optimizer.state[raw[0].weight]["count"] = 2 if second == "state" else 1
    data = DataLoader(loader().dataset, 3 if second == "batch" else 2)
    backend: Any = accel.FSDP() if second == "backend" else "ddp"
    if change == "option":
        backend = accel.DDP(find_unused_parameters=bool(second))
    precision = "bf16-mixed" if second == "precision" else "32-true"
    before = [p.clone() for p in raw.parameters()]
    try:
        accel.setup(raw, None if second == "optimizer" else optimizer, data, backend=backend, precision=precision)
    finally:
        assert not registry.engines
        assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), before, strict=True))


DIFFERENT = {
    "shape": "0.weight",
    "dtype": "0.weight",
    "mask": "0.weight",
    "optimizer": "optimizers",
    "precision": "precision is 32-true on rank 0; bf16-mixed on rank 1",
    "lr": "lr of group 0 of optimizer 0 is 0.1 on rank 0; 0.2 on rank 1.",
    "order": "params[0] of group 0 of optimizer 0 is 0.weight on rank 0; 0.bias on rank 1.",
    "state": "count of the state of 0.weight in optimizer 0 is 1 on rank 0; 2 on rank 1.",
    "batch": "batch_size of dataloader 0 is 2 on rank 0; 3 on rank 1.",
    "backend": "backend is ddp on rank 0; fsdp on rank 1.",
    "option": "find_unused_parameters of accel.DDP is False on rank 0; True on rank 1.",
}


@pytest.mark.parametrize(("change", "words"), DIFFERENT.items())
def test_different_arguments_raise_on_all(change: str, words: str) -> None:
    for message in refusals(2, differ, change, error="RankMismatchError"):
        assert message.startswith("accel.setup got different arguments: ")
        assert words in message


class Forked(torch.utils.data.Dataset[torch.Tensor]):
    """Calls accel in a worker of a DataLoader."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        accel.setup(net())
        raise AssertionError("no error")


def test_forked_processes_raise() -> None:
    accel.init()
    with pytest.raises(accel.AccelError, match="forked from rank 0.*Call accel in the process that called accel.setup"):
        list(DataLoader(Forked(), num_workers=1, multiprocessing_context="fork"))


def train_on(batches: Any, backend: Any) -> list[str]:
    """Return the warnings of a training."""
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    with logged() as texts:
        if isinstance(batches, DataLoader):
            batches = accel.setup(model, optimizer, batches).dataloaders
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    accel.teardown(model)
    return texts


def train_on_each(backend: Any) -> list[list[str]]:
    data = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    raw, different = DataLoader(TensorDataset(data), 2), data + accel.rank()
    return [
        train_on([*raw], backend),  # a loader that was never passed to setup
        train_on(raw, backend),
        train_on([(data[:2],), *((x,) for x in different.split(2))], backend),  # only the first batch is the same
        train_on(DataLoader(TensorDataset(different), 2), backend),  # sharded by the program and by setup
    ]


SAME = (
    r"All 2 ranks got the same inputs for Linear #\d+, so every rank computes the same gradients\. Pass the DataLoader to "
    r"accel\.setup\(\)\. Ignore this warning if it is intended\."
)


@pytest.mark.parametrize("backend", [accel.DDP(), accel.Sharded()])
def test_a_loader_without_setup_warns_once(backend: Any) -> None:
    need(backend)
    for rank, (never, *others, different) in enumerate(run(2, train_on_each, backend)):
        assert len(never) == len(different) == (rank == 0)
        assert all(re.fullmatch(SAME, text) for text in never)
        assert others == [[], []]
        assert all(text.startswith("dataloader 0 has different data on different ranks") for text in different)


def train_criterion() -> list[str]:
    """Train a criterion with parameters and an image that setup doesn't know."""
    torch.manual_seed(0)
    raw, criterion, image = net(), nn.Linear(2, 1), torch.zeros(2, 2, requires_grad=True)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp")
    optimizers = [optimizer, *(torch.optim.Adam(given) for given in (criterion.parameters(), [image]))]
    with logged() as texts:
        for _ in range(2):
            criterion(model(image + accel.rank())).sum().backward()
            for each in optimizers:
                each.step()
    return texts


def test_parameters_in_no_model_warn_once() -> None:
    for texts in run(2, train_criterion):
        assert texts == [
            "Adam steps 2 parameters that aren't set up, the first of shape (1, 2), so each rank trains "
            "its own. Pass their module and this optimizer to accel.setup()."
        ]

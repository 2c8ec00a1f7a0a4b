"""Common slips in a call, each by the class of its error and the words that lead on."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.__main__ import main
from accel.engines import resolve
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


def handles() -> Any:
    raw = net()
    return accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))


ANY: Any = accel
#: What stands in the optimizer's place, and words of the OptimizerError.
OPTIMIZER = [
    (lambda: step(sgd()), "optimizers is a torch.optim.lr_scheduler.StepLR"),
    (lambda: {"all": step(sgd())}, 'optimizers["all"] is a torch.optim.lr_scheduler.StepLR'),
    (lambda: net().parameters(), "Pass a torch.optim.Optimizer"),
    (lambda: list(net().parameters()), "optimizers[0] is a torch.nn.parameter.Parameter"),
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
    (lambda: ANY.setup(net(), backend=accel.FSDP), accel.BackendError, "accel.FSDP()"),
    (lambda: ANY.DDP(find_unused=True), TypeError, "unexpected keyword argument 'find_unused'"),
    (lambda: ANY.setup(net(), backend="fdsp"), accel.BackendError, "'fdsp'. Did you mean 'fsdp'?"),
    (lambda: ANY.setup(net(), backend={"name": "ddp"}), accel.BackendError, "an options object"),
    (lambda: ANY.setup(net(), backend="fdsp:replicas=2"), accel.BackendError, "Did you mean 'fsdp'?"),
    (lambda: ANY.setup(net(), backend="ddp:4"), accel.BackendError, "name:option=value"),
    (lambda: ANY.setup(net(), backend="fsdp:replicas=2,replicas=1"), accel.BackendError, "at 'replicas=1'"),
    (lambda: ANY.setup(net(), backend="nccl"), accel.BackendError, "accel.init(process_group='nccl')"),
    (lambda: ANY.launch("train.py"), accel.LaunchError, "python -m accel run"),
    (lambda: ANY.setup(None, None, loader(), loader_options={"seed": 0}), accel.LoaderError, "found a dict"),
    (lambda: ANY.accumulate(iter(loader()), 2), accel.LoaderError, "takes the loader that accel.setup returned"),
    (lambda: ANY.save({"loader": loader()}, "here"), accel.CheckpointError, "can't be stored without pickle"),
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
    monkeypatch.setenv("ACCEL_BACKEND", "fsdp:replicas=2")
    assert accel.setup(net()).model(torch.ones(1, 2)).shape == (1, 2)
    for name, value, error, words in (
        ("ACCEL_BACKEND", "fsdp:replica=2", accel.BackendError, "with the options drift_check,"),
        ("ACCEL_BACKEND", "fsdp:param_dtype=float16", accel.BackendError, "expected None or torch.bfloat16"),
        ("ACCEL_DEVICES", "some", accel.DeviceError, "'some' is not a device"),
        ("ACCEL_PRECISION", "bf16", accel.PrecisionError, "Use one of 32-true, bf16-mixed"),
        ("ACCEL_PRECISION", "16-mixed", accel.PrecisionError, "weight is torch.float16. Call model.float()"),
    ):
        accel.teardown()
        with monkeypatch.context() as patch:
            patch.delenv("ACCEL_BACKEND")
            patch.setenv(name, value)
            with pytest.raises(error, match=re.escape(words)):
                accel.setup(net().half())


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


def test_differences_have_a_name() -> None:
    differs = "RankMismatchError: accel.setup got different arguments: "
    for rank, said in enumerate(run(2, differing)):
        assert said == {
            "lr": f"{differs}lr of group 0 of optimizer 0 is 0.1 on rank 0; 0.2 on rank 1.",
            "order": f"{differs}params[0] of group 0 of optimizer 0 is weight on rank 0; bias on rank 1.",
            "state": f"{differs}count of the state of weight in optimizer 0 is 1 on rank 0; 2 on rank 1.",
            "batch": f"{differs}batch size of dataloader 0 is 2 on rank 0; 3 on rank 1.",
            "backend": f"{differs}backend is ddp on rank 0; fsdp on rank 1.",
            "option": f"{differs}find_unused_parameters of accel.DDP is False on rank 0; True on rank 1.",
            "outside": "BackendError: backend='single' can't train on 2 ranks, because each process "
            "would train a model of its own. Use a distributed backend.",
            "forked": f"This process was forked from rank {rank}, as DataLoader workers are, and can't use its connections to "
            "other ranks. Call accel in the process that called accel.setup.",
        }


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trained(batches: Any, backend: Any) -> list[str]:
    """Return what is logged in training on some batches."""
    raw = net()
    logger, records = logging.getLogger("accel"), Records()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    logger.addHandler(records)
    if isinstance(batches, DataLoader):
        batches = accel.setup(model, optimizer, batches).dataloaders
    for (x,) in batches:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    logger.removeHandler(records)
    accel.teardown(model)
    return records.texts


def same_inputs(backend: Any) -> list[list[str]]:
    data = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    raw, different = DataLoader(TensorDataset(data), 2), data + accel.rank()
    return [
        trained([*raw], backend),  # a loader that was never set up
        trained(raw, backend),
        trained([(data[:2],), *((x,) for x in different.split(2))], backend),  # the same at first only
        trained([(data[:2].to_sparse(),)] * 20, backend),  # has no bits to read
        trained(DataLoader(TensorDataset(different), 2), backend),  # each rank's data, and sharded once more
    ]


SAME = (
    r"All 2 ranks got the same inputs for Linear #\d+, so every rank computes the same gradients\. Pass the DataLoader to "
    r"accel\.setup\(\)\. Ignore this warning if it is intended\."
)


@pytest.mark.parametrize("backend", [accel.DDP(), accel.Sharded()])
def test_a_loader_without_setup_warns_once(backend: Any) -> None:
    need(backend)
    for rank, (never, *others, different) in enumerate(run(2, same_inputs, backend)):
        assert len(never) == len(different) == (rank == 0)
        assert all(re.fullmatch(SAME, text) for text in never)
        assert others == [[]] * 3
        assert all(text.startswith("dataloader 0 has different data on different ranks") for text in different)


def with_criterion(backend: Any) -> list[str]:
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


def test_parameters_in_no_model_warn_once() -> None:
    for texts in run(2, with_criterion, "ddp"):
        assert texts == [
            "Adam steps 2 parameters that are in no model of accel.setup, the first of shape (1, 2), so each rank trains "
            "its own. Give their module and this optimizer to accel.setup, unless ranks are meant to differ."
        ]


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"accel {accel.__version__}\n"
    assert main(["run", "--backend", "fdsp", __file__]) == 1
    assert capsys.readouterr().err.startswith("accel run: Unknown backend 'fdsp'. Did you mean 'fsdp'?")
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m accel [-h] [--version]\n")


def checkpoints() -> None:
    """Some of each kind, in this directory."""
    raw = net()
    for name in ("one", "damaged"):
        accel.save({"model": raw}, name)
    (file,) = Path("damaged").glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    Path("file").write_text("x")
    accel.export("one", "weights")


COMMANDS = {
    "verify one damaged": "is damaged between bytes 0 and ",
    "verify nowhere": "nowhere does not exist",
    "export one file": "Not a directory: ",
    "export one weights": "overwrite=True replaces them",
    "export one new --dtype x": "expected a floating-point dtype such as 'bfloat16'",
    "inspect xx://bucket/run": "Protocol not known: xx",
    "memory torch.nn:Linear": "missing 2 required positional arguments",
    "memory torch.nn:ReLU": "got an empty parameter list. Write a class of torch.optim",
    "memory builds:model --optimizer sgd(rate=1)": "unexpected keyword argument 'rate'",
    "run nowhere.py": "there is no file nowhere.py in ",
}
USAGES = {
    "run -n x train.py": "expected a number above 0, found 'x'",
    "run": "the following arguments are required: script",
}


def test_errors_of_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints()
    Path("builds.py").write_text("import torch\ndef model(): return torch.nn.Linear(2, 2)")
    for command, words in COMMANDS.items():
        assert main(command.split()) == 1
        text = capsys.readouterr().err
        assert text.startswith(f"accel {command.split()[0]}: "), command
        assert words in text, command
    for command, words in USAGES.items():
        with pytest.raises(SystemExit):
            main(command.split())
        assert words in capsys.readouterr().err, command
    assert main(["verify", "one"]) == 0
    assert capsys.readouterr().out == "one: every byte is as it was written\n"

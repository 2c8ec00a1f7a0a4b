"""Common slips in a call, each by the class of its error and the words that lead on."""

from __future__ import annotations

import functools
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


def handles() -> Any:
    raw = net()
    return accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))


ANY: Any = accel
OPTIMIZER = [
    # what stands in the optimizer's place, and words of the OptimizerError
    (lambda: step(sgd()), "Pass the optimizer of this StepLR"),
    (lambda: {"all": step(sgd())}, 'optimizers["all"] is a torch.optim.lr_scheduler.StepLR'),
    (lambda: net().parameters(), "not an iterator"),
    (lambda: list(net().parameters()), "optimizers[0] is a torch.nn.parameter.Parameter"),
    (lambda: torch.optim.SGD, "Pass an object of this class: SGD(...)"),
    (lambda: functools.partial(torch.optim.SGD, lr=0.1), "optimizers is a functools.partial"),
    (nn.MSELoss, "optimizers is a torch.nn.modules.loss.MSELoss"),
    (loader, "optimizers is a torch.utils.data.dataloader.DataLoader"),
]
LOADER = [
    (lambda: step(sgd()), "dataloaders is a torch.optim.lr_scheduler.StepLR"),
    (lambda: loader().dataset, "DataLoader(dataset, batch_size=...)"),
    (lambda: enumerate(loader()), "not an iterator"),
    (lambda: [torch.zeros(2, 2)], "dataloaders[0] is a torch.Tensor"),
    (sgd, "dataloaders is a torch.optim.sgd.SGD"),
]
MODEL = [
    (lambda: nn.Linear, "Pass an object of this class: Linear(...)"),
    (sgd, "got a torch.optim.sgd.SGD"),
    (lambda: [net(), net()], "got a list"),
    (lambda: net().state_dict(), "got a collections.OrderedDict"),
    (lambda: "gpt2", "Expected a torch.nn.Module as the model, got a str"),
    (handles, "model, optimizer, loader = accel.setup(model, optimizer, loader)"),
]
OTHERS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ANY.setup(net(), sgd(), [], []), accel.LoaderError, "takes all DataLoaders in one argument"),
    (lambda: ANY.clip_grad_norm_(net().parameters(), 1.0), accel.AccelError, "Pass the model, the optimizer"),
    (lambda: ANY.no_sync(handles().optimizers), accel.AccelError, "an accel.handles.OptimizerHandle"),
    (lambda: handles().model.module, AttributeError, "accel.unwrap(model)"),
    (lambda: ANY.prepare(net(), sgd()), AttributeError, "docs/migrating.md"),
    (lambda: ANY.setup(net(), backend=accel.FSDP), accel.BackendError, "accel.FSDP()"),
    (lambda: ANY.DDP(find_unused=True), accel.BackendError, "did you mean find_unused_parameters?"),
    (lambda: ANY.setup(net(), backend="fdsp"), accel.BackendError, "'fdsp' (did you mean 'fsdp'?)"),
    (lambda: ANY.setup(net(), backend={"name": "ddp"}), accel.BackendError, "an options object"),
    (lambda: ANY.setup(net(), backend="fdsp:replicas=2"), accel.BackendError, "did you mean 'fsdp'?"),
    (lambda: ANY.setup(net(), backend="ddp:4"), accel.BackendError, "name:option=value"),
    (lambda: ANY.setup(net(), backend="fsdp:replicas=2,replicas=1"), accel.BackendError, "at 'replicas=1'"),
    (lambda: ANY.setup(net(), backend="ddp(bucket_cap_mb=5)"), accel.BackendError, "name:option=value"),
    (lambda: ANY.setup(net(), backend="nccl"), accel.BackendError, "accel.init(process_group='nccl')"),
    (lambda: ANY.launch("train.py"), accel.LaunchError, "python -m accel run train.py"),
    (lambda: ANY.no_sync(ANY.setup(nn.Sequential(net())).model[0]), accel.AccelError, "is a part of a Sequential"),
    (lambda: ANY.LoaderOptions(sed=1), accel.LoaderError, "did you mean seed?"),
    (lambda: ANY.LoaderOptions(dispatch_batches=True), accel.LoaderError, "did you mean dispatch?"),
    (lambda: ANY.setup(None, None, loader(), loader_options={"seed": 0}), accel.LoaderError, "found a dict"),
    (lambda: ANY.accumulate(iter(loader()), 2), accel.LoaderError, "expected the loader that accel.setup returned"),
    (lambda: ANY.largest_batch(4, print), accel.AccelError, "expected a function of the batch size"),
    (
        lambda: ANY.save({"model": net()}, "here", filter="model"),
        accel.CheckpointError,
        "a function of a tensor's name",
    ),
    (
        lambda: ANY.save({"loader": loader()}, "here"),
        accel.CheckpointError,
        "Save the loader that accel.setup returned",
    ),
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


def test_a_slip_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call, error, words in SLIPS:
        with pytest.raises(error, match=re.escape(words)) as caught:
            call()
        assert type(caught.value) is error, words
        accel.teardown()
    assert not list(tmp_path.iterdir())


def test_files_in_the_places_of_directories(tmp_path: Path) -> None:
    raw, file = net(), tmp_path / "model.pt"
    torch.save(raw.state_dict(), file)
    accel.save({"model": raw}, tmp_path / "saved")
    calls = {
        f"File exists: {file}": lambda: accel.save({"model": raw}, file),
        f"Not a directory: {file}/step1": lambda: accel.save({"model": raw}, file / "step1"),
        f"{file} is a file; expected the directory": lambda: accel.load(file, {"model": raw}),
        "accel.json is a file": lambda: accel.load(tmp_path / "saved" / "accel.json", {"model": raw}),
    }
    for words, call in calls.items():
        with pytest.raises(accel.CheckpointError, match=re.escape(words)):
            call()


def test_options_of_a_backend_in_a_text() -> None:
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


def test_what_comes_from_the_environment_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_BACKEND", "fsdp:replicas=2")
    assert accel.setup(net()).model(torch.ones(1, 2)).shape == (1, 2)
    for name, value, error, words in (
        ("ACCEL_BACKEND", "fsdp:replica=2", accel.BackendError, "did you mean replicas?"),
        ("ACCEL_BACKEND", "fsdp:param_dtype=float16", accel.BackendError, "expected None or torch.bfloat16"),
        ("ACCEL_DEVICES", "some", accel.DeviceError, "'some' is no device"),
        ("ACCEL_PRECISION", "bf16", accel.PrecisionError, "Use one of 32-true, bf16-mixed"),
        ("ACCEL_PRECISION", "16-mixed", accel.PrecisionError, "weight of this Linear is float16. Call model.float()"),
    ):
        accel.teardown()
        with monkeypatch.context() as patch:
            patch.delenv("ACCEL_BACKEND")
            patch.setenv(name, value)
            with pytest.raises(error, match=f"^{name}='{re.escape(value)}'.*{re.escape(words)}"):
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


def test_what_differs_is_told_by_its_name_on_every_rank() -> None:
    differs = "RankMismatchError: accel.setup got different arguments on different ranks: "
    for rank, said in enumerate(run(2, differing)):
        assert said == {
            "lr": f"{differs}lr of group 0 of optimizer 0 is 0.1 on rank 0; 0.2 on rank 1.",
            "order": f"{differs}params[0] of group 0 of optimizer 0 is weight on rank 0; bias on rank 1.",
            "state": f"{differs}count of the state of weight in optimizer 0 is 1 on rank 0; 2 on rank 1.",
            "batch": f"{differs}batch size of dataloader 0 is 2 on rank 0; 3 on rank 1.",
            "backend": f"{differs}backend is ddp on rank 0; fsdp on rank 1.",
            "option": f"{differs}find_unused_parameters of accel.DDP is False on rank 0; True on rank 1.",
            "outside": "BackendError: ACCEL_BACKEND='single': backend='single' can't train on 2 ranks, because each process "
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
    r"All 2 ranks got the same inputs for Linear #\d+, so every rank computes the same gradients\. Pass the DataLoader to "
    r"accel\.setup\(\)\. Ignore this warning if it is intended\."
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
        assert [
            re.match("dataloader 0 has different data on different ranks", text) is not None for text in own[0]
        ] == [True] * (rank == 0)


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
            "Adam steps 2 parameters that are in no model of accel.setup, the first of shape (1, 2), so each rank trains "
            "its own. Give their module and this optimizer to accel.setup, unless ranks are meant to differ."
        ]


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_lines_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"accel {accel.__version__}\n"
    assert main(["run", "--backend", "fdsp", __file__]) == 1
    assert capsys.readouterr().err.startswith("accel run: unknown backend 'fdsp' (did you mean 'fsdp'?)")
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
    "verify one damaged": "is damaged between bytes 256 and 280, in model/weight, model/bias",
    "verify nowhere": "nowhere does not exist",
    "export one file": "File exists: ",
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


def test_commands_say_what_is_wrong_in_their_own_words(
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

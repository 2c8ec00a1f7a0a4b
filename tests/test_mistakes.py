"""Common slips in a call, each by the whole text of its error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.__main__ import main
from accel.engines import resolve
from tests.backends import need


def net() -> nn.Module:
    return nn.Linear(2, 2)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(net().parameters(), lr=0.1)


ANY: Any = accel
OPTIMIZER = "; expected a torch.optim.Optimizer: "
SWAPPED = (
    "expected the path of a directory, found a dict: the order is accel.save(state, dir) and accel.load(dir, state)"
)
MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a scheduler": (
        lambda: accel.setup(net(), torch.optim.lr_scheduler.StepLR(sgd(), 1)),  # type: ignore[call-overload]
        accel.OptimizerError,
        f"optimizers is a torch.optim.lr_scheduler.StepLR{OPTIMIZER}give the optimizer that this StepLR schedules; the "
        "scheduler stays as it is in the loop",
    ),
    "parameters": (
        lambda: ANY.setup(net(), net().parameters()),
        accel.OptimizerError,
        f"optimizers is a builtins.generator{OPTIMIZER}give what steps them, as torch.optim.AdamW(model.parameters())",
    ),
    "a class of optimizers": (
        lambda: ANY.setup(net(), torch.optim.SGD),
        accel.OptimizerError,
        f"optimizers is the class torch.optim.sgd.SGD{OPTIMIZER}make one, SGD(model.parameters(), ...)",
    ),
    "a class of modules": (
        lambda: ANY.setup(nn.Linear),
        accel.AccelError,
        "expected a torch.nn.Module as the model, got the class torch.nn.modules.linear.Linear",
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
        "Single(xyz=...): there is no such option; its options are drift_check, activation_checkpointing, activation_offload",
    ),
    "an option without its name": (
        lambda: ANY.Single(True),
        accel.BackendError,
        "Single(True): options go by their names: drift_check, activation_checkpointing, activation_offload",
    ),
    "an option outside, without its name": (
        lambda: accel.setup(net(), backend="ddp:4"),
        accel.BackendError,
        "backend 'ddp:4': '4' names no option; expected name=value",
    ),
    "an argument of the function": (
        lambda: accel.launch(print, epochs=5),
        accel.LaunchError,
        "accel.launch has no option 'epochs': arguments of print go by position, or as functools.partial(print, epochs=...)",
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


def test_a_backend_by_a_similar_name() -> None:
    with pytest.raises(
        accel.BackendError, match=r"^unknown backend 'fdsp', did you mean 'fsdp'\?; expected 'auto', one of "
    ):
        accel.setup(net(), backend="fdsp")


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


def test_devices_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_DEVICES", "some")
    with pytest.raises(accel.DeviceError, match=r"^ACCEL_DEVICES='some': devices='some': "):
        accel.setup(net())


def test_the_command_lines_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"accel {accel.__version__}\n"
    assert main(["run", "--backend", "fdsp", __file__]) == 1
    assert "accel run: unknown backend 'fdsp', did you mean 'fsdp'?" in capsys.readouterr().err

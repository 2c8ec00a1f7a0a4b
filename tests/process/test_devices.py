"""The grammar of ``devices=``, with made-up counts of accelerators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accel
from accel.errors import AccelError, DeviceError
from accel.process.environments import (
    available,
    default_backend,
    identity,
    parse_backend,
    parse_devices,
    pick,
    refuse_shared,
    resolve,
)

CPU = (torch.device("cpu"),)


def cuda(*numbers: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", number) for number in numbers)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (None, CPU),
        (0, CPU),
        ("cpu", CPU),
        ("cpu:0", CPU),
        (torch.device("cpu"), CPU),
        (3, cuda(0, 1, 2)),
        (1, cuda(0)),
        (-1, cuda(0, 1, 2, 3)),
        ([0], cuda(0)),
        ([1, 3], cuda(1, 3)),
        ((3, 1), cuda(3, 1)),
        ("0", cuda(0)),
        ("3", cuda(3)),
        ("1, 3", cuda(1, 3)),
        (" 1,3 ", cuda(1, 3)),
        ("-1", cuda(0, 1, 2, 3)),
        ("auto", cuda(0, 1, 2, 3)),
        ("cuda:1", cuda(1)),
        (torch.device("cuda", 2), cuda(2)),
        (["cuda:1", torch.device("cuda", 0)], cuda(1, 0)),
    ],
    ids=repr,
)
def test_the_table(request_: Any, expected: tuple[torch.device, ...]) -> None:
    assert parse_devices(request_, 4) == expected


@pytest.mark.parametrize(
    "bad",
    [-2, 5, 2.0, 1.5, True, False, "", " ", "1,", ",1", "1,,2", "4", "-2", "1.0", "two", "gpu", "cuda:4", "mps", "cuda"]
    + [[], [4], [-1], [1, 1], "1, 1", [0, True], [0.0], [None], {0, 1}, b"0", "0-2", "xpu:0", torch.device("xpu", 0)]
    + ["free:", "free:0", "free:-1", "free:x", "free", "1_0", "٣"],
    ids=repr,
)
def test_bad_values_are_refused_with_what_exists(bad: Any) -> None:
    with pytest.raises(DeviceError, match="this machine has cuda:0, cuda:1, cuda:2, cuda:3 and cpu"):
        parse_devices(bad, 4)


@pytest.mark.parametrize("wanted", [1, -1, [0], "0", "-1", "cuda:0", "free:1", torch.device("cuda", 0)], ids=repr)
def test_an_explicit_gpu_is_refused_where_there_is_none(wanted: Any) -> None:
    with pytest.raises(DeviceError, match="no accelerator, only cpu"):
        parse_devices(wanted, 0, "cpu")


@pytest.mark.parametrize("wanted", ["auto", "cpu", 0, None], ids=repr)
def test_a_machine_without_accelerators(wanted: Any) -> None:
    assert parse_devices(wanted, 0, "cpu") == CPU


def test_another_kind_of_accelerator() -> None:
    assert parse_devices("auto", 2, "xpu") == (torch.device("xpu", 0), torch.device("xpu", 1))
    assert parse_devices("mps", 1, "mps") == (torch.device("mps", 0),)
    with pytest.raises(DeviceError, match="this machine has xpu:0 and cpu"):
        parse_devices("cuda:0", 1, "xpu")


def test_free_devices() -> None:
    asked: list[int] = []

    def probe(number: int) -> bool:
        asked.append(number)
        return number in (0, 2)

    assert parse_devices("free:2", 4, probe=probe) == cuda(1, 3)
    assert asked == [0, 1, 2, 3]
    assert parse_devices("free:1", 4, probe=probe) == cuda(1)
    with pytest.raises(DeviceError, match=r"3 free accelerators are asked for, free are \[1, 3\]"):
        parse_devices("free:3", 4, probe=probe)


def test_nothing_is_probed_unless_asked() -> None:
    def probe(number: int) -> bool:
        raise AssertionError(number)

    assert parse_devices([1], 2, probe=probe) == cuda(1)


def test_pick() -> None:
    assert pick(cuda(0, 1), 0, 1) == cuda(0, 1)
    assert [pick(cuda(2, 3), local, 2) for local in (0, 1)] == [cuda(2), cuda(3)]
    assert pick(cuda(0), 3, 4) == cuda(0)
    assert pick(CPU, 1, 2) == CPU


def test_one_device_for_two_ranks_is_refused() -> None:
    owners = [identity(torch.device("mps", 0), host) for host in ("a", "b", "a")]
    refuse_shared(owners[:2])
    with pytest.raises(DeviceError, match=r"ranks \[0, 2\] would share one device"):
        refuse_shared(owners)


def test_default_backends() -> None:
    assert default_backend("cpu") == "gloo"
    assert default_backend("xpu") == "cpu:gloo,xpu:xccl"
    with pytest.raises(DeviceError, match="no backend for ipu"):
        default_backend("ipu")


def test_backend_names() -> None:
    assert parse_backend("gloo") == parse_backend("GLOO") == {"cpu": "gloo", "cuda": "gloo"}
    assert parse_backend("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    for bad in ("", "gluu", "cpu:gloo,gpu", "a:b:gloo", 3):
        with pytest.raises(AccelError, match="process_group="):
            parse_backend(bad)  # type: ignore[arg-type]


def test_the_environment_speaks_where_the_call_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_DEVICES", "cpu")
    assert resolve("auto") == CPU
    monkeypatch.setenv("ACCEL_DEVICES", "99")
    assert resolve("cpu") == CPU
    with pytest.raises(DeviceError, match="'99'"):
        resolve("auto")
    monkeypatch.setenv("ACCEL_DEVICES", "")
    kind, count = available()
    assert resolve("auto") == parse_devices("auto", count, kind)


def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in {"ACCEL_BACKENDS": "fsdp", "ACCEL_BENCH_DIR": "x"}.items():
        monkeypatch.setenv(name, value)
    accel.init()
    assert caplog.messages == ["ACCEL_BACKENDS=fsdp has no effect: did you mean ACCEL_BACKEND?"]


def test_available_tells_what_torch_has() -> None:
    kind, count = available()
    assert (kind == "cpu") == (count == 0)
    assert torch.device(kind).type == kind

"""The grammar of ``devices=``, with made-up counts of accelerators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from accel.errors import AccelError, DeviceError
from accel.process import devices, startup, watchdog
from accel.process.devices import default_backend, parse_backend, parse_devices, pick

CPU = (torch.device("cpu"),)


def cuda(*numbers: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", number) for number in numbers)


TABLE: list[tuple[Any, tuple[torch.device, ...]]] = [
    (None, CPU),
    (0, CPU),
    ("cpu", CPU),
    (torch.device("cpu"), CPU),
    (3, cuda(0, 1, 2)),
    (-1, cuda(0, 1, 2, 3)),
    ([0], cuda(0)),
    ((3, 1), cuda(3, 1)),
    ("3", cuda(3)),
    ("1, 3", cuda(1, 3)),
    ("-1", cuda(0, 1, 2, 3)),
    ("auto", cuda(0, 1, 2, 3)),
    ("cuda:1", cuda(1)),
    (["cuda:1", torch.device("cuda", 0)], cuda(1, 0)),
]


def test_grammar() -> None:
    for request, expected in TABLE:
        assert parse_devices(request, 4) == expected, request
    for request in ("auto", "cpu", 0, None):
        assert parse_devices(request, 0, "cpu") == CPU
    assert parse_devices("auto", 2, "xpu") == (torch.device("xpu", 0), torch.device("xpu", 1))
    assert parse_devices("mps", 1, "mps") == (torch.device("mps", 0),)
    # A rank alone on its node gets all devices. A launcher may show each rank only its own.
    assert pick(cuda(0, 1), 0, 1) == cuda(0, 1)
    assert pick(cuda(2, 3), 1, 2) == cuda(3)
    assert pick(cuda(0), 3, 4) == cuda(0)


BAD = [-2, 5, 2.0, True, "", "1,", "1,,2", "4", "-2", "two", "gpu", "cuda:4", "mps", "cuda", "0-2", "free:0", "free"]
BAD += [[], [4], [-1], [1, 1], [0, True], [None], {0, 1}, torch.device("xpu", 0)]


def test_wrong_devices() -> None:
    for bad in BAD:
        with pytest.raises(DeviceError, match="this machine has 4 cuda devices"):
            parse_devices(bad, 4)
    for bad in (1, -1, [0], "0", "cuda:0", "free:1"):
        with pytest.raises(DeviceError, match="this machine has no accelerator"):
            parse_devices(bad, 0, "cpu")
    with pytest.raises(DeviceError, match="this machine has 1 xpu devices"):
        parse_devices("cuda:0", 1, "xpu")


def test_free_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_free_gpus", lambda: [1, 3])
    assert parse_devices("free:2", 4) == cuda(1, 3)
    assert parse_devices("free:1", 4) == cuda(1)
    with pytest.raises(DeviceError, match=r"3 free devices were requested, but only \[1, 3\] are free"):
        parse_devices("free:3", 4)


def test_ranks_check_their_devices() -> None:
    first = {"kind": "mps", "problem": ""}
    startup._check([first, first])
    for second, words in (
        ({"kind": "cpu", "problem": ""}, "rank 1 uses cpu, but rank 0 uses mps"),
        ({"kind": "mps", "problem": "no mps"}, "rank 1: no mps"),
    ):
        with pytest.raises(DeviceError, match=words):
            startup._check([first, second])


def test_process_group_backends() -> None:
    assert default_backend("cpu") == "gloo"
    assert default_backend("xpu") == "cpu:gloo,xpu:xccl"
    with pytest.raises(DeviceError, match="no backend for ipu"):
        default_backend("ipu")
    assert parse_backend("gloo") == parse_backend("GLOO") == {"cpu": "gloo", "cuda": "gloo"}
    assert parse_backend("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    for bad in ("", "gluu", "cpu:gloo,gpu"):
        with pytest.raises(AccelError, match="process_group="):
            parse_backend(bad)


def test_backends_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is none of torch's classes, as nccl2 is none of ``ProcessGroupNCCL``."""
    gloo, nccl = Mock(spec=["name"]), Mock(spec=["name", "abort"])
    gloo.name.return_value, nccl.name.return_value = "gloo", "nccl2"
    backends = {torch.device("cpu"): gloo, torch.device("cuda"): nccl}
    group: Any = SimpleNamespace(_device_types=list(backends), _get_backend=backends.__getitem__)
    assert watchdog.accelerator_backends(group) == [nccl]
    groups = SimpleNamespace(_world=SimpleNamespace(pg_map=[group]))
    monkeypatch.setattr(watchdog, "distributed_c10d", groups)
    monkeypatch.setattr(watchdog, "_close_gloo", lambda group: None)
    watchdog.disconnect_all()
    nccl.abort.assert_called_once_with()

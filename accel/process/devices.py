"""The grammar of ``devices=``: what a request means among the devices that exist.

None, 0, "cpu"      the CPU
3, -1               the first three accelerators, all of them
[1, 3], "1, 3"      these accelerators ("3" is the one numbered 3)
"-1"                all accelerators
"auto"              all accelerators, else the CPU
"free:2"            two accelerators that no other process occupies
"cuda:1"            one device by its torch name, also as torch.device or in a list
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import AccelError, DeviceError

_CPU = (torch.device("cpu"),)
_IDLE_MEMORY = 64  # MiB: less than a CUDA context takes, more than the driver itself


def available() -> tuple[str, int]:
    """The kind of accelerator that torch finds on this machine and how many; ``("cpu", 0)`` without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return accelerator.type, torch.accelerator.device_count()
    if os.environ.get("PJRT_DEVICE") and importlib.util.find_spec("torch_xla"):
        torch_xla = importlib.import_module("torch_xla")  # torch.accelerator does not know its devices
        return torch_xla.device().type, torch_xla.device_count()
    return "cpu", 0


def resolve(devices: object) -> tuple[torch.device, ...]:
    """What a request means on this machine; ``"auto"`` is what ACCEL_DEVICES says, where it says something."""
    outside = os.environ.get("ACCEL_DEVICES") if isinstance(devices, str) and devices == "auto" else None
    kind, count = available()
    try:
        return parse_devices(outside or devices, count, kind)
    except DeviceError as error:
        if not outside:
            raise
        raise DeviceError(f"ACCEL_DEVICES={outside!r}: {error}") from None


def parse_devices(
    devices: object, count: int, kind: str = "cuda", probe: Callable[[int], bool] | None = None
) -> tuple[torch.device, ...]:
    """The devices that a request means.

    Args:
        devices: The request, in the grammar at the top of this module.
        count: How many accelerators exist.
        kind: Their type, as ``torch.device`` knows it.
        probe: Tells whether another process occupies the accelerator of that number; asks the driver by default.

    Raises:
        DeviceError: The request is not in the grammar, or asks for a device that does not exist or is not free.
    """
    request = _Request(devices, count, kind)
    if devices is None:
        return _CPU
    if isinstance(devices, str):
        return request.text(devices.strip(), probe or _occupied)
    if isinstance(devices, bool):
        raise request.error("a bool says neither how many nor which")
    if isinstance(devices, int):
        return request.first(devices) if devices else _CPU
    if isinstance(devices, torch.device) and devices.type == "cpu":
        return _CPU
    return request.these([request.number(d) for d in (devices if isinstance(devices, list | tuple) else [devices])])


class _Request:
    """One request among the accelerators that exist."""

    def __init__(self, devices: object, count: int, kind: str) -> None:
        self.devices, self.count, self.kind = devices, count, kind

    def error(self, reason: str) -> DeviceError:
        names = ", ".join(f"{self.kind}:{index}" for index in range(self.count))
        found = f"this machine has {names} and cpu" if names else "this machine has no accelerator, only cpu"
        return DeviceError(
            f"devices={self.devices!r}: {reason}; {found}. Ask for a number of devices (2, -1 for all), "
            "a list ([0, 1]), their numbers ('0, 1'), 'free:2', 'cpu' or 'auto'"
        )

    def these(self, indices: list[int]) -> tuple[torch.device, ...]:
        if not indices:
            raise self.error("an empty list")
        for index in indices:
            if not 0 <= index < self.count:
                raise self.error(f"there is no accelerator number {index}")
        if len(set(indices)) < len(indices):
            raise self.error("a device is named twice")
        return tuple(torch.device(self.kind, index) for index in indices)

    def first(self, number: int) -> tuple[torch.device, ...]:
        if number < -1:
            raise self.error("the only negative value is -1, all accelerators")
        if number > self.count or self.count == 0:
            wanted = "all accelerators are" if number == -1 else f"{number} accelerators are"
            raise self.error(f"{wanted} asked for, {self.count} exist")
        return self.these(list(range(self.count if number == -1 else number)))

    def number(self, item: object) -> int:
        """The number of one device in a list: an int, or a device of torch."""
        if isinstance(item, int) and not isinstance(item, bool):
            return item
        device: Any = None
        with contextlib.suppress(RuntimeError):
            device = torch.device(item) if isinstance(item, str) else item
        if not isinstance(device, torch.device):
            raise self.error(f"{item!r} is no device")
        if device.type != self.kind or self.count == 0:
            raise self.error(f"there is no {device.type} accelerator")
        index: int | None = device.index
        if index is None and self.count > 1:
            raise self.error(f"{str(device)!r} does not say which: name '{device.type}:0', or ask for -1, all of them")
        return index or 0

    def text(self, text: str, probe: Callable[[int], bool]) -> tuple[torch.device, ...]:
        if text == "cpu" or (text == "auto" and self.count == 0):
            return _CPU
        if text in ("auto", "-1"):
            return self.first(-1)
        if text.startswith("free:"):
            return self.free(text.removeprefix("free:"), probe)
        if re.fullmatch(r"[0-9]+(\s*,\s*[0-9]+)*", text):
            return self.these([int(number) for number in text.split(",")])
        if re.fullmatch(r"[a-z]+(:[0-9]+)?", text):
            return self.these([self.number(text)])
        raise self.error("not in the known form")

    def free(self, wanted: str, probe: Callable[[int], bool]) -> tuple[torch.device, ...]:
        if not re.fullmatch(r"[1-9][0-9]*", wanted):
            raise self.error("expected free: and how many, as 'free:2'")
        free = [index for index in range(self.count) if not probe(index)]
        if len(free) < int(wanted):
            raise self.error(f"{wanted} free accelerators are asked for, free are {free}")
        return self.these(free[: int(wanted)])


def _occupied(index: int) -> bool:
    """Whether another process occupies this GPU, from the driver: allocating there would itself occupy it."""
    if not torch.cuda.is_available():
        raise DeviceError("devices='free:...' can be told for CUDA devices only: name the devices instead")
    query = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
    try:
        rows = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"devices='free:...' needs nvidia-smi, which failed ({error}): name the devices") from error
    used = {name.strip().removeprefix("GPU-"): memory for name, memory in (row.split(",") for row in rows)}
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    if not used.get(uuid, "").strip().isdecimal():
        raise DeviceError(f"nvidia-smi does not tell the used memory of cuda:{index}: name the devices instead")
    return int(used[uuid]) > _IDLE_MEMORY


# -- which of them a rank takes, and what carries their tensors between ranks -----------------------------------------


def pick(devices: tuple[torch.device, ...], local_rank: int, local_world_size: int) -> tuple[torch.device, ...]:
    """The devices of one rank: all where it is alone on its host, else its own one.

    The number wraps round, since a launcher may show each rank nothing but its own device, as the first one.
    """
    return devices if local_world_size == 1 else (devices[local_rank % len(devices)],)


def identity(device: torch.device, host: str) -> str:
    """The physical device, since its number depends on what the process can see."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    return f"{device} of {host}"


def refuse_shared(owners: Sequence[str]) -> None:
    """Refuses ranks with one physical device; ``owners`` is each rank's ``identity``."""
    for owner in owners:
        ranks = [rank for rank, other in enumerate(owners) if other == owner]
        if len(ranks) > 1:
            raise DeviceError(
                f"ranks {ranks} would share one device ({owner}): start fewer processes, set LOCAL_RANK, show each "
                "process a device of its own, or let them share it with accel.init(process_group='gloo')"
            )


def unserved(device: torch.device, backends: Mapping[str, str]) -> str:
    """Why the process group cannot carry this device's tensors; empty where it can."""
    if device.type in backends:
        return ""
    return f"the process group has no backend for {device.type} tensors, only {dict(backends)}"


def default_backend(kind: str) -> str:
    """The backend of torch.distributed for a type of device; CPU tensors always have theirs."""
    if kind == "cpu" or (kind == "cuda" and not dist.is_nccl_available()):
        return "gloo"
    if kind not in dist.Backend.default_device_backend_map:
        raise DeviceError(f"torch.distributed has no backend for {kind} devices: use devices='cpu', or one process")
    return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}"


def parse_backend(text: str) -> dict[str, str]:
    """Device type to backend, from torch's form: ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        AccelError: a backend that torch does not know, or another form.
    """
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    asked = [part.rpartition(":")[2] for part in text.lower().split(",")] if isinstance(text, str) else []
    if not asked or not set(asked) <= set(known):
        raise AccelError(f"process_group={text!r}: expected one of {', '.join(known)}, or a form 'cpu:gloo,cuda:nccl'")
    try:
        served = dist.BackendConfig(dist.Backend(text)).get_device_backend_map()
    except ValueError as error:
        raise AccelError(f"process_group={text!r}: {' '.join(str(error).split())}") from error
    return {device: str(name) for device, name in served.items()}

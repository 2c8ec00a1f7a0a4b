"""Find the devices of this node, and resolve requests such as ``"free:2"``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from ..errors import AccelError, DeviceError

Devices: TypeAlias = "tuple[torch.device, ...]"

# In MiB. An idle GPU's driver uses less than this, and any CUDA context uses more.
_IDLE_MEMORY: Final = 64


def available() -> tuple[str, int]:
    """Return the type and number of this node's accelerators, or ``("cpu", 0)``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return accelerator.type, torch.accelerator.device_count()
    # torch.accelerator doesn't know the devices of torch_xla.
    if os.environ.get("PJRT_DEVICE") and importlib.util.find_spec("torch_xla"):
        torch_xla = importlib.import_module("torch_xla")
        return torch_xla.device().type, torch_xla.device_count()
    return "cpu", 0


def resolve(devices: object) -> Devices:
    """Return the devices for a request. ACCEL_DEVICES replaces ``"auto"``."""
    kind, count = available()
    name, variable = "devices", os.environ.get("ACCEL_DEVICES")
    if devices == "auto" and variable:
        name, devices = "ACCEL_DEVICES", variable
    return parse_devices(devices, count, kind, name)


def parse_devices(devices: Any, count: int, kind: str = "cuda", name: str = "devices") -> Devices:
    """Return the devices for a request on a node with ``count`` accelerators."""
    try:
        numbers = _numbers(devices, count, kind)
    except (RuntimeError, ValueError) as error:
        # Replace the text of torch.device's RuntimeError, which lists 20 device types.
        reason = error if isinstance(error, ValueError) else f"{devices!r} is not a device"
        existing = f"{count} {kind} devices" if count else "no accelerator"
        raise DeviceError(
            f"{name}={devices!r}: {reason}, and this machine has {existing}. "
            'Use a number, -1 for all, [0, 1], "0, 1", "free:2", "cpu" or "auto".'
        ) from None
    chosen = tuple(torch.device(kind, number) for number in numbers)
    return chosen or (torch.device("cpu"),)


def _numbers(devices: Any, count: int, kind: str) -> list[int]:
    """Return the numbers of the requested accelerators. Empty for the CPU."""
    if isinstance(devices, str):
        devices = _parse_text(devices.strip(), count)
    if devices is None or devices == torch.device("cpu"):
        return []
    if type(devices) is int:
        number = count if devices == -1 else devices
        if devices and not 0 < number <= count:
            raise ValueError("the number is out of range")
        return list(range(number))
    listed = devices if isinstance(devices, list | tuple) else [devices]
    numbers = [_number(device, count, kind) for device in listed]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError("expected distinct devices, and at least one")
    return numbers


def _parse_text(text: str, count: int) -> Any:
    """Convert a string to an int, a list or a torch.device."""
    if text in ("auto", "-1"):
        return None if text == "auto" and not count else -1
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        return list(map(int, text.split(",")))
    if re.fullmatch(r"free:[1-9]\d*", text):
        wanted = int(text.removeprefix("free:"))
        free = _free_gpus() if count else []
        if len(free) < wanted:
            raise ValueError(f"{wanted} free devices were requested, but only {free} are free")
        return free[:wanted]
    return torch.device(text)


def _number(device: Any, count: int, kind: str) -> int:
    """Return the number of an accelerator, given by number, name or torch.device."""
    device = torch.device(device) if isinstance(device, str) else device
    number = device
    if isinstance(device, torch.device) and device.type == kind:
        # "cuda" without a number is unambiguous only if the machine has a single accelerator.
        number = 0 if str(device) == kind and count == 1 else device.index
    if type(number) is not int or not 0 <= number < count:
        raise ValueError(f"there is no accelerator {str(device)!r}")
    return number


def _free_gpus() -> list[int]:
    """Return the idle GPUs."""
    # Ask the driver, because torch would create a context on each GPU, which takes memory.
    query = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
    table = subprocess.check_output(query, text=True)
    used = dict(row.split(", ") for row in table.splitlines())
    free: list[int] = []
    for gpu in range(torch.cuda.device_count()):
        # Compare UUIDs: CUDA_VISIBLE_DEVICES renumbers torch's GPUs, but not nvidia-smi's.
        name = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
        if int(used[name]) <= _IDLE_MEMORY:
            free.append(gpu)
    return free


def pick(devices: Devices, local_rank: int, local_world_size: int) -> Devices:
    """Return the devices of a rank. The only rank on a node gets all devices."""
    if local_world_size == 1:
        return devices
    # If a launcher makes a single GPU visible to each rank, it is number 0 on every rank.
    return (devices[local_rank % len(devices)],)


def default_backend(kind: str) -> str:
    """Return torch's default backends for the CPU and a device type."""
    if kind == "cpu":
        return "gloo"
    backend = dist.Backend.default_device_backend_map.get(kind)
    if backend is None:
        raise DeviceError(f'torch has no backend for {kind} devices. Use devices="cpu".')
    return f"cpu:gloo,{kind}:{backend}"


def parse_backend(text: str) -> dict[str, str]:
    """Return the backend for each device type."""
    # Skip the first backend, "undefined".
    known = dist.Backend.backend_list[1:]
    for part in text.lower().split(","):
        if part.rpartition(":")[2] not in known:
            raise AccelError(
                f"process_group={text!r} isn't one of {', '.join(known)}. "
                'Pass one, or a string such as "cpu:gloo,cuda:nccl".'
            )
    return dict(dist.BackendConfig(dist.Backend(text)).get_device_backend_map())

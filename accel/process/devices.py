"""The devices of this node, and the devices that a request such as ``devices=2`` means.

====================  ==========================================================
``None, 0, "cpu"``    the CPU
``3, -1``             the first three accelerators, or all of them
``[1, 3], "1, 3"``    these accelerators. ``"3"`` is the accelerator numbered 3
``"-1"``              all accelerators
``"auto"``            all accelerators, or the CPU without any
``"free:2"``          two GPUs that no other process uses
``"cuda:1"``          a device by its name. A ``torch.device`` and lists work too
====================  ==========================================================
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
from typing import Any

import torch
import torch.distributed as dist

from ..errors import AccelError, DeviceError

_CPU = (torch.device("cpu"),)
_IDLE_MEMORY = 64  # MiB. The driver uses less, and any CUDA context uses more


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


def resolve(devices: object) -> tuple[torch.device, ...]:
    """Return the devices of this node that a request means. ACCEL_DEVICES replaces ``"auto"``."""
    kind, count = available()
    variable = os.environ.get("ACCEL_DEVICES")
    if devices == "auto" and variable:
        return parse_devices(variable, count, kind, "ACCEL_DEVICES")
    return parse_devices(devices, count, kind)


def parse_devices(
    devices: object, count: int, kind: str = "cuda", name: str = "devices"
) -> tuple[torch.device, ...]:
    """Return the devices that a request means, on a node with ``count`` accelerators.

    Raises:
        DeviceError: the request has a different form, or the devices don't exist.
    """
    try:
        numbers = _numbers(devices, count, kind)
    except (RuntimeError, ValueError) as error:
        # torch.device raises a RuntimeError that lists 20 types of devices.
        reason = error if isinstance(error, ValueError) else f"{devices!r} is not a device"
        names = ", ".join(f"{kind}:{number}" for number in range(count))
        existing = f"{names} and cpu" if count else "no accelerator, only cpu"
        raise DeviceError(
            f"{name}={devices!r}: {reason}, and this machine has {existing}. Use a number of "
            'devices, -1, a list ([0, 1]), numbers ("0, 1"), "free:2", "cpu" or "auto".'
        ) from None
    return tuple(torch.device(kind, number) for number in numbers) or _CPU


def _numbers(devices: Any, count: int, kind: str) -> list[int]:
    """Return the numbers of the accelerators that a request means. Empty for the CPU."""
    if isinstance(devices, str):
        devices = _parse_text(devices.strip(), count)
    if devices is None or (isinstance(devices, torch.device) and devices.type == "cpu"):
        return []
    if type(devices) is int:
        number = count if devices == -1 else devices
        if devices and not 0 < number <= count:
            raise ValueError(f"there are {count} accelerators")
        return list(range(number))
    several = devices if isinstance(devices, list | tuple) else [devices]
    numbers = [_number(device, count, kind) for device in several]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError("expected each device once, and at least one")
    return numbers


def _parse_text(text: str, count: int) -> Any:
    """Return the object that a string stands for."""
    if text == "auto":
        return -1 if count else None
    if text == "-1":
        return -1
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        return [int(number) for number in text.split(",")]
    if re.fullmatch(r"free:[1-9]\d*", text):
        wanted, free = int(text.removeprefix("free:")), _free_gpus() if count else []
        if len(free) < wanted:
            raise ValueError(f"{wanted} free accelerators are asked for, free are {free}")
        return free[:wanted]
    return torch.device(text)


def _number(device: Any, count: int, kind: str) -> int:
    """Return the number of an accelerator, which is given by number, name or torch.device."""
    device = torch.device(device) if isinstance(device, str) else device
    number = device
    if isinstance(device, torch.device) and device.type == kind:
        # "cuda" is a single accelerator only if there is one.
        number = 0 if str(device) == kind and count == 1 else device.index
    if type(number) is not int or not 0 <= number < count:
        raise ValueError(f"there is no accelerator {str(device)!r}")
    return number


def _free_gpus() -> list[int]:
    """Return the GPUs that no other process uses. Ask the driver, because a context uses memory."""
    query = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        used = dict(row.split(", ") for row in text.splitlines())
        gpus = range(torch.cuda.device_count())
        return [gpu for gpu in gpus if int(used[f"GPU-{_uuid(gpu)}"]) <= _IDLE_MEMORY]
    except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f'devices="free:n" needs nvidia-smi, which failed ({error}). Name the devices.'
        ) from error


def _uuid(gpu: int | torch.device) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)


# -- the devices of one rank, and the process group backends for them ------------------------------


def pick(
    devices: tuple[torch.device, ...], local_rank: int, local_world_size: int
) -> tuple[torch.device, ...]:
    """Return the devices of one rank: all if it is alone on its node, else one."""
    if local_world_size == 1:
        return devices
    # A launcher may show each rank a single device, always as number 0.
    return (devices[local_rank % len(devices)],)


def identity(device: torch.device, host: str) -> str:
    """Return a name of the physical device. Its number depends on the devices a process sees."""
    return f"GPU {_uuid(device)}" if device.type == "cuda" else f"{device} of {host}"


def default_backend(kind: str) -> str:
    """Return the process group backend for a type of device, beside gloo for CPU tensors."""
    if kind == "cpu" or (kind == "cuda" and not dist.is_nccl_available()):
        return "gloo"
    backend = dist.Backend.default_device_backend_map.get(kind)
    if backend is None:
        text = f'torch.distributed has no backend for {kind} devices. Use devices="cpu".'
        raise DeviceError(text)
    return f"cpu:gloo,{kind}:{backend}"


def parse_backend(text: str) -> dict[str, str]:
    """Return the backend of each device type, from ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``."""
    known = set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED}
    names = {part.rpartition(":")[2] for part in str(text).lower().split(",")}
    try:
        if not names <= known:
            raise ValueError(f"the backends are {', '.join(sorted(known))}")
        served = dist.BackendConfig(dist.Backend(text)).get_device_backend_map()
    except ValueError as error:
        raise AccelError(
            f"process_group={text!r}: {' '.join(str(error).split())}. Pass a backend or "
            '"cpu:gloo,cuda:nccl".'
        ) from error
    return {device: str(name) for device, name in served.items()}

"""Counts how often the host would wait for a device in a program that runs on the CPU.

On an accelerator ``item()``, ``bool(tensor)``, ``tolist()``, ``nonzero()`` and their like wait for all that was launched
before, so that the host no longer runs ahead. Here each is found where it is called. Not found: a blocking copy between
two tensors that exist already, since both lie on the CPU; tests/gpu asks torch itself for those.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Container
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs import ROOT

_aten = torch.ops.aten
#: Operators whose result, or its shape, the host reads from the device.
_READS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.bincount.default,
}
#: Methods that go to the host without an operator where the tensor lies there already.
_METHODS = ("tolist", "numpy", "__array__", "cpu", "to")
_OWN = {name: vars(torch.Tensor).get(name) for name in _METHODS}
_PACKAGES = Path(torch.__file__).parent.parent
_DISPATCHING = tuple(
    f"{_PACKAGES}/torch/{part}"
    for part in ("utils/_python_dispatch", "_dynamo", "_compile.py", "_ops.py", "overrides.py")
)
#: What the ranks tell each other travels between hosts, by gloo: these read no device.
_HOST = ("accel/process/packing.py", "accel/process/control.py", "accel/process/hangs.py", "accel/process/startup.py")
#: ``send_object_list`` over gloo.
_HOST += ("torch/distributed/distributed_c10d.py",)


def _place(frame: FrameType | None) -> str:
    """Where a read was called: ``file:line`` below accel, tests or site-packages."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(_DISPATCHING):
            return f"{file.removeprefix(f'{_PACKAGES}/').removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


class _Dispatch(TorchDispatchMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is _aten.index.Tensor and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if func in _READS or masked:
            self.reads.note(args[0])
        return func(*args, **(kwargs or {}))


class _Methods:
    """In the place of tensors' own: torch's modes for functions are off inside a backward."""

    def __init__(self, reads: DeviceReads) -> None:
        self.reads = reads
        self._inside = False

    def __enter__(self) -> None:
        for name in _METHODS:
            setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))

    def __exit__(self, *error: Any) -> None:
        for name in _METHODS:
            if _OWN[name] is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, _OWN[name])

    def _noting(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # A copy to a given device is one to the accelerator where there is one; so is DeepSpeed's to the one by name.
            to_host = name != "to" or "cpu" in (a for a in (*args, *kwargs.values()) if isinstance(a, str))
            by_name = name == "to" and _place(sys._getframe(1)).startswith("deepspeed/")
            if to_host and not by_name and not self._inside:
                self.reads.note(tensor)
            outer, self._inside = self._inside, True  # one calls another
            try:
                return method(tensor, *args, **kwargs)
            finally:
                self._inside = outer

        return call


class DeviceReads:
    """Context: notes each read of a tensor's values by the host, in this thread.

    Args:
        on_host: storages that lie on the host on an accelerator too, by ``untyped_storage().data_ptr()``: AdamW's steps, say.

    Attributes:
        places: how often, by ``file:line`` of the innermost caller.
    """

    def __init__(self, on_host: Container[int] = ()) -> None:
        self.places: Counter[str] = Counter()
        self._on_host = on_host
        self._modes = (_Methods(self), _Dispatch(self))

    def note(self, tensor: torch.Tensor) -> None:
        place = _place(sys._getframe(2))
        if not place.startswith(_HOST) and tensor.untyped_storage().data_ptr() not in self._on_host:
            self.places[place] += 1

    def __enter__(self) -> DeviceReads:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

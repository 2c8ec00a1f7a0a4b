"""Counts the calls for which a program would wait for an accelerator, in a program on the CPU.

On an accelerator ``item()``, ``bool(tensor)``, ``tolist()``, ``nonzero()`` and similar calls wait for every kernel that
was launched before. A blocking copy between two existing tensors isn't found, because both are on the CPU. tests/gpu
asks torch for those.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs import ROOT

_aten = torch.ops.aten
#: Operators with a result, or the shape of a result, that Python reads from the device.
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
#: Methods that call no operator if the tensor is on the CPU.
_METHODS = ("tolist", "numpy", "__array__", "cpu", "to")
_PACKAGES = Path(torch.__file__).parent.parent
_DISPATCHING = tuple(
    f"{_PACKAGES}/torch/{part}"
    for part in ("utils/_python_dispatch", "_dynamo", "_compile.py", "_ops.py", "overrides.py")
)
#: Files and functions that send values between ranks with gloo. These values are never on a device.
_ON_CPU = ("accel/process/packing.py", "accel/process/control.py", "accel/process/startup.py")
_ON_CPU += ("torch/distributed/distributed_c10d.py",)


def _place(frame: FrameType | None) -> str:
    """Return ``file:function:line`` of a read, relative to the repository or site-packages."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(_DISPATCHING):
            file = file.removeprefix(f"{_PACKAGES}/").removeprefix(f"{ROOT}/")
            return f"{file}:{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


class DeviceReads(TorchDispatchMode):
    """Context that notes each read of a tensor in this thread.

    Attributes:
        places: the number of reads by ``file:function:line`` of the innermost caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._patches = contextlib.ExitStack()
        self._inside = False

    def _note(self) -> None:
        place = _place(sys._getframe(2))
        if not place.startswith(_ON_CPU):
            self.places[place] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is _aten.index.Tensor and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if func in _READS or masked:
            self._note()
        return func(*args, **(kwargs or {}))

    def _noting(self, name: str) -> Any:
        """Return a method that notes its call. torch's modes for functions are off inside a backward."""
        method = getattr(torch.Tensor, name)

        @functools.wraps(method)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # `to(device)` copies to the accelerator if there is one, and so does DeepSpeed's `to("cpu")`.
            to_cpu = name != "to" or "cpu" in (a for a in (*args, *kwargs.values()) if isinstance(a, str))
            by_deepspeed = name == "to" and _place(sys._getframe(1)).startswith("deepspeed/")
            if to_cpu and not by_deepspeed and not self._inside:
                self._note()
            outer, self._inside = self._inside, True  # one method calls another
            try:
                return method(tensor, *args, **kwargs)
            finally:
                self._inside = outer

        return call

    def __enter__(self) -> DeviceReads:
        for name in _METHODS:
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, self._noting(name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

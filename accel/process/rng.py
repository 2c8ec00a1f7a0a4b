"""Random number generators: seed them, save their states, and use other states for a while."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from ..errors import AccelError, whole_number
from . import own_devices, rank


def seed(n: int, *, per_rank: bool = False) -> None:
    """Seed Python, NumPy if it is installed, and torch on all devices.

    Args:
        n: from 0 to 2**32 - 1.
        per_rank: add the rank to ``n``, so that each rank draws different numbers.

    Raises:
        AccelError: ``n`` is not such a number.
    """
    number = whole_number(n)
    if not 0 <= number < 2**32:
        raise AccelError(f"seed({n!r}): expected an integer from 0 to 2**32 - 1")
    _seed_all((number + rank()) % 2**32 if per_rank else number)


def _seed_all(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(number)


def rng_state() -> RngState:
    """Return the random generators as an object for ``save`` and ``load``, with a state per rank.

    Use it as ``{"model": model, ..., "rng": accel.rng_state()}`` in both. A rank that the saving
    job didn't have draws different numbers from every other rank.
    """
    return RngState()


@final
class RngState:
    """The generators of Python, of torch on this rank's devices, and of NumPy if it is in use."""

    def state_dict(self) -> dict[str, Any]:
        states = Generators(global_generators()).states()
        return {"numpy": None, **states, "devices": torch_states()[1:]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state. Generators without a state stay as they are."""
        if state_dict["numpy"] is not None:
            importlib.import_module("numpy")
        Generators(global_generators()).put(state_dict)
        devices = [*state_dict.get("devices", ())]
        # Checkpoints of older versions have the state of a single device.
        if state_dict.get("device") is not None:
            devices.insert(0, state_dict["device"])
        _put_on_devices(devices)

    def diverge(self, number: int) -> None:
        """Seed from the state and ``number``, so ranks with equal states draw differently."""
        content = bytes(torch.get_rng_state().tolist()) + str(number).encode()
        digest = hashlib.blake2b(content, digest_size=4).digest()
        _seed_all(int.from_bytes(digest, "big"))


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's generators, first of the CPU, then of this rank's devices."""
    states = [torch.get_rng_state()]
    for device in _accelerators():
        states.append(torch.get_device_module(device).get_rng_state(device).cpu())
    return states


def put_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Restore the states of ``torch_states``."""
    torch.set_rng_state(states[0])
    _put_on_devices(states[1:])


def _put_on_devices(states: Sequence[torch.Tensor]) -> None:
    # The saving rank may have had another number of devices.
    for device, state in zip(_accelerators(), states, strict=False):
        torch.get_device_module(device).set_rng_state(state, device)


def _accelerators() -> list[torch.device]:
    return [device for device in own_devices() if device.type != "cpu"]


# -- the generators of a dataloader ----------------------------------------------------------------


def global_generators() -> dict[str, Any]:
    """Return the global generators of the CPU. Those of other devices belong to the model."""
    generators: dict[str, Any] = {"torch": torch.default_generator, "python": random}
    if "numpy" in sys.modules:
        generators["numpy"] = sys.modules["numpy"].random
    return generators


def is_generator(value: Any) -> bool:
    """True for a generator object of torch, random or NumPy."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "random")


def seed_of(generator: Any) -> Any:
    """Return the seed of a torch generator, or the state of any other as plain values."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return to_plain(_get(generator))


def _get(generator: Any) -> Any:
    if hasattr(generator, "getstate"):  # Python's
        return generator.getstate()
    if hasattr(generator, "get_state"):  # torch's, and NumPy's global one
        return generator.get_state()
    return generator.bit_generator.state


def _set(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _seed(generator: Any, number: int) -> None:
    if hasattr(generator, "manual_seed"):
        generator.manual_seed(number)
    elif hasattr(generator, "getstate"):
        generator.seed(number)
    elif hasattr(generator, "seed"):  # NumPy takes 32 bits
        generator.seed(number % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state


class Generators:
    """Generators by name, which are read, restored and seeded together."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._all = dict(named)

    def states(self) -> dict[str, Any]:
        return {name: _get(generator) for name, generator in self._all.items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Restore the generators with a state in ``states``."""
        for name, generator in self._all.items():
            if states.get(name) is not None:
                _set(generator, states[name])

    def seeded(self, seed: int) -> dict[str, Any]:
        """Return the states after seeding. The generators stay as they are."""
        with Private(self, {}):
            for generator in self._all.values():
                _seed(generator, seed)
            return self.states()


class Private:
    """A context in which generators continue from given states. Outside they are as before."""

    def __init__(self, generators: Generators, states: Mapping[str, Any]) -> None:
        self._generators = generators
        self._states = dict(states)

    def __enter__(self) -> None:
        self._outer = self._generators.states()
        self._generators.put(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = self._generators.states()
        self._generators.put(self._outer)


def to_plain(state: Any) -> Any:
    """Return a generator's state as values for JSON."""
    if isinstance(state, torch.Tensor):
        return {"bytes": bytes(state.tolist()).hex()}
    if isinstance(state, dict):
        return {name: to_plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return list(map(to_plain, state))
    return state.tolist() if hasattr(state, "tolist") else state


def from_plain(state: Any) -> Any:
    """Undo ``to_plain``."""
    if isinstance(state, list | tuple):
        return tuple(map(from_plain, state))
    if not isinstance(state, dict):
        return state
    if state.keys() == {"bytes"}:
        return torch.frombuffer(bytearray.fromhex(state["bytes"]), dtype=torch.uint8)
    return {name: from_plain(value) for name, value in state.items()}

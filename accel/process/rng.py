"""Random number generators: seed them, save their states, and use other states for a while."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
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
        states = {"numpy": None, **Generators(global_generators()).states()}
        return states | {"devices": torch_states()[1:]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state. Generators that it doesn't have stay as they are."""
        names = [name for name in ("python", "torch", "numpy") if state_dict[name] is not None]
        if "numpy" in names:
            importlib.import_module("numpy")
        Generators(global_generators()).put({name: state_dict[name] for name in names})
        devices = [*state_dict.get("devices", ())]
        if state_dict.get("device") is not None:  # checkpoints of older versions
            devices.insert(0, state_dict["device"])
        _put_on_devices(devices)

    def diverge(self, number: int) -> None:
        """Seed from the state and ``number``, so that ranks with equal states draw differently."""
        _seed_all(_derive(torch.get_rng_state(), number))


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's generators: of the CPU, then of each of this rank's devices."""
    states = [torch.get_rng_state()]
    for device in _accelerators():
        states.append(torch.get_device_module(device).get_rng_state(device).cpu())
    return states


def put_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Restore the states of ``torch_states``."""
    torch.set_rng_state(states[0])
    _put_on_devices(states[1:])


def _put_on_devices(states: Sequence[torch.Tensor]) -> None:
    for number, device in enumerate(_accelerators() if states else []):
        module = torch.get_device_module(device)
        if number < len(states):
            module.set_rng_state(states[number], device)
        else:  # the saving rank had fewer devices
            with module.device(device):
                module.manual_seed(_derive(states[0], number))


def _accelerators() -> list[torch.device]:
    return [device for device in own_devices() if device.type != "cpu"]


def _derive(state: torch.Tensor, number: int) -> int:
    content = bytes(state.tolist()) + str(number).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "big")


# -- generators at states of a dataloader ----------------------------------------------------------


def global_generators() -> dict[str, Any]:
    """Return the global generators of the CPU. Those of other devices belong to the model."""
    generators = {"torch": torch.default_generator, "python": random}
    numpy = sys.modules.get("numpy")
    return generators if numpy is None else {**generators, "numpy": numpy.random}


def is_generator(value: Any) -> bool:
    """True for a generator object of torch, random or NumPy."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "random")


def seed_of(generator: Any) -> Any:
    """Return the seed of a torch generator, or the state of another one as plain values."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return to_plain(_access(generator)[0]())


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return the functions that get and set the state of a generator."""
    if hasattr(generator, "getstate"):  # Python's
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):  # torch's, and NumPy's global one
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _seed(generator: Any, number: int) -> None:
    if hasattr(generator, "manual_seed"):
        generator.manual_seed(number)
    elif hasattr(generator, "seed"):  # NumPy takes 32 bits
        generator.seed(number if hasattr(generator, "getstate") else number % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state


class Generators:
    """Generators by name, which are read, restored and seeded together."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._all = dict(named)

    def states(self) -> dict[str, Any]:
        return {name: _access(generator)[0]() for name, generator in self._all.items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Restore the generators that are in ``states``."""
        for name in states.keys() & self._all.keys():
            _access(self._all[name])[1](states[name])

    def seeded(self, seed: int) -> dict[str, Any]:
        """Return the states after seeding. The generators stay as they are."""
        with Private(self, {}):
            for generator in self._all.values():
                _seed(generator, seed)
            return self.states()


class Private:
    """A context in which generators continue from ``states``. Outside they are as before."""

    def __init__(self, generators: Generators, states: Mapping[str, Any]) -> None:
        self._generators = generators
        self.states = dict(states)

    def __enter__(self) -> None:
        self._outer = self._generators.states()
        self._generators.put(self.states)

    def __exit__(self, *_: object) -> None:
        self.states = self._generators.states()
        self._generators.put(self._outer)


def to_plain(state: Any) -> Any:
    """Return a generator's state as values for JSON."""
    if isinstance(state, torch.Tensor):
        return {"bytes": bytes(state.tolist()).hex()}
    if isinstance(state, dict):
        return {name: to_plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [to_plain(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


def from_plain(state: Any) -> Any:
    """Return the state that ``to_plain`` was given."""
    if isinstance(state, dict):
        if state.keys() == {"bytes"}:
            return torch.frombuffer(bytearray.fromhex(state["bytes"]), dtype=torch.uint8)
        return {name: from_plain(value) for name, value in state.items()}
    return tuple(map(from_plain, state)) if isinstance(state, list | tuple) else state

"""Random number generators: seed, save and restore them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from . import own_devices, rank


def seed(n: int, *, per_rank: bool = False) -> None:
    """Seed Python, NumPy if it is installed, and torch on all devices.

    Args:
        n: a seed from 0 to 2**32 - 1.
        per_rank: add the rank to ``n``, so that each rank draws different numbers.
    """
    if per_rank:
        n = (n + rank()) % 2**32
    random.seed(n)
    torch.manual_seed(n)
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy").random.seed(n)


def rng_state() -> RngState:
    """Return the random generators as an object for ``save`` and ``load``.

    Use it as ``{"model": model, ..., "rng": accel.rng_state()}`` in both. Each rank has
    its own state. If you add ranks, they draw different numbers.
    """
    return RngState()


@final
class RngState:
    """The generators of Python, torch on this rank's devices, and NumPy if imported."""

    def state_dict(self) -> dict[str, Any]:
        states = global_generators().states()
        return {"numpy": None, **states, "devices": torch_states()[1:]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state. Generators without a saved state don't change."""
        if state_dict["numpy"] is not None:
            importlib.import_module("numpy")
        global_generators().put(state_dict)
        put_torch_states([state_dict["torch"], *state_dict["devices"]])

    def diverge(self, number: int) -> None:
        """Seed from the state and ``number``, so that ranks draw different numbers."""
        content = bytes(torch.get_rng_state().tolist()) + str(number).encode()
        digest = hashlib.blake2b(content, digest_size=4).digest()
        seed(int.from_bytes(digest, "big"))


def torch_states() -> list[Tensor]:
    """Return torch's states, first of the CPU, then of this rank's devices."""
    states = [torch.get_rng_state()]
    for device in _accelerators():
        states.append(torch.get_device_module(device).get_rng_state(device).cpu())
    return states


def put_torch_states(states: Sequence[Tensor]) -> None:
    """Restore the states of ``torch_states``."""
    torch.set_rng_state(states[0])
    # The rank that saved may have had a different number of devices.
    for device, state in zip(_accelerators(), states[1:], strict=False):
        torch.get_device_module(device).set_rng_state(state, device)


def _accelerators() -> list[torch.device]:
    return [device for device in own_devices() if device.type != "cpu"]


# -- the generators of a dataloader ----------------------------------------------------------------


def global_generators() -> Generators:
    """Return the global CPU generators."""
    generators = Generators(torch=torch.default_generator, python=random)
    if "numpy" in sys.modules:
        generators["numpy"] = sys.modules["numpy"].random
    return generators


def is_generator(value: Any) -> bool:
    """True for a generator object of torch, random or NumPy."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "random")


def seed_of(generator: Any) -> Any:
    """Return a torch generator's seed, or any other generator's state."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return to_plain(_get(generator))


def _get(generator: Any) -> Any:
    # Python has getstate(), torch and numpy.random get_state(), and default_rng() neither.
    get = getattr(generator, "getstate", None) or getattr(generator, "get_state", None)
    return get() if get else generator.bit_generator.state


def _set(generator: Any, state: Any) -> None:
    put = getattr(generator, "setstate", None) or getattr(generator, "set_state", None)
    if put:
        put(state)
    else:
        generator.bit_generator.state = state


def _seed(generator: Any, number: int) -> None:
    if hasattr(generator, "manual_seed"):
        generator.manual_seed(number)
    elif hasattr(generator, "seed"):
        # NumPy takes seeds of up to 32 bits, and Python takes any.
        generator.seed(number if hasattr(generator, "getstate") else number % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state


class Generators(dict[str, Any]):
    """Named generators that are read, restored and seeded together."""

    def states(self) -> dict[str, Any]:
        return {name: _get(generator) for name, generator in self.items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Restore the generators with a state in ``states``."""
        for name, generator in self.items():
            if states.get(name) is not None:
                _set(generator, states[name])

    def seeded(self, seed: int) -> dict[str, Any]:
        """Return the states after seeding. The generators don't change."""
        with Private(self, {}):
            for generator in self.values():
                _seed(generator, seed)
            return self.states()


class Private:
    """A context in which generators continue from given states."""

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
    if isinstance(state, Tensor):
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

"""Random number generators: all of a process, seeded or saved; and some of them at states of their own for a while."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from ..errors import AccelError, whole_number
from . import own_devices, rank


def seed(n: int, *, per_rank: bool = False) -> None:
    """Seeds Python, NumPy where it is installed, and torch on all devices.

    Args:
        n: From 0 to 2**32 - 1.
        per_rank: Gives each rank numbers of its own, from ``n`` plus its rank.

    Raises:
        AccelError: ``n`` is not such a number.
    """
    number = whole_number(n)
    if not 0 <= number < 2**32:
        raise AccelError(f"seed({n!r}): expected an integer from 0 to 2**32 - 1")
    _seed((number + rank()) % 2**32 if per_rank else number)


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(number)


@final
class RngState:
    """The random generators of this process: Python's, torch's on the CPU and its devices, NumPy's where it is in use."""

    def state_dict(self) -> dict[str, Any]:
        # The others were not saved before, so that they have a name of their own.
        _, *there = torch_states()
        first = there[0] if there else None
        return {
            "numpy": None,
            **Generators(global_generators()).states(),
            "device": first,
            "devices": there[1:],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Bring them to a saved state; those that it does not have stay as they are."""
        if state_dict["numpy"] is not None:
            importlib.import_module("numpy")
        states = {name: state_dict[name] for name in ("python", "torch", "numpy")}
        Generators(global_generators()).put(
            {name: state for name, state in states.items() if state is not None}
        )
        if state_dict["device"] is not None:
            _put_on_devices([state_dict["device"], *state_dict.get("devices", ())])

    def diverge(self, number: int) -> None:
        """Seed them from their state and ``number``, so that two processes with one state draw different numbers."""
        _seed(_derived(torch.get_rng_state(), number))


def torch_states() -> list[torch.Tensor]:
    """Those of torch's generators: of the CPU, and of each of this rank's devices."""
    there = (
        torch.get_device_module(one).get_rng_state(one).cpu()
        for one in own_devices()
        if one.type != "cpu"
    )
    return [torch.get_rng_state(), *there]


def put_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Bring them to states of another rank."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        _put_on_devices(states[1:])


def _put_on_devices(states: Sequence[torch.Tensor]) -> None:
    """Bring the rank's devices to the states of the saving rank's; one that it did not have draws numbers of its own."""
    for number, place in enumerate(one for one in own_devices() if one.type != "cpu"):
        module = torch.get_device_module(place)
        if number < len(states):
            module.set_rng_state(states[number], place)
        else:
            with module.device(place):
                module.manual_seed(_derived(states[0], number))


def _derived(state: torch.Tensor, number: int) -> int:
    content = bytes(state.tolist()) + str(number).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "big")


def rng_state() -> RngState:
    """The random generators as something that ``save`` stores, for each rank its own, and ``load`` brings back.

    Use it as ``{"model": model, ..., "rng": accel.rng_state()}`` in both. What is stored is the state when ``save`` is called.
    A rank that the saving job did not have gets numbers that no other rank draws.
    """
    return RngState()


# -- generators by name ------------------------------------------------------------------------------------------------


class _Access(NamedTuple):
    """How a random generator of torch, random or numpy is read, put back and seeded."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object]


def _access(generator: Any) -> _Access:
    """The access to a generator object, or to the modules ``random`` and ``numpy.random``."""
    if isinstance(generator, torch.Generator):
        return _Access(generator.get_state, generator.set_state, generator.manual_seed)
    if hasattr(generator, "getstate"):
        return _Access(generator.getstate, generator.setstate, generator.seed)
    if hasattr(generator, "get_state"):
        return _Access(
            generator.get_state, generator.set_state, lambda seed: generator.seed(seed % 2**32)
        )
    bits = generator.bit_generator
    return _Access(
        lambda: bits.state,
        lambda state: setattr(bits, "state", state),
        lambda seed: setattr(bits, "state", type(bits)(seed).state),
    )


class Generators:
    """Random generators by name, which are read, put back and seeded together."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._all = {name: _access(generator) for name, generator in named.items()}

    def states(self) -> dict[str, Any]:
        return {name: access.get() for name, access in self._all.items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Brings those that ``states`` names, and that are here, to their states."""
        for name in states.keys() & self._all.keys():
            self._all[name].put(states[name])

    def seeded(self, seed: int) -> dict[str, Any]:
        before = self.states()
        try:
            for access in self._all.values():
                access.seed(seed)
            return self.states()
        finally:
            self.put(before)


def global_generators() -> dict[str, Any]:
    """The global CPU generators; those of other devices are the model's."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.default_generator,
        "python": random,
        **({"numpy": numpy.random} if numpy else {}),
    }


class Private:
    """A context in which generators continue from ``states``. Outside they are as before."""

    def __init__(self, generators: Generators, states: Mapping[str, Any]) -> None:
        self._generators = generators
        self.states = dict(states)

    def __enter__(self) -> None:
        outer = self._generators.states()
        self._outer = {name: outer[name] for name in self.states if name in outer}
        self._generators.put(self.states)

    def __exit__(self, *_: object) -> None:
        inner = self._generators.states()
        self.states = {name: inner[name] for name in self._outer}
        self._generators.put(self._outer)


def to_plain(state: Any) -> Any:
    """A generator's state as what JSON holds."""
    if isinstance(state, torch.Tensor):
        return {"bytes": bytes(state.tolist()).hex()}
    if isinstance(state, dict):
        return {name: to_plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [to_plain(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


def from_plain(state: Any) -> Any:
    """The generator's state that ``to_plain`` was given, or its equal."""
    if isinstance(state, dict):
        if state.keys() == {"bytes"}:
            return torch.frombuffer(bytearray.fromhex(state["bytes"]), dtype=torch.uint8)
        return {name: from_plain(value) for name, value in state.items()}
    return tuple(map(from_plain, state)) if isinstance(state, list | tuple) else state


def is_generator(value: Any) -> bool:
    """Whether an object is a random generator: of torch, random or numpy."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "random")


def seed_of(generator: Any) -> Any:
    """What a generator was seeded with; torch's tell, of others it is their state."""
    return (
        generator.initial_seed()
        if isinstance(generator, torch.Generator)
        else to_plain(_access(generator).get())
    )

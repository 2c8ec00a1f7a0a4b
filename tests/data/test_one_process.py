"""In one process batches and random numbers are raw PyTorch's, and a resumed loader goes on as if uninterrupted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel import LoaderError
from tests.data.loaders import (
    Mine,
    Noisy,
    Numbers,
    flat,
    loader_of,
    make,
    numbers,
    own,
    raw_like,
    reset,
    rng_states,
)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Drawing(Sampler[Any]):
    """Draws each item when it is asked for."""

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        for _ in range(23):
            yield int(torch.randint(50, ()))


RAW: dict[str, Any] = {
    "in order": lambda: numbers(23),
    "shuffle": lambda: numbers(23, shuffle=True),
    "shuffle, drop_last, generator": lambda: numbers(24, shuffle=True, drop_last=True, generator=own()),
    "replacement": lambda: loader_of(RandomSampler(range(50), replacement=True, num_samples=70)),
    "weighted, generator": lambda: loader_of(WeightedRandomSampler([1.0] * 50, 33, generator=own())),
    "subset": lambda: loader_of(SubsetRandomSampler(range(5, 40))),
    "plain batch sampler": lambda: DataLoader(
        Numbers(50), batch_sampler=BatchSampler(RandomSampler(range(50)), 3, True), collate_fn=list
    ),
    "no batches": lambda: numbers(17, None, shuffle=True),
    "persistent workers": lambda: numbers(23, shuffle=True, num_workers=2, persistent_workers=True),
    "stream, workers": lambda: DataLoader(Noisy(), batch_size=5, num_workers=1, collate_fn=list),
    "mine numpy": lambda: loader_of(Mine("numpy")),
    "mine own numpy": lambda: loader_of(Mine("own numpy")),
}


DRAWING: dict[str, Any] = {
    "drawing": lambda: loader_of(Drawing()),
    "stream": lambda: DataLoader(Noisy(), batch_size=3, collate_fn=list),
}


def play(loader: Any, draws: bool, break_at: int = 2) -> list[Any]:
    """Three epochs, the second with a break, of a loop that draws too; what it got, and its generators."""
    reset()
    seen: list[Any] = []
    for epoch in range(3):
        for k, batch in enumerate(loader):
            seen.append(batch)
            if draws:
                seen.append((torch.rand(()).item(), random.random(), np.random.rand()))
            if (epoch, k) == (1, break_at):
                break
        seen.append(rng_states())
    return seen


@pytest.mark.parametrize("name", [*RAW, *DRAWING])
def test_batches_are_raw_pytorchs(name: str) -> None:
    build = (RAW | DRAWING)[name]
    assert play(raw_like(build()), draws=True) == play(build(), draws=True)


def interrupted(build: Any, draws: bool, stop: tuple[int, int]) -> tuple[list[Any], dict[str, Any], Any]:
    """What a loop of two epochs got after it had saved its position, that position, and the generators then."""
    reset()
    handle, state, after, states = raw_like(build()), None, [], ()
    for epoch in range(2):
        for k, batch in enumerate(handle):
            if state is not None:
                after.append(batch)
            if draws:
                torch.rand(()), random.random(), np.random.rand()
            if (epoch, k) == stop:
                state = json.loads(json.dumps(handle.state_dict()))
                states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    assert state is not None
    return after, state, states


@pytest.mark.parametrize("name", [*RAW, *DRAWING])
def test_resume_as_if_uninterrupted(name: str) -> None:
    """Interrupted in the first or second epoch; the loop draws numbers too, unless the sampler draws while it does."""
    build, draws = (RAW | DRAWING)[name], name in RAW
    stop = (list(RAW | DRAWING).index(name) % 2, 1)
    expected, state, (torch_state, python_state, numpy_state) = interrupted(build, draws, stop)
    reset(99)
    handle = raw_like(build())
    handle.load_state_dict(state)
    assert handle.state_dict() == state
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    found = []
    for _ in range(stop[0], 2):
        for batch in handle:
            found.append(batch)
            if draws:
                torch.rand(()), random.random(), np.random.rand()
    assert [_plain(b) for b in found] == [_plain(b) for b in expected]


def _plain(batch: Any) -> Any:
    """A batch without the epoch that a Noisy stream was told."""
    items = batch if isinstance(batch, list) else [batch]
    return [item[2:] if isinstance(item, tuple) else item for item in items]


def test_order_mixed_with_loop_is_refused() -> None:
    _, state, _ = interrupted(DRAWING["drawing"], True, (0, 2))
    with pytest.raises(LoaderError, match="draws a different or shorter order"):
        raw_like(DRAWING["drawing"]()).load_state_dict(state)


@pytest.mark.parametrize("name", ["shuffle", "weighted, generator", "mine own numpy"])
def test_resume_on_ranks_and_back(name: str) -> None:
    build = (RAW | DRAWING)[name]
    after, state, _ = interrupted(build, False, (0, 1))
    rest = [_plain(b) for b in after][: len(list(build())) - 2]
    handles = [make(build(), rank, 2, even_batches=False) for rank in range(2)]
    for handle in handles:
        handle.load_state_dict(state)
    iterators = [iter(handle) for handle in handles]
    seen = [_plain(next(iterator)) for iterator in iterators]
    assert handles[0].state_dict() == {**handles[1].state_dict(), "generators": handles[0].state_dict()["generators"]}
    back = raw_like(build())
    back.load_state_dict(json.loads(json.dumps(handles[0].state_dict())))
    assert flat(seen) + flat(_plain(b) for b in back) == flat(rest)

"""The order of an epoch: the sampler's on every rank, and raw PyTorch's in one process."""

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
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import accel
from accel.data import LoaderHandle
from tests.data.loaders import (
    SAMPLERS,
    Noisy,
    Numbers,
    by_step,
    flat,
    loader_of,
    make,
    numbers,
    own,
    raw_like,
    reset,
    rng_states,
    sampled,
    samples,
    setup_loader,
)
from tests.distributed import run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize("name", SAMPLERS)
def test_order_is_the_samplers(name: str) -> None:
    build = SAMPLERS[name]
    orders = []
    for world in (1, 2, 3):
        handles = []
        for rank in range(world):
            reset(rank)
            handles.append(make(sampled(build(), batch_size=5), rank, world, even_batches=False))
        before = rng_states()
        orders.append([by_step([list(handle) for handle in handles]) for _ in range(2)])
        assert rng_states() == before
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) != orders[0][0]
    if name not in ("replacement", "weighted"):
        assert sorted(orders[0][0]) == sorted(build())
    assert len(orders[0][0]) == len(build())
    assert flat(make(sampled(build(), batch_size=5), seed=8)) != orders[0][0]
    again = make(sampled(build(), batch_size=50), seed=8)
    again.set_epoch(1)
    assert flat(again) != orders[0][1]


def test_sampler_gets_set_epoch() -> None:
    class Told(SequentialSampler):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    handle = make(sampled(BatchSampler(Told(range(6)), 2, False), batch_size=None))
    for _ in range(2):
        list(handle)
    handle.set_epoch(7)
    list(handle)
    assert Told.epochs == [0, 1, 7]


def _epochs(raw: Any, program: int = 21, **options: Any) -> list[list[int]]:
    accel.seed(program)
    loader = setup_loader(raw, **options)
    epochs = [samples(loader), samples(loader)]
    accel.teardown()
    return epochs


def _same_orders() -> None:
    def raw(generator: Any = None) -> Any:
        return numbers(40, shuffle=True, generator=generator)

    first = _epochs(raw())
    assert first[0] != first[1]
    assert _epochs(raw()) == first != _epochs(raw(), 22)
    by_option = [_epochs(raw(), seed, seed=7) for seed in (21, 22)]
    assert by_option[0] == by_option[1] != first
    drawn = [_epochs(raw(own(1)), seed) for seed in (21, 22)]
    assert drawn[0] == drawn[1] != _epochs(raw(own(2)))
    accel.seed(21)
    pair = accel.setup(None, dataloaders=[raw(), raw()]).dataloaders
    assert samples(pair[0]) == first[0] != samples(pair[1])


def test_order_depends_on_the_program() -> None:
    run(2, _same_orders)


def test_break_ends_an_epoch() -> None:
    handle = make(numbers(40, shuffle=True))
    epochs = [list(handle) for _ in range(4)]
    handle.set_epoch(0)
    for batch in handle:
        assert batch == epochs[0][0]
        break
    next(iter(handle))
    assert list(handle) == epochs[2]
    assert handle.state_dict()["epoch"] == 3


@pytest.mark.parametrize("dataset", [Noisy(), Numbers(20)])
def test_persistent_workers(dataset: Any) -> None:
    """Those of a seeded stream start again in each epoch, because they learn their seed when they start."""

    def build(**kwargs: Any) -> LoaderHandle:
        return make(DataLoader(dataset, batch_size=5, collate_fn=list, num_workers=1, **kwargs), 0, 2)

    handle, plain = build(persistent_workers=True), build()
    assert list(handle) == list(plain)
    persistent = handle._accel.persistent
    assert (persistent is None) == isinstance(dataset, Noisy)
    next(iter(handle)), next(iter(plain))
    assert list(handle) == list(plain)
    assert handle._accel.persistent is persistent
    assert handle._accel.raw._iterator is None


class Drawn(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return torch.initial_seed(), random.random(), float(np.random.rand()), get_worker_info().id  # type: ignore[union-attr]


def reseed(worker: int) -> None:
    random.seed(worker)


def test_seeds_of_workers() -> None:
    def seeds(**kwargs: Any) -> list[Any]:
        found = []
        for rank in range(2):
            handle = make(DataLoader(Drawn(), batch_size=1, num_workers=2, collate_fn=list, **kwargs), rank, 2)
            found += [flat(handle), flat(handle)]
        return found

    torch.manual_seed(0)
    before = rng_states()
    found = seeds()
    assert rng_states() == before
    for column in range(3):
        assert len({sample[column] for epoch in found for sample in epoch}) == 8
    torch.manual_seed(1)
    assert seeds() == found
    after = seeds(worker_init_fn=reseed)
    assert {sample[1] for epoch in after for sample in epoch} == {random.Random(i).random() for i in (0, 1)}
    assert [[s[::2] for s in epoch] for epoch in after] == [[s[::2] for s in epoch] for epoch in found]


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
    "weighted, generator": lambda: loader_of(WeightedRandomSampler([1.0] * 50, 33, generator=own())),
    "plain batch sampler": lambda: DataLoader(
        Numbers(50), batch_sampler=BatchSampler(RandomSampler(range(50)), 3, True), collate_fn=list
    ),
    "no batches": lambda: numbers(17, None, shuffle=True),
    "persistent workers": lambda: numbers(23, shuffle=True, num_workers=2, persistent_workers=True),
    "stream, workers": lambda: DataLoader(Noisy(), batch_size=5, num_workers=1, collate_fn=list),
    **{
        name: lambda name=name: loader_of(SAMPLERS[name]())
        for name in ("replacement", "subset", "mine numpy", "mine own numpy")
    },
}


DRAWING: dict[str, Any] = {
    "drawing": lambda: loader_of(Drawing()),
    "stream": lambda: DataLoader(Noisy(), batch_size=3, collate_fn=list),
}


def looped(loader: Any, draws: bool) -> Iterator[Any]:
    """The batches of a loop that draws too."""
    for batch in loader:
        yield batch, (torch.rand(()).item(), random.random(), np.random.rand()) if draws else ()


def play(loader: Any) -> list[Any]:
    """Three epochs, the second with a break; what the loop got, and its generators."""
    reset()
    seen: list[Any] = []
    for epoch in range(3):
        for k, item in enumerate(looped(loader, True)):
            seen.append(item)
            if (epoch, k) == (1, 2):
                break
        seen.append(rng_states())
    return seen


@pytest.mark.parametrize("name", [*RAW, *DRAWING])
def test_batches_are_raw_pytorchs(name: str) -> None:
    build = (RAW | DRAWING)[name]
    assert play(raw_like(build())) == play(build())


def interrupted(build: Any, draws: bool, stop: tuple[int, int]) -> tuple[list[Any], dict[str, Any], Any]:
    """What a loop of two epochs got after it had saved its position, that position, and the generators then."""
    reset()
    handle, state, after, states = raw_like(build()), None, [], ()
    for epoch in range(2):
        for k, (batch, _) in enumerate(looped(handle, draws)):
            if state is not None:
                after.append(_plain(batch))
            if (epoch, k) == stop:
                state = json.loads(json.dumps(handle.state_dict()))
                states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    assert state is not None
    return after, state, states


@pytest.mark.parametrize("name", [*RAW, "stream"])
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
    assert [_plain(batch) for _ in range(stop[0], 2) for batch, _ in looped(handle, draws)] == expected


def _plain(batch: Any) -> Any:
    """A batch without the epoch that a Noisy stream was told."""
    items = batch if isinstance(batch, list) else [batch]
    return [item[2:] if isinstance(item, tuple) else item for item in items]

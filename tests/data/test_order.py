"""The order of an epoch, iterators, and workers."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    get_worker_info,
)

import accel
from accel.data import LoaderHandle, LoaderOptions
from tests.data.loaders import (
    OWN,
    SAMPLERS,
    Noisy,
    Numbers,
    by_step,
    flat,
    make,
    numbers,
    own,
    reset,
    rng_states,
    sampled,
    samples,
)
from tests.distributed import run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize("name", [*SAMPLERS, "mine own torch", "mine own numpy"])
def test_order_is_the_samplers(name: str) -> None:
    build = (SAMPLERS | OWN)[name]
    orders = []
    for world in (1, 2, 3):
        handles = []
        for rank in range(world):
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            handles.append(make(sampled(build(), batch_size=5), rank, world, even_batches=False))
        before = rng_states()
        orders.append([by_step([list(handle) for handle in handles]) for _ in range(2)])
        assert rng_states() == before
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) != orders[0][0]
    if name not in ("replacement", "weighted", "more than once"):
        assert sorted(orders[0][0]) == sorted(build())
    assert len(orders[0][0]) == len(build())
    assert flat(make(sampled(build(), batch_size=5), seed=8)) != orders[0][0]
    again = make(sampled(build(), batch_size=50), seed=8)
    again.set_epoch(1)
    assert flat(again) != orders[0][1]


def test_own_generators_are_restored() -> None:
    for build in (SAMPLERS | OWN).values():
        sampler = build()
        control = copy.deepcopy(sampler)
        before = rng_states()
        list(make(sampled(sampler, batch_size=5)))
        assert rng_states() == before
        reset()
        mine = list(sampler)
        reset()
        assert mine == list(control)


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


def _epochs(raw: Any, seed: int = 21, options: LoaderOptions | None = None) -> list[list[int]]:
    accel.seed(seed)
    loader = accel.setup(nn.Linear(1, 1), None, raw, loader_options=options).dataloaders
    epochs = [samples(loader) for _ in range(2)]
    accel.teardown()
    return epochs


def _same_orders() -> None:
    seeded = LoaderOptions(seed=7)
    first = _epochs(numbers(40, shuffle=True))
    assert first[0] != first[1]
    assert _epochs(numbers(40, shuffle=True)) == first != _epochs(numbers(40, shuffle=True), 22)
    by_option = [_epochs(numbers(40, shuffle=True), seed, seeded) for seed in (21, 22)]
    assert by_option[0] == by_option[1] != first
    drawn = [_epochs(numbers(40, shuffle=True, generator=own(1)), seed) for seed in (21, 22)]
    assert drawn[0] == drawn[1] != _epochs(numbers(40, shuffle=True, generator=own(2)))
    accel.seed(21)
    pair = accel.setup(nn.Linear(1, 1), None, [numbers(40, shuffle=True), numbers(40, shuffle=True)]).dataloaders
    assert samples(pair[0]) == first[0]
    assert samples(pair[1]) != first[0]


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


def test_workers_keep_the_samplers_order() -> None:
    handle = make(numbers(12, 2, num_workers=2, in_order=False), 1, 2)
    assert list(handle) == [[2, 3], [6, 7], [10, 11]]
    assert handle._accel.prepare()[0].in_order


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

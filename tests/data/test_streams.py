"""Iterable datasets: divided, read by workers, and refused where the ranks do not read them alike."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    get_worker_info,
)

import accel
from accel import LoaderError
from accel.data import LoaderOptions
from tests.data.loaders import Counting, Divided, Noisy, by_step, everyone, make, samples
from tests.distributed import refusals, run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize("workers", [0, 1])
def test_random_stream_is_equal_on_ranks(workers: int) -> None:
    found = []
    for world in (1, 2):
        ranks = []
        for rank in range(world):
            handle = make(
                DataLoader(Noisy(), batch_size=10 // world, collate_fn=list, num_workers=workers), rank, world
            )
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            expected = [random.Random(rank).random(), np.random.RandomState(rank).randn(2)[0]]
            epochs = []
            for epoch in range(2):
                epochs.append([])
                for k, batch in enumerate(handle):
                    if epoch == k == 0:
                        assert [random.random(), np.random.randn()] == expected
                    epochs[-1].append(batch)
            ranks.append(epochs)
        found.append([by_step([epochs[e] for epochs in ranks]) for e in range(2)])
    assert found[0] == found[1]
    assert [sample[1] for sample in found[0][0] + found[0][1]] == [0] * 20 + [1] * 20
    assert found[0][0][0][2:] != found[0][1][0][2:]
    assert len({sample[2:] for sample in found[0][0]}) == 20


def test_workers_read_each_sample_once() -> None:
    ranks = everyone(lambda: DataLoader(Counting(48), batch_size=3, collate_fn=list, num_workers=2), 2)
    assert sorted(by_step(ranks)) == list(range(48))
    assert ranks[0][:2] == [[0, 2, 4], [1, 3, 5]]


def take_half(worker: int) -> None:
    """The idiom of torch's documentation."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    half = len(dataset) // info.num_workers
    dataset.first, dataset.last = worker * half, (worker + 1) * half


class Range(IterableDataset[int]):
    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last))


def test_worker_init_fn() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(
            Range(0, 16),
            batch_size=2,
            num_workers=2,
            worker_init_fn=take_half,
            collate_fn=list,
        )

    found = [list(make(build(), rank, 2)) for rank in range(2)]
    assert found == [[[0, 1], [8, 9], [4, 5], [12, 13]], [[2, 3], [10, 11], [6, 7], [14, 15]]]


class Augmented(IterableDataset[Any]):
    """The same items on each rank, with noise of its own."""

    def __iter__(self) -> Iterator[Any]:
        noise = torch.Generator().manual_seed(accel.rank())
        return iter([(torch.rand(2, generator=noise), i) for i in range(16)])


class Constant(IterableDataset[float]):
    """Nothing tells one item from another."""

    def __iter__(self) -> Iterator[float]:
        return iter([1.0] * 16)


def _train(dataset: Any, train: bool, options: LoaderOptions | None = None) -> list[int]:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer, loader = accel.setup(net, optimizer, DataLoader(dataset, 4), loader_options=options)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        if train:
            optimizer.zero_grad()
            model(batch.float()[:, None]).mean().backward()
            optimizer.step()
    return seen


@pytest.mark.parametrize("train", [False, True])
def test_self_sharding_stream_is_refused(train: bool) -> None:
    assert all("shard=False" in text for text in refusals(2, _train, Divided(), train, error="LoaderError"))


def _legitimate() -> None:
    _, _, loader = accel.setup(nn.Linear(1, 1), None, DataLoader(Counting(16), 4))
    assert samples(loader) == ([0, 1, 2, 3, 8, 9, 10, 11] if accel.is_main() else [4, 5, 6, 7, 12, 13, 14, 15])
    for dataset in (Augmented(), Constant(), Noisy()):
        _, _, other = accel.setup(nn.Linear(1, 1), None, DataLoader(dataset, 4))
        for _ in range(2):
            assert len(list(other)) == (3 if isinstance(dataset, Noisy) else 2)
    assert len(_train(Divided(), True, LoaderOptions(shard=False))) == 32


def test_equal_streams_pass() -> None:
    run(2, _legitimate)


class Sharded(IterableDataset[int]):
    """A stream of lists with the methods of ``datasets.IterableDataset``. It notes the items that were read."""

    def __init__(self, lists: list[list[int]]) -> None:
        self.lists = lists
        self.num_shards = len(lists)
        self.state = self.loaded = 0
        self.read: list[int] = []

    def shard(self, num_shards: int, index: int) -> Sharded:
        part = Sharded(self.lists[index::num_shards])
        part.read = self.read
        return part

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        lists = self.lists[info.id :: info.num_workers] if info else self.lists
        items = [item for part in lists for item in part]
        first, self.loaded = self.loaded, 0
        for self.state, item in enumerate(items[first:], first + 1):
            self.read.append(item)
            yield item

    def state_dict(self) -> dict[str, int]:
        return {"at": self.state}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]


LISTS = [list(range(10 * number, 10 * number + 3 + number)) for number in range(4)]
EVERY = [item for part in LISTS for item in part]


def read_shards(workers: int, batch: int, stop: int, states: list[Any]) -> tuple[list[int], list[Any], list[int]]:
    """The gathered samples of an epoch until a step, every rank's state there, and the items that this rank read."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon has no workers
    dataset, seen = Sharded(LISTS), []
    loader: Any = accel.setup(None, dataloaders=DataLoader(dataset, batch, num_workers=workers)).dataloaders
    if states:
        loader.load_state_dict(states[accel.rank()])
    for step, items in enumerate(loader, 1):
        last = loader.is_last
        seen += accel.gather_for_metrics(items).tolist()
        if step == stop:
            return seen, accel.all_gather([loader.state_dict()], objects=True), dataset.read
    assert last
    assert sorted(samples(accel.gather_for_metrics(items) for items in loader)) == EVERY
    return seen, [], dataset.read


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_reads_its_shards(workers: int) -> None:
    for world in (2, 4):
        stopped = run(world, read_shards, workers, 2, 2, [])
        rest = run(world, read_shards, workers, 2, 0, stopped[0][1])
        for (first, _, _), (second, _, _) in zip(stopped, rest, strict=True):
            assert sorted(first + second) == EVERY
        if not workers:
            for rank, (_, _, read) in enumerate(stopped):
                assert set(read) <= {0, *(item for part in LISTS[rank::world] for item in part)}


def other_shards() -> list[str]:
    rank, texts = accel.rank(), []
    _, state, _ = read_shards(0, 2, 1, [])
    full: Any = accel.setup(None, dataloaders=DataLoader(Sharded(LISTS[:3]), 2)).dataloaders
    assert sorted(samples(accel.gather_for_metrics(items) for items in full)) == sorted(sum(LISTS[:3], []))
    sharded: Any = accel.setup(None, dataloaders=DataLoader(Sharded(LISTS), 2)).dataloaders
    empty: Any = accel.setup(None, dataloaders=DataLoader(Sharded([[1, 2], []]), 2)).dataloaders
    assert [accel.gather_for_metrics(items).tolist() for items in empty] == [[1, 2]]
    twice: Any = accel.setup(None, dataloaders=DataLoader(Sharded(LISTS).shard(2, rank), 2)).dataloaders
    calls: list[Any] = [
        lambda: sharded.load_state_dict(state[1 - rank]),
        lambda: list(twice),
    ]
    for call in calls:
        with pytest.raises(LoaderError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_bad_shards_are_refused() -> None:
    for position, twice in run(2, other_shards):
        assert "Use as many ranks" in position
        assert "shards itself" in twice

"""Iterable datasets: shared streams, shards, and streams that rank 0 reads for all ranks."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import accel
from accel import LoaderError
from accel.data import LoaderOptions
from tests.data.loaders import Counting, Divided, Noisy, by_step, make, numbers, samples, setup_loader
from tests.distributed import outcomes, refusals, run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize("workers", [0, 1])
def test_random_stream_is_equal_on_ranks(workers: int) -> None:
    found = []
    for world in (1, 2):
        ranks = []
        for rank in range(world):
            raw = DataLoader(Noisy(), batch_size=10 // world, collate_fn=list, num_workers=workers)
            handle = make(raw, rank, world)
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            epochs: list[Any] = [[], []]
            for batch in handle:
                if not epochs[0]:  # the loop draws its own numbers between those of the stream
                    assert random.random() == random.Random(rank).random()
                    assert np.random.randn() == np.random.RandomState(rank).randn()
                epochs[0].append(batch)
            epochs[1] = list(handle)
            ranks.append(epochs)
        found.append([by_step([epochs[e] for epochs in ranks]) for e in range(2)])
    assert found[0] == found[1]
    first, second = found[0]
    assert [sample[1] for sample in first + second] == [0] * 20 + [1] * 20
    assert first[0][2:] != second[0][2:]
    assert len({sample[2:] for sample in first}) == 20


def take_half(worker: int) -> None:
    """The idiom of torch's documentation."""
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    half = len(dataset) // 2
    dataset.first, dataset.last = worker * half, (worker + 1) * half


class Range(IterableDataset[int]):
    first, last = 0, 16

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last))


def test_worker_init_fn() -> None:
    options: Any = {"batch_size": 2, "num_workers": 2, "worker_init_fn": take_half, "collate_fn": list}
    found = [list(make(DataLoader(Range(), **options), rank, 2)) for rank in range(2)]
    assert found == [[[0, 1], [8, 9], [4, 5], [12, 13]], [[2, 3], [10, 11], [6, 7], [14, 15]]]


class Augmented(IterableDataset[Any]):
    """The same items on each rank, with noise of its own."""

    def __iter__(self) -> Iterator[Any]:
        noise = torch.Generator().manual_seed(accel.rank())
        return iter([(torch.rand(2, generator=noise), i) for i in range(16)])


def _train(dataset: Any, options: LoaderOptions | None = None) -> list[int]:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer, loader = accel.setup(net, optimizer, DataLoader(dataset, 4), loader_options=options)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        optimizer.zero_grad()
        model(batch.float()[:, None]).mean().backward()
        optimizer.step()
    return seen


def test_self_sharding_stream_is_refused() -> None:
    assert all("shard=False" in text for text in refusals(2, _train, Divided(), error="LoaderError"))


def _legitimate() -> None:
    first = [0, 1, 2, 3, 8, 9, 10, 11]
    assert _train(Counting(16)) == (first if accel.is_main() else [i + 4 for i in first])
    for dataset, batches in ((Augmented(), 2), (Noisy(), 3)):
        assert len(list(setup_loader(DataLoader(dataset, 4)))) == batches
    assert len(_train(Divided(), LoaderOptions(shard=False))) == 32


def test_equal_streams_pass() -> None:
    run(2, _legitimate)


class Sharded(IterableDataset[int]):
    """A stream of lists with the methods of ``datasets.IterableDataset``. It notes the items that were read."""

    def __init__(self, lists: list[list[int]]) -> None:
        self.lists = lists
        self.num_shards = len(lists)
        self.read: list[int] = []

    def shard(self, num_shards: int, index: int) -> Sharded:
        part = Sharded(self.lists[index::num_shards])
        part.read = self.read
        return part

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for part in self.lists[info.id :: info.num_workers] if info else self.lists:
            for item in part:
                self.read.append(item)
                yield item


LISTS = [list(range(10 * number, 10 * number + 3 + number)) for number in range(4)]


def read_shards(shards: int, workers: int, stop: int, states: list[Any]) -> tuple[list[int], list[Any], list[int]]:
    """The gathered samples of an epoch until a step, every rank's state there, and the items that this rank read."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon has no workers
    dataset, seen = Sharded(LISTS[:shards]), []
    loader = setup_loader(DataLoader(dataset, 2, num_workers=workers))
    if states:
        loader.load_state_dict(states[accel.rank()])
    for step, items in enumerate(loader, 1):
        last = loader.is_last
        seen += accel.gather_for_metrics(items).tolist()
        if step == stop:
            return seen, accel.all_gather([loader.state_dict()], objects=True), dataset.read
    assert last
    assert sorted(samples(map(accel.gather_for_metrics, loader))) == sum(LISTS[:shards], [])
    return seen, [], dataset.read


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("world", "shards"), [(1, 4), (2, 4), (4, 4), (2, 3), (4, 3)])
def test_streaming_dataset_is_read_once(world: int, shards: int, workers: int) -> None:
    """A Hugging Face dataset: each rank reads its shards if the ranks divide their number, and the stream otherwise."""
    stopped = run(world, read_shards, shards, workers, 1, [])
    rest = run(world, read_shards, shards, workers, 0, stopped[0][1])
    for rank, ((first, _, read), (second, _, _)) in enumerate(zip(stopped, rest, strict=True)):
        assert sorted(first + second) == sum(LISTS[:shards], [])
        if not workers and shards % world == 0:
            assert set(read) <= {0, *sum(LISTS[rank:shards:world], [])}


def other_shards() -> tuple[str, str]:
    rank = accel.rank()
    _, states, _ = read_shards(4, 0, 1, [])
    sharded = setup_loader(DataLoader(Sharded(LISTS), 2))
    sharded.skip(1)
    assert sorted(samples(map(accel.gather_for_metrics, sharded))) == sorted({*sum(LISTS, [])} - {0, 1, 10, 11})
    empty = setup_loader(DataLoader(Sharded([[1, 2], []]), 2))
    assert [accel.gather_for_metrics(items).tolist() for items in empty] == [[1, 2]]
    twice = setup_loader(DataLoader(Sharded(LISTS).shard(2, rank), 2))
    with pytest.raises(LoaderError) as position:
        sharded.load_state_dict(states[1 - rank])
    with pytest.raises(LoaderError) as again:
        list(twice)
    return str(position.value), str(again.value)


def test_bad_shards_are_refused() -> None:
    for position, twice in run(2, other_shards):
        assert "Use as many ranks" in position
        assert "shards itself" in twice


def an_epoch(directory: str, load: bool) -> int:
    """Save after an epoch of a sharded stream, or load that."""
    loader = setup_loader(DataLoader(Sharded(LISTS), 2))
    if load:
        accel.load(directory, {"loader": loader})
    else:
        samples(loader)
        accel.save({"loader": loader}, directory)
    assert sorted(samples(map(accel.gather_for_metrics, loader))) == sum(LISTS, [])
    return int(loader.state_dict()["epoch"])


@pytest.mark.parametrize(("world", "later"), [(1, 2), (2, 1), (2, 4)])
def test_streams_resume_between_epochs(world: int, later: int, tmp_path: Path) -> None:
    """At any world size, although each rank or only the process has a position."""
    assert run(world, an_epoch, str(tmp_path), False) == [2] * world
    assert run(later, an_epoch, str(tmp_path), True) == [2] * later


def _alone(directory: str) -> None:
    world = accel.world_size()
    raw: Any = DataLoader(torch.arange(10), batch_size=3)  # type: ignore[arg-type]
    handles = accel.setup(None, dataloaders=raw)
    loader: Any = handles.dataloaders
    assert handles == (None, None, loader)
    assert setup_loader(raw) is accel.setup(None, None, loader).dataloaders is loader
    assert samples(map(accel.gather_for_metrics, loader)) == list(range(10))
    assert next(iter(loader)).device.type == accel.device().type
    iterator = iter(loader)
    next(iterator)
    accel.save({"loader": loader}, directory)
    rest = samples(iterator)
    accel.load(directory, {"loader": loader})
    assert samples(loader) == rest
    if world > 1:
        whole: Any = accel.setup(nn.Linear(4, 4), None, raw, backend=accel.DDP(sequence_parallel=2)).dataloaders
        assert [len(batch) for batch in whole] == [3, 3, 3, 1]
        assert whole is not loader
    accel.teardown()
    with pytest.raises(LoaderError, match="ended this loader" if world > 1 else "ended"):
        iter(loader)


@pytest.mark.parametrize("world", [1, 2])
def test_a_loader_needs_no_model(world: int, tmp_path: Path) -> None:
    run(world, _alone, str(tmp_path / f"{world}"))


def test_split_batches() -> None:
    for build in (
        lambda b: numbers(22, b, shuffle=True),
        lambda b: DataLoader(Counting(22), b, collate_fn=list),
        lambda b: DataLoader(Counting(22), b, collate_fn=list, drop_last=True),
    ):
        plain = [make(build(3), rank, 2) for rank in range(2)]
        split = [make(build(6), rank, 2, split_batches=True) for rank in range(2)]
        assert len(split[0]) == len(plain[0])
        assert [list(handle) for handle in split] == [list(handle) for handle in plain]
        assert [accel.effective_batch_size(handle) for handle in (plain[0], split[0])] == [6, 6]


class Rank0(IterableDataset[Any]):
    """Only rank 0 can read it, up to where the disk fails."""

    def __init__(self, n: int, fails: int = -1) -> None:
        self.n, self.fails = n, fails

    def __iter__(self) -> Iterator[Any]:
        assert accel.is_main()
        for i in range(self.n):
            if i == self.fails:
                raise KeyError("the disk")
            yield {"x": (torch.full((2,), i, dtype=torch.bfloat16), [torch.tensor(i > 3)]), "name": f"n{i}", "i": i}


def _numbers(loader: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in loader]


def _dispatched(n: int, size: int, options: dict[str, Any]) -> Any:
    def build() -> Any:
        return setup_loader(DataLoader(Rank0(n), size, drop_last=n == 13), dispatch=True, **options)

    loader, given, lasts, every = build(), [], [], []
    for batch in loader:
        given.append(batch["i"].tolist())
        if accel.is_main():  # it may ask alone
            lasts.append(loader.is_last)
        every += accel.gather_for_metrics(batch["i"]).tolist()
        x, [late] = batch["x"]
        assert (x.dtype, x[:, 1].tolist()) == (torch.bfloat16, given[-1])
        assert late.tolist() == [i > 3 for i in given[-1]]
        assert batch["name"] == [f"n{i}" for i in given[-1]]
    assert lasts == [step == len(given) for step in range(1, len(lasts) + 1)]
    assert [len(list(group)) for group in accel.accumulate(loader, 2)] == [2, 1][: len(given) - 1]
    loader.skip(1)
    assert _numbers(loader) == given[1:]
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), _numbers(iterator)
    again, single = build(), setup_loader(DataLoader(Rank0(n), 1), dispatch=True)
    again.load_state_dict(state)
    assert _numbers(again) == rest == given[1:]
    single.load_state_dict(state)
    assert every == list(range(len(every)))
    return given, len(every), _numbers(single)[0]


def _all_dispatched(cases: list[Any]) -> list[Any]:
    return [_dispatched(*case) for case in cases]


def test_rank_0_reads_for_all_ranks() -> None:
    cases = [(10, 3, {}), (9, 3, {}), (13, 3, {}), (11, 4, {"split_batches": True})]  # 13: drop_last
    mine, other = run(2, _all_dispatched, cases)
    assert mine == [
        ([[0, 1, 2], [6, 7]], 10, [6]),
        ([[0, 1, 2], [6, 7]], 9, [6]),
        ([[0, 1, 2], [6, 7, 8]], 12, [6]),
        ([[0, 1], [4, 5], [8, 9]], 11, [4]),
    ]
    assert other == [
        ([[3, 4, 5], [8, 9]], 10, [7]),
        ([[3, 4, 5], [8, 0]], 9, [7]),
        ([[3, 4, 5], [9, 10, 11]], 12, [7]),
        ([[2, 3], [6, 7], [10, 0]], 11, [5]),
    ]


def _fails() -> None:
    list(setup_loader(DataLoader(Rank0(10, fails=5), 2), dispatch=True))


def test_dispatch_errors_reach_all_ranks() -> None:
    mine, other = outcomes(2, _fails, breaks=True)
    assert "KeyError" in mine.error
    assert "LoaderError" in other.error
    assert "failed on rank 0: KeyError: 'the disk'" in other.message

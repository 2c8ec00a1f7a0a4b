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
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    get_worker_info,
)

import accel
from accel import LoaderError
from accel.data import LoaderOptions
from tests.data.loaders import Counting, Divided, Noisy, by_step, make, numbers, samples
from tests.distributed import outcomes, refusals, run

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
    for dataset in (Augmented(), Noisy()):
        _, _, other = accel.setup(nn.Linear(1, 1), None, DataLoader(dataset, 4))
        assert len(list(other)) == (3 if isinstance(dataset, Noisy) else 2)
    assert len(_train(Divided(), True, LoaderOptions(shard=False))) == 32


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
        lists = self.lists[info.id :: info.num_workers] if info else self.lists
        items = [item for part in lists for item in part]
        for item in items:
            self.read.append(item)
            yield item


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
    sharded.skip(1)
    skipped = samples(accel.gather_for_metrics(items) for items in sharded)
    assert sorted(skipped) == sorted(set(EVERY) - {0, 1, 10, 11})
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


def _alone(directory: str) -> None:
    world = accel.world_size()
    raw: Any = DataLoader(torch.arange(10), batch_size=3)  # type: ignore[arg-type]
    handles = accel.setup(None, dataloaders=raw)
    loader: Any = handles.dataloaders
    assert handles == (None, None, loader)
    assert accel.setup(None, dataloaders=raw).dataloaders is accel.setup(None, None, loader).dataloaders is loader
    gathered = torch.cat([accel.gather_for_metrics(batch) for batch in loader])
    assert gathered.tolist() == list(range(10))
    assert next(iter(loader)).device.type == accel.device().type
    iterator = iter(loader)
    next(iterator)
    accel.save({"loader": loader}, directory)
    rest = [batch.tolist() for batch in iterator]
    accel.load(directory, {"loader": loader})
    assert [batch.tolist() for batch in loader] == rest
    if world > 1:
        whole: Any = accel.setup(nn.Linear(4, 4), None, raw, backend=accel.DDP(sequence_parallel=2)).dataloaders
        assert [len(batch) for batch in whole] == [3, 3, 3, 1]
        assert whole is not loader
    accel.teardown()
    with pytest.raises(LoaderError, match=r"has ended" if world > 1 else "ended"):
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


def _dispatched(n: int, size: int, **options: Any) -> Any:
    raw: Any = DataLoader(
        Rank0(n, options.pop("fails", -1)), batch_size=size, drop_last=options.pop("drop_last", False)
    )
    options = {"dispatch": True, **options}
    return accel.setup(None, dataloaders=raw, loader_options=LoaderOptions(**options)).dataloaders


def _numbers(loader: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in loader]


def _all_dispatched(cases: list[Any]) -> list[Any]:
    return [_one_dispatched(n, size, options) for n, size, options in cases]


def _one_dispatched(n: int, size: int, options: dict[str, Any]) -> Any:
    loader, given, lasts, every = _dispatched(n, size, **options), [], [], []
    for batch in loader:
        given.append(batch["i"].tolist())
        lasts.append(loader.is_last if accel.is_main() else given and None)  # rank 0 may ask alone
        every.append(accel.gather_for_metrics(batch["i"]))
        x, [late] = batch["x"]
        assert (x.dtype, x[:, 1].tolist()) == (torch.bfloat16, given[-1])
        assert late.tolist() == [i > 3 for i in given[-1]]
        assert batch["name"] == [f"n{i}" for i in given[-1]]
    assert lasts == ([False] * (len(given) - 1) + [True] if accel.is_main() else [None] * len(given))
    assert [len(group) for group in accel.accumulate(loader, 2) for _ in [list(group)]] == [2, 1][: len(given) - 1]
    loader.skip(1)
    assert _numbers(loader) == given[1:]
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), _numbers(iterator)
    again = _dispatched(n, size, **options)
    again.load_state_dict(state)
    assert _numbers(again) == rest == given[1:]
    wide = _dispatched(n, 1, dispatch=True)
    wide.load_state_dict(state)
    return given, torch.cat(every).tolist(), _numbers(wide)


def test_rank_0_reads_for_all_ranks() -> None:
    cases = [(10, 3, {}), (9, 3, {}), (13, 3, {"drop_last": True}), (11, 4, {"split_batches": True})]
    mine, other = run(2, _all_dispatched, cases)
    assert [given for given, *_ in mine] == [
        [[0, 1, 2], [6, 7]],
        [[0, 1, 2], [6, 7]],
        [[0, 1, 2], [6, 7, 8]],
        [[0, 1], [4, 5], [8, 9]],
    ]
    assert [given for given, *_ in other] == [
        [[3, 4, 5], [8, 9]],
        [[3, 4, 5], [8, 0]],
        [[3, 4, 5], [9, 10, 11]],
        [[2, 3], [6, 7], [10, 0]],
    ]
    for (_, every, rest), (_, same, others) in zip(mine, other, strict=True):
        assert every == same == list(range(len(every)))
        assert (rest[0], others[0]) == (([6], [7]) if len(every) != 11 else ([4], [5]))


def _fails(directory: str) -> str:
    loader, given = _dispatched(10, 2, fails=5), []
    try:
        for batch in loader:
            given.append(batch["i"].tolist())
    except Exception as error:
        assert not given
        failed = repr(error)
    return failed


def test_dispatch_errors_reach_all_ranks(tmp_path: Path) -> None:
    mine, other = (one.value for one in outcomes(2, _fails, str(tmp_path), breaks=True))
    assert mine.startswith("KeyError('the disk')")
    assert other.startswith(
        "LoaderError(\"reading an iterable dataset failed on rank 0, so on every rank: KeyError: 'the disk'"
    )

"""The datasets, samplers and loaders of these tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import accel
from accel.data import LoaderHandle, LoaderOptions, LoaderPlace, LoaderState


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i


class Counting(IterableDataset[int]):
    """0, 1, ..., n - 1; with workers, each takes every num_workers-th."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, self.n, info.num_workers) if info else range(self.n))

    def __len__(self) -> int:
        return self.n


def make(loader: DataLoader[Any], rank: int = 0, world: int = 1, seed: int = 7, **options: Any) -> LoaderHandle:
    place = LoaderPlace(rank, world, torch.device("cpu"))
    return LoaderHandle(LoaderState(loader, LoaderOptions(**options), place, seed))


def numbers(n: int, batch_size: int | None = 4, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(n), batch_size=batch_size, collate_fn=list if batch_size else int, **kwargs)


def sampled(sampler: Any, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(1000), sampler=sampler, collate_fn=list, **kwargs)


def everyone(make_loader: Any, world: int, **options: Any) -> list[list[Any]]:
    """Each rank's batches of the first epoch."""
    return [list(make(make_loader(), rank, world, **options)) for rank in range(world)]


def flat(lists: Any) -> list[Any]:
    return [item for batch in lists for item in batch]


def by_step(ranks: list[list[Any]]) -> list[Any]:
    """The samples in the order of the global steps, ranks one after the other."""
    return [x for step in range(max(map(len, ranks))) for rank in ranks for x in flat(rank[step : step + 1])]


class Mine(Sampler[int]):
    """Draws from whatever it is told to."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.torch = torch.Generator()
        self.numpy = np.random.default_rng(1)

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        order = list(range(50))
        {
            "random": lambda: random.shuffle(order),
            "numpy": lambda: np.random.shuffle(order),
            "own torch": lambda: order.sort(key=torch.rand(50, generator=self.torch).tolist().__getitem__),
            "own numpy": lambda: self.numpy.shuffle(order),
        }[self.source]()
        return iter(order)


SAMPLERS: dict[str, Any] = {
    "shuffle": lambda: RandomSampler(range(50)),
    "generator": lambda: RandomSampler(range(50), generator=torch.Generator().manual_seed(random.randrange(99))),
    "replacement": lambda: RandomSampler(range(50), replacement=True, num_samples=70),
    "subset": lambda: SubsetRandomSampler(range(30, 80)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 50, 60),
    **{f"mine {s}": lambda s=s: Mine(s) for s in ("random", "numpy", "own torch", "own numpy")},
}


def rng_states() -> str:
    return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))


def own(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader_of(sampler: Any, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(50), 6, sampler=sampler, collate_fn=list, **kwargs)


def raw_like(loader: DataLoader[Any]) -> LoaderHandle:
    """The handle that setup gives a program of one process."""
    return LoaderHandle(LoaderState(loader, LoaderOptions(), LoaderPlace(0, 1, torch.device("cpu")), 0, in_place=True))


def reset(seed: int = 3) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def ragged() -> DataLoader[Any]:
    return DataLoader(Numbers(10), batch_sampler=[[0], [1, 2], [3, 4, 5], [6], [7, 8]], collate_fn=list)


class Noisy(IterableDataset[float]):
    """A stream that draws from every global generator, one normal (which numpy caches in pairs) at a time."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for i in range(20):
            yield i, self.epoch, random.random(), torch.rand(()).item(), np.random.randn()


def resumed(build: Any, world: int, state: Any, **options: Any) -> list[LoaderHandle]:
    handles = [make(build(), rank, world, seed=1000, **options) for rank in range(world)]
    for handle in handles:
        handle.load_state_dict(state)
        assert handle.state_dict() == state
    return handles


def samples(loader: Any) -> list[int]:
    return [int(i) for batch in loader for i in batch]


class Divided(IterableDataset[int]):
    """Each rank reads a part of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(accel.rank(), 64, accel.world_size()))


def setup_loader(raw: DataLoader[Any], **options: Any) -> Any:
    return accel.setup(None, dataloaders=raw, loader_options=LoaderOptions(**options)).dataloaders

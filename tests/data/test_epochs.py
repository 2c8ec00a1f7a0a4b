"""Epochs, iterators, and the workers that live on between them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    get_worker_info,
)

from accel.data import LoaderHandle
from tests.data.loaders import Counting, Noisy, Numbers, flat, make, numbers, rng_states

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


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


@pytest.mark.parametrize("kwargs", [{}, {"num_workers": 1}])
@pytest.mark.parametrize("kind", [Numbers, Counting])
def test_two_iterators(kind: Any, kwargs: Any) -> None:
    shuffle = {"shuffle": True} if kind is Numbers else {}
    handle = make(DataLoader(kind(12), batch_size=2, collate_fn=list, **shuffle, **kwargs), 1, 2)
    alone = [list(handle), list(handle)]
    handle.set_epoch(0)
    pairs = list(zip(handle, handle, strict=True))
    assert [[a for a, _ in pairs], [b for _, b in pairs]] == alone


@pytest.mark.parametrize("kind", [Numbers, Counting])
def test_persistent_workers(kind: Any) -> None:
    class Where(kind):  # type: ignore[misc]
        pass

    def build(**kwargs: Any) -> LoaderHandle:
        loader = DataLoader(Noisy() if kind is Counting else Numbers(20), batch_size=5, collate_fn=list, **kwargs)
        return make(loader, 0, 2)

    handle = build(num_workers=1, persistent_workers=True)
    plain = build(num_workers=1)
    assert list(handle) == list(plain)
    workers = handle._accel.persistent[0]._iterator._workers  # type: ignore[index, union-attr]
    next(iter(handle)), next(iter(plain))
    assert list(handle) == list(plain)
    assert handle._accel.persistent[0]._iterator._workers is workers  # type: ignore[index, union-attr]
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

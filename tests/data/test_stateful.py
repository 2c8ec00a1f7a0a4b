"""Loaders that keep a position of their own: torchdata's StatefulDataLoader."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

import accel
from tests.data.loaders import Numbers, flat, make

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


class Reading:
    """An iterator that keeps where it is."""

    def __init__(self, first: int, step: int) -> None:
        self.at, self.step = first, step

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> int:
        if self.at >= 40:
            raise StopIteration
        self.at += self.step
        return self.at - self.step

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream(IterableDataset[int]):
    """Each rank reads its own part, and each worker a part of that."""

    def __iter__(self) -> Reading:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        return Reading(accel.rank() + accel.world_size() * number, accel.world_size() * workers)


def loader(**options: Any) -> Any:
    return stateful.StatefulDataLoader(**{"dataset": Stream(), "batch_size": 3, "collate_fn": list, **options})


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_own_position_is_resumed(options: dict[str, Any]) -> None:
    whole = list(make(loader(**options), shard=False))
    assert sorted(flat(whole)) == list(range(40))
    handle = make(loader(**options), shard=False)
    iterator = iter(handle)
    seen = [next(iterator) for _ in range(4)]
    assert not handle.is_last
    state = json.loads(json.dumps(handle.state_dict()))
    assert [*seen, *iterator] == whole
    again = make(loader(**options), shard=False)
    again.load_state_dict(state)
    assert list(again) == whole[4:]
    assert list(again) == list(handle) == whole
    handle.skip(2)
    groups: Any = accel.accumulate(handle, 2)  # type: ignore[arg-type]
    assert flat(list(group) for group in groups) == whole[2:]
    again.load_state_dict(handle.state_dict())  # of the end of an epoch
    assert list(again) == whole


def test_sharded_one_resumes_anywhere() -> None:
    handles = [make(loader(dataset=Numbers(20), shuffle=True), rank, 2) for rank in range(2)]
    iterators = [iter(handle) for handle in handles]
    seen = [next(iterator) for iterator in iterators]
    again = make(loader(dataset=Numbers(20), shuffle=True))
    again.load_state_dict(json.loads(json.dumps(handles[0].state_dict())))
    assert sorted(flat([*seen, *again])) == list(range(20))

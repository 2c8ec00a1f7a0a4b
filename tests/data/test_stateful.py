"""Loaders that keep a position of their own: torchdata's StatefulDataLoader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

import accel
from accel.data import LoaderOptions
from tests.data.loaders import Numbers, make, reset
from tests.distributed import run

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


class Reading:
    """An iterator that keeps where it is, and what it was told."""

    def __init__(self, first: int, step: int) -> None:
        self.at, self.step, self.read = first, step, 0

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> int:
        if self.at >= 40:
            raise StopIteration
        self.at, self.read = self.at + self.step, self.read + 1
        return self.at - self.step

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream(IterableDataset[int]):
    """Each rank reads its own part, and each worker a part of that."""

    def __init__(self) -> None:
        self.last: Any = None

    def __iter__(self) -> Reading:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        self.last = Reading(accel.rank() + accel.world_size() * number, accel.world_size() * workers)
        return self.last  # type: ignore[no-any-return]


def loader(**options: Any) -> Any:
    return stateful.StatefulDataLoader(**{"dataset": Stream(), "batch_size": 3, "collate_fn": list, **options})


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_own_position_is_resumed(options: dict[str, Any]) -> None:
    whole = list(make(loader(**options), shard=False))
    assert sorted(i for batch in whole for i in batch) == list(range(40))
    for after, asks in ((4, False), (len(whole) - 1, True)):
        handle = make(loader(**options), shard=False)
        iterator = iter(handle)
        for _ in range(after):
            next(iterator)
        assert not asks or not handle.is_last
        state = json.loads(json.dumps(handle.state_dict()))
        assert list(iterator) == whole[after:]
        again = make(loader(**options), shard=False)
        again.load_state_dict(state)
        rest = list(again)
        assert rest == whole[after:]
        assert list(again) == list(handle) == whole
        if not options:
            assert len(rest) <= again.dataset.last.read
    handle = make(loader(**options), shard=False)
    handle.skip(2)
    groups = [[len(group), list(group)] for group in accel.accumulate(handle, 2)]  # type: ignore[arg-type,var-annotated]
    assert [batch for _, group in groups for batch in group] == whole[2:]  # type: ignore[union-attr]
    again = make(loader(**options), shard=False)
    again.load_state_dict(handle.state_dict())  # of the end of an epoch
    assert list(again) == whole


def test_sharded_one_resumes_anywhere() -> None:
    for world in (1, 2):
        handles = [make(loader(dataset=Numbers(20), shuffle=True), rank, world) for rank in range(world)]
        iterators = [iter(handle) for handle in handles]
        seen = [next(iterator) for iterator in iterators]
        state = json.loads(json.dumps(handles[0].state_dict()))
        assert state["own"] is None
        assert state["consumed"] == 3 * world
        again = make(loader(dataset=Numbers(20), shuffle=True))
        again.load_state_dict(state)
        assert sorted(i for batch in [*seen, *again] for i in batch) == list(range(20))


def _own_parts(directory: str) -> None:
    def handle() -> Any:
        options = LoaderOptions(shard=False)
        return accel.setup(None, dataloaders=loader(), loader_options=options).dataloaders

    loop = handle()
    iterator = iter(loop)
    next(iterator)
    accel.save({"loader": loop}, directory)
    again = handle()
    accel.load(directory, {"loader": again})
    assert list(again) == list(iterator)
    assert accel.world_size() < 2 or again.dataset.last.at % 2 == accel.rank()


def test_checkpoint_of_own_positions(tmp_path: Path) -> None:
    reset()
    run(2, _own_parts, str(tmp_path / "one"))

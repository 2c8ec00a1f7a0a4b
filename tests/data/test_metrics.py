"""Batches that arrive on the device, and gather_for_metrics on real ranks."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import accel
from accel import LoaderError
from accel.data import LoaderHandle, LoaderOptions, LoaderPlace, LoaderState, gather_for_metrics
from tests.data.loaders import Counting, make, numbers
from tests.distributed import run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Movable:
    """A batch with a ``to`` method, such as transformers' BatchEncoding."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.calls: list[Any] = []

    def is_pinned(self) -> bool:
        return self.pinned

    def to(self, device: Any, **kwargs: Any) -> Movable:
        self.calls.append((device, kwargs))
        return self


def test_batches_arrive_on_the_device() -> None:
    meta = torch.device("meta")
    movable = [Movable(True), Movable(False)]
    data: Any = [{"x": [torch.ones(2), (torch.ones(2), "text")], "y": item} for item in movable]
    for move, device in ((True, "meta"), (False, "cpu")):
        raw: Any = DataLoader(data, batch_size=None)
        for batch in LoaderHandle(LoaderState(raw, LoaderOptions(move=move), LoaderPlace(0, 1, meta), 0)):
            first, (second, text) = batch["x"]
            assert (first.device.type, second.device.type, text) == (device, device, "text")
    assert [item.calls for item in movable] == [[(meta, {"non_blocking": True})], [(meta, {})]]
    assert {item["x"][0].device.type for item in data} == {"cpu"}


def _tensors(n: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(n), **kwargs)  # type: ignore[arg-type]


def _here(loader: DataLoader[Any], **options: Any) -> LoaderHandle:
    return make(loader, accel.rank(), accel.world_size(), **options)


def _gather_all(n: int, batch_size: int) -> list[Any]:
    found = []
    loaders = (
        DataLoader(Counting(n), batch_size=batch_size),
        _tensors(n, batch_size=batch_size),
        _tensors(n, batch_size=batch_size, shuffle=True),
    )
    for loader in loaders:
        gathered = [gather_for_metrics({"x": batch, "y": [batch * 2]}) for batch in _here(loader)]
        for part in gathered:
            assert torch.equal(part["x"] * 2, part["y"][0])
        found.append(torch.cat([part["x"] for part in gathered]).tolist())
    assert found[0] == found[1] == sorted(found[2]) == list(range(n))
    assert n == 1 or found[2] != found[1]
    return found


def test_metrics_have_each_sample_once() -> None:
    for world in (1, 2, 4):
        for n in (1, 13):
            results = run(world, _gather_all, n, 3)
            assert all(result == results[0] for result in results)


def _gather_kinds() -> None:
    pairs = BatchSampler(SequentialSampler(range(5)), 2, False)
    whole = DataLoader(torch.arange(5), sampler=pairs, batch_size=None)  # type: ignore[arg-type]
    assert torch.cat([gather_for_metrics(batch) for batch in _here(whole)]).tolist() == list(range(5))
    custom = DataLoader(torch.arange(6), batch_sampler=[[0], [1, 2], [3, 4, 5]])  # type: ignore[arg-type]
    assert torch.cat([gather_for_metrics(batch) for batch in _here(custom)]).tolist() == list(range(6))
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon has no workers
    workers = DataLoader(Counting(13), batch_size=2, num_workers=2)
    assert sorted(torch.cat([gather_for_metrics(b) for b in _here(workers)]).tolist()) == list(range(13))
    train, validation = _here(_tensors(3, batch_size=2)), _here(_tensors(4, batch_size=2))
    (mine,) = train
    list(validation)
    assert gather_for_metrics(mine, train).tolist() == [0, 1, 2]
    del validation
    gc.collect()
    assert gather_for_metrics(mine).tolist() == [0, 1, 2, 0]
    free = _here(_tensors(3, batch_size=2, drop_last=True))
    list(free)
    list(_here(_tensors(4, batch_size=2), shard=False))
    assert gather_for_metrics(torch.ones(3)).tolist() == [1.0] * 6


def test_metrics_of_all_loaders() -> None:
    run(2, _gather_kinds)


def _gather_unknown() -> None:
    loader = _here(_tensors(8, batch_size=2))
    with pytest.raises(LoaderError, match="No loader"):
        gather_for_metrics(torch.ones(2), loader)
    for batch in loader:
        for wrong in (batch.float().mean(), torch.cat([batch, batch])):
            with pytest.raises(LoaderError, match="dim 0"):
                gather_for_metrics(wrong)


def test_unknown_padding_is_refused() -> None:
    run(2, _gather_unknown)


def test_gather_in_one_process() -> None:
    data = {"x": torch.ones(()), "y": [torch.ones(3)]}
    handle = make(numbers(4))
    assert gather_for_metrics(data, handle) is data
    list(handle)
    assert gather_for_metrics(data) is data
    with pytest.raises(LoaderError, match="Pass the loader or the items of split"):
        gather_for_metrics(data, numbers(4))  # type: ignore[arg-type]


def _gather_texts(n: int) -> tuple[list[str], list[int]]:
    found: list[Any] = []
    for batch in _here(_tensors(n, batch_size=3)):
        data: Any = {"text": [f"text {i}" for i in batch.tolist()], "x": torch.full((len(batch), 1 + accel.rank()), 1)}
        found.append(gather_for_metrics(data, pad=0, objects=True))
        with pytest.raises(LoaderError, match=r"found a str of shape \(\)"):
            gather_for_metrics({"text": "one for all"}, objects=True)
        with pytest.raises(LoaderError, match=r"expected dim 0 to be this rank's batch"):
            gather_for_metrics({"text": ["more"] * 7}, objects=True)
    assert all(part["x"].shape[1] == 2 for part in found)
    return [text for part in found for text in part["text"]], [len(part["x"]) for part in found]


def test_texts_are_gathered_once() -> None:
    for texts, rows in run(2, _gather_texts, 13):
        assert texts == [f"text {i}" for i in range(13)]
        assert sum(rows) == 13

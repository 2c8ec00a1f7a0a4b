"""Batches that arrive on the device, and gather_for_metrics on real ranks."""

from __future__ import annotations

import gc
import multiprocessing
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
)

import accel
from accel import LoaderError
from accel.data import LoaderHandle, LoaderOptions, LoaderPlace, distribute, gather_for_metrics
from accel.process.transfer import Transfer
from tests.data.loaders import Counting, make, numbers
from tests.distributed import refusals, run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Pair(NamedTuple):
    x: Any
    y: Any


class Movable:
    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.calls: list[Any] = []

    def is_pinned(self) -> bool:
        return self.pinned

    def to(self, device: Any, **kwargs: Any) -> Movable:
        self.calls.append((device, kwargs))
        return self


def test_moves_keep_containers() -> None:
    x, meta = torch.ones(2), torch.device("meta")
    batch = {"pair": Pair(x, "text"), "nested": OrderedDict(a=[x, (x, 1)]), "none": None}
    moved = Transfer(meta)(batch)
    assert moved["pair"] == Pair(moved["pair"].x, "text")
    assert (type(moved["nested"]), moved["none"]) == (OrderedDict, None)
    places = [moved["pair"].x, moved["nested"]["a"][0], moved["nested"]["a"][1][0]]
    assert {t.device for t in places} == {meta}
    assert batch["nested"]["a"][0].device.type == "cpu"  # type: ignore[index]
    pinned, paged = Transfer(meta)([Movable(True), Movable(False)])
    assert pinned.calls == [(meta, {"non_blocking": True})]
    assert paged.calls == [(meta, {})]


def test_batches_arrive_on_the_device() -> None:
    data = [(torch.ones(2), i) for i in range(4)]
    for options, device in ((LoaderOptions(), "meta"), (LoaderOptions(move=False), "cpu")):
        loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        handle = distribute(loader, options, LoaderPlace(0, 1, torch.device("meta")), seed=0)
        assert {tensor.device.type for batch in handle for tensor in batch} == {device}
    movable = Movable(False)
    assert next(iter(make(DataLoader([movable], batch_size=None)))) is movable  # type: ignore[arg-type]
    assert movable.calls == []


def _tensors(n: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(n), **kwargs)  # type: ignore[arg-type]


def _here(loader: DataLoader[Any], **options: Any) -> LoaderHandle:
    import accel

    return make(loader, accel.rank(), accel.world_size(), **options)


def _gather_all(n: int, batch_size: int) -> list[Any]:
    found = []
    for iterable in (False, True):
        for shuffle in (False, True):
            if iterable and shuffle:
                continue
            loader = (
                DataLoader(Counting(n), batch_size=batch_size)
                if iterable
                else _tensors(n, batch_size=batch_size, shuffle=shuffle)
            )
            handle = _here(loader)
            gathered = [gather_for_metrics({"x": batch, "y": [batch * 2]}) for batch in handle]
            for part in gathered:
                assert torch.equal(part["x"] * 2, part["y"][0])
            order = torch.cat([part["x"] for part in gathered]).tolist()
            assert order == list(range(n)) or (shuffle and order != list(range(n)) and sorted(order) == list(range(n)))
            found.append(order)
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


def _gather_scalar() -> None:
    for batch in _here(_tensors(8, batch_size=2)):
        gather_for_metrics(batch.float().mean())


def _gather_wrong_rows() -> None:
    for batch in _here(_tensors(8, batch_size=2)):
        gather_for_metrics(torch.cat([batch, batch]))


def _gather_never() -> None:
    loader = _here(_tensors(8, batch_size=2))
    gather_for_metrics(torch.ones(2), loader)


def test_unknown_padding_is_refused() -> None:
    for fn in (_gather_scalar, _gather_wrong_rows):
        assert all("dim 0" in message for message in refusals(2, fn, error="LoaderError"))
    assert all("no loader" in message for message in refusals(2, _gather_never, error="LoaderError"))


def test_gather_in_one_process() -> None:
    data = {"x": torch.ones(()), "y": [torch.ones(3)]}
    handle = make(numbers(4))
    assert gather_for_metrics(data, handle) is data
    list(handle)
    assert gather_for_metrics(data) is data
    with pytest.raises(LoaderError, match="the loader of accel.setup"):
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

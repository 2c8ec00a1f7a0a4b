"""The handle of a loader: its refusals, and what it leaves of the raw loader as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Sampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from accel import LoaderError
from accel.data import LoaderOptions, check, describe
from tests.data.loaders import Numbers, flat, make, numbers, sampled

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_raw_loader_is_unchanged() -> None:
    raw = numbers(10, 2, shuffle=True)
    before = dict(vars(raw))
    handle = make(raw, 1, 2)
    list(handle)
    assert vars(raw) == before
    assert sorted(flat(raw)) == list(range(10))
    assert (handle.batch_size, handle.dataset, handle.sampler) == (2, raw.dataset, raw.sampler)
    handle.collate_fn = tuple
    handle.note = "mine"
    assert (raw.collate_fn, raw.note) == (tuple, "mine")
    assert isinstance(next(iter(handle)), tuple)
    for name in ("batch_size", "sampler", "dataset"):
        with pytest.raises(ValueError, match=name):
            setattr(handle, name, 1)
    with pytest.raises(AttributeError):
        _ = handle.nothing
    public = {name for name in set(dir(handle)) - set(dir(raw)) if not name.startswith("_")}
    assert public == {"is_last", "load_state_dict", "set_epoch", "skip", "state_dict"}
    assert "rank 1 of 2" in repr(handle)


def test_pickle_and_copy_are_refused() -> None:
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(LoaderError, match="pickled"):
            refused(make(numbers(4, 2)))


def test_off_is_raw_pytorch() -> None:
    for kwargs in ({"shuffle": True}, {"shuffle": True, "generator": torch.Generator()}, {"num_workers": 1}):
        raw, handle = numbers(20, 3, **kwargs), make(numbers(20, 3, **copy.deepcopy(kwargs)), 1, 2, shard=False)
        assert len(handle) == len(raw)
        for _ in range(2):
            torch.manual_seed(5)
            expected = list(raw)
            torch.manual_seed(5)
            assert list(handle) == expected
    own = DistributedSampler(Numbers(20), 2, 1, shuffle=True)
    handle = make(DataLoader(Numbers(20), batch_size=3, sampler=own, collate_fn=list), 1, 2, shard=False)
    handle.sampler.set_epoch(3)
    assert flat(handle) == list(own)


def test_subclasses_of_dataloader() -> None:
    class Shouting(DataLoader[Any]):
        def __init__(self, *args: Any, word: str, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.word = word

        def __iter__(self) -> Any:
            return ((self.word, batch) for batch in super().__iter__())

    handle = make(Shouting(Numbers(5), batch_size=2, collate_fn=list, word="hey"), 1, 2)
    assert (handle.word, list(handle)) == ("hey", [("hey", [2, 3]), ("hey", [0])])

    class Ready(DataLoader[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.ready = super().__iter__()

        def __iter__(self) -> Any:
            return self.ready

    with pytest.raises(LoaderError, match="one batch for each batch of its sampler"):
        next(iter(make(Ready(Numbers(5)))))


class Foreign(Sampler[int]):
    num_replicas = 2

    def __len__(self) -> int:
        return 5


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: sampled(DistributedSampler(Numbers(4), 1, 0)), {}, "distributed already, by a DistributedSampler"),
    (lambda: sampled(Foreign()), {}, "distributed already, by a Foreign"),
]


def test_check_refuses() -> None:
    for build, options, message in REFUSED:
        with pytest.raises(LoaderError, match=message):
            check(build(), LoaderOptions(**options), 2)


def test_describe() -> None:
    split = [DataLoader(Subset(Numbers(9), indices)) for indices in ([1, 2], [1, 3], [1, 2])]
    options = LoaderOptions()
    texts = [describe(loader, options) for loader in split]
    assert texts[0] == texts[2] != texts[1]
    assert describe(numbers(4), options) != describe(numbers(5), options)
    assert describe(numbers(4, 2), options) != describe(numbers(4, 4), options)
    off = LoaderOptions(shard=False)
    assert describe(numbers(4), off) == describe(numbers(5), off)

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import multiprocessing
import pickle
import random
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import accel
from accel import LoaderError
from accel.data import LoaderHandle, LoaderOptions, check, describe, distribute, gather_for_metrics
from accel.data.iteration import move
from accel.data.sampling import Generators, InPlace, Plan, Source, deal
from tests.distributed import outcomes, refusals, run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


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
    return distribute(loader, LoaderOptions(**options), rank=rank, world_size=world, device="cpu", seed=seed)


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


# -- the arithmetic -----------------------------------------------------------------------------------------------------

sizes = st.integers(0, 40)
plans = st.fixed_dictionaries(
    {"world": st.integers(1, 6), "batch": st.integers(1, 5), "even": st.booleans(), "drop_last": st.booleans()}
)


def divided(total: int, start: int, plan: dict[str, Any]) -> tuple[list[Plan], list[list[list[int]]]]:
    ranks = [Plan(rank=rank, **plan) for rank in range(plan["world"])]
    return ranks, [_dealt(total, start, rank) for rank in ranks]


def _dealt(total: int, start: int, plan: Plan) -> list[list[int]]:
    rest = iter(range(start, total))
    head = list(range(min(start, plan.world - 1)))
    return [mine for mine, _ in deal(lambda count: list(islice(rest, count)), plan, head) if mine]


@settings(max_examples=300, deadline=None)
@given(total=sizes, skipped=sizes, plan=plans)
def test_the_ranks_take_consecutive_slices_of_each_global_step(total: int, skipped: int, plan: dict[str, Any]) -> None:
    start = min(total, skipped)
    ranks, given_ = divided(total, start, plan)
    width = plan["world"] * plan["batch"]
    steps = [list(range(at, min(at + width, total))) for at in range(start, total, width)]
    if plan["drop_last"]:
        steps = [step for step in steps if len(step) == width]
    for rank, mine in zip(ranks, given_, strict=True):
        assert rank.local_steps(total - start) == len(mine)
        assert rank.global_steps(total - start) == len(steps)
    for k, step in enumerate(steps):
        shares = [rank.share(len(step)) for rank in ranks]
        parts = [mine[k] if k < len(mine) else [] for mine in given_]
        assert [len(part) for part in parts] == [share.size for share in shares]
        assert flat(part[: share.real] for part, share in zip(parts, shares, strict=True)) == step
        padding = flat(part[share.real :] for part, share in zip(parts, shares, strict=True))
        assert padding == [i % total for i in range(len(padding))]
        lengths = {len(part) for part in parts}
        assert max(lengths) <= plan["batch"]
        assert max(lengths) - min(lengths) <= (0 if plan["even"] else 1)
        assert plan["even"] or not padding


@settings(max_examples=300, deadline=None)
@given(total=sizes, parts=st.lists(st.tuples(plans, st.integers(1, 4)), max_size=6))
def test_any_chain_of_resumes_sees_each_sample_once(total: int, parts: list[tuple[dict[str, Any], int]]) -> None:
    seen: list[int] = []
    for plan, stop in [*parts, ({"world": 2, "batch": 2, "even": False, "drop_last": False}, 100)]:
        plan = {**plan, "even": False, "drop_last": False}
        _, ranks = divided(total, len(seen), plan)
        seen += by_step([mine[:stop] for mine in ranks])
    assert seen == list(range(total))


@pytest.mark.parametrize(
    ("n", "world", "options", "expected"),
    [
        (10, 2, {}, [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]]),
        (9, 2, {}, [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 0]]]),
        (9, 2, {"even_batches": False}, [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8]]]),
        (7, 2, {"even_batches": False}, [[[0, 1, 2], [6]], [[3, 4, 5]]]),
        (7, 2, {}, [[[0, 1, 2], [6]], [[3, 4, 5], [0]]]),
        (5, 4, {}, [[[0, 1]], [[2, 3]], [[4, 0]], [[1, 2]]]),
        (2, 5, {}, [[[0]], [[1]], [[0]], [[1]], [[0]]]),
        (2, 3, {"even_batches": False}, [[[0]], [[1]], []]),
        (0, 2, {}, [[], []]),
        (7, 1, {}, [[[0, 1, 2], [3, 4, 5], [6]]]),
    ],
)
@pytest.mark.parametrize("dataset", [Numbers, Counting])
def test_the_table_of_the_docs(n: int, world: int, options: Any, expected: Any, dataset: Any) -> None:
    found = everyone(lambda: DataLoader(dataset(n), batch_size=3, collate_fn=list), world, **options)
    assert found == expected


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [3, None])
def test_iterable_datasets_are_divided_as_map_style_ones(batch_size: int | None, drop_last: bool) -> None:
    def build(dataset: Any) -> DataLoader[Any]:
        kwargs = {"drop_last": drop_last, "collate_fn": list} if batch_size else {}
        return DataLoader(dataset, batch_size=batch_size, **kwargs)

    for n in (0, 1, 5, 12, 13, 17):
        for world in (1, 2, 3, 4):
            for even in (True, False):
                streams = everyone(lambda n=n: build(Counting(n)), world, even_batches=even)
                assert streams == everyone(lambda n=n: build(Numbers(n)), world, even_batches=even)


@pytest.mark.parametrize("kind", [Numbers, Counting])
@pytest.mark.parametrize("options", [{}, {"even_batches": False}])
@pytest.mark.parametrize("kwargs", [{"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}])
def test_len_is_right_on_each_rank(kind: Any, options: Any, kwargs: Any) -> None:
    for n in (0, 2, 6, 7, 11):
        for rank in range(3):
            handle = make(DataLoader(kind(n), **kwargs), rank, 3, **options)
            assert len(handle) == len(list(handle))
        raw = DataLoader(kind(n), **kwargs)
        assert len(make(raw)) == len(raw)


def test_len_of_an_unsized_stream_fails_as_in_torch_and_it_can_still_be_listed() -> None:
    class Unsized(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    handle = make(DataLoader(Unsized(), batch_size=2, collate_fn=list))
    with pytest.raises(TypeError):
        len(handle)
    assert list(handle) == [[0, 1], [2, 3], [4]]


# -- the order of an epoch ----------------------------------------------------------------------------------------------


class Mine(Sampler[int]):
    """Draws from whatever it is told to."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.torch = torch.Generator()
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(1)

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        order = list(range(50))
        {
            "random": lambda: random.shuffle(order),
            "numpy": lambda: np.random.shuffle(order),
            "own torch": lambda: order.sort(key=torch.rand(50, generator=self.torch).tolist().__getitem__),
            "own random": lambda: self.python.shuffle(order),
            "own numpy": lambda: self.numpy.shuffle(order),
            "own legacy": lambda: self.legacy.shuffle(order),
        }[self.source]()
        return iter(order)


SAMPLERS: dict[str, Any] = {
    "shuffle": lambda: RandomSampler(range(50)),
    "generator": lambda: RandomSampler(range(50), generator=torch.Generator().manual_seed(random.randrange(99))),
    "replacement": lambda: RandomSampler(range(50), replacement=True, num_samples=70),
    "more than once": lambda: RandomSampler(range(50), num_samples=120),
    "subset": lambda: SubsetRandomSampler(range(30, 80)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 50, 60),
} | {f"mine {s}": lambda s=s: Mine(s) for s in ("random", "numpy")}
OWN = {f"mine {s}": lambda s=s: Mine(s) for s in ("own torch", "own random", "own numpy", "own legacy")}


def rng_states() -> str:
    return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))


@pytest.mark.parametrize("name", [*SAMPLERS, *OWN])
def test_the_order_is_the_samplers_the_same_everywhere_and_new_each_epoch(name: str) -> None:
    build = (SAMPLERS | OWN)[name]
    orders = []
    for world in (1, 2, 3):
        handles = []
        for rank in range(world):
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            handles.append(make(sampled(build(), batch_size=5), rank, world, even_batches=False))
        before = rng_states()
        orders.append([by_step([list(handle) for handle in handles]) for _ in range(2)])
        assert rng_states() == before
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) != orders[0][0]
    if name not in ("replacement", "weighted", "more than once"):
        assert sorted(orders[0][0]) == sorted(build())
    assert len(orders[0][0]) == len(build())
    assert flat(make(sampled(build(), batch_size=5), seed=8)) != orders[0][0]
    again = make(sampled(build(), batch_size=50), seed=8)
    again.set_epoch(1)
    assert flat(again) != orders[0][1]


def test_weights_and_replacement_are_the_samplers() -> None:
    order = flat(make(sampled(WeightedRandomSampler([0.0, 1.0, 0.0, 3.0], 400), batch_size=9)))
    assert set(order) == {1, 3}
    assert 250 < order.count(3) < 350


@pytest.mark.parametrize("name", [*SAMPLERS, *OWN])
def test_the_samplers_own_generators_are_put_back(name: str) -> None:
    sampler = (SAMPLERS | OWN)[name]()
    control = copy.deepcopy(sampler)
    before = rng_states()
    list(make(sampled(sampler, batch_size=5)))
    assert rng_states() == before
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    mine = list(sampler)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    assert mine == list(control)


def test_states_are_put_back_where_the_sampler_raises() -> None:
    class Broken(Mine):
        def __iter__(self) -> Iterator[int]:
            random.random()
            raise RuntimeError("broken")

    handle = make(sampled(Broken("random"), batch_size=5))
    before = rng_states()
    with pytest.raises(RuntimeError, match="broken"):
        list(handle)
    assert rng_states() == before
    assert handle.state_dict()["epoch"] == 0


def test_a_sampler_with_set_epoch_is_told_the_epoch() -> None:
    class Told(SequentialSampler):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    handle = make(sampled(BatchSampler(Told(range(6)), 2, False), batch_size=None))
    for _ in range(2):
        list(handle)
    handle.set_epoch(7)
    list(handle)
    assert Told.epochs == [0, 1, 7]


def test_indices_may_be_anything() -> None:
    class Letters(Dataset[str]):
        def __getitem__(self, key: Any) -> Any:
            return key

    def build() -> DataLoader[Any]:
        return DataLoader(Letters(), sampler=["a", ("b", 1), "c"], batch_size=2, collate_fn=list)

    assert everyone(build, 2) == [[["a", ("b", 1)]], [["c", "a"]]]
    tensors = DataLoader(Numbers(5), sampler=list(torch.tensor([3, 1])), batch_size=2, collate_fn=list)
    assert list(make(tensors)) == [[3, 1]]


# -- one process: as raw PyTorch ----------------------------------------------------------------------------------------


class Drawing(Sampler[Any]):
    """Draws each item when it is asked for, from a global generator."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        for _ in range(23):
            yield {
                "torch": lambda: int(torch.randint(50, ())),
                "random": lambda: random.randrange(50),
                "numpy": lambda: int(np.random.randint(50)),
            }[self.source]()


class Batches(Sampler[Any]):
    """A batch sampler that draws when its iterator is made."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(24).view(6, 4).tolist())


def own(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader_of(sampler: Any, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(50), 6, sampler=sampler, collate_fn=list, **kwargs)


RAW: dict[str, Any] = {
    "in order": lambda: numbers(23),
    "shuffle": lambda: numbers(23, shuffle=True),
    "shuffle, full batches": lambda: numbers(24, shuffle=True),
    "shuffle, drop_last": lambda: numbers(23, shuffle=True, drop_last=True),
    "shuffle, generator": lambda: numbers(24, shuffle=True, generator=own()),
    "generator, in order": lambda: numbers(24, generator=own()),
    "replacement": lambda: loader_of(RandomSampler(range(50), replacement=True, num_samples=70)),
    "replacement, generator": lambda: loader_of(
        RandomSampler(range(50), replacement=True, num_samples=70, generator=own())
    ),
    "more than once": lambda: loader_of(RandomSampler(range(50), num_samples=120)),
    "weighted": lambda: loader_of(WeightedRandomSampler([1.0] * 50, 33)),
    "weighted, generator": lambda: loader_of(WeightedRandomSampler([1.0] * 50, 33, generator=own())),
    "subset": lambda: loader_of(SubsetRandomSampler(range(5, 40))),
    "subset, generator": lambda: loader_of(SubsetRandomSampler(range(5, 40), generator=own())),
    "plain batch sampler": lambda: DataLoader(
        Numbers(50), batch_sampler=BatchSampler(RandomSampler(range(50)), 3, True), collate_fn=list
    ),
    "batch sampler": lambda: DataLoader(Numbers(24), batch_sampler=Batches(), collate_fn=list),
    "no batches": lambda: numbers(17, None, shuffle=True),
    "workers": lambda: numbers(23, shuffle=True, num_workers=2),
    "persistent workers": lambda: numbers(23, shuffle=True, num_workers=2, persistent_workers=True),
    "stream, workers": lambda: DataLoader(Noisy(), batch_size=5, num_workers=1, collate_fn=list),
    **{
        f"mine {s}": lambda s=s: loader_of(Mine(s)) for s in ("random", "numpy", "own torch", "own random", "own numpy")
    },
}
#: Those that draw while the loop does.
DRAWING: dict[str, Any] = {
    **{f"drawing {s}": lambda s=s: loader_of(Drawing(s)) for s in ("torch", "random", "numpy")},
    "drawing one by one": lambda: DataLoader(Numbers(50), sampler=Drawing("torch"), batch_size=None),
    "stream": lambda: DataLoader(Noisy(), batch_size=3, collate_fn=list),
    "stream, one by one": lambda: DataLoader(Noisy(), batch_size=None),
}


def raw_like(loader: DataLoader[Any]) -> LoaderHandle:
    """The handle that setup gives a program of one process."""
    return distribute(loader, LoaderOptions(), rank=0, world_size=1, device="cpu", seed=0, in_place=True)


def reset(seed: int = 3) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def play(loader: Any, draws: bool, break_at: int = 2) -> list[Any]:
    """Three epochs, the second with a break, of a loop that draws too; what it got, and its generators."""
    reset()
    seen: list[Any] = []
    for epoch in range(3):
        for k, batch in enumerate(loader):
            seen.append(batch)
            if draws:
                seen.append((torch.rand(()).item(), random.random(), np.random.rand()))
            if (epoch, k) == (1, break_at):
                break
        seen.append(rng_states())
    return seen


@pytest.mark.parametrize("name", [*RAW, *DRAWING])
def test_in_one_process_batches_and_random_numbers_are_raw_pytorchs(name: str) -> None:
    build = (RAW | DRAWING)[name]
    for draws in (False, True) if "workers" not in name else (True,):
        assert play(raw_like(build()), draws) == play(build(), draws)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    batch=st.integers(1, 7),
    drop_last=st.booleans(),
    generator=st.booleans(),
    replacement=st.booleans(),
    num_samples=st.integers(1, 90),
    draws=st.booleans(),
)
def test_any_random_sampler_is_raw_pytorchs(
    n: int, batch: int, drop_last: bool, generator: bool, replacement: bool, num_samples: int, draws: bool
) -> None:
    def build() -> DataLoader[Any]:
        source = own() if generator else None
        sampler = RandomSampler(range(n), replacement, num_samples, source)
        return DataLoader(Numbers(n), batch, sampler=sampler, drop_last=drop_last, generator=source, collate_fn=list)

    assert play(raw_like(build()), draws) == play(build(), draws)


def interrupted(build: Any, draws: bool, stop: tuple[int, int]) -> tuple[list[Any], dict[str, Any], Any]:
    """What a loop of two epochs got after it had saved its position, that position, and the generators then."""
    reset()
    handle, state, after, states = raw_like(build()), None, [], ()
    for epoch in range(2):
        for k, batch in enumerate(handle):
            if state is not None:
                after.append(batch)
            if draws:
                torch.rand(()), random.random(), np.random.rand()
            if (epoch, k) == stop:
                state = json.loads(json.dumps(handle.state_dict()))
                states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    assert state is not None
    return after, state, states


@pytest.mark.parametrize("stop", [(0, 2), (1, 1)])
@pytest.mark.parametrize("name", [*RAW, *DRAWING])
def test_in_one_process_a_resumed_loader_goes_on_as_if_uninterrupted(name: str, stop: tuple[int, int]) -> None:
    build = (RAW | DRAWING)[name]
    for draws in (False, True) if name in RAW and "workers" not in name else (False,):
        expected, state, (torch_state, python_state, numpy_state) = interrupted(build, draws, stop)
        reset(99)
        handle = raw_like(build())
        handle.load_state_dict(state)
        assert handle.state_dict() == state
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        found = []
        for _ in range(stop[0], 2):
            for batch in handle:
                found.append(batch)
                if draws:
                    torch.rand(()), random.random(), np.random.rand()
        assert [_plain(b) for b in found] == [_plain(b) for b in expected]


def _plain(batch: Any) -> Any:
    """A batch without the epoch that a Noisy stream was told."""
    items = batch if isinstance(batch, list) else [batch]
    return [item[2:] if isinstance(item, tuple) else item for item in items]


@pytest.mark.parametrize("name", DRAWING)
def test_an_order_that_cannot_be_drawn_again_is_refused_when_its_position_is_asked_for(name: str) -> None:
    with pytest.raises(LoaderError, match=r"LoaderOptions\(seed=...\)"):
        interrupted(DRAWING[name], True, (0, 2))
    seeded = make(DRAWING[name]())
    iterator = iter(seeded)
    next(iterator), torch.rand(3), random.random(), np.random.rand(), next(iterator)
    (again,) = resumed(DRAWING[name], 1, seeded.state_dict())
    assert list(again) == list(iterator)


@pytest.mark.parametrize(
    "name", ["shuffle", "shuffle, generator", "weighted", "batch sampler", "mine own numpy", "stream"]
)
def test_a_position_of_one_process_resumes_on_several_ranks_and_back(name: str) -> None:
    build = (RAW | DRAWING)[name]
    after, state, _ = interrupted(build, False, (0, 1))
    rest = [_plain(b) for b in after][: len(list(build())) - 2]
    handles = [make(build(), rank, 2, even_batches=False) for rank in range(2)]
    for handle in handles:
        handle.load_state_dict(state)
    iterators = [iter(handle) for handle in handles]
    seen = [_plain(next(iterator)) for iterator in iterators]
    assert handles[0].state_dict() == {**handles[1].state_dict(), "generators": handles[0].state_dict()["generators"]}
    back = raw_like(build())
    back.load_state_dict(json.loads(json.dumps(handles[0].state_dict())))
    assert flat(seen) + flat(_plain(b) for b in back) == flat(rest)


def test_an_epoch_that_is_chosen_by_number_is_drawn_from_the_seed() -> None:
    found = []
    for first in (0, 2):
        reset(first)
        handle = raw_like(numbers(20, shuffle=True))
        for epoch in range(first, 4):
            handle.set_epoch(epoch)
            found.append((epoch, list(handle)))
    assert found[2:4] == found[4:]
    assert found[0][1] != found[1][1]


# -- samplers without end -----------------------------------------------------------------------------------------------


class Shuffling(Sampler[int]):
    """Says that it is as long as can be, and has no end."""

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(100).tolist()


ENDLESS: dict[str, Any] = {
    "replacement": lambda: RandomSampler(range(1000), replacement=True, num_samples=int(1e10)),
    "replacement, generator": lambda: RandomSampler(range(1000), True, int(1e10), own()),
    "shuffling": Shuffling,
    "no length": lambda: Endless(),
    "wrong length": lambda: EndlessSized(),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_sampler_without_end_is_drawn_as_it_is_read(name: str) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Numbers(1000), 4, sampler=ENDLESS[name](), collate_fn=list)

    def start(steps: int, *handles: LoaderHandle) -> tuple[list[Any], list[Any]]:
        iterators = [iter(handle) for handle in handles]
        return [next(iterator) for _ in range(steps) for iterator in iterators], iterators

    reset()
    raw = iter(build())
    expected = [next(raw) for _ in range(60)]
    reset()
    one = raw_like(build())
    seen, _ = start(40, one)
    again = raw_like(build())
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert seen + start(20, again)[0] == expected
    handles = [make(build(), rank, 2) for rank in range(2)]
    seen, iterators = start(20, *handles)
    state = handles[0].state_dict()
    more = [next(iterator) for _ in range(5) for iterator in iterators]
    assert start(5, *resumed(build, 2, state))[0] == more
    if name != "replacement, generator":  # whose seed is the generator's
        assert flat(seen) == flat(start(40, make(build()))[0])


def test_what_is_drawn_in_blocks_is_what_the_sampler_gives() -> None:
    for sampler in (
        RandomSampler(range(2**40), replacement=True, num_samples=200_000),
        RandomSampler(range(70_000), num_samples=150_001),
        RandomSampler(range(131_072)),
    ):
        torch.manual_seed(4)
        expected = list(sampler)
        torch.manual_seed(4)
        source = Source(sampler, InPlace(Generators({})), ahead=True)
        assert source.read(len(expected) + 1) == expected


# -- batch samplers and batch_size=None -----------------------------------------------------------------------------------


def ragged() -> DataLoader[Any]:
    return DataLoader(Numbers(10), batch_sampler=[[0], [1, 2], [3, 4, 5], [6], [7, 8]], collate_fn=list)


def test_custom_batches_stay_whole() -> None:
    assert everyone(ragged, 2) == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6], [0]]]
    assert everyone(ragged, 2, even_batches=False) == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6]]]
    assert everyone(ragged, 1) == [[[0], [1, 2], [3, 4, 5], [6], [7, 8]]]
    assert [len(make(ragged(), rank, 2, even_batches=False)) for rank in (0, 1)] == [3, 2]


def test_a_plain_batch_sampler_is_divided_by_samples() -> None:
    def build() -> DataLoader[Any]:
        sampler = BatchSampler(SequentialSampler(range(9)), 2, True)
        return DataLoader(Numbers(9), batch_sampler=sampler, collate_fn=list)

    assert everyone(build, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_without_batching_samples_are_dealt_one_by_one() -> None:
    assert everyone(lambda: numbers(5, None), 2) == [[0, 2, 4], [1, 3, 0]]
    lists = lambda: DataLoader(  # noqa: E731
        torch.arange(6), sampler=BatchSampler(SequentialSampler(range(6)), 2, False), batch_size=None
    )
    assert [[batch.tolist() for batch in rank] for rank in everyone(lists, 2)] == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


# -- iterable datasets --------------------------------------------------------------------------------------------------


class Noisy(IterableDataset[float]):
    """A stream that draws from every global generator, one normal (which numpy caches in pairs) at a time."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for i in range(20):
            yield i, self.epoch, random.random(), torch.rand(()).item(), np.random.randn()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_random_stream_is_the_same_on_all_ranks_and_leaves_the_loop_alone(workers: int) -> None:
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


def test_each_worker_has_random_numbers_of_its_own() -> None:
    found = flat(make(DataLoader(Noisy(), batch_size=5, num_workers=2, collate_fn=list)))
    assert len({sample[2:] for sample in found}) == 40


def test_workers_read_their_own_part_and_every_sample_comes_once() -> None:
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


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_init_fn_configures_the_workers_copy(context: str) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(
            Range(0, 16),
            batch_size=2,
            num_workers=2,
            worker_init_fn=take_half,
            collate_fn=list,
            multiprocessing_context=context,
        )

    ranks = [0, 1] if context == "fork" else [1]
    found = [list(make(build(), rank, 2)) for rank in ranks]
    assert found[-1] == [[2, 3], [10, 11], [6, 7], [14, 15]]
    assert len(ranks) == 1 or found[0] == [[0, 1], [8, 9], [4, 5], [12, 13]]


# -- epochs, iterators --------------------------------------------------------------------------------------------------


def test_an_abandoned_iteration_was_an_epoch_and_set_epoch_chooses_one() -> None:
    handle = make(numbers(40, shuffle=True))
    epochs = [list(handle) for _ in range(4)]
    handle.set_epoch(0)
    for batch in handle:
        assert batch == epochs[0][0]
        break
    next(iter(handle))
    assert list(handle) == epochs[2]
    assert handle.state_dict()["epoch"] == 3


@pytest.mark.parametrize("kwargs", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("kind", [Numbers, Counting])
def test_two_iterators_do_not_disturb_each_other(kind: Any, kwargs: Any) -> None:
    shuffle = {"shuffle": True} if kind is Numbers else {}
    handle = make(DataLoader(kind(12), batch_size=2, collate_fn=list, **shuffle, **kwargs), 1, 2)
    alone = [list(handle), list(handle)]
    handle.set_epoch(0)
    pairs = list(zip(handle, handle, strict=True))
    assert [[a for a, _ in pairs], [b for _, b in pairs]] == alone


@pytest.mark.parametrize("kind", [Numbers, Counting])
def test_persistent_workers_live_on_and_see_new_epochs(kind: Any) -> None:
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


def test_the_raw_loaders_persistent_workers_stay_its_own() -> None:
    raw = numbers(8, 2, num_workers=1, persistent_workers=True)
    iterator = iter(raw)
    assert next(iterator) == [0, 1]
    assert list(make(raw, 1, 2)) == [[2, 3], [6, 7]]
    assert list(iterator) == [[2, 3], [4, 5], [6, 7]]


# -- workers' seeds -----------------------------------------------------------------------------------------------------


class Drawn(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return torch.initial_seed(), random.random(), float(np.random.rand()), get_worker_info().id  # type: ignore[union-attr]


def reseed(worker: int) -> None:
    random.seed(worker)


def test_workers_have_seeds_of_their_own_in_each_epoch_and_rank() -> None:
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


# -- the position -------------------------------------------------------------------------------------------------------


def advance(handles: list[LoaderHandle], steps: int) -> tuple[list[Any], dict[str, Any]]:
    """The samples of some steps in lockstep, and the state inside the loop's body, which must be JSON and equal."""
    seen: list[Any] = []
    iterators = [iter(handle) for handle in handles]
    for _ in range(steps):
        seen += flat(next(iterator) for iterator in iterators)
    states = [json.loads(json.dumps(handle.state_dict())) for handle in handles]
    assert all(state == states[0] for state in states)
    return seen, states[0]


def resumed(build: Any, world: int, state: Any, **options: Any) -> list[LoaderHandle]:
    handles = [make(build(), rank, world, seed=1000, **options) for rank in range(world)]
    for handle in handles:
        handle.load_state_dict(state)
        assert handle.state_dict() == state
    return handles


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("even", [True, False])
def test_a_resume_at_another_world_and_batch_size_sees_the_rest_once(workers: int, even: bool) -> None:
    def build(batch_size: int = 3) -> DataLoader[Any]:
        return numbers(100, batch_size, shuffle=True, num_workers=workers)

    whole = make(numbers(100, 1, shuffle=True))
    epochs = [flat(whole), flat(whole)]
    first, state = advance([make(build(), rank, 4, even_batches=even) for rank in range(4)], 3)
    assert (state["epoch"], state["consumed"]) == (0, 36)
    second, state = advance(resumed(lambda: build(5), 2, state, even_batches=even), 2)
    assert state["consumed"] == 56
    handles = resumed(lambda: build(4), 3, state, even_batches=even)
    assert len(handles[0]) == 9
    rest = by_step([list(handle) for handle in handles])
    assert (first + second + rest)[:100] == epochs[0]
    assert len(first + second + rest) == (101 if even else 100)
    assert handles[0].state_dict()["epoch"] == 1
    assert by_step([list(handle) for handle in handles])[:100] == epochs[1]


@pytest.mark.parametrize(
    "build",
    [
        *[lambda s=s: sampled(s(), batch_size=3) for s in (SAMPLERS | OWN).values()],
        ragged,
        lambda: numbers(17, None, shuffle=True),
        lambda: DataLoader(Counting(17), batch_size=3, collate_fn=list),
        lambda: DataLoader(Noisy(), batch_size=3, collate_fn=list),
    ],
)
def test_every_kind_of_loader_resumes(build: Any) -> None:
    def samples(steps: Any) -> list[Any]:
        return flat(step if isinstance(step, list) else [step] for step in steps)

    whole = make(build(), even_batches=False)
    epochs = [samples(whole), samples(whole)]
    handles = [make(build(), rank, 2, even_batches=False) for rank in range(2)]
    iterators = [iter(handle) for handle in handles]
    seen = samples([next(iterators[0]), next(iterators[1])])
    (handle,) = resumed(build, 1, handles[0].state_dict(), even_batches=False)
    assert seen + samples(handle) == epochs[0]
    assert samples(handle) == epochs[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_stream_is_divided_and_padded_as_the_rest_of_an_order(workers: int) -> None:
    found = []
    for kind in (Numbers, Counting):
        build = lambda kind=kind, size=1: DataLoader(  # noqa: E731
            kind(8), batch_size=size, collate_fn=list, num_workers=workers
        )
        _, state = advance([make(build(size=2))], 1)
        found.append([list(handle) for handle in resumed(build, 5, state)])
    assert found[0] == found[1] == [[[2], [7]], [[3], [0]], [[4], [1]], [[5], [2]], [[6], [3]]]


def test_the_state_at_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    for kwargs in ({}, {"drop_last": True}):
        build = lambda kwargs=kwargs: numbers(10, 2, shuffle=True, **kwargs)  # noqa: E731
        handles = [make(build(), rank, 2) for rank in range(2)]
        steps = len(handles[0])
        _, inside = advance(handles, steps)
        assert (inside["epoch"], inside["next"], inside["consumed"]) == (1, 2, 0)
        for handle in handles:
            handle.set_epoch(0)
            assert len(list(handle)) == steps
        assert handles[0].state_dict() == inside
        assert len(list(resumed(build, 1, inside)[0])) == 5


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("even", "n"), [(True, 12), (False, 12), (True, 13), (False, 13)])
def test_a_stream_that_was_read_to_its_end_resumes_with_the_next_epoch(workers: int, even: bool, n: int) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Counting(n), batch_size=3, collate_fn=list, num_workers=workers if even else 0)

    handles = [make(build(), rank, 2, even_batches=even) for rank in range(2)]
    _, state = advance(handles, 2)
    assert state["consumed"] == 12
    after = [list(handle) for handle in resumed(build, 2, state, even_batches=even)]
    if n == 12:
        assert after == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
    else:
        assert after == [[[12]], [[0]] if even else []]


def test_len_is_of_the_epoch_and_that_of_an_iterator_is_of_what_it_gives() -> None:
    _, state = advance([make(numbers(20, 4))], 2)
    (handle,) = resumed(lambda: numbers(20, 4), 1, state)
    assert (len(handle), len(iter(handle))) == (5, 3)
    assert len(iter(handle)) == 5


def test_what_drop_last_would_drop_is_no_epoch() -> None:
    _, state = advance([make(numbers(11, 2, drop_last=True))], 5 - 1)
    assert state["consumed"] == 8
    handles = resumed(lambda: numbers(11, 2, drop_last=True), 2, state)
    assert [list(handle) for handle in handles] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert handles[0].state_dict()["epoch"] == 2


def test_a_rank_without_a_share_agrees_on_the_position() -> None:
    handles = [make(numbers(9, 2), rank, 4, even_batches=False) for rank in range(4)]
    _, state = advance(handles, 1)
    assert state["consumed"] == 8
    ranks = [list(handle) for handle in resumed(lambda: numbers(9, 2), 4, state, even_batches=False)]
    assert ranks == [[[8]], [], [], []]


def test_the_position_is_that_of_the_loop() -> None:
    handle = make(numbers(40, 4, shuffle=True))
    kept = iter(handle)
    next(kept)
    consumed = []
    for k, _ in enumerate(handle):
        if k == 2:
            next(iter(handle))
        for _ in handle if k == 3 else ():
            pass
        consumed.append((handle.state_dict()["epoch"], handle.state_dict()["consumed"]))
        if k == 4:
            break
    assert consumed == [(1, 4), (1, 8), (1, 12), (1, 16), (1, 20)]
    saved = make(numbers(40, 4, shuffle=True)).state_dict()
    (other,) = resumed(lambda: numbers(40, 4, shuffle=True), 1, saved)
    alive = iter(other)
    next(alive)
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    del kept
    assert (handle.state_dict()["epoch"], handle.state_dict()["consumed"]) == (4, 0)


def test_a_finished_iterator_has_no_position() -> None:
    handle = make(DataLoader(Counting(20), batch_size=2), 0, 2, even_batches=False)
    kept, finished = iter(handle), iter(handle)
    next(kept)
    list(finished)
    assert (handle.state_dict()["epoch"], handle.state_dict()["consumed"]) == (0, 4)
    del kept
    assert (handle.state_dict()["epoch"], handle.state_dict()["consumed"]) == (2, 0)


def test_a_resumed_loader_keeps_the_epochs_that_were_begun() -> None:
    handle = make(numbers(20, 4, shuffle=True))
    epochs = [list(handle) for _ in range(4)]
    handle.set_epoch(1)
    loop = iter(handle)
    next(iter(handle)), next(loop), next(loop)
    (again,) = resumed(lambda: numbers(20, 4, shuffle=True), 1, handle.state_dict())
    again.set_epoch(1)
    assert list(again) == epochs[1][2:]
    assert list(again) == epochs[3]
    again.load_state_dict(handle.state_dict())
    again.set_epoch(2)
    assert list(again) == epochs[2]


def test_workers_streams_resume_with_as_many_workers() -> None:
    def build(workers: int = 2) -> DataLoader[Any]:
        return DataLoader(Counting(60), batch_size=3, collate_fn=list, num_workers=workers)

    seen, state = advance([make(build(), rank, 2) for rank in range(2)], 3)
    assert state["streams"] == [12, 6]
    assert state["consumed"] == 18
    rest = flat(resumed(build, 1, state)[0])
    assert sorted(seen + rest) == list(range(60))
    with pytest.raises(LoaderError, match="num_workers"):
        make(build(1)).load_state_dict(state)


def test_refused_states_change_nothing() -> None:
    handle = make(numbers(20, 4, shuffle=True))
    iterator = iter(handle)
    next(iterator)
    good = handle.state_dict()
    bad = [
        None,
        {},
        {**good, "epoch": -1},
        {**good, "epoch": 1.0},
        {**good, "streams": [3]},
        {**good, "consumed": 30, "streams": [30]},
        {**good, "checksum": good["checksum"] + 1},
        {**good, "seed": good["seed"] + 1},
        {**good, "length": 21},
        {k: v for k, v in good.items() if k != "next"},
    ]
    other = make(numbers(20, 4, shuffle=True))
    before = other.state_dict()
    for state in bad:
        with pytest.raises(LoaderError):
            other.load_state_dict(state)  # type: ignore[arg-type]
        assert other.state_dict() == before
    with pytest.raises(LoaderError, match="another order"):
        make(numbers(20, 4)).load_state_dict(good)
    with pytest.raises(LoaderError, match="shard=False"):
        make(numbers(20, 4), shard=False).load_state_dict(good)
    with pytest.raises(LoaderError, match="iterable"):
        make(DataLoader(Counting(20))).load_state_dict(good)
    with pytest.raises(LoaderError, match="set_epoch"):
        other.set_epoch(-1)


def test_a_stream_that_became_shorter_is_noticed() -> None:
    stream = Counting(20)
    handle = make(DataLoader(stream, batch_size=4))
    _, state = advance([handle], 3)
    handle.load_state_dict(state)
    stream.n = 10
    with pytest.raises(LoaderError, match="ended after 10 items"):
        next(iter(handle))


def test_a_position_that_cannot_be_known_is_refused_when_it_is_asked_for() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    off = make(Own(Numbers(8), 2, collate_fn=list), shard=False)
    assert off.state_dict()["consumed"] == 0
    for k, _ in enumerate(off):
        if k < 3:
            with pytest.raises(LoaderError, match="mid-epoch"):
                off.state_dict()
        else:
            assert off.state_dict()["epoch"] == 1
    off.load_state_dict(off.state_dict())
    uneven = make(DataLoader(Counting(20), batch_size=2, num_workers=1), 0, 2, even_batches=False)
    iterator = iter(uneven)
    next(iterator)
    with pytest.raises(LoaderError, match="even_batches"):
        uneven.state_dict()


# -- the handle ---------------------------------------------------------------------------------------------------------


def test_the_raw_loader_stays_as_it_is() -> None:
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
    del handle.note
    assert not hasattr(raw, "note")
    for name in ("batch_size", "sampler", "dataset"):
        with pytest.raises(ValueError, match=name):
            setattr(handle, name, 1)
    with pytest.raises(AttributeError):
        _ = handle.nothing
    public = {name for name in set(dir(handle)) - set(dir(raw)) if not name.startswith("_")}
    assert public == {"set_epoch", "state_dict", "load_state_dict"}
    assert "rank 1 of 2" in repr(handle)


def test_pickle_is_refused_and_deepcopy_gives_a_raw_copy() -> None:
    raw = numbers(4, 2)
    handle = make(raw)
    for refused in (pickle.dumps, copy.copy):
        with pytest.raises(LoaderError, match="pickled"):
            refused(handle)
    clone = copy.deepcopy({"loader": handle})["loader"]
    assert type(clone) is DataLoader
    assert clone is not raw
    assert list(clone) == [[0, 1], [2, 3]]


def test_a_dropped_handle_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        handle = make(numbers(4, 2, num_workers=1, persistent_workers=True))
        iterator = iter(handle)
        next(iterator)
        gone = [weakref.ref(handle), weakref.ref(handle._accel.persistent[1])]  # type: ignore[index]
        del handle, iterator
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


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


def test_subclasses_keep_their_class_and_must_obey_their_sampler() -> None:
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

    with pytest.raises(LoaderError, match="without asking its sampler"):
        next(iter(make(Ready(Numbers(5)))))

    class Skipping(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch for k, batch in enumerate(super().__iter__()) if k != 1)

    with pytest.raises(LoaderError, match="gave 4"):
        list(make(Skipping(Numbers(5))))
    with pytest.raises(LoaderError, match="__iter__"):
        make(Skipping(Counting(5)))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class EndlessSized(Endless):
    def __len__(self) -> int:
        return 5


class Foreign(Sampler[int]):
    num_replicas = 2

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (lambda: [1, 2], {}, "found a list"),
        (lambda: make(numbers(4)), {}, "found a LoaderHandle"),
        (lambda: sampled(DistributedSampler(Numbers(4), 1, 0)), {}, "distributed already, by a DistributedSampler"),
        (
            lambda: sampled(BatchSampler(DistributedSampler(Numbers(4), 2, 0), 2, False), batch_size=None),
            {},
            "distributed already",
        ),
        (lambda: sampled(Foreign()), {}, "distributed already, by a Foreign"),
        (lambda: numbers(4, num_workers=1, in_order=False), {}, "in_order"),
        (lambda: numbers(4), {"seed": 1.5}, "seed"),
        (lambda: numbers(4), {"even_batches": 1}, "even_batches"),
    ],
)
def test_check_refuses(loader: Any, options: Any, message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        check(loader(), LoaderOptions(**options), 2)


def test_other_refusals() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(LoaderError, match="DataPipes"):
        check(DataLoader(IterableWrapper([1])), LoaderOptions(), 1)
    with pytest.raises(LoaderError, match="LoaderOptions"):
        check(numbers(4), {"shard": True}, 1)
    with pytest.raises(LoaderError, match="world size"):
        check(numbers(4), LoaderOptions(), 0)


def test_describe_tells_apart_what_must_be_equal() -> None:
    split = [DataLoader(Subset(Numbers(9), indices)) for indices in ([1, 2], [1, 3], [1, 2])]
    texts = [describe(loader) for loader in split]
    assert texts[0] == texts[2] != texts[1]
    assert describe(numbers(4)) != describe(numbers(5))
    assert describe(numbers(4, 2)) != describe(numbers(4, 4))
    off = LoaderOptions(shard=False)
    assert describe(numbers(4), off) == describe(numbers(5), off)


class Unpredictable(Sampler[int]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(20).tolist())


def _descriptions() -> list[str]:
    torch.manual_seed(torch.distributed.get_rank())
    samplers = [Unpredictable(), WeightedRandomSampler([1.0] * 20, 20), RandomSampler(range(20)), EndlessSized()]
    return [describe(sampled(sampler)) for sampler in samplers]


def test_a_sampler_that_draws_differently_on_each_rank_is_described_so() -> None:
    mine, other = run(2, _descriptions)
    assert [a == b for a, b in zip(mine, other, strict=True)] == [False, True, True, True]


def test_pin_memory_without_an_accelerator_only_warns() -> None:
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without accelerator")
    handle = make(numbers(4, 2, pin_memory=True))
    with pytest.warns(UserWarning, match="pin_memory"):
        assert list(handle) == [[0, 1], [2, 3]]


# -- device moves -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    n: int = dataclasses.field(default=3, init=False)


class Words(list):  # type: ignore[type-arg]
    pass


class Movable:
    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.calls: list[Any] = []

    def is_pinned(self) -> bool:
        return self.pinned

    def to(self, device: Any, **kwargs: Any) -> Movable:
        self.calls.append((device, kwargs))
        return self


def test_moves_reach_every_tensor_and_keep_the_containers() -> None:
    x, meta = torch.ones(2), torch.device("meta")
    words = Words([x])
    words.note = "mine"  # type: ignore[attr-defined]
    batch = {
        "pair": Pair(x, "text"),
        "nested": OrderedDict(a=[x, (x, 1)]),
        "frozen": Frozen(x),
        "proxy": MappingProxyType({"x": x}),
        "words": words,
        "packed": torch.nn.utils.rnn.pack_sequence([x]),
        "class": torch.nn.Linear,
        "none": None,
    }
    moved = move(batch, meta)
    assert moved["pair"] == Pair(moved["pair"].x, "text")
    assert (type(moved["nested"]), type(moved["words"]), moved["words"].note) == (OrderedDict, Words, "mine")
    assert (moved["frozen"].n, moved["class"], moved["none"]) == (3, torch.nn.Linear, None)
    places = [moved["pair"].x, moved["nested"]["a"][0], moved["nested"]["a"][1][0], moved["frozen"].x]
    places += [moved["proxy"]["x"], moved["words"][0], moved["packed"].data]
    assert {t.device for t in places} == {meta}
    assert batch["nested"]["a"][0].device.type == "cpu"  # type: ignore[index]
    pinned, paged = move([Movable(True), Movable(False)], meta)
    assert pinned.calls == [(meta, {"non_blocking": True})]
    assert paged.calls == [(meta, {})]


def test_batches_arrive_on_the_device_unless_it_is_switched_off() -> None:
    data = [(torch.ones(2), i) for i in range(4)]
    for options, device in ((LoaderOptions(), "meta"), (LoaderOptions(move=False), "cpu")):
        loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        handle = distribute(loader, options, rank=0, world_size=1, device="meta", seed=0)
        assert {tensor.device.type for batch in handle for tensor in batch} == {device}
    movable = Movable(False)
    assert next(iter(make(DataLoader([movable], batch_size=None)))) is movable  # type: ignore[arg-type]
    assert movable.calls == []


# -- gather_for_metrics on real ranks -------------------------------------------------------------------------------------


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


def test_gathered_metrics_have_each_sample_once_in_order() -> None:
    for world in (1, 2, 4):
        for n in (1, 8, 13):
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


def test_metrics_of_every_kind_of_loader() -> None:
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


def test_metrics_whose_padding_is_unknown_are_refused_on_the_first_batch() -> None:
    for fn in (_gather_scalar, _gather_wrong_rows):
        assert all("dim 0" in message for message in refusals(2, fn, error="LoaderError"))
    assert all("no loader" in message for message in refusals(2, _gather_never, error="LoaderError"))


def test_gather_on_one_process_is_the_identity() -> None:
    data = {"x": torch.ones(()), "y": [torch.ones(3)]}
    handle = make(numbers(4))
    assert gather_for_metrics(data, handle) is data
    list(handle)
    assert gather_for_metrics(data) is data
    with pytest.raises(LoaderError, match="handle"):
        gather_for_metrics(data, numbers(4))  # type: ignore[arg-type]


def test_no_warning_is_given_that_torch_does_not_give() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = make(DataLoader(Counting(7), batch_size=2), 1, 2)
        assert len(handle) == 2
        assert len(list(handle)) == 2


def _samples(loader: Any) -> list[int]:
    return [int(i) for batch in loader for i in batch]


def _changed_replicas() -> tuple[list[int], list[int]]:
    """What one loader gives to a pipeline, and then to ranks that each have a replica."""
    net, raw = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), numbers(8, batch_size=2)
    stages = accel.setup(net, None, raw, backend="pipeline")
    whole = _samples(stages.dataloaders)
    accel.teardown(stages.model)
    with pytest.raises(LoaderError, match="raw DataLoader"):
        accel.setup(net, None, stages.dataloaders, backend="ddp")
    replicas = accel.setup(net, None, raw, backend="ddp")
    assert accel.setup(net, None, raw).dataloaders is replicas.dataloaders
    assert accel.setup(copy.deepcopy(net), None, raw, backend="pipeline").dataloaders is stages.dataloaders
    return whole, _samples(replicas.dataloaders)


def test_a_loader_is_divided_for_the_engine_that_it_is_set_up_with() -> None:
    every = list(range(8))
    assert run(2, _changed_replicas) == [(every, [0, 1, 4, 5]), (every, [2, 3, 6, 7])]


def _ended() -> list[int]:
    net, raw = nn.Linear(1, 1), numbers(8, batch_size=2)
    handle = accel.setup(net, None, raw).dataloaders
    accel.teardown()
    with pytest.raises(LoaderError, match="teardown"):
        iter(handle)
    return _samples(accel.setup(net, None, raw).dataloaders)


def test_a_loader_ends_with_the_process_that_it_was_divided_for() -> None:
    assert run(2, _ended) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def _refused_options() -> None:
    accel.setup(nn.Linear(1, 1), None, numbers(8), loader_options={"shard": False})  # type: ignore[arg-type]


def test_options_of_another_type_are_refused() -> None:
    assert all("LoaderOptions" in message for message in refusals(2, _refused_options, error="LoaderError"))


# -- the same program gives the same order ------------------------------------------------------------------------------


def _run(
    raw: Any, *, seed: int = 21, options: LoaderOptions | None = None, one: bool = False, before: bool = False
) -> list[list[int]]:
    """Two epochs of a program's first setup, which ends with a teardown of the model, or of all."""
    accel.seed(seed)
    if before:
        accel.setup(nn.Linear(1, 1), None, [numbers(12, shuffle=True)])
    handles = accel.setup(nn.Linear(1, 1), None, raw, loader_options=options)
    epochs = [_samples(handles.dataloaders) for _ in range(2)]
    accel.teardown(handles.model if one else None)
    return epochs


def _same_orders() -> None:
    first, kept, seeded = _run(numbers(40, shuffle=True)), numbers(40, shuffle=True), LoaderOptions(seed=7)
    assert first[0] != first[1]
    for one in (False, True):
        assert _run(numbers(40, shuffle=True), one=one) == first
        assert _run(numbers(40, shuffle=True), one=one, before=True) == first
        assert _run(kept, one=one) == _run(kept, one=one) == first
    by_option = _run(numbers(40, shuffle=True), options=seeded)
    assert by_option != first
    for seed in (21, 22):
        assert _run(numbers(40, shuffle=True), seed=seed, options=seeded, one=True, before=True) == by_option
    drawn = _run(numbers(40, shuffle=True, generator=own(1)))
    assert _run(numbers(40, shuffle=True, generator=own(1)), seed=22, one=True) == drawn
    assert _run(numbers(40, shuffle=True, generator=own(2))) != drawn
    assert _run(loader_of(Mine("own numpy"))) == _run(loader_of(Mine("own numpy")))
    accel.seed(21)
    pair = accel.setup(nn.Linear(1, 1), None, [numbers(40, shuffle=True), numbers(40, shuffle=True)]).dataloaders
    assert _samples(pair[0]) == first[0]
    assert _samples(pair[1]) != first[0]


@pytest.mark.parametrize("world", [1, 2])
def test_the_order_depends_on_nothing_but_the_program(world: int) -> None:
    run(world, _same_orders if world > 1 else _same_orders_alone)


def _same_orders_alone() -> None:
    def raw_epochs(loader: DataLoader[Any], folds: int) -> list[Any]:
        nn.Linear(1, 1)
        return [[int(i) for batch in loader for i in batch] for _ in range(folds)]

    data = Numbers(40)
    for options in ({}, {"generator": 1}):
        found, expected = [], []
        for fold in range(3):
            subset = Subset(data, [i for i in range(40) if i % 3 != fold])
            build = lambda subset=subset, options=options: DataLoader(  # noqa: E731
                subset, 4, shuffle=True, **({"generator": own()} if options else {})
            )
            found.append(_run(build(), one=fold == 1, before=fold == 2))
            accel.seed(21)
            if fold == 2:
                nn.Linear(1, 1)
            expected.append(raw_epochs(build(), 2))
        assert found == expected
    seeded = LoaderOptions(seed=7)
    assert _run(numbers(40, shuffle=True), options=seeded) == _run(numbers(40, shuffle=True), options=seeded, one=True)


# -- iterable datasets that the ranks do not read alike -------------------------------------------------------------------


class Divided(IterableDataset[int]):
    """Each rank reads a part of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(accel.rank(), 64, accel.world_size()))


class Shorter(IterableDataset[int]):
    """Each rank reads the same beginning, and another end."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(64 - 16 * accel.rank()))


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
def test_a_dataset_that_divides_itself_is_refused_on_every_rank(train: bool) -> None:
    assert all("shard=False" in text for text in refusals(2, _train, Divided(), train, error="LoaderError"))


def test_ranks_whose_streams_end_at_different_places_end_with_an_error() -> None:
    for text in refusals(2, _train, Shorter(), False, error="LoaderError", breaks=True):
        assert "6" in text
        assert "8" in text or "at least 7" in text  # where the longer stream has not ended yet
    ends = outcomes(2, _train, Shorter(), True, breaks=True)
    assert all(end.error for end in ends)
    assert "LoaderError" in ends[1].error


def _legitimate() -> None:
    _, _, loader = accel.setup(nn.Linear(1, 1), None, DataLoader(Counting(16), 4))
    if accel.is_main():
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]  # a look by one rank
    assert _samples(loader) == ([0, 1, 2, 3, 8, 9, 10, 11] if accel.is_main() else [4, 5, 6, 7, 12, 13, 14, 15])
    for dataset in (Augmented(), Constant(), Noisy()):
        _, _, other = accel.setup(nn.Linear(1, 1), None, DataLoader(dataset, 4))
        for _ in range(2):
            assert len(list(other)) == (3 if isinstance(dataset, Noisy) else 2)
    assert len(_train(Divided(), True, LoaderOptions(shard=False))) == 32


def test_streams_that_are_alike_pass() -> None:
    run(2, _legitimate)


def _off(directory: str, saves: bool, stream: bool) -> list[list[int]]:
    accel.seed(5 if saves else 6, per_rank=True)
    raw = DataLoader(Divided(), 4) if stream else numbers(40, shuffle=True)
    loader = accel.setup(nn.Linear(1, 1), None, raw, loader_options=LoaderOptions(shard=False)).dataloaders
    state = {"loader": loader, "rng": accel.rng_state()}
    rest = iter(loader)
    if saves:
        next(rest), next(rest)
        accel.save(state, directory)
    else:
        accel.load(directory, state)
        rest = iter(loader)
    return [_samples(rest), _samples(loader)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_loader_that_each_rank_reads_by_itself_resumes_on_each(tmp_path: Any, stream: bool) -> None:
    saved = run(2, _off, str(tmp_path), True, stream)
    assert run(2, _off, str(tmp_path), False, stream) == saved
    (refused,) = refusals(1, _off, str(tmp_path), False, stream, error="CheckpointError")
    assert "rank 0 of 2" in refused


def test_a_position_in_another_order_says_how_to_go_on_without_it() -> None:
    def loader(seed: int) -> Any:
        raw = DataLoader(list(range(12)), batch_size=3, shuffle=True)
        return accel.setup(
            torch.nn.Linear(1, 1), dataloaders=raw, loader_options=accel.LoaderOptions(seed=seed)
        ).dataloaders

    first = loader(1)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    state["checksum"] += 1
    with pytest.raises(accel.LoaderError, match="draws another order.*load the state without the loader"):
        loader(1).load_state_dict(state)

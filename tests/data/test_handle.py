"""The handle of a loader: refused loaders, and which samples each rank gets."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, Subset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from accel import LoaderError
from accel.data import LoaderOptions, check, describe
from accel.data.readers import Position, SampleSource
from accel.data.sampling import Division, portion
from tests.data.loaders import Counting, Numbers, everyone, flat, make, numbers, ragged, sampled

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

    raw = Shouting(Numbers(5), batch_size=2, collate_fn=list, word="hey")
    handle = make(raw, 1, 2)
    assert (handle.word, list(handle)) == ("hey", [("hey", [2, 3]), ("hey", [0])])
    off = make(raw, 1, 2, shard=False)
    iterator = iter(off)
    assert off.state_dict()["consumed"] == 0
    next(iterator)
    with pytest.raises(LoaderError, match="The loader has no state_dict"):
        off.state_dict()

    class Repeating(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([[0], [0]])

    with pytest.raises(LoaderError, match="doesn't read its own sampler. Use shard=False"):
        next(iter(make(Repeating(Numbers(5)))))


class Foreign(Sampler[int]):
    num_replicas = 2

    def __len__(self) -> int:
        return 5


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: sampled(DistributedSampler(Numbers(4), 1, 0)), {}, "distributed already, by a DistributedSampler"),
    (lambda: sampled(Foreign()), {}, "distributed already, by a Foreign"),
    (lambda: numbers(9, 4), {"split_batches": True}, "batch_size=4 isn't a multiple of 3 ranks"),
    (ragged, {"split_batches": True}, "batch_size=1 isn't a multiple of 3 ranks"),
    (lambda: numbers(9, 3), {"dispatch": True}, "dispatch=True needs an iterable dataset"),
    (lambda: DataLoader(Counting(9), 3), {"dispatch": True, "shard": False}, "needs an iterable dataset, shard=True"),
    (lambda: DataLoader(Counting(9), 3), {"dispatch": True, "even_batches": False}, "even_batches=True"),
    (lambda: DataLoader(Counting(9), 3, num_workers=1), {"even_batches": False}, "needs num_workers=0"),
]


def test_bad_options_are_refused() -> None:
    for build, options, message in REFUSED:
        with pytest.raises(LoaderError, match=message):
            check(build(), LoaderOptions(**options), 3)


def test_describe() -> None:
    options, splits = LoaderOptions(), ([1, 2], [1, 3], torch.tensor([1, 2]))
    for split in (
        [DataLoader(Subset(Numbers(9), indices)) for indices in splits],
        [DataLoader(Numbers(9), sampler=SubsetRandomSampler(indices)) for indices in splits],
    ):
        texts = [describe(loader, options) for loader in split]
        assert texts[0] == texts[2] != texts[1]
    # A sampler of the user's own may have such an attribute for anything.
    own: Any = SequentialSampler(Numbers(9))
    own.indices = None
    assert describe(DataLoader(Numbers(9), sampler=own), options) == describe(DataLoader(Numbers(9)), options)
    assert describe(numbers(4), options) != describe(numbers(5), options)
    assert describe(numbers(4, 2), options) != describe(numbers(4, 4), options)
    off = LoaderOptions(shard=False)
    assert describe(numbers(4), off) == describe(numbers(5), off)


sizes = st.integers(0, 40)


plans = st.fixed_dictionaries(
    {"world": st.integers(1, 6), "batch": st.integers(1, 5), "even": st.booleans(), "drop_last": st.booleans()}
)


def divided(total: int, start: int, plan: dict[str, Any]) -> tuple[list[Division], list[list[list[int]]]]:
    """The ranks, and their shares of the items from ``start`` to ``total``."""
    ranks, shares = [Division(rank=rank, **plan) for rank in range(plan["world"])], []
    for rank in ranks:
        source = SampleSource(range(total), rank, {}, Position(epoch=0, at=(start,)))
        parts = [portion(chunk, rank, source.head) for chunk in source.chunks()]
        shares.append([part for part in parts if part])
    return ranks, shares


@settings(max_examples=300, deadline=None)
@given(total=sizes, skipped=sizes, plan=plans)
def test_ranks_take_consecutive_slices(total: int, skipped: int, plan: dict[str, Any]) -> None:
    start = min(total, skipped)
    ranks, given_ = divided(total, start, plan)
    width = plan["world"] * plan["batch"]
    steps = [list(range(at, min(at + width, total))) for at in range(start, total, width)]
    if plan["drop_last"]:
        steps = [step for step in steps if len(step) == width]
    for rank, mine in zip(ranks, given_, strict=True):
        assert rank.local_steps(total - start) == len(mine)
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


def of_three(n: int) -> DataLoader[Any]:
    return numbers(n, 3)


def of_pairs() -> DataLoader[Any]:
    pairs = BatchSampler(SequentialSampler(range(6)), 2, False)
    return DataLoader(torch.arange(6), sampler=pairs, batch_size=None, collate_fn=torch.Tensor.tolist)  # type: ignore[arg-type]


TABLE: list[Any] = [
    (lambda: of_three(10), 2, {}, [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]]),
    (lambda: of_three(9), 2, {}, [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 0]]]),
    (lambda: of_three(9), 2, {"even_batches": False}, [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8]]]),
    (lambda: of_three(7), 2, {"even_batches": False}, [[[0, 1, 2], [6]], [[3, 4, 5]]]),
    (lambda: of_three(5), 4, {}, [[[0, 1]], [[2, 3]], [[4, 0]], [[1, 2]]]),
    (lambda: of_three(2), 5, {}, [[[0]], [[1]], [[0]], [[1]], [[0]]]),
    (lambda: of_three(0), 2, {}, [[], []]),
    (lambda: of_three(7), 1, {}, [[[0, 1, 2], [3, 4, 5], [6]]]),
    # custom batches stay whole
    (ragged, 2, {}, [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6], [0]]]),
    (ragged, 2, {"even_batches": False}, [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6]]]),
    (ragged, 1, {}, [[[0], [1, 2], [3, 4, 5], [6], [7, 8]]]),
    # without batching
    (lambda: numbers(5, None), 2, {}, [[0, 2, 4], [1, 3, 0]]),
    (of_pairs, 2, {}, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]),
]


@pytest.mark.parametrize(("build", "world", "options", "expected"), TABLE)
def test_the_table_of_the_docs(build: Any, world: int, options: Any, expected: Any) -> None:
    assert everyone(build, world, **options) == expected
    for rank, batches in enumerate(expected):
        assert len(make(build(), rank, world, **options)) == len(batches)


@pytest.mark.parametrize("kwargs", [{"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}])
def test_streams_are_sharded_as_maps(kwargs: dict[str, Any]) -> None:
    for n, world, even in itertools.product((0, 1, 5, 12, 13, 17), (1, 2, 3, 4), (True, False)):
        found = []
        for kind in (Numbers, Counting):
            collate = {"collate_fn": list} if kwargs["batch_size"] else {}
            handles = [
                make(DataLoader(kind(n), **kwargs, **collate), r, world, even_batches=even) for r in range(world)
            ]
            found.append([list(handle) for handle in handles])
            assert [len(handle) for handle in handles] == [len(batches) for batches in found[-1]]
        assert found[0] == found[1]

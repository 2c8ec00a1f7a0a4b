"""Which samples each rank gets: the arithmetic, the length, batch samplers, and loaders without batches."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
)

from accel.data.sampling import Division, divide
from tests.data.loaders import Counting, Numbers, by_step, everyone, flat, make, numbers, ragged

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


sizes = st.integers(0, 40)


plans = st.fixed_dictionaries(
    {"world": st.integers(1, 6), "batch": st.integers(1, 5), "even": st.booleans(), "drop_last": st.booleans()}
)


def divided(total: int, start: int, plan: dict[str, Any]) -> tuple[list[Division], list[list[list[int]]]]:
    ranks = [Division(rank=rank, **plan) for rank in range(plan["world"])]
    return ranks, [_dealt(total, start, rank) for rank in ranks]


def _dealt(total: int, start: int, plan: Division) -> list[list[int]]:
    rest = iter(range(start, total))
    head = list(range(min(start, plan.world - 1)))
    return [mine for mine, _ in divide(lambda count: list(islice(rest, count)), plan, head) if mine]


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


@settings(max_examples=300, deadline=None)
@given(total=sizes, parts=st.lists(st.tuples(plans, st.integers(1, 4)), max_size=6))
def test_chains_of_resumes(total: int, parts: list[tuple[dict[str, Any], int]]) -> None:
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
def test_streams_are_sharded_as_maps(batch_size: int | None, drop_last: bool) -> None:
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


def test_custom_batches_stay_whole() -> None:
    assert everyone(ragged, 2) == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6], [0]]]
    assert everyone(ragged, 2, even_batches=False) == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6]]]
    assert everyone(ragged, 1) == [[[0], [1, 2], [3, 4, 5], [6], [7, 8]]]
    assert [len(make(ragged(), rank, 2, even_batches=False)) for rank in (0, 1)] == [3, 2]


def test_without_batching() -> None:
    assert everyone(lambda: numbers(5, None), 2) == [[0, 2, 4], [1, 3, 0]]
    lists = lambda: DataLoader(  # noqa: E731
        torch.arange(6), sampler=BatchSampler(SequentialSampler(range(6)), 2, False), batch_size=None
    )
    assert [[batch.tolist() for batch in rank] for rank in everyone(lists, 2)] == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]

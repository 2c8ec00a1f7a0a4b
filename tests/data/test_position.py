"""The position of a loader: saved, loaded at other world and batch sizes, and refused where it cannot be known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

import accel
from accel import LoaderError
from accel.data import LoaderHandle, LoaderOptions
from tests.data.loaders import (
    OWN,
    SAMPLERS,
    Counting,
    Divided,
    Noisy,
    Numbers,
    by_step,
    flat,
    make,
    numbers,
    ragged,
    resumed,
    sampled,
    samples,
)
from tests.distributed import refusals, run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


# -- the position -----------------------------------------------------------------------------------------------------


def advance(handles: list[LoaderHandle], steps: int) -> tuple[list[Any], dict[str, Any]]:
    """The samples of some steps in lockstep, and the state inside the loop's body, which must be JSON and equal."""
    seen: list[Any] = []
    iterators = [iter(handle) for handle in handles]
    for _ in range(steps):
        seen += flat(next(iterator) for iterator in iterators)
    states = [json.loads(json.dumps(handle.state_dict())) for handle in handles]
    assert all(state == states[0] for state in states)
    return seen, states[0]


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


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_have_read_ahead_is_not_lost_where_no_length_tells_the_end(workers: int) -> None:
    def build() -> DataLoader[Any]:
        return sampled(Unsized(), num_workers=workers)

    _, state = advance([make(build())], 2)
    (handle,) = resumed(build, 1, state)
    assert flat(handle) == [2, 3, 4, 5]


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


@pytest.mark.parametrize("skip", [True, False])
def test_it_does_not_begin_the_next_epoch_alone_where_no_length_tells_the_end(skip: bool) -> None:
    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    handles = [make(sampled(Plain(), batch_size=2), rank, 2, even_batches=False) for rank in range(2)]
    if skip:
        for handle in handles:
            handle.skip(1)
    else:
        _, state = advance(handles, 1)
        handles = resumed(lambda: sampled(Plain(), batch_size=2), 2, state, even_batches=False)
    assert [list(handle) for handle in handles] == [[[4]], []]
    assert [list(handle) for handle in handles] == [[[0, 1], [4]], [[2, 3]]]


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
    uneven.skip(1)
    with pytest.raises(LoaderError, match="even_batches"):
        iter(uneven)


# -- iterable datasets that the ranks do not read alike ---------------------------------------------------------------


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
    return [samples(rest), samples(loader)]


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

"""The position of a loader: saved, loaded at other world and batch sizes, and refused where it cannot be known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import DataLoader

import accel
from accel import LoaderError
from accel.data import LoaderHandle
from tests.data.loaders import (
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
    setup_loader,
)
from tests.distributed import refusals, run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


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
def test_resume_at_different_world_and_batch(workers: int, even: bool) -> None:
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
        *[lambda s=s: sampled(SAMPLERS[s](), batch_size=3) for s in ("shuffle", "weighted", "mine own numpy")],
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
def test_resumed_stream_is_padded(workers: int) -> None:
    found = []
    for kind in (Numbers, Counting):
        build = lambda kind=kind, size=1: DataLoader(  # noqa: E731
            kind(8), batch_size=size, collate_fn=list, num_workers=workers
        )
        _, state = advance([make(build(size=2))], 1)
        found.append([list(handle) for handle in resumed(build, 5, state)])
    assert found[0] == found[1] == [[[2], [7]], [[3], [0]], [[4], [1]], [[5], [2]], [[6], [3]]]


def test_state_at_end_of_epoch() -> None:
    for kwargs in ({}, {"drop_last": True}):
        build = lambda kwargs=kwargs: numbers(10, 2, shuffle=True, **kwargs)  # noqa: E731
        handles = [make(build(), rank, 2) for rank in range(2)]
        steps = len(handles[0])
        _, inside = advance(handles, steps)
        assert (inside["epoch"], inside["consumed"]) == (1, 0)
        for handle in handles:
            handle.set_epoch(0)
            assert len(list(handle)) == steps
        assert handles[0].state_dict() == inside
        assert len(list(resumed(build, 1, inside)[0])) == 5


def test_streams_of_workers_resume() -> None:
    def build(workers: int = 2) -> DataLoader[Any]:
        return DataLoader(Counting(60), batch_size=3, collate_fn=list, num_workers=workers)

    seen, state = advance([make(build(), rank, 2) for rank in range(2)], 3)
    assert state["streams"] == [12, 6]
    assert sorted(seen + flat(resumed(build, 1, state)[0])) == list(range(60))
    with pytest.raises(LoaderError, match="num_workers"):
        make(build(1)).load_state_dict(state)


def test_refused_states_change_nothing() -> None:
    handle = make(numbers(20, 4, shuffle=True))
    iterator = iter(handle)
    next(iterator)
    good = handle.state_dict()
    other = make(numbers(20, 4, shuffle=True))
    before = other.state_dict()
    with pytest.raises(LoaderError, match="length is 21, not 20"):
        other.load_state_dict({**good, "length": 21})
    assert other.state_dict() == before
    # A state of accel 0.1 has more keys.
    other.load_state_dict({**good, "next": 1, "checksum": 7})
    assert list(other) == list(iterator)
    with pytest.raises(LoaderError, match="by all ranks"):
        make(numbers(20, 4), shard=False).load_state_dict(good)


def _off(directory: str, saves: bool, stream: bool) -> list[list[int]]:
    accel.seed(5 if saves else 6, per_rank=True)
    loader = setup_loader(DataLoader(Divided(), 4) if stream else numbers(40, shuffle=True), shard=False)
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
def test_unsharded_loader_resumes_per_rank(tmp_path: Any, stream: bool) -> None:
    saved = run(2, _off, str(tmp_path), True, stream)
    assert run(2, _off, str(tmp_path), False, stream) == saved
    (refused,) = refusals(1, _off, str(tmp_path), False, stream, error="CheckpointError")
    assert "rank 0 of 2" in refused

"""What the loop is told of the next batches: the last one of an epoch, groups of one step, batches that are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

import accel
from accel import LoaderError
from tests.data.loaders import (
    SAMPLERS,
    Counting,
    loader_of,
    make,
    numbers,
    ragged,
    raw_like,
    reset,
    rng_states,
    sampled,
)
from tests.distributed import run
from tests.models import mlp, sgd

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(17))


BUILDS: dict[str, Any] = {
    "shuffle, drop_last": lambda: numbers(17, 3, shuffle=True, drop_last=True),
    "batch sampler": ragged,
    "no length": lambda: sampled(Unsized(), batch_size=3),
    "stream": lambda: DataLoader(Counting(17), 3, collate_fn=list),
    "workers": lambda: numbers(17, 3, num_workers=2),
    "stream, workers": lambda: DataLoader(Counting(17), 3, collate_fn=list, num_workers=2),
}


def with_lasts(loader: Any) -> list[Any]:
    """The batches of a loop, each with whether it is the last."""
    return [(batch, loader.is_last) for batch in loader]


def lasts(batches: list[Any]) -> list[Any]:
    return [(batch, number == len(batches)) for number, batch in enumerate(batches, 1)]


@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
def test_last_batch_and_groups(build: Any) -> None:
    """On each rank, also in a resumed epoch, with the batches and positions of a loop that does not ask."""
    places: list[Any] = [(0, 1, {}), (1, 2, {}), (1, 2, {"even_batches": False}), (1, 2, {"shard": False})]
    for rank, world, options in places[: 2 if build().num_workers else 4]:  # workers take their time to begin
        reset()
        expected = list(make(build(), rank, world, **options))
        reset()
        handle = make(build(), rank, world, **options)
        assert not handle.is_last
        assert with_lasts(handle) == lasts(expected)
        assert not handle.is_last
        handle.set_epoch(0)
        reset()
        groups = [(len(group), list(group)) for group in accel.accumulate(handle, 2)]  # type: ignore[arg-type,var-annotated]
        assert groups == [(len(group), group) for group in (expected[at : at + 2] for at in range(0, len(expected), 2))]
        if options == {"even_batches": False}:
            continue
        handle.set_epoch(0)
        reset()
        iterator = iter(handle)
        next(iterator), next(iterator)
        before = json.dumps(handle.state_dict())
        assert handle.is_last == (len(expected) == 2)
        assert json.dumps(handle.state_dict()) == before
        again = make(build(), rank, world, **options)
        again.load_state_dict(json.loads(before))
        if len(expected) > 2:
            assert with_lasts(again) == lasts(list(iterator))
        again.load_state_dict(handle.state_dict())  # after the loop: the next epoch is next
        assert len(list(again)) == len(expected)


@pytest.mark.parametrize(
    "build", [*BUILDS.values(), lambda: loader_of(SAMPLERS["mine own torch"]())], ids=[*BUILDS, "own"]
)
def test_skip_equals_reading(build: Any) -> None:
    """The rest of the epoch, the epoch after it, and in one process the program's random numbers too."""
    wraps = [raw_like, lambda raw: make(raw, 1, 2), lambda raw: make(raw, 1, 2, shard=False)]
    for wrap in wraps[: 1 if build().num_workers else 3]:
        reset()
        whole = wrap(build())
        first, second, end = list(whole), list(whole), rng_states()
        for n in (1, len(first) - 1):
            reset()
            handle = wrap(build())
            handle.skip(n)
            handle.skip(n)  # a cell that runs twice
            # Worker 0 gives the first batch, so with workers the rest is in a different order.
            assert sorted(handle) == sorted(first[n:])
            assert (list(handle), rng_states()) == (second, end)


def test_skip_and_set_epoch() -> None:
    handle, again = (make(numbers(20, 2), 1, 2) for _ in range(2))
    handle.skip(3)
    handle.set_epoch(4)  # in either order
    assert list(handle) == [[14, 15], [18, 19]]
    handle.set_epoch(0)
    handle.skip(3)
    again.load_state_dict(handle.state_dict())
    assert list(handle) == list(again) == [[14, 15], [18, 19]]


def test_bad_skip_is_refused() -> None:
    handle = make(numbers(17, 3))
    for short in (handle, make(sampled(Unsized(), batch_size=3)), make(DataLoader(Counting(17), 3))):
        short.skip(7)
        with pytest.raises(LoaderError, match="shorter epoch"):
            list(short)
    with pytest.raises(LoaderError, match="a number of batches, not"):
        accel.accumulate(handle, 0)  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match="takes the loader that accel.setup returned"):
        accel.accumulate(numbers(4), 2)


def test_group_is_iterated_once() -> None:
    handle = make(numbers(10, 1))
    seen = []
    for group in accel.accumulate(handle, 4):  # type: ignore[arg-type]
        for batch in group:
            seen.append(batch)
            break
        with pytest.raises(LoaderError, match="once"):
            list(group)
    assert seen == [[0], [4], [8]]
    for group in accel.accumulate(handle, 3):  # type: ignore[arg-type]
        for _ in group:
            with pytest.raises(LoaderError, match="Save after the group"):
                handle.state_dict()
            break
        assert handle.state_dict()["consumed"] == 1
        break
    state = handle.state_dict()
    assert (state["consumed"], len(group)) == (0, 3)


def _steps() -> list[Any]:
    """By backend: trained weights and, of ddp, in which backwards gradients stayed this rank's own."""
    found = []
    for backend in ("ddp", "fsdp"):
        model = mlp(3, 4, 2)
        torch.manual_seed(1)
        loader: Any = DataLoader(torch.randn(22, 3), batch_size=4 // accel.world_size())  # type: ignore[arg-type]
        model, optimizer, loader = accel.setup(model, sgd(model), loader, backend=backend)
        own: list[bool] = []
        for group in (group for _ in range(2) for group in accel.accumulate(loader, 4)):
            for batch in group:
                (model(batch).square().mean() / len(group)).backward()
                if backend == "ddp":
                    grads = accel.all_gather(next(model.parameters()).grad.flatten()).chunk(2)  # type: ignore[union-attr]
                    own.append(not torch.equal(*grads))
            optimizer.step()
            optimizer.zero_grad()
        found.append((list(accel.full_state_dict(model).values()), own))
        accel.teardown()
    return found


def test_groups_step_as_one_process() -> None:
    raw = mlp(3, 4, 2)
    torch.manual_seed(1)
    optimizer, batches = sgd(raw), list(torch.randn(22, 3).split(4))
    for group in [batches[:4], batches[4:]] * 2:
        for batch in group:
            (raw(batch).square().mean() / len(group)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (weights, own), (fsdp_weights, _) in run(2, _steps):
        torch.testing.assert_close(weights, list(raw.state_dict().values()))
        torch.testing.assert_close(fsdp_weights, list(raw.state_dict().values()))
        assert own == [True, True, True, False, True, False] * 2

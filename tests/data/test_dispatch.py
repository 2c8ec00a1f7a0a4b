"""Loaders without a model, batches that are split, and streams that rank 0 reads for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel import LoaderError
from accel.data import LoaderOptions, check
from tests.data.loaders import Counting, make, numbers, ragged
from tests.distributed import outcomes, run


def _alone(directory: str) -> None:
    world = accel.world_size()
    raw: Any = DataLoader(torch.arange(10), batch_size=3)  # type: ignore[arg-type]
    handles = accel.setup(None, dataloaders=raw)
    loader: Any = handles.dataloaders
    assert handles == (None, None, loader)
    assert accel.setup(None, dataloaders=raw).dataloaders is accel.setup(None, None, loader).dataloaders is loader
    gathered = torch.cat([accel.gather_for_metrics(batch) for batch in loader])
    assert gathered.tolist() == list(range(10))
    assert next(iter(loader)).device.type == accel.device().type
    iterator = iter(loader)
    next(iterator)
    accel.save({"loader": loader}, directory)
    rest = [batch.tolist() for batch in iterator]
    accel.load(directory, {"loader": loader})
    assert [batch.tolist() for batch in loader] == rest
    if world > 1:
        whole: Any = accel.setup(nn.Linear(4, 4), None, raw, backend=accel.DDP(sequence_parallel=2)).dataloaders
        assert [len(batch) for batch in whole] == [3, 3, 3, 1]
        assert whole is not loader
    accel.teardown()
    with pytest.raises(LoaderError, match=r"has ended" if world > 1 else "ended"):
        iter(loader)


@pytest.mark.parametrize("world", [1, 2])
def test_a_loader_needs_no_model(world: int, tmp_path: Path) -> None:
    run(world, _alone, str(tmp_path / f"{world}"))


def test_split_batches() -> None:
    for build in (
        lambda b: numbers(22, b, shuffle=True),
        lambda b: DataLoader(Counting(22), b, collate_fn=list),
        lambda b: DataLoader(Counting(22), b, collate_fn=list, drop_last=True),
    ):
        plain = [make(build(3), rank, 2) for rank in range(2)]
        split = [make(build(6), rank, 2, split_batches=True) for rank in range(2)]
        assert len(split[0]) == len(plain[0])
        assert [list(handle) for handle in split] == [list(handle) for handle in plain]
        assert [accel.effective_batch_size(handle) for handle in (plain[0], split[0])] == [6, 6]
        iterators = [iter(handle) for handle in split]
        for iterator in iterators:
            next(iterator)
        wide = make(build(6), split_batches=True)
        wide.load_state_dict(split[0].state_dict())
        parts = [list(iterator) for iterator in iterators]
        assert [sorted(batch) for batch in wide][:2] == [sorted(a + b) for a, b in zip(*parts, strict=True)][:2]


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: numbers(9, 4), {"split_batches": True}, "batch_size=4 does not divide over 3 ranks"),
    (lambda: numbers(9, 3), {"split_batches": True, "shard": False}, "needs shard=True"),
    (ragged, {"split_batches": True}, "a loader with a batch_size"),
    (lambda: numbers(9, 3), {"dispatch": True}, "dispatch=True needs an iterable dataset"),
    (lambda: DataLoader(Counting(9), 3), {"dispatch": True, "shard": False}, "needs an iterable dataset, shard=True"),
    (lambda: DataLoader(Counting(9), 3), {"dispatch": True, "even_batches": False}, "even_batches=True"),
    (lambda: DataLoader(Counting(9), 3, num_workers=1), {"even_batches": False}, "needs num_workers=0"),
]


def test_bad_options_are_refused() -> None:
    for build, options, message in REFUSED:
        with pytest.raises(LoaderError, match=message):
            check(build(), LoaderOptions(**options), 3)


class Rank0(IterableDataset[Any]):
    """Only rank 0 can read it, up to where the disk fails."""

    def __init__(self, n: int, fails: int = -1) -> None:
        self.n, self.fails = n, fails

    def __iter__(self) -> Iterator[Any]:
        assert accel.is_main()
        for i in range(self.n):
            if i == self.fails:
                raise KeyError("the disk")
            yield {"x": (torch.full((2,), i, dtype=torch.bfloat16), [torch.tensor(i > 3)]), "name": f"n{i}", "i": i}


def _dispatched(n: int, size: int, **options: Any) -> Any:
    raw: Any = DataLoader(
        Rank0(n, options.pop("fails", -1)), batch_size=size, drop_last=options.pop("drop_last", False)
    )
    options = {"dispatch": True, **options}
    return accel.setup(None, dataloaders=raw, loader_options=LoaderOptions(**options)).dataloaders


def _numbers(loader: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in loader]


def _all_dispatched(cases: list[Any]) -> list[Any]:
    return [_one_dispatched(n, size, options) for n, size, options in cases]


def _one_dispatched(n: int, size: int, options: dict[str, Any]) -> Any:
    loader, given, lasts, every = _dispatched(n, size, **options), [], [], []
    for batch in loader:
        given.append(batch["i"].tolist())
        lasts.append(loader.is_last if accel.is_main() else given and None)  # rank 0 may ask alone
        every.append(accel.gather_for_metrics(batch["i"]))
        x, [late] = batch["x"]
        assert (x.dtype, x[:, 1].tolist()) == (torch.bfloat16, given[-1])
        assert late.tolist() == [i > 3 for i in given[-1]]
        assert batch["name"] == [f"n{i}" for i in given[-1]]
    assert lasts == ([False] * (len(given) - 1) + [True] if accel.is_main() else [None] * len(given))
    assert [len(group) for group in accel.accumulate(loader, 2) for _ in [list(group)]] == [2, 1][: len(given) - 1]
    loader.skip(1)
    assert _numbers(loader) == given[1:]
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), _numbers(iterator)
    again = _dispatched(n, size, **options)
    again.load_state_dict(state)
    assert _numbers(again) == rest == given[1:]
    wide = _dispatched(n, 1, dispatch=True)
    wide.load_state_dict(state)
    return given, torch.cat(every).tolist(), _numbers(wide)


def test_rank_0_reads_for_all_ranks() -> None:
    cases = [(10, 3, {}), (9, 3, {}), (13, 3, {"drop_last": True}), (11, 4, {"split_batches": True})]
    mine, other = run(2, _all_dispatched, cases)
    assert [given for given, *_ in mine] == [
        [[0, 1, 2], [6, 7]],
        [[0, 1, 2], [6, 7]],
        [[0, 1, 2], [6, 7, 8]],
        [[0, 1], [4, 5], [8, 9]],
    ]
    assert [given for given, *_ in other] == [
        [[3, 4, 5], [8, 9]],
        [[3, 4, 5], [8, 0]],
        [[3, 4, 5], [9, 10, 11]],
        [[2, 3], [6, 7], [10, 0]],
    ]
    for (_, every, rest), (_, same, others) in zip(mine, other, strict=True):
        assert every == same == list(range(len(every)))
        assert (rest[0], others[0]) == (([6], [7]) if len(every) != 11 else ([4], [5]))


def _fails(directory: str) -> str:
    loader, given = _dispatched(10, 2, fails=5), []
    try:
        for batch in loader:
            given.append(batch["i"].tolist())
    except Exception as error:
        assert not given
        failed = repr(error)
    return failed


def test_dispatch_errors_reach_all_ranks(tmp_path: Path) -> None:
    mine, other = (one.value for one in outcomes(2, _fails, str(tmp_path), breaks=True))
    assert mine.startswith("KeyError('the disk')")
    assert other.startswith(
        "LoaderError(\"reading an iterable dataset failed on rank 0, so on every rank: KeyError: 'the disk'"
    )

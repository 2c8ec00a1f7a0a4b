"""Agreement between ranks, its errors, and the public collectives over nested containers; on real gloo ranks."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accel
from accel import process
from accel.errors import AccelError
from accel.process import packing
from accel.process.collectives import all_gather, all_reduce, broadcast
from accel.process.control import agree, barrier, main_first
from accel.trees import map_tensors
from tests.distributed import outcomes, run, wait_for

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Output:
    loss: Any
    extra: Any = field(default=None)


# -- agreement --------------------------------------------------------------------------------------------------------


def agree_often() -> None:
    rank = process.rank()
    assert agree("first", rank) == [0, 1, 2]
    # The first message has 1024 bytes, and the rest follows in a second one.
    for size in (*range(960, 1024, 7), 5000):
        assert [len(text) for text in agree("long on some ranks", "x" * size * rank)] == [0, size, 2 * size]
    with pytest.raises(accel.RankMismatchError, match="rank 0 is in 'save'; rank 1 is in 'setup'; rank 2 is in 'save'"):
        agree("setup" if rank == 1 else "save", None)
    assert agree("again", {"shape": torch.Size([rank])})[2] == {"shape": torch.Size([2])}


def test_ranks_agree_or_name_their_places() -> None:
    run(3, agree_often)
    value = object()
    assert agree("alone", value)[0] is value
    process.shutdown()


def one_rank_elsewhere(done: Path) -> str:
    process.current()
    if process.rank() == 1:
        dist.all_reduce(torch.ones(2))  # a training collective that no other rank comes to
    if process.rank() == 2:
        wait_for(done.exists)
        time.sleep(0.5)  # late, but not missing
    done.touch()
    with pytest.raises(AccelError) as caught:
        agree("refresh", None, timeout=timedelta(seconds=3))
    with pytest.raises(AccelError, match="process groups were shut down: rank 1 is in all_reduce"):
        agree("next", None)
    return f"{type(caught.value).__name__} {caught.value}"


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    first, missing, late = outcomes(3, one_rank_elsewhere, tmp_path / "begins", breaks=True)
    assert "rank 0 can't continue in 'refresh': rank 1 is in all_reduce (test_collectives.py:" in first.value
    assert first.value.startswith("TimeoutError")
    assert "RuntimeError" in missing.error  # gloo's own, from the training collective
    assert "'refresh'" in late.value
    assert max(outcome.seconds for outcome in (first, missing, late)) < 50  # the group's own timeout is 60 s


def write_first(path: Path, local: bool) -> str:
    with main_first(local=local):
        if not path.exists():
            time.sleep(0.2)
            path.write_text(f"by rank {process.rank()}")
    return path.read_text()


def fail_first(path: Path) -> None:
    with main_first():
        (path / str(process.rank())).touch()
        raise OSError("disk full")


def test_main_first(tmp_path: Path) -> None:
    for local in (False, True):
        assert run(2, write_first, tmp_path / f"data{local}", local) == ["by rank 0"] * 2
    (tmp_path / "failed").mkdir()
    first, second = outcomes(2, fail_first, tmp_path / "failed")
    assert "OSError" in first.error
    assert "main_first failed on rank 0: OSError: disk full" in second.message
    assert [entry.name for entry in (tmp_path / "failed").iterdir()] == ["0"]


# -- trees ------------------------------------------------------------------------------------------------------------


def test_map_tensors_keeps_every_container() -> None:
    one = torch.ones(2)
    tree = {
        "ordered": OrderedDict(b=one, a=one),
        "default": defaultdict(list, a=one),
        "user": UserDict(x=one),
        "output": Output(one, {"y": one}),
        "max": torch.ones(2, 2).max(0),
        3: [Pair(one, (one,)), ()],
    }
    mapped: Any = map_tensors(lambda tensor: tensor + 1, tree)
    assert [type(value) for value in mapped.values()] == [type(value) for value in tree.values()]
    assert list(mapped["ordered"]) == ["b", "a"]
    assert mapped["default"].default_factory is list
    for result in (mapped["user"]["x"], mapped["output"].loss, mapped["max"].values, mapped[3][0].left):
        assert torch.equal(result, one + 1)
    assert tree["output"].loss is one  # type: ignore[attr-defined]
    assert map_tensors(lambda tensor: tensor, [tree, "text", None])[0] is tree


# -- collectives ------------------------------------------------------------------------------------------------------


def test_one_process_gets_its_own_tensors() -> None:
    data = {"a": torch.randn(3, 2), "b": [torch.tensor(2), (torch.tensor(True),)]}
    assert all_gather(data) is data
    assert broadcast(data) is data
    for op in ("max", "min"):
        assert all_reduce(data, op) is data
    assert all_reduce(data)["a"] is data["a"]
    assert all_reduce(data)["b"][1][0].dtype is torch.int64  # as on several
    assert not all_reduce(torch.ones(1, requires_grad=True)).requires_grad
    process.shutdown()


STACKED = {
    "sum": lambda t: t.sum(0),
    "mean": lambda t: t.mean(0) if t.is_floating_point() or t.is_complex() else t.sum(0) / len(t),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0),
}
REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def sample(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype in WHOLE:
        return torch.randint(0, 2 if dtype is torch.bool else 100, (4, 3), generator=generator).to(dtype)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64).to(dtype)


def reduce_all(op: str) -> dict[str, torch.Tensor]:
    kinds = [*REAL, *WHOLE, *((torch.complex64, torch.complex128) if op in ("sum", "mean") else ())]
    data = {str(dtype): sample(process.rank(), dtype).t() for dtype in kinds}
    before = {name: tensor.clone() for name, tensor in data.items()}
    result: dict[str, torch.Tensor] = all_reduce(data, op)
    assert all(torch.equal(data[name], before[name]) for name in data)
    assert all(result[name].untyped_storage().size() == result[name].nbytes for name in data)
    return result


@pytest.mark.parametrize("op", list(STACKED))
def test_all_reduce_reduces_stacked_tensors(op: str) -> None:
    results = run(3, reduce_all, op)
    for name in results[0]:
        dtype = getattr(torch, name.removeprefix("torch."))
        expected = STACKED[op](torch.stack([sample(rank, dtype).t() for rank in range(3)]))
        for result in results:
            assert result[name].dtype is expected.dtype
            torch.testing.assert_close(result[name], expected)


def reduce_special() -> None:
    """A NaN is not lost, whichever rank has it; half precision does not overflow on the way; numbers stay numbers."""
    rank = process.rank()
    data = torch.tensor([float("nan") if rank == 1 else 1.0, rank, float("inf") if rank else -1.0])
    largest, smallest = all_reduce(data, "max"), all_reduce(data, "min")
    assert largest[0].isnan()
    assert smallest[0].isnan()
    assert (largest[1].item(), smallest[1].item(), largest[2].item()) == (1.0, 0.0, float("inf"))
    tree = all_reduce(
        Output(torch.tensor(float(rank), requires_grad=True), [Pair(torch.ones(0, 2), torch.tensor(rank))])
    )
    assert not tree.loss.requires_grad
    assert (tree.loss.item(), tree.extra[0].right.item(), tree.extra[0].left.shape) == (1.0, 1, (0, 2))
    a, b = torch.tensor(2.0), torch.tensor(1)
    unordered = all_reduce({"b": b, "a": a} if rank else {"a": a, "b": b})
    assert (unordered["a"].item(), unordered["b"].item()) == (4.0, 2)
    assert all_reduce(torch.full((2,), 60000.0, dtype=torch.float16), "mean").tolist() == [60000.0, 60000.0]
    numbers: Any = {"loss": rank + 0.5, "counts": [rank, 7], "done": rank == 1, "none": None}
    assert all_reduce(numbers) == {"loss": 2.0, "counts": [1, 14], "done": 1, "none": None}
    assert all_reduce(numbers, "mean") == {"loss": 1.0, "counts": [0.5, 7.0], "done": 0.5, "none": None}
    assert all_reduce(numbers, "max") == {"loss": 1.5, "counts": [1, 7], "done": True, "none": None}
    assert all_reduce(0 if rank == 0 else 2.5) == 2.5  # a total that one rank never added to
    assert math.isnan(all_reduce(float("nan") if rank else 1.0, "min"))


def test_all_reduce_of_special_values() -> None:
    run(2, reduce_special)


def gather_all() -> Any:
    rank = process.rank()
    return all_gather(
        {
            "uneven": torch.arange(rank * 2, dtype=torch.int16).reshape(rank, 2) + 10 * rank,
            "scalar": torch.tensor(rank, dtype=torch.bfloat16),
            "bool": torch.tensor([[rank == 1]]),
            "strided": (torch.arange(6).reshape(2, 3) + rank).t(),
            "one row": (torch.arange(6).reshape(2, 3) + rank)[:1, 1],
            "complex": torch.tensor([1j * rank]),
            "pair": Pair(torch.tensor([rank]), [torch.zeros(0)]),
        }
    )


def test_all_gather_concatenates() -> None:
    for data in run(3, gather_all):
        assert data["uneven"].tolist() == [[10, 11], [20, 21], [22, 23]]
        assert data["uneven"].dtype is torch.int16
        assert (data["scalar"].tolist(), data["scalar"].dtype) == ([0, 1, 2], torch.bfloat16)
        assert data["bool"].tolist() == [[False], [True], [False]]
        assert torch.equal(data["strided"], torch.cat([(torch.arange(6).reshape(2, 3) + r).t() for r in range(3)]))
        assert data["one row"].tolist() == [1, 2, 3]
        assert data["complex"].tolist() == [0, 1j, 2j]
        assert data["pair"].left.tolist() == [0, 1, 2]
        assert data["pair"].right[0].shape == (0,)


def gather_with_gradients() -> None:
    """Each rank's rows get the gradients that all ranks have for them."""
    rank, world = process.rank(), process.world_size()
    x = torch.ones(rank + 1, 2, requires_grad=True)
    s = torch.tensor(float(rank), requires_grad=True)
    found = all_gather({"x": x, "s": s, "fixed": torch.ones(1)}, gradients=True)
    assert not found["fixed"].requires_grad
    rows = torch.arange(float(len(found["x"])))[:, None].expand(-1, 2)
    ((found["x"] * rows).sum() * (rank + 1) + (found["s"] * (rank + 1)).sum()).backward()
    total, first = sum(r + 1 for r in range(world)), sum(r + 1 for r in range(rank))
    assert x.grad is not None
    assert x.grad.tolist() == [[total * (first + i)] * 2 for i in range(rank + 1)]
    assert s.grad is not None
    assert s.grad.item() == total
    assert not all_gather(x).requires_grad
    with torch.no_grad():
        assert not all_gather(x, gradients=True).requires_grad


@pytest.mark.parametrize("world", [1, 3])
def test_all_gather_with_gradients(world: int) -> None:
    run(world, gather_with_gradients)


def broadcast_all(src: int) -> Any:
    rank = process.rank()
    data = [torch.full((2, 3), rank, dtype=torch.float16).t(), {"flag": torch.tensor(rank == 1)}, torch.tensor(rank)]
    result = broadcast(data, src)
    assert data[2].item() == rank  # type: ignore[union-attr]
    return result


@pytest.mark.parametrize("src", [0, 1])
def test_broadcast(src: int) -> None:
    for matrix, flag, number in run(2, broadcast_all, src):
        assert matrix.tolist() == [[src] * 2] * 3
        assert flag["flag"].item() == (src == 1)
        assert number.item() == src


def send_objects() -> None:
    rank = accel.rank()
    part: Any = torch.arange(6.0)[2 * rank : 2 * rank + 2]  # of a larger tensor
    data: Any = {
        "x": torch.ones(1 + rank, 1),
        "words": ["a", "b"][: 1 + rank],
        "path": Path(str(rank)),
        "items": [{"x": part}],
    }
    gathered = all_gather(data, objects=True)
    assert gathered["x"].shape == (3, 1)
    assert gathered["words"] == ["a", "a", "b"]
    assert gathered["path"] == [Path("0"), Path("1")]
    assert [item["x"].tolist() for item in gathered["items"]] == [[0.0, 1.0], [2.0, 3.0]]
    assert all_gather(("x", "y") if rank else ("z",), objects=True) == ["z", "x", "y"]  # a batch of texts, as collated
    given = broadcast({"run": "name", "x": part} if rank == 1 else None, 1, objects=True)
    assert (given["run"], given["x"].tolist()) == ("name", [2.0, 3.0])
    sent = broadcast({"x": part, "none": None})
    assert (sent["x"].tolist(), sent["none"]) == ([0.0, 1.0], None)


def pad() -> None:
    rank = accel.rank()
    assert all_gather(torch.full((1, 1 + rank), rank), pad=-1).tolist() == [[0, -1], [1, 1]]
    assert all_gather(torch.zeros(1, 1 + rank), pad=float("-inf"))[0, 1] == float("-inf")
    leaf = torch.ones(1, 1 + rank, requires_grad=True)
    rows = all_gather(leaf, pad=0, gradients=True)
    (rows * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == ([[2.0]], [[6.0, 8.0]])[rank]


def test_objects_and_padding() -> None:
    run(2, send_objects)
    run(2, pad)


def differences() -> None:
    """Each call raises on every rank. Afterwards the ranks go on together."""
    rank, ones = process.rank(), torch.ones(2)
    size = 3 if rank else 2
    calls: dict[str, Any] = {
        'data["b"] is absent on rank 0 and torch.float32 of shape (2)': lambda: all_reduce(
            {"a": ones, "b": ones} if rank else {"a": ones}
        ),
        "data[0] is torch.float32 of shape (2) sent on cpu on rank 0": lambda: all_reduce([torch.ones(size)]),
        "torch.float64 of shape (any) sent on cpu on rank 1": lambda: all_gather(ones.double() if rank else ones),
        "pad=value to fill the shorter ones": lambda: all_gather({"x": torch.ones(1, size)}),
        "data is torch.float32 of shape (2) sent on cpu on rank 0": lambda: broadcast(torch.ones(size)),
        "rank 0 is in \"all_reduce(op='min')\"; rank 1": lambda: all_reduce(ones, "max" if rank else "min"),
        "rank 1 is in 'barrier'": lambda: barrier() if rank else all_reduce(ones),
        'on rank 1: data["a"][1] is a str. Pass a tensor': lambda: all_reduce({"a": [ones, "3" if rank else ones]}),
        "of shape (2) sent on cpu on rank 0 and a number": lambda: all_reduce([3 if rank else ones]),
        "expected op to be one of sum, mean, max, min, product": lambda: all_reduce(ones, "avg"),
        "data is a torch.sparse_coo tensor": lambda: all_gather(ones.to_sparse()),
        "data[2].loss is a str. Pass a tensor, or dicts": lambda: all_gather({2: Output("text")}),
        "a list of objects on rank 0 and an object on rank 1": lambda: all_gather(
            "text" if rank else ["text"], objects=True
        ),
    }
    for words, call in calls.items():
        with pytest.raises(AccelError) as caught:
            call()
        assert words in str(caught.value)
        assert all_reduce(torch.ones(1)).item() == 2


def test_differences_raise_on_every_rank() -> None:
    run(2, differences)


# -- packing ----------------------------------------------------------------------------------------------------------


def layouts(number: float) -> list[torch.Tensor]:
    """Tensors that no flat piece holds as they are: transposed, 0-dim, empty, complex, larger than a piece."""
    tensors = [
        torch.full((3, 5), number).t(),
        torch.tensor(number),
        torch.empty(0),
        torch.full((40, 9), number)[:, ::2],
        torch.full((2, 3), number)[:1, 1],  # contiguous, with a stride of 3
    ]
    return [*tensors, torch.full((2, 2), complex(number, -number)).t(), torch.full((300,), number, dtype=torch.float16)]


def packed() -> list[Any]:
    rank, packing._CPU_PIECE_BYTES = accel.rank(), 64
    process.current()
    sent, averaged = layouts(rank + 1.0), layouts(rank + 1.0)
    packing.broadcast_(sent, None, 1)
    packing.average_(averaged, 2, dist.all_reduce)
    owned = [layouts(rank + 1.0), layouts(rank + 5.0)]
    packing.reduce_to_owners(owned, rank, None)
    return [sent, averaged, owned[rank]]


def test_packed_tensors_keep_their_layouts() -> None:
    """Broadcast, averaged and reduced to their owners, in pieces smaller than most of them."""
    for rank, (sent, averaged, owned) in enumerate(run(2, packed)):
        for found, number in ((sent, 2.0), (averaged, 1.5), (owned, (1.5, 5.5)[rank])):
            for tensor, expected in zip(found, layouts(number), strict=True):
                assert torch.equal(tensor, expected)

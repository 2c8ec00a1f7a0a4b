"""Agreement between ranks, its refusals, and the public collectives over nested containers; on real gloo ranks."""

from __future__ import annotations

import contextlib
import copy
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
import torch.nn.functional as F
from torch import nn

import accel
from accel import process
from accel.errors import AccelError
from accel.process import packing
from accel.process.collectives import all_gather, all_reduce, broadcast
from accel.process.control import agree, barrier, main_first, raise_together
from accel.trees import map_tensors
from tests.distributed import outcomes, refusals, run, wait_for

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Output:
    loss: Any
    extra: Any = field(default=None)


# -- agreement --------------------------------------------------------------------------------------------------------


def agree_often() -> list[Any]:
    rank = process.rank()
    long = "x" * (5000 * rank)
    return [
        agree("first", rank),
        agree("first", rank),
        [len(text) for text in agree("long on some ranks", long)],
        agree("a dict", {"rank": rank, "shape": torch.Size([rank])}),
    ]


def test_agree_gathers_by_rank() -> None:
    for result in run(3, agree_often):
        assert result[:2] == [[0, 1, 2], [0, 1, 2]]
        assert result[2] == [0, 5000, 10000]
        assert [value["rank"] for value in result[3]] == [0, 1, 2]


def test_one_process_agrees_with_itself() -> None:
    value = object()
    assert agree("alone", value)[0] is value
    barrier()
    process.shutdown()


def different_places() -> None:
    agree("setup" if process.rank() == 1 else "save", None)


def test_ranks_in_different_places_are_told_so() -> None:
    for message in refusals(3, different_places, error="RankMismatchError"):
        assert "rank 0 is in 'save'; rank 1 is in 'setup'; rank 2 is in 'save'" in message


def agree_after_a_mismatch() -> list[int]:
    try:
        different_places()
    except AccelError:
        return agree("again", process.rank())
    return []


def test_the_group_goes_on_after_a_mismatch() -> None:
    assert run(2, agree_after_a_mismatch) == [[0, 1], [0, 1]]


def one_rank_elsewhere(done: Path) -> None:
    process.current()
    if process.rank() == 1:
        dist.all_reduce(torch.ones(2))  # a training collective that no other rank comes to
    if process.rank() == 0:
        (done / "begins").touch()
    if process.rank() == 2:
        wait_for((done / "begins").exists)
        time.sleep(0.5)  # late, but not missing
    start = time.monotonic()
    try:
        agree("refresh", None, timeout=timedelta(seconds=3))
    finally:
        (done / str(process.rank())).write_text(str(time.monotonic() - start))


def test_a_missing_rank_is_named_and_no_rank_hangs(tmp_path: Path) -> None:
    results = outcomes(3, one_rank_elsewhere, tmp_path, breaks=True)
    assert "TimeoutError" in results[0].error
    assert "AccelError" in results[0].error
    assert "waited 3 s in 'refresh', but rank 1 did not come" in results[0].message
    assert "RuntimeError" in results[1].error  # gloo's own, from the training collective
    assert results[1].seconds < 50  # the group's own timeout is 60 s
    assert "AccelError" in results[2].error
    assert "'refresh'" in results[2].message
    assert 2.9 < float((tmp_path / "0").read_text()) < 50


def end_before(waiting: Path) -> None:
    process.current()
    if process.rank() == 1:
        wait_for(lambda: len(list(waiting.iterdir())) == 2)
        time.sleep(0.3)
        process.end_groups("rank 1 fails")
        raise ValueError("rank 1 fails")
    (waiting / str(process.rank())).touch()
    agree("step", None)


def test_a_failed_rank_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    first, second, third = outcomes(3, end_before, tmp_path, breaks=True)
    for waiting in (first, third):
        assert "AccelError" in waiting.error
        assert "TimeoutError" not in waiting.error
        assert "cannot go on in 'step': " in waiting.message
    assert "ValueError" in second.error


def afterwards(failed: Path) -> list[str]:
    process.current()
    if process.rank() == 0:
        with contextlib.suppress(AccelError):
            agree("alone", None, timeout=timedelta(seconds=0.4))
        failed.touch()
    wait_for(failed.exists)
    messages = []
    for _ in range(2):
        try:
            agree("next", None)
        except AccelError as error:
            messages.append(str(error))
    return messages


def test_after_the_end_every_call_says_why(tmp_path: Path) -> None:
    first, second = outcomes(2, afterwards, tmp_path / "failed", breaks=True)
    assert all("not every rank came to 'alone' within 0.4 s" in message for message in first.value)
    assert "process groups were ended" in second.value[1]


# -- main first -------------------------------------------------------------------------------------------------------


def write_first(path: Path, local: bool) -> str:
    with main_first(local=local):
        if not path.exists():
            time.sleep(0.2)
            path.write_text(f"by rank {process.rank()}")
    return path.read_text()


@pytest.mark.parametrize("local", [False, True])
def test_main_first(tmp_path: Path, local: bool) -> None:
    assert run(3, write_first, tmp_path / "data", local) == ["by rank 0"] * 3


def fail_first(path: Path) -> None:
    with main_first():
        (path / str(process.rank())).touch()
        raise OSError("disk full")


def test_an_error_of_the_first_rank_reaches_the_others(tmp_path: Path) -> None:
    first, second = outcomes(2, fail_first, tmp_path)
    assert "OSError" in first.error
    assert "AccelError" in second.error
    assert "failed on rank 0, which was first: OSError: disk full" in second.message
    assert [entry.name for entry in tmp_path.iterdir()] == ["0"]


# -- trees ------------------------------------------------------------------------------------------------------------


def test_map_tensors_keeps_every_container() -> None:
    one, two = torch.ones(2), torch.zeros(())
    default: defaultdict[str, Any] = defaultdict(list, a=one)
    tree = {
        "list": [one, (two,)],
        "pair": Pair(one, two),
        "ordered": OrderedDict(b=one, a=two),
        "default": default,
        "user": UserDict(x=one),
        "output": Output(one, {"y": two}),
        "max": torch.ones(2, 2).max(0),
        3: (),
    }
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert [type(value) for value in mapped.values()] == [type(value) for value in tree.values()]
    assert mapped["pair"].right.item() == 1
    assert list(mapped["ordered"]) == ["b", "a"]
    assert mapped["default"].default_factory is list
    assert torch.equal(mapped["user"]["x"], one + 1)
    assert torch.equal(mapped["output"].loss, one + 1)
    assert torch.equal(mapped["max"].values, one + 1)
    assert torch.equal(one, torch.ones(2))
    assert tree["output"].loss is one  # type: ignore[attr-defined]


def test_map_tensors_returns_what_did_not_change() -> None:
    tree = {"a": [torch.ones(1)], "b": [torch.ones(1, dtype=torch.int64)], "c": "text", "d": None}
    mapped = map_tensors(lambda t: t.half() if t.is_floating_point() else t, tree)
    assert mapped is not tree
    assert mapped["b"] is tree["b"]
    assert mapped["c"] == "text"
    assert map_tensors(lambda t: t, tree) is tree


@pytest.mark.parametrize(
    ("tree", "path", "functions"),
    [
        ({"a": [torch.ones(1), 3]}, r'data\["a"\]\[1\] is an int', (all_gather, broadcast)),
        ({2: Output("x")}, r"data\[2\]\.loss is a str", (all_reduce, all_gather, broadcast)),
        (3.0, "data is a float", (all_gather, broadcast)),
    ],
)
def test_a_leaf_that_is_no_tensor_is_named(tree: Any, path: str, functions: tuple[Any, ...]) -> None:
    for fn in functions:
        with pytest.raises(AccelError, match=path):
            fn(tree)
    process.shutdown()


# -- data: one process ------------------------------------------------------------------------------------------------


def test_on_one_process_the_collectives_are_identities() -> None:
    data = {"a": torch.randn(3, 2), "b": [torch.tensor(2), (torch.tensor(True),)]}
    assert all_gather(data) is data
    assert broadcast(data) is data
    for op in ("max", "min"):
        assert all_reduce(data, op) is data
    for op in ("sum", "product"):
        assert all_reduce(data, op)["a"] is data["a"]
    assert all_reduce(data)["b"][1][0].dtype is torch.int64  # as on several
    assert not all_reduce(torch.ones(1, requires_grad=True)).requires_grad
    with pytest.raises(AccelError, match=r"op='avg'.*sum, mean, max, min, product"):
        all_reduce(data, "avg")
    with pytest.raises(AccelError, match="rank from 0 to 0"):
        broadcast(data, src=1)
    process.shutdown()


# -- data: several ranks ----------------------------------------------------------------------------------------------

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
        return torch.randint(0, 100, (4, 3), generator=generator).remainder(2 if dtype is torch.bool else 100).to(dtype)
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
def test_all_reduce_is_the_reduction_of_the_stacked_tensors(op: str) -> None:
    results = run(3, reduce_all, op)
    for name in results[0]:
        dtype = getattr(torch, name.removeprefix("torch."))
        expected = STACKED[op](torch.stack([sample(rank, dtype).t() for rank in range(3)]))
        for result in results:
            assert result[name].dtype is expected.dtype
            torch.testing.assert_close(result[name], expected)


def reduce_special() -> None:
    """A NaN is not lost, whichever rank has it; half precision does not overflow on the way."""
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


def test_all_reduce_of_what_is_easily_wrong() -> None:
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
            "empty": torch.zeros(0),
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
        assert data["pair"] == Pair(data["pair"].left, data["pair"].right)
        assert data["pair"].left.tolist() == [0, 1, 2]
        assert data["pair"].right[0].shape == (0,)
        assert data["empty"].shape == (0,)


def gather_with_gradients() -> None:
    """Each rank's rows get the gradients that all ranks have for them."""
    rank, world = process.rank(), process.world_size()
    x = torch.ones(rank + 1, 2, requires_grad=True)
    s = torch.tensor(float(rank), requires_grad=True)
    fixed = torch.ones(1)
    found = all_gather({"x": x, "s": s, "fixed": fixed}, gradients=True)
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


def contrast() -> float:
    """A contrastive loss over the samples of all ranks, in ddp and in one process on the whole batch."""
    rank, world = process.rank(), process.world_size()
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    plain = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (net, plain)]
    model, optimizer, _ = accel.setup(net, optimizers[0], backend="ddp" if world > 1 else "single")
    for step in range(3):
        batch = torch.randn(2, 4 * world, 6, generator=torch.Generator().manual_seed(step))
        own = slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        optimizers[1].zero_grad()
        a, b = model(batch[:, own])
        F.cross_entropy(a @ accel.all_gather(b, gradients=True).T, torch.arange(8)[own]).backward()
        a, b = plain(batch)
        F.cross_entropy(a @ b.T, torch.arange(len(a))).backward()
        optimizer.step()
        optimizers[1].step()
    return float((net.weight - plain.weight).abs().max().detach())


def test_a_contrastive_loss_over_all_ranks() -> None:
    assert max(run(2, contrast)) < 1e-6


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


def differences() -> dict[str, tuple[str, str]]:
    """The class and the text of the error of each call; after each the ranks go on together."""
    one = process.rank() == 1
    ones = torch.ones(2)
    calls: dict[str, Any] = {
        "structure": lambda: all_reduce({"a": ones, "b": ones} if one else {"a": ones}),
        "shape": lambda: all_reduce([torch.ones(3 if one else 2)]),
        "dtype": lambda: all_gather(ones.double() if one else ones),
        "columns": lambda: all_gather(torch.ones(1, 2 if one else 3)),
        "broadcast": lambda: broadcast(torch.ones(3 if one else 2)),
        "op": lambda: all_reduce(ones, "max" if one else "min"),
        "call": lambda: barrier() if one else all_reduce(ones),
        "leaf": lambda: all_reduce({"a": [ones, "3" if one else ones]}),
        "number": lambda: all_reduce({"a": [ones, 3 if one else ones]}),
        "bad op": lambda: all_reduce(ones, "avg"),
        "bad src": lambda: broadcast(ones, 2),
        "complex": lambda: all_reduce([torch.ones(1, dtype=torch.complex64)], "max"),
        "sparse": lambda: all_gather(ones.to_sparse()),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(AccelError) as caught:
            call()
        found[name] = type(caught.value).__name__, str(caught.value)
        assert all_reduce(torch.ones(1)).item() == 2
    return found


DIFFERENCES = {
    "structure": ("RankMismatchError", 'data["b"] is absent on rank 0 and torch.float32 of shape (2)'),
    "shape": ("RankMismatchError", "data[0] is torch.float32 of shape (2) sent on cpu on rank 0 and torch.float32"),
    "dtype": ("RankMismatchError", "torch.float64 of shape (any) sent on cpu on rank 1"),
    "columns": ("RankMismatchError", "(any, 3) sent on cpu on rank 0 and torch.float32 of shape (any, 2)"),
    "broadcast": ("RankMismatchError", "data is torch.float32 of shape (2) sent on cpu on rank 0"),
    "op": ("RankMismatchError", "rank 0 is in \"all_reduce(op='min')\"; rank 1 is in \"all_reduce(op='max')\""),
    "call": ("RankMismatchError", "rank 1 is in 'barrier'"),
    "leaf": ("AccelError", 'on rank 1: data["a"][1] is a str; expected a tensor'),
    "number": ("RankMismatchError", 'data["a"][1] is torch.float32 of shape (2) sent on cpu on rank 0 and a number'),
    "bad op": ("AccelError", "expected op to be one of sum, mean, max, min, product"),
    "bad src": ("AccelError", "expected src to be a rank from 0 to 1"),
    "complex": ("AccelError", "data[0] is complex, which has no max over ranks"),
    "sparse": ("AccelError", "data is a torch.sparse_coo tensor"),
}


def test_differences_are_refused_on_every_rank() -> None:
    for found in run(2, differences):
        for name, (error, text) in DIFFERENCES.items():
            assert found[name][0] == error, name
            assert text in found[name][1], name


def arrive(path: Path) -> int:
    if process.rank() == 1:
        time.sleep(0.3)
    (path / str(process.rank())).touch()
    barrier()
    return len(list(path.iterdir()))


def test_barrier(tmp_path: Path) -> None:
    assert run(3, arrive, tmp_path) == [3, 3, 3]


# -- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 1015, 1016, 1017, 5000])
def test_framed_messages_carry_content_of_any_length(size: int) -> None:
    """Up to 1016 bytes in one message of a known length, beside their number; the rest in a second one."""
    content = bytes(number % 251 for number in range(size))
    lengths = []

    def gather(message: bytes) -> list[bytearray]:
        lengths.append(len(message))
        return [bytearray(message)]

    assert packing.gather_framed(content, gather) == [content]
    assert lengths == ([1024, size - 1016] if size > 1016 else [1024])


def layouts(number: float) -> list[torch.Tensor]:
    """Tensors that no flat piece holds as they are: transposed, 0-dim, empty, complex, larger than a piece."""
    tensors = [
        torch.full((3, 5), number).t(),
        torch.tensor(number),
        torch.empty(0),
        torch.full((40, 9), number)[:, ::2],
    ]
    return [*tensors, torch.full((2, 2), complex(number, -number)).t(), torch.full((300,), number, dtype=torch.float16)]


def packed() -> list[Any]:
    rank, packing._CPU_PIECE_BYTES = accel.rank(), 64
    process.current()
    sent, averaged = layouts(rank + 1.0), layouts(rank + 1.0)
    packing.broadcast_(sent, None, 1)
    one = torch.full((2, 3), rank + 1.0)[:1, 1]  # contiguous, with a stride of 3
    packing.broadcast_([one], None, 1)
    assert one.item() == 2
    packing.average_(averaged, 2, dist.all_reduce)
    owned = [layouts(rank + 1.0), layouts(rank + 5.0)]
    packing.reduce_to_owners(owned, rank, None)
    packing.broadcast_from_owners(owned, None)
    return [sent, averaged, *owned]


def test_packed_tensors_come_as_they_are_in_any_layout() -> None:
    """Broadcast, averaged, reduced to their owners and spread again, in pieces smaller than most of them."""
    for sent, averaged, first, second in run(2, packed):
        for found, number in ((sent, 2.0), (averaged, 1.5), (first, 1.5), (second, 5.5)):
            for tensor, expected in zip(found, layouts(number), strict=True):
                assert torch.equal(tensor, expected)


def test_one_ranks_failure_is_everyones() -> None:
    raise_together("a step", None, ["", ""])
    with pytest.raises(AccelError, match="a step failed on rank 1, so on every rank: ValueError: no"):
        raise_together("a step", None, ["", "ValueError: no"], AccelError)
    with pytest.raises(ValueError, match="mine"):
        raise_together("a step", ValueError("mine"), ["", "ValueError: mine"])


# -- numbers, objects and lengths that differ ---------------------------------------------------------------------------


def reduce_numbers() -> None:
    rank = accel.rank()
    data: Any = {"loss": rank + 0.5, "counts": [rank, 7], "done": rank == 1, "none": None, "x": torch.ones(2)}
    total, mean, largest = (all_reduce(data, op) for op in ("sum", "mean", "max"))
    assert (total["loss"], total["counts"], total["done"], total["none"]) == (2.0, [1, 14], 1, None)
    assert total["x"].tolist() == [2.0, 2.0]
    assert (mean["loss"], mean["counts"], mean["done"]) == (1.0, [0.5, 7.0], 0.5)
    assert (largest["loss"], largest["counts"], largest["done"]) == (1.5, [1, 7], True)
    assert all_reduce(0 if rank == 0 else 2.5) == 2.5  # a total that one rank never added to
    assert math.isnan(all_reduce(float("nan") if rank else 1.0, "min"))


def test_all_reduce_of_numbers_gives_numbers() -> None:
    run(2, reduce_numbers)


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


def test_objects_and_lengths_that_differ() -> None:
    run(2, send_objects)
    run(2, pad)


def refuse_objects() -> None:
    rank = accel.rank()
    wrong: dict[str, Any] = {
        "pad=value fills what is shorter": lambda: all_gather({"x": torch.ones(1, 1 + rank)}),
        "rank 1: data is a list that cannot be pickled": lambda: all_gather(
            [lambda: 0] if rank else ["a"],  # type: ignore[call-overload]
            objects=True,
        ),
        "rank 1: a function that cannot be pickled": lambda: broadcast(lambda: 0, 1, objects=True),
        "objects=True sends what can be pickled": lambda: all_gather({"x": "text"}),
        "numbers are reduced too": lambda: all_reduce({"x": "text"}),
        "is a str; expected a tensor": lambda: broadcast("text" if rank else None),
        "a list of objects on rank 0 and an object on rank 1": lambda: all_gather(
            "text" if rank else ["text"], objects=True
        ),
    }
    for words, call in wrong.items():
        with pytest.raises(AccelError, match=words):
            call()


def test_what_is_not_sent_is_refused_on_every_rank() -> None:
    run(2, refuse_objects)

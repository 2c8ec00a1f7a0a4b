"""Every state that ``save`` accepts, ``load`` gives back: generated models, freezes, optimizers, values and backends.

Others must be refused by an error of accel's. ``ACCEL_TEST_FUZZ`` is the number of examples of each test.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

import accel
from accel.errors import AccelError
from tests.backends import need, replica_of
from tests.checkpoint.helpers import differences, save_fully
from tests.distributed import run

EXAMPLES = int(os.environ.get("ACCEL_TEST_FUZZ", "0"))
WIDTH = 6


def examples(count: int) -> Any:
    """A failing example is not made smaller: that takes minutes, and it is printed."""
    return settings(
        max_examples=EXAMPLES or count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.rand(()))
        self.one = nn.Parameter(torch.rand(1))
        self.unused = nn.Parameter(torch.rand(1, 1))
        self.cube = nn.Parameter(torch.rand(3, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number + self.one * self.cube.sum((0, 1))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.rand(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum(0)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)
        self.register_buffer("mean", torch.rand(WIDTH, dtype=torch.float64))
        self.register_buffer("narrow", torch.rand(2, 3).bfloat16())
        self.register_buffer("passing", torch.rand(3), persistent=False)
        self.register_buffer("absent", None)
        self.inner = nn.Module()
        self.inner.register_buffer("again", self.mean)
        self.notes: Any = {"n": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
            self.mean += 0.5
        self.notes = {"n": self.notes["n"] + 1, 3: (torch.ones(2), b"x")}
        return x + self.mask

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


class Mixed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x * self.weight
        return (product.real if product.is_complex() else product).float()


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.rand(2, WIDTH)), nn.Parameter(torch.rand(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ["a/b", "!", "ü", "[0:3]", "groups"]
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names})
        self.register_parameter("!", nn.Parameter(torch.rand(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = torch.tanh(part(x))
        return x * getattr(self, "!")


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "nested": lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, WIDTH, bias=False))),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "tanh": nn.Tanh,
    "odd": Odd,  # one element, no dimension, three of them, and a parameter without a use
    "empty": Empty,
    "buffers": Buffers,  # of several dtypes, with two names, unsaved, and an extra state
    "double": lambda: Mixed(torch.float64),
    "half": lambda: Mixed(torch.bfloat16),
    "complex": lambda: Mixed(torch.complex64),
    "lora": Lora,  # a frozen base, and two small factors beside it
    "strange": Strange,  # names that mean something in a path, in JSON or in a record
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adamw": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "adamax": torch.optim.Adamax,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "warm": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


#: A program: what it builds, what it freezes when, how long it trains before the save and after it.
Case = SimpleNamespace


def cases(
    backends: Sequence[Any], layers: Sequence[str] = tuple(LAYERS), optimizers: Sequence[str] = tuple(OPTIMIZERS)
) -> st.SearchStrategy[Case]:
    few = st.frozensets(st.integers(0, 11), max_size=4)
    return st.builds(
        Case,
        layers=st.lists(st.sampled_from(layers), min_size=2, max_size=5).map(tuple),
        tied=st.booleans(),
        frozen=few,
        optimizers=st.lists(st.sampled_from(optimizers), max_size=3).map(tuple),
        trainable_only=st.booleans(),
        left_out=few,
        groups=st.integers(1, 3),
        empty_group=st.booleans(),
        named=st.booleans(),
        flips=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 11)), max_size=4).map(tuple),
        steps=st.integers(0, 3),
        scheduler=st.sampled_from(["", *SCHEDULERS]),
        used=st.integers(0, 1),
        backend=st.sampled_from(backends),
        other=st.sampled_from(backends),
        background=st.booleans(),
        loose=st.booleans(),
    )


class Program:
    """What a case describes, at its beginning."""

    def __init__(self, case: Case, seed: int, backend: Any, replica: int) -> None:
        torch.manual_seed(seed)
        self.case, self.replica = case, replica
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), *(LAYERS[layer]() for layer in case.layers), nn.Linear(WIDTH, 3)
        )
        if case.tied and case.layers[0] == "linear":
            self.net[1].weight = self.net[0].weight
        named = list(self.net.named_parameters())
        for number in case.frozen:
            named[number % len(named)][1].requires_grad_(False)
        self.raw: list[torch.optim.Optimizer] = list(self._optimizers(named))
        self.flip(-1)
        self.model: nn.Module = self.net
        self.optimizers = self.raw
        if backend != "raw":
            self.model, self.optimizers, _ = accel.setup(self.net, self.raw, backend=backend)
        self.schedulers = [SCHEDULERS[case.scheduler](o) for o in self.optimizers] if case.scheduler else []
        self.done = 0

    def _optimizers(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[torch.optim.Optimizer]:
        """Each of them takes every so-many-th parameter of those that it can step, cut into groups."""
        case = self.case
        left_out = {number % len(named) for number in case.left_out}
        held = []
        for i, (name, parameter) in enumerate(named):
            if i not in left_out and (parameter.requires_grad or not case.trainable_only):
                held.append((name, parameter))
        for number, kind in enumerate(case.optimizers):
            mine = held[number :: len(case.optimizers)]
            if kind == "muon":
                mine = [(n, p) for n, p in mine if p.dim() == 2 and p.numel()]
            if kind == "adafactor":
                mine = [(n, p) for n, p in mine if p.numel()]
            if kind not in ("sgd", "momentum"):
                mine = [(n, p) for n, p in mine if not p.is_complex()]
            if not mine:
                continue
            each = -(-len(mine) // case.groups)
            groups: list[dict[str, Any]] = []
            for at in range(0, len(mine), each):
                part = mine[at : at + each]
                groups.append({"params": part if case.named else [p for _, p in part], "lr": 0.01 * (len(groups) + 1)})
            groups[0]["tag"] = ("first", 1)
            if case.empty_group and not case.named:
                groups.append({"params": [], "lr": 0.5})
            yield OPTIMIZERS[kind](groups, lr=0.01)

    def flip(self, step: int) -> None:
        now = list(self.net.parameters())  # an engine may have put others in their places
        for when, number in self.case.flips:
            if when == step:
                parameter = now[number % len(now)]
                parameter.requires_grad_(not parameter.requires_grad)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.flip(self.done)
            generator = torch.Generator().manual_seed(100 * self.done + self.replica)
            loss = self.model(torch.randn(4, WIDTH, generator=generator)).square().mean()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if loss.requires_grad and self.optimizers:
                loss.backward()
                for optimizer in self.optimizers:
                    optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
            self.done += 1

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizers": list(self.optimizers), "schedulers": self.schedulers, "n": self.done}

    def frozen(self) -> dict[str, bool]:
        return {name: not p.requires_grad for name, p in self.net.named_parameters()}

    def held(self) -> set[str]:
        ids = {id(p) for o in self.raw for group in o.param_groups for p in group["params"]}
        return {name for name, p in self.net.named_parameters() if id(p) in ids}

    def snapshot(self) -> dict[str, Any]:
        optimizers = [copied(self._whole(optimizer)) for optimizer in self.optimizers]
        for one in optimizers:  # an optimizer makes an entry where it only looks
            one["state"] = {key: state for key, state in one["state"].items() if state}
        return {
            "model": copied(dict(self._whole(self.model))),
            "optimizers": optimizers,
            "schedulers": [copied(s.state_dict()) for s in self.schedulers],
            "n": self.done,
        }

    def _whole(self, value: Any) -> Any:
        return value.state_dict() if self.model is self.net else accel.full_state_dict(value)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def check_case(case: Case, directory: str) -> str:
    """What came of a case: ``"loaded"``, or where it was refused. Fails where what was accepted did not come back."""
    programs: list[Program] = []  # alive on every rank until the end
    try:
        for seed, backend, steps in ((1, case.backend, case.steps), (2, case.other, case.used)):
            replica = replica_of(backend)[0] if backend != "raw" else 0
            programs.append(Program(case, seed, backend, replica))
            programs[-1].train(steps)
    except AccelError:
        accel.teardown()
        return "refused by setup"
    try:
        return check_programs(case, directory, *programs)
    finally:
        accel.teardown()


def check_programs(case: Case, directory: str, one: Program, two: Program) -> str:
    try:
        save_fully(one.state(), directory, not case.background)
    except AccelError:
        return "refused by save"
    expected, frozen, own = of_rank_0(one.snapshot()), one.frozen(), two.frozen()
    accel.verify(directory)
    state = two.state()
    accel.load(directory, state, strict=not case.loose)
    two.done = state["n"]
    agree_on(case, differences(expected, two.snapshot()))
    held = two.held()
    agree_on(case, differences({n: (frozen if n in held else own)[n] for n in frozen}, two.frozen()))
    if case.backend == case.other:
        for name, parameter in two.net.named_parameters():
            parameter.requires_grad_(not frozen[name])
        one.train(2)
        two.train(2)
        found = differences(one.snapshot(), two.snapshot())
        agree_on(case, found if accel.rank() == 0 else [])  # other ranks' buffers are their own until the next forward
    return "loaded"


def of_rank_0(value: Any) -> Any:
    held = [value]
    if accel.world_size() > 1:
        dist.broadcast_object_list(held)
    return held[0]


def agree_on(case: Case, found: list[str]) -> None:
    told = [found] * accel.world_size()
    if accel.world_size() > 1:
        dist.all_gather_object(told, found)
    assert not any(told), (case, [one[:3] for one in told])


def check_batch(batch: Sequence[Case], directory: str) -> list[str]:
    logging.disable(logging.WARNING)
    try:
        return [check_case(case, directory) for case in batch]
    finally:
        logging.disable(logging.NOTSET)


ZERO = [accel.DeepSpeed(stage=stage) for stage in (1, 2, 3)]
DDP = accel.DDP(find_unused_parameters=True)
#: Engines whose optimizers step whole tensors take all layers and optimizers; others not those which setup refuses there.
POOLS: dict[str, Any] = {
    "alone": cases(["raw", "single"]),
    "whole": cases(["raw", DDP, "sharded", "pipeline"]),
    "divided": cases(
        [DDP, "sharded", "fsdp", *ZERO, "pipeline"],
        [layer for layer in LAYERS if layer not in ("empty", "double", "half", "complex")],
        [kind for kind in OPTIMIZERS if kind not in ("rprop", "adafactor", "muon")],
    ),
}


@pytest.mark.parametrize("pool", POOLS)
def test_programs(pool: str, tmp_path: Path) -> None:
    """In one process; on two ranks from every backend into every other, many cases to a call of the workers."""
    world, size, count, least = (1, 1, 200, 0.95) if pool == "alone" else (2, 6, 8, 0.75)
    for backend in ("sharded", "fsdp", *ZERO, "pipeline") if world == 2 else ():
        need(backend, 2)
    tally: Counter[str] = Counter()

    @given(st.lists(POOLS[pool], min_size=size, max_size=size))
    @examples(count)
    def check(batch: list[Case]) -> None:
        tally.update(run(world, check_batch, batch, str(tmp_path / "c"))[0])

    check()
    assert tally.total() >= size * (EXAMPLES or count), tally
    assert tally["loaded"] >= least * tally.total(), tally


DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int8, torch.uint8,
    torch.uint16, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (2, 0, 3), (2, 3), (1, 1, 1), (400,), (25, 31)]
WORDS = st.sampled_from(
    ["", "a", "b", "a/b", "%2F", "[1]", "~", "~0", "!", "items", "name", "__metadata__", "ü", "\0", "\ud800"]
)


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...], form: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape) + len(shape))
    made = (torch.rand((2, *shape), generator=generator) * 9).to(dtype)
    views: dict[str, Callable[[], torch.Tensor]] = {
        "plain": made[0].clone,
        "slice": lambda: made[1],
        "transposed": lambda: made[0].clone().movedim(0, -1) if shape else made[0],
        "expanded": lambda: made.new_ones(()).expand(shape),
        "conjugate": made[0].conj,
    }
    return views[form]()


def make_array(dtype: str, shape: tuple[int, ...]) -> Any:
    return numpy.arange(math.prod(shape)).reshape(shape).astype(dtype)


FORMS = st.sampled_from(["plain", "slice", "transposed", "expanded", "conjugate"])
TENSORS = st.builds(make_tensor, st.sampled_from(DTYPES), st.sampled_from(SHAPES), FORMS)
NUMPY_TYPES = st.sampled_from(
    ["<f4", "<f8", "<f2", "<i8", "|u1", "|b1", "<c8", "<U3", "|S2", "<M8[ns]", "<m8[s]", "<f16"]
)
ODD_ARRAYS = [numpy.str_(""), numpy.bytes_(b""), numpy.datetime64("NaT", "s"), numpy.ma.masked_array([1, 2], [0, 1])]
ARRAYS = st.one_of(
    st.builds(make_array, NUMPY_TYPES, st.sampled_from(SHAPES)),
    st.builds(lambda dtype: make_array(dtype, (4,))[3], NUMPY_TYPES),
    st.sampled_from(ODD_ARRAYS),
)
PLACES = [torch.device("cpu"), torch.device("cuda:1"), Path("a/b"), range(3), range(5, 2**70, 3), torch.Size([2, 3])]
ATOMS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([2**63, 2**64, -(2**63) - 1, 2**5000]), st.floats(),
    st.complex_numbers(), st.text(max_size=5), WORDS, st.binary(max_size=5), st.builds(bytearray, st.binary(max_size=5)),
    st.frozensets(st.integers(), max_size=2), st.sampled_from(DTYPES), st.sampled_from(PLACES),
)  # fmt: skip
KEYS = st.one_of(
    WORDS, st.text(max_size=4), st.integers(-2, 2), st.none(), st.floats(), st.binary(max_size=2), st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 2), WORDS), st.just(Path("1")), st.frozensets(st.integers(0, 3), max_size=2),
)  # fmt: skip


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)
    names = st.dictionaries(st.sampled_from(["a", "self", "kwargs", "b c"]), inner, max_size=2)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.builds(deque, lists, st.sampled_from([None, 2, 5])),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda d: defaultdict(list, d)),
        names.map(lambda d: SimpleNamespace(**d)),
        st.builds(Namespace, lr=inner),
    )


SETS = st.sets(ATOMS.filter(lambda v: not isinstance(v, torch.Size | bytearray)), max_size=3)
COUNTERS = st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
VALUES = st.recursive(
    st.one_of(ATOMS, TENSORS, ARRAYS), lambda inner: st.one_of(containers(inner), SETS, COUNTERS), max_leaves=6
)


def holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(holds_tensor, items))


def blank(value: Any) -> Any:
    """What a program has before it loads: the same tensors with other values, and something else for each value."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if not holds_tensor(value):
        return "other"
    if isinstance(value, dict):
        made = defaultdict(list) if isinstance(value, defaultdict) else type(value)()
        made.update((key, blank(item)) for key, item in value.items())
        return made
    return type(value)(map(blank, value))


def test_values(tmp_path: Path) -> None:
    directory = str(tmp_path / "c")
    tally: Counter[str] = Counter()

    @given(st.dictionaries(KEYS, VALUES, max_size=4))
    @examples(250)
    def check(state: dict[Any, Any]) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        try:
            accel.save(state, directory)
        except AccelError:
            tally["refused by save"] += 1
            return
        accel.verify(directory)
        target = {key: blank(value) for key, value in state.items()}
        assert accel.load(directory, target) is target
        assert not differences(state, target), state
        tally["loaded"] += 1
        if not any(map(holds_tensor, state.values())):
            assert not differences(state, accel.load(directory))

    check()
    assert tally.total() >= (EXAMPLES or 250), tally
    assert tally["loaded"] >= 0.9 * tally.total()

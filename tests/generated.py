"""Random training loops, each compared with one process after every step.

``python -m tests.generated --backend fsdp --seeds 200`` runs 200 programs on 2 gloo ranks.
``python -m tests.generated --backend fsdp --show 7`` prints program 7 as the lines of a loop.

A seed describes a program (``draw``). ``Reference`` runs the program in plain torch in one process
on the batches of all ranks, and ``Distributed`` runs it with accel on a rank's part of each batch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import random
import tempfile
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.backends import replica_of
from tests.distributed import Outcome, outcomes, run

TOLERANCE = 2e-5
ROWS, INPUTS, WIDTH, CLASSES = 4, 5, 7, 11  # odd widths, so that shards are uneven
TIMEOUT = 50.0  # seconds for a program; gloo gives up after 60
MAX_REFUSED = 0.05

FEATURES = ("embedding", "tied", "norm", "scalar", "side", "base")
BACKWARDS = ("sum", "each", "twice", "two", "swapped", "alone")
OPTIMIZERS: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    # A larger eps keeps rounding errors small in gradients that are zero in exact arithmetic.
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-4),
}
SCHEDULERS: dict[str, Any] = {
    "StepLR": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "LinearLR": functools.partial(torch.optim.lr_scheduler.LinearLR, total_iters=3),
    "CosineAnnealingLR": functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=8),
}
ZEROS = {
    "optimizer": "optimizer.zero_grad()",
    "optimizer in place": "optimizer.zero_grad(set_to_none=False)",
    "model": "model.zero_grad()",
    "model in place": "model.zero_grad(set_to_none=False)",
}
CLIPS = {
    "norm": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)",
    "value": "torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)",
    "accel": "accel.clip_grad_norm_(model, 0.3)",
}

#: What a backend doesn't support, as its page in docs/ says.
UNSUPPORTED: dict[str, set[str]] = {
    "pipeline": {"tied", "side", "penalty", "alone"},
    "deepspeed:3": {"each", "twice"},
}
#: Backends that promise correct gradients if ranks use different branches of a model.
BRANCHES_DIFFER = ("ddp", "sharded", "deepspeed:1")


# -- the description of a program -----------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One micro-batch: its forwards and backwards."""

    heads: tuple[int, ...]
    backward: str
    side: tuple[bool, ...]  # by rank
    penalty: bool = False
    no_sync: bool = False

    def lines(self) -> Iterator[str]:
        which = self.side[0] if len(set(self.side)) < 2 else f"{self.side}[accel.rank()]"
        forward = f"losses_of(model(x, heads={self.heads}, side={which}))"
        if self.penalty:
            forward += " + 0.1 * model.penalty()"
        backwards = {
            "sum": ["sum(losses).backward()"],
            "each": [
                *(f"losses[{i}].backward(retain_graph=True)" for i in range(len(self.heads) - 1)),
                "losses[-1].backward()",
            ],
            "twice": ["sum(losses).backward(retain_graph=True)", "sum(losses).backward()"],
            "two": [f"others = {forward}", "sum(losses).backward()", "sum(others).backward()"],
            "swapped": [f"others = {forward}", "sum(others).backward()", "sum(losses).backward()"],
            "alone": ["sum(losses).backward()", "(0.1 * model.penalty()).backward()"],
        }
        if self.no_sync:
            yield "with accel.no_sync(model):"
        for line in (f"losses = {forward}", *backwards[self.backward]):
            yield "    " * self.no_sync + line


@dataclass(frozen=True)
class Step:
    """One step of the optimizers, with all that comes before and after it."""

    passes: tuple[Pass, ...]
    toggled: tuple[str, ...] = ()  # submodules that are frozen, or trained again
    evaluates: bool = False
    optimizers: tuple[int, ...] = (0,)  # those that step
    events: tuple[str, ...] = ()  # after the step: save, load, resume, again


@dataclass(frozen=True)
class Program:
    """A training loop."""

    seed: int
    backend: str
    features: tuple[str, ...]
    heads: int
    optimizers: tuple[str, ...]
    groups: bool
    scheduler: str
    scheduler_of_handle: bool
    zero: str
    zero_first: bool
    clip: str
    steps: tuple[Step, ...]
    sequential: bool = False

    @property
    def branches_differ(self) -> bool:
        return any(len(set(one.side)) > 1 for step in self.steps for one in step.passes)

    @property
    def uses_all(self) -> bool:
        """True if every step uses every parameter on every rank."""
        for step in self.steps:
            heads = {head for one in step.passes for head in one.heads}
            whole = any(one.penalty or one.backward == "alone" for one in step.passes)
            side = "side" not in self.features or any(all(one.side) for one in step.passes)
            if not whole and not (side and len(heads) == self.heads):
                return False
        return True

    def __str__(self) -> str:
        kind = "nn.Sequential" if self.sequential else "Net"
        which = ("all parameters",) if len(self.optimizers) == 1 else ("all but heads", "heads")
        pairs = zip(self.optimizers, which, strict=True)
        optimizers = ", ".join(f"{name}({part})" for name, part in pairs)
        groups = ", no decay and twice the rate for biases" if self.groups else ""
        owner = "the handles" if self.scheduler_of_handle else "the raw optimizers"
        lines = [
            f"program {self.seed}, backend {self.backend!r}",
            f"model = {kind}({', '.join((*self.features, f'heads={self.heads}'))})",
            f"optimizers = {optimizers}{groups}",
            f"schedulers = {self.scheduler} of {owner}" if self.scheduler else "no scheduler",
        ]
        for number, step in enumerate(self.steps):
            lines += [f"# step {number}", *(f"    {line}" for line in self._lines(step))]
        return "\n".join(lines)

    def _lines(self, step: Step) -> Iterator[str]:
        for name in step.toggled:
            yield f"flip requires_grad of model.{name}"
        if step.evaluates:
            yield "model.eval(); model(x) in torch.no_grad(); model.train()"
        if self.zero_first:
            yield ZEROS[self.zero]
        for one in step.passes:
            yield from one.lines()
        if self.clip:
            yield CLIPS[self.clip]
        for index in step.optimizers:
            yield f"optimizers[{index}].step()"
        if self.scheduler:
            yield "schedulers step"
        if not self.zero_first:
            yield ZEROS[self.zero]
        yield from step.events


def draw(seed: int, backend: str, world: int = 2) -> Program:
    """Return the program of a seed, without what the backend doesn't support."""
    rng = random.Random(seed)
    unsupported = UNSUPPORTED.get(backend, set())
    features = _features(rng, unsupported)
    heads = rng.choice((1, 2))
    optimizers = tuple(rng.choices(list(OPTIMIZERS), k=rng.choice((1, 1, 2))))
    scheduler = rng.choice(("", "", *SCHEDULERS))
    scheduler_of_handle = rng.random() < 0.5
    passes = _Passes(rng, backend, world, features, heads)
    steps = [
        Step(
            passes.draw(),
            evaluates=rng.random() < 0.2,
            optimizers=_stepped(rng, len(optimizers)),
        )
        for _ in range(rng.randint(4, 6))
    ]
    if rng.random() < 0.35:
        _freeze(rng, steps, features, heads)
    _add_events(rng, steps, again=not scheduler or not scheduler_of_handle)
    program = Program(
        seed=seed,
        backend=backend,
        features=features,
        heads=heads,
        optimizers=optimizers,
        groups=rng.random() < 0.4,
        scheduler=scheduler,
        scheduler_of_handle=scheduler_of_handle,
        zero=rng.choice(list(ZEROS)),
        zero_first=rng.random() < 0.5,
        clip=rng.choice(("", "", *CLIPS)),
        steps=tuple(steps),
        sequential=backend.startswith("pipeline"),
    )
    return _with_options(program, rng)


def _features(rng: random.Random, unsupported: set[str]) -> tuple[str, ...]:
    features = [name for name in FEATURES if rng.random() < 0.3]
    if "tied" in features and "embedding" not in features:
        features.insert(0, "embedding")
    return tuple(name for name in features if name not in unsupported)


def _stepped(rng: random.Random, count: int) -> tuple[int, ...]:
    """Return which optimizers step: mostly all of them."""
    if count == 2 and rng.random() < 0.25:
        return (rng.randrange(2),)
    return tuple(range(count))


class _Passes:
    """The habits of a program: the kinds of micro-batches that its steps consist of."""

    def __init__(
        self,
        rng: random.Random,
        backend: str,
        world: int,
        features: tuple[str, ...],
        heads: int,
    ) -> None:
        self.rng, self.world, self.heads = rng, world, heads
        self.unsupported = UNSUPPORTED.get(backend, set())
        kinds = rng.choices(BACKWARDS, weights=(6, 2, 1, 2, 1, 1), k=2)
        self.kinds = [kind if kind not in self.unsupported else "sum" for kind in kinds]
        self.count = rng.choice((1, 1, 2, 3))
        self.no_sync = rng.choice(("", "", "all but last", "all"))
        self.penalty = rng.random() < 0.2 and "penalty" not in self.unsupported
        self.one_head = rng.random() < 0.4
        self.has_side = "side" in features
        self.differ = rng.random() < 0.3 and backend.startswith(BRANCHES_DIFFER)

    def draw(self) -> tuple[Pass, ...]:
        side = self._side()
        return tuple(self._pass(number, side) for number in range(self.count))

    def _side(self) -> tuple[bool, ...]:
        if not self.has_side:
            return (False,) * self.world
        same = self.rng.random() < 0.6
        each = tuple(self.rng.random() < 0.5 for _ in range(self.world))
        return each if self.differ else (same,) * self.world

    def _pass(self, number: int, side: tuple[bool, ...]) -> Pass:
        heads = tuple(range(self.heads))
        if self.one_head:
            heads = (self.rng.choice(heads),)
        waits = self.no_sync == "all" or (self.no_sync != "" and number < self.count - 1)
        return Pass(heads, self.rng.choice(self.kinds), side, self.penalty, waits)


def _freeze(rng: random.Random, steps: list[Step], features: tuple[str, ...], heads: int) -> None:
    """Freeze and thaw submodules; block1 and head 0 always train, so that a backward never fails."""
    names = ["block0", *(name for name in ("norm", "scalar", "side") if name in features)]
    if "base" not in features:
        names.append("embed")
    if heads == 2:
        names.append("heads.1")
    for number, step in enumerate(steps):
        if rng.random() < 0.5:
            toggled = tuple(rng.sample(names, k=min(len(names), rng.choice((1, 1, 2)))))
            steps[number] = replace(step, toggled=toggled)


def _add_events(rng: random.Random, steps: list[Step], again: bool) -> None:
    """Save and load, or tear down and set up again, between two steps."""
    last = len(steps) - 2
    if rng.random() < 0.4:
        saved = rng.randint(0, last)
        loaded = rng.randint(saved, last)
        steps[saved] = replace(steps[saved], events=("save",))
        loads = (*steps[loaded].events, rng.choice(("load", "resume")))
        steps[loaded] = replace(steps[loaded], events=loads)
    if rng.random() < 0.15 and again:
        at = rng.randint(0, last)
        steps[at] = replace(steps[at], events=(*steps[at].events, "again"))


def _with_options(program: Program, rng: random.Random) -> Program:
    """Add the options that the docs tell users to pass for such a program, and others by chance."""
    backend, steps = program.backend, program.steps
    if backend == "ddp" and not program.uses_all:
        backend += ":find_unused_parameters=True"  # which wants one backward of each forward
        steps = tuple(replace(step, passes=tuple(_with_one_backward(one) for one in step.passes)) for step in steps)
    if backend == "pipeline":
        chunks = 1 if "norm" in program.features else rng.choice((1, 2))
        backend += f":chunks={chunks},checkpoint={rng.choice(('always', 'except_last', 'never'))}"
    if backend == "deepspeed:3" and rng.random() < 0.5:  # small weights are sharded too
        zero = {"stage3_param_persistence_threshold": 0}
        backend += f",config={ ({'zero_optimization': zero}) }"
    return replace(program, backend=backend, steps=steps)


def _with_one_backward(one: Pass) -> Pass:
    return replace(one, backward="sum") if one.backward in ("each", "twice") else one


# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Bag(nn.Module):
    """The mean of the embeddings of a row of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).mean(1)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Heads(nn.ModuleList):
    """Linear layers on one input: a tensor for one of them, else a tuple."""

    def forward(self, x: torch.Tensor, heads: tuple[int, ...] | None = None) -> Any:
        out = tuple(self[i](x) for i in (range(len(self)) if heads is None else heads))
        return out if len(out) > 1 else out[0]


class Net(nn.Module):
    def __init__(self, children: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor, heads: tuple[int, ...], side: bool) -> Any:
        for name, child in self.named_children():
            if name != "heads" and (side or name != "side"):
                x = child(x)
        return self.heads(x, heads)

    def penalty(self) -> torch.Tensor:
        return sum(p.square().sum() for p in self.parameters())


def build(program: Program) -> nn.Module:
    torch.manual_seed(program.seed)
    has = program.features
    children: dict[str, nn.Module] = OrderedDict()
    children["embed"] = Bag() if "embedding" in has else nn.Linear(INPUTS, WIDTH)
    children["block0"] = Block()
    if "norm" in has:
        children["norm"] = nn.BatchNorm1d(WIDTH)
    children["block1"] = Block()
    if "side" in has:
        children["side"] = Block()
    if "scalar" in has:
        children["scalar"] = Scalar()
    heads = Heads(nn.Linear(WIDTH, CLASSES) for _ in range(program.heads))
    children["heads"] = heads
    if "tied" in has:
        heads[0].weight = children["embed"].table.weight
    if "base" in has:
        children["embed"].requires_grad_(False)
    return nn.Sequential(children) if program.sequential else Net(children)


def build_optimizers(program: Program, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return optimizers of what trains at first: of all parameters, or of trunk and heads."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parts = [named]
    if len(program.optimizers) == 2:
        parts = [[], []]
        for name, p in named:
            parts[name.startswith("heads.")].append((name, p))
    optimizers = []
    for kind, part in zip(program.optimizers, parts, strict=True):
        groups = [{"params": [p for _, p in part]}]
        if program.groups:
            groups = [
                {"params": [p for _, p in part if p.ndim > 1]},
                {"params": [p for _, p in part if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
            ]
        optimizers.append(OPTIMIZERS[kind]([group for group in groups if group["params"]]))
    return optimizers


# -- the two ways to run a program ----------------------------------------------------------------


class Reference:
    """One process in plain torch, on the batches of all ranks."""

    def __init__(self, program: Program, replicas: int = 2) -> None:
        self.program, self.replicas = program, replicas
        # BatchNorm normalizes by the batch of a rank, so each rank has a forward of its own then.
        apart = "norm" in program.features or program.branches_differ
        self.pieces = replicas if apart else 1
        self.batches = 0
        self.start()

    def start(self) -> None:
        """Build everything anew."""
        self.model: Any = build(self.program)
        self.optimizers: list[Any] = build_optimizers(self.program, self.model)
        self.make_schedulers()

    def make_schedulers(self) -> None:
        make = SCHEDULERS.get(self.program.scheduler)
        self.schedulers = [make(optimizer) for optimizer in self.optimizers] if make else []

    # Every method below is another one for ``Distributed``.

    def forward(self, x: torch.Tensor, one: Pass) -> list[Any]:
        """Return the outputs of all pieces of a batch. Buffers become those of rank 0."""
        outs = []
        for index, piece in enumerate(x.chunk(self.pieces)):
            arguments = self.arguments(piece, one, index)
            buffers = {name: b.clone() for name, b in self.model.named_buffers()} if index else {}
            outs.append(torch.func.functional_call(self.model, buffers, arguments))
        return outs

    def targets(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y.chunk(self.pieces)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def clip_by_accel(self) -> Any:
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    def state(self, one: Any) -> Any:
        return copy.deepcopy(one.state_dict())

    def save(self) -> None:
        trains = [p.requires_grad for p in self.model.parameters()]
        states = [self.state(one) for one in (self.model, *self.optimizers, *self.schedulers)]
        self.saved = (trains, states)

    def load(self) -> None:
        trains, states = copy.deepcopy(self.saved)
        for p, trained in zip(self.model.parameters(), trains, strict=True):
            p.requires_grad_(trained)
        for one, state in zip((self.model, *self.optimizers, *self.schedulers), states, strict=True):
            one.load_state_dict(state)

    def resume(self) -> None:
        self.start()
        self.load()

    def again(self) -> None:
        pass

    # What both have in common.

    def arguments(self, x: torch.Tensor, one: Pass, index: int) -> tuple[Any, ...]:
        return (x,) if self.program.sequential else (x, one.heads, one.side[index])

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the next global batch: inputs, labels and values."""
        self.batches += 1
        generator = torch.Generator().manual_seed(self.program.seed * 1000 + self.batches)
        rows = ROWS * self.replicas
        x = torch.randn(rows, INPUTS, generator=generator)
        if "embedding" in self.program.features:
            x = torch.randint(CLASSES, (rows, 3), generator=generator)
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        return x, labels, torch.randn(rows, CLASSES, generator=generator)

    def losses(self, one: Pass, share: int) -> list[torch.Tensor]:
        """Return the loss of each head, for a new batch."""
        x, labels, values = self.batch()
        targets = list(zip(self.targets(labels), self.targets(values), strict=True))
        losses = [torch.zeros(()) for _ in one.heads]
        for out, target in zip(self.forward(x, one), targets, strict=True):
            outs = out if isinstance(out, tuple) else (out,)
            for position, head in enumerate(one.heads):
                value = outs[head if self.program.sequential else position]
                measure = F.mse_loss if head else F.cross_entropy
                loss = measure(value, target[head]) / len(targets)
                losses[position] = losses[position] + loss / share
        if one.penalty:
            losses[0] = losses[0] + 0.1 * self.model.penalty() / share
        return losses

    def run_pass(self, one: Pass, share: int) -> None:
        with self.no_sync() if one.no_sync else contextlib.nullcontext():
            losses = self.losses(one, share)
            if one.backward == "each":
                for loss in losses[:-1]:
                    loss.backward(retain_graph=True)
                losses[-1].backward()
                return
            backwards = [sum(losses)]
            if one.backward in ("two", "swapped"):
                backwards.append(sum(self.losses(one, share)))
            if one.backward == "twice":
                backwards[0].backward(retain_graph=True)
            if one.backward == "swapped":
                backwards.reverse()
            for loss in backwards:
                loss.backward()
            if one.backward == "alone":
                (0.1 * self.model.penalty() / share).backward()

    def zero_grad(self) -> None:
        whose = [self.model] if self.program.zero.startswith("model") else self.optimizers
        for one in whose:
            one.zero_grad(set_to_none=not self.program.zero.endswith("in place"))

    def clip(self) -> Any:
        parameters = self.model.parameters()
        if self.program.clip == "value":
            return nn.utils.clip_grad_value_(parameters, 0.02)
        if self.program.clip == "accel":
            return self.clip_by_accel()
        return nn.utils.clip_grad_norm_(parameters, 0.3)

    def evaluate(self) -> torch.Tensor:
        """Return the outputs in evaluation mode, for a batch that all ranks have in common."""
        self.model.eval()
        x, _, _ = self.batch()
        everything = Pass(tuple(range(self.program.heads)), "sum", (True,))
        with torch.no_grad():
            out = self.model(*self.arguments(x, everything, 0))
        self.model.train()
        return torch.stack(out if isinstance(out, tuple) else (out,))

    def run_step(self, step: Step) -> dict[str, Any]:
        """Run a step and its events, and return what is compared afterwards, by name."""
        seen = {}
        for name in step.toggled:
            for p in self.model.get_submodule(name).parameters():
                p.requires_grad_(not p.requires_grad)
        if step.evaluates:
            seen["evaluation"] = self.evaluate()
        if self.program.zero_first:
            self.zero_grad()
        for one in step.passes:
            self.run_pass(one, len(step.passes))
        if self.program.clip:
            norm = self.clip()
            seen["norm"] = 0.0 if norm is None else float(norm)
        for index in step.optimizers:
            self.optimizers[index].step()
        for scheduler in self.schedulers:
            scheduler.step()
        if not self.program.zero_first:
            self.zero_grad()
        seen["model"] = self.state(self.model)
        for event in step.events:
            getattr(self, event)()
        if step.events or step is self.program.steps[-1]:
            seen["model afterwards"] = self.state(self.model)
            seen["optimizers"] = [self.state(one) for one in self.optimizers]
        return dict(leaves(seen))

    def train(self) -> list[dict[str, Any]]:
        return [self.run_step(step) for step in self.program.steps]


class Distributed(Reference):
    """One rank with accel, on its part of each batch."""

    def __init__(self, program: Program, folder: str) -> None:
        self.folder = folder
        self.replica, replicas = replica_of(program.backend)
        super().__init__(program, replicas)

    def start(self) -> None:
        self.raw = build(self.program)
        self.raw_optimizers = build_optimizers(self.program, self.raw)
        if self.program.scheduler_of_handle:
            self.set_up()
            self.make_schedulers()
        else:
            self.optimizers = self.raw_optimizers
            self.make_schedulers()
            self.set_up()

    def set_up(self) -> None:
        self.model, self.optimizers, _ = accel.setup(self.raw, self.raw_optimizers, backend=self.program.backend)

    def forward(self, x: torch.Tensor, one: Pass) -> list[Any]:
        piece = x.chunk(self.replicas)[self.replica]
        return [self.model(*self.arguments(piece, one, accel.rank()))]

    def targets(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (y.chunk(self.replicas)[self.replica],)

    def no_sync(self) -> Any:
        return accel.no_sync(self.model)

    def clip_by_accel(self) -> Any:
        return accel.clip_grad_norm_(self.model, 0.3)

    def state(self, one: Any) -> Any:
        return copy.deepcopy(accel.full_state_dict(one))

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizers": self.optimizers,
            "schedulers": self.schedulers,
        }

    def save(self) -> None:
        accel.save(self.checkpoint(), self.folder)

    def load(self) -> None:
        accel.load(self.folder, self.checkpoint())

    def resume(self) -> None:
        accel.teardown(self.model)
        self.start()
        self.load()

    def again(self) -> None:
        accel.teardown(self.model)
        self.set_up()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a state, by their path."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield path, value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def difference(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> str:
    """Return the first difference of two runs, or an empty text."""
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one.keys() != other.keys():
            return f"step {number}: only one run has {sorted(one.keys() ^ other.keys())[:4]}"
        for name, value in one.items():
            if not isinstance(value, float | torch.Tensor):
                if value != other[name]:
                    return f"step {number}, {name}: {other[name]!r} instead of {value!r}"
                continue
            a, b = torch.as_tensor(value).double(), torch.as_tensor(other[name]).double()
            if a.shape != b.shape:
                return f"step {number}, {name}: {tuple(b.shape)} instead of {tuple(a.shape)}"
            apart = float((a - b).abs().max()) if a.numel() else 0.0
            if not apart <= TOLERANCE:
                return f"step {number}, {name}: differs by {apart:.1e}"
    return ""


# -- many programs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    kind: str  # equal, refused, failed
    text: str = ""


def train_rank(program: Program, folder: str) -> list[dict[str, Any]]:
    return Distributed(program, folder).train()


@functools.cache
def replicas_of(backend: str, world: int) -> int:
    return int(run(world, replica_of, backend)[0][1])


def judge(expected: list[dict[str, Any]], results: list[Outcome]) -> Result:
    """Compare the ranks with the reference. Ranks that all raise an AccelError refuse a program."""
    failures = [(rank, result) for rank, result in enumerate(results) if result.error]
    if failures and all("AccelError" in result.error for result in results):
        return Result("refused", results[0].message)
    if failures:
        return Result("failed", "\n".join(f"rank {i}: {r.trace or r.message}" for i, r in failures))
    for rank, result in enumerate(results):
        if text := difference(expected, result.value):
            return Result("failed", f"rank {rank}: {text}")
    return Result("equal")


def check(program: Program, world: int = 2, train: Any = train_rank) -> Result:
    """Run a program on ``world`` ranks and in one process."""
    expected = Reference(program, replicas_of(program.backend, world)).train()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "checkpoint"))
        try:
            results = outcomes(world, train, program, path, timeout=TIMEOUT)
        except AssertionError as hang:
            return Result("failed", str(hang))
    return judge(expected, results)


def report(backend: str, results: dict[int, Result], seconds: float) -> bool:
    """Print a summary; return True if no program failed and few were refused."""
    by_kind = defaultdict(list)
    texts = defaultdict(list)
    for seed, result in results.items():
        by_kind[result.kind].append(seed)
        if result.kind == "refused":
            texts[result.text.splitlines()[0][:200]].append(seed)
    counts = ", ".join(f"{len(by_kind[kind])} {kind}" for kind in ("equal", "refused", "failed"))
    print(f"{backend}: {len(results)} programs, {counts}, {seconds:.0f} s")
    for text, seeds in texts.items():
        print(f"  refused {seeds}: {text}")
    if by_kind["failed"]:
        print(f"  failed {by_kind['failed']}")
    return not by_kind["failed"] and len(by_kind["refused"]) <= MAX_REFUSED * len(results)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["ddp"], help='such as "deepspeed:3"')
    parser.add_argument("--seeds", type=int, default=200, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a program instead")
    options = parser.parse_args()
    good = True
    for backend in options.backend:
        if options.show is not None:
            print(draw(options.show, backend, options.world))
            continue
        start, results = time.monotonic(), {}
        for seed in range(options.first, options.first + options.seeds):
            program = draw(seed, backend, options.world)
            results[seed] = check(program, options.world)
            if results[seed].kind == "failed":
                print(f"{program}\n{results[seed].text}\n", flush=True)
        good &= report(backend, results, time.monotonic() - start)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Random training loops, each compared with one process after every step.

``python -m tests.generated --backend fsdp --seeds 200`` runs 200 programs on 2 gloo ranks.
``python -m tests.generated --backend fsdp --show 7`` prints program 7.

A seed gives a program: a model and the source lines of each step (``draw``). ``Reference`` executes
the lines in plain torch in one process on the batches of all ranks. ``Distributed`` executes the
same lines with accel on each rank's share of the batches.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import accel
from tests.backends import replica_of
from tests.distributed import Outcome, outcomes, run

TOLERANCE = 2e-5
ROWS, INPUTS, WIDTH, CLASSES = 4, 5, 7, 11  # odd widths make uneven shards
TIMEOUT = 55.0  # seconds for one program; gloo gives up after 60
MAX_REFUSED = 0.05

FEATURES = ("embedding", "tied", "norm", "scalar", "side", "base")
OPTIMIZERS: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    # The large eps keeps rounding errors small if a gradient is zero in exact arithmetic.
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-4),
}
SCHEDULERS: dict[str, Any] = {
    "StepLR": functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "LinearLR": functools.partial(lr_scheduler.LinearLR, total_iters=3),
    "CosineAnnealingLR": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=8),
}
ZERO = (
    "for optimizer in optimizers: optimizer.zero_grad()",
    "for optimizer in optimizers: optimizer.zero_grad(set_to_none=False)",
    "model.zero_grad()",
    "model.zero_grad(set_to_none=False)",
)
CLIP = (
    "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)",
    "torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)",
    "norm = accel.clip_grad_norm_(model, 0.3)",
)
#: The lines of a micro-batch. ``each`` needs two heads.
BACKWARDS = {
    "sum": ("loss = {loss}", "loss.backward()"),
    "each": ("first, second = {losses}", "(first{share}).backward(retain_graph=True)", "(second{share}).backward()"),
    "twice": ("loss = {loss}", "loss.backward(retain_graph=True)", "loss.backward()"),
    "two": ("first = {loss}", "second = {loss}", "first.backward()", "second.backward()"),
    "swapped": ("first = {loss}", "second = {loss}", "second.backward()", "first.backward()"),
    "alone": ("loss = {loss}", "loss.backward()", "(0.1 * model.penalty()).backward()"),
}
#: What a program's lines use, besides torch.
NAMES = (
    *("accel", "model", "optimizers", "schedulers", "losses"),
    *("evaluate", "save", "load", "resume", "set_up_again"),
)
#: What a backend doesn't support, as its page in docs/ says.
UNSUPPORTED: dict[str, set[str]] = {"pipeline": {"tied", "side", "penalty", "alone"}, "deepspeed:3": {"each", "twice"}}
#: Backends that promise correct gradients if ranks use different branches of a model.
BRANCHES_DIFFER = ("ddp", "sharded", "deepspeed:1")


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A model, its optimizers, and the source lines of each step."""

    seed: int
    backend: str
    features: tuple[str, ...]
    heads: int
    optimizers: tuple[str, ...]  # of all parameters, or of the trunk and the heads
    groups: bool  # biases have a group of their own
    scheduler: str
    scheduler_on: str  # "raw" or "handle"
    steps: tuple[tuple[str, ...], ...] = ()

    @property
    def sequential(self) -> bool:
        return self.backend.startswith("pipeline")

    def __str__(self) -> str:
        lines = [f"# program {self.seed}", f"# model: {self.heads} heads, {self.features}"]
        lines.append(f"# optimizers: {self.optimizers}, biases in a group: {self.groups}")
        lines.append(f"# schedulers of the {self.scheduler_on} optimizers: {self.scheduler}")
        lines.append(f"accel.setup(model, optimizers, backend={self.backend!r})")
        for number, step in enumerate(self.steps):
            lines += [f"# step {number}", *step]
        return "\n".join(lines)


def draw(seed: int, backend: str, world: int = 2, without: tuple[str, ...] = ()) -> Program:
    """Return the program of a seed. Backends get the same program if they support all of it."""
    rng = random.Random(seed)
    lacks = {*without, *UNSUPPORTED.get(backend, ())}
    features = [name for name in FEATURES if rng.random() < 0.3]
    if "tied" in features and "embedding" not in features:
        features.append("embedding")
    scheduler = rng.choice(("", "", *SCHEDULERS))
    shape = Program(
        seed=seed,
        backend=_with_options(backend, features, rng),
        features=tuple(name for name in features if name not in lacks),
        heads=rng.choice((1, 2)),
        optimizers=tuple(rng.choices(list(OPTIMIZERS), k=rng.choice((1, 1, 2)))),
        groups=rng.random() < 0.4,
        scheduler=scheduler,
        scheduler_on=rng.choice(("raw", "handle")),
    )
    writer = _Writer(rng, shape, world, lacks)
    steps = [writer.step() for _ in range(rng.randint(4, 6))]
    _add_events(rng, steps, again=not scheduler or shape.scheduler_on == "raw")
    if backend == "ddp" and writer.leaves_unused:
        if not without:  # the option wants one backward for each forward
            return draw(seed, backend, world, ("each", "twice"))
        shape = replace(shape, backend="ddp:find_unused_parameters=True")
    return replace(shape, steps=tuple(map(tuple, steps)))


def _with_options(backend: str, features: list[str], rng: random.Random) -> str:
    chunks = 1 if "norm" in features else rng.choice((1, 2))  # BatchNorm needs the whole batch
    checkpoint = rng.choice(("always", "except_last", "never"))
    shards_all = rng.random() < 0.5
    if backend == "pipeline":
        return f"pipeline:chunks={chunks},checkpoint={checkpoint}"
    if backend == "deepspeed:3" and shards_all:  # small weights too
        return backend + ",config={'zero_optimization': {'stage3_param_persistence_threshold': 0}}"
    return backend


class _Writer:
    """Write the steps of a program. The habits of a program are the same in all of its steps."""

    def __init__(self, rng: random.Random, shape: Program, world: int, lacks: set[str]) -> None:
        self.rng, self.shape, self.world, self.lacks = rng, shape, world, lacks
        self.leaves_unused = False
        self.kinds = rng.choices(list(BACKWARDS), weights=(6, 2, 1, 2, 1, 1), k=2)
        self.count = rng.choice((1, 1, 2, 3))  # micro-batches
        self.no_sync = rng.choice(("", "", "all but last", "all"))
        self.penalty = rng.random() < 0.2 and "penalty" not in lacks
        self.one_head = rng.random() < 0.4
        self.branches_differ = rng.random() < 0.3 and shape.backend.startswith(BRANCHES_DIFFER)
        self.zero = rng.choice(ZERO)
        self.zero_first = rng.random() < 0.5
        self.clip = rng.choice(("", "", *CLIP))
        self.freezes = rng.random() < 0.35
        # block1 and the first head always train, so that every backward has a gradient.
        names = ["block0", "embed", "norm", "scalar", "side"]
        self.parts = [name for name in names if name in ("block0", "embed", *shape.features)]
        if "base" in shape.features:
            self.parts.remove("embed")
        if shape.heads == 2:
            self.parts.append("heads[1]")
        self.frozen: set[str] = set()

    def step(self) -> list[str]:
        lines = list(self._freeze()) if self.freezes else []
        if self.rng.random() < 0.2:
            lines.append("evaluation = evaluate()")
        if self.zero_first:
            lines.append(self.zero)
        lines += self._micro_batches()
        if self.clip:
            lines.append(self.clip)
        stepped = range(len(self.shape.optimizers))
        if self.rng.random() < 0.25 and not self.shape.scheduler:
            stepped = [self.rng.choice(stepped)]
        lines += [f"optimizers[{index}].step()" for index in stepped]
        if self.shape.scheduler:
            lines.append("for scheduler in schedulers: scheduler.step()")
        if not self.zero_first:
            lines.append(self.zero)
        return lines

    def _freeze(self) -> Iterator[str]:
        for part in self.parts:
            if self.rng.random() < 0.3:
                self.frozen ^= {part}
                yield f"model.{part}.requires_grad_({part not in self.frozen})"

    def _micro_batches(self) -> Iterator[str]:
        same = self.rng.random() < 0.6
        differ = [self.rng.random() < 0.5 for _ in range(self.world)]
        side: Any = same
        if self.branches_differ and len(set(differ)) == 2:
            side = differ
        if "side" not in self.shape.features:
            side = False
        used = set()
        for number in range(self.count):
            heads = tuple(range(self.shape.heads))
            if self.one_head:
                heads = (self.rng.choice(heads),)
            kind = self.rng.choice(self.kinds)
            if kind in self.lacks or (kind == "each" and len(heads) < 2):
                kind = "sum"
            used |= {*heads, kind}
            waits = self.no_sync == "all" or (self.no_sync and number < self.count - 1)
            if waits:
                yield "with accel.no_sync(model):"
            for line in self._micro_batch(kind, heads, side):
                yield "    " + line if waits else line
        uses_all = len(used & {0, 1}) == self.shape.heads
        uses_all &= side is True or "side" not in self.shape.features
        uses_all |= self.penalty or "alone" in used
        self.leaves_unused |= not uses_all or side is differ

    def _micro_batch(self, kind: str, heads: tuple[int, ...], side: Any) -> Iterator[str]:
        losses = f"losses({heads}, side={side})"
        share = f" / {self.count}" if self.count > 1 else ""
        loss = f"sum({losses}){share}"
        if self.penalty:
            loss = f"(sum({losses}) + 0.1 * model.penalty()){share}"
        for line in BACKWARDS[kind]:
            yield line.format(loss=loss, losses=losses, share=share)


def _add_events(rng: random.Random, steps: list[list[str]], again: bool) -> None:
    """Save and load, or tear down and set up again, between two steps."""
    saved, loaded = sorted(rng.choices(range(1, len(steps)), k=2))
    if rng.random() < 0.4:
        steps.insert(loaded, [rng.choice(("load()", "resume()"))])
        steps.insert(saved, ["save()"])
    if rng.random() < 0.15 and again:
        steps.insert(rng.randrange(1, len(steps)), ["set_up_again()"])


# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Bag(nn.Embedding):
    """The mean of a row of embeddings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(1)


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
    model = nn.Sequential() if program.sequential else Net()
    model.embed = Bag(CLASSES, WIDTH) if "embedding" in has else nn.Linear(INPUTS, WIDTH)
    model.block0 = Block()
    if "norm" in has:
        model.norm = nn.BatchNorm1d(WIDTH)
    model.block1 = Block()
    if "side" in has:
        model.side = Block()
    if "scalar" in has:
        model.scalar = Scalar()
    model.heads = Heads(nn.Linear(WIDTH, CLASSES) for _ in range(program.heads))
    if "tied" in has:
        model.heads[0].weight = model.embed.weight
    if "base" in has:  # frozen and in no optimizer, as with LoRA
        model.embed.requires_grad_(False)
    return model


def build_optimizers(program: Program, model: nn.Module) -> list[Any]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parts = [[p for _, p in named]]
    if len(program.optimizers) == 2:
        parts = [[], []]
        for name, p in named:
            parts[name.startswith("heads.")].append(p)
    optimizers = []
    for kind, part in zip(program.optimizers, parts, strict=True):
        groups: list[dict[str, Any]] = [{"params": part}]
        if program.groups:
            biases = {"params": [p for p in part if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02}
            groups = [{"params": [p for p in part if p.ndim > 1]}, biases]
        optimizers.append(OPTIMIZERS[kind]([group for group in groups if group["params"]]))
    return optimizers


# -- runs -----------------------------------------------------------------------------------------


class PlainAccel:
    """The functions of accel that a program's lines call, for one process."""

    @staticmethod
    def no_sync(model: nn.Module) -> Any:
        return contextlib.nullcontext()

    @staticmethod
    def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class Reference:
    """A run in plain torch in one process, on the batches of all ranks."""

    accel: Any = PlainAccel

    def __init__(self, program: Program, replicas: int = 2) -> None:
        self.program, self.replicas, self.batches = program, replicas, 0
        self.rows = [slice(i * ROWS, (i + 1) * ROWS) for i in range(replicas)]  # of each rank
        if "norm" not in program.features and "side=[" not in str(program):
            self.rows = [slice(None)]  # one forward gives the same gradients as one for each rank
        self.start()

    def start(self) -> None:
        self.model: Any = build(self.program)
        self.optimizers = build_optimizers(self.program, self.model)
        self.build_schedulers()

    def build_schedulers(self) -> None:
        kind = SCHEDULERS.get(self.program.scheduler)
        self.schedulers = [kind(optimizer) for optimizer in self.optimizers] if kind else []

    # ``Distributed`` overrides these.

    def forward(self, rank: int, *arguments: Any) -> Any:
        """Return the model's output. Only rank 0's forwards change the buffers."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()} if rank else {}
        return torch.func.functional_call(self.model, buffers, arguments)

    def state(self, stateful: Any) -> Any:
        return copy.deepcopy(stateful.state_dict())

    def save(self) -> None:
        self.saved = [self.state(one) for one in self.stateful()]
        self.trainable = [p.requires_grad for p in self.model.parameters()]

    def load(self) -> None:
        for one, state in zip(self.stateful(), self.saved, strict=True):
            one.load_state_dict(copy.deepcopy(state))
        for p, trainable in zip(self.model.parameters(), self.trainable, strict=True):
            p.requires_grad_(trainable)

    def resume(self) -> None:
        """Load into new objects."""
        self.start()
        self.load()

    def set_up_again(self) -> None:
        """Do nothing: one process needs no setup."""

    # The rest is the same for both.

    def stateful(self) -> list[Any]:
        return [self.model, *self.optimizers, *self.schedulers]

    def batch(self) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the next global batch: inputs, and the targets of both heads."""
        self.batches += 1
        generator = torch.Generator().manual_seed(1000 * self.program.seed + self.batches)
        rows = ROWS * self.replicas
        x = torch.randn(rows, INPUTS, generator=generator)
        if "embedding" in self.program.features:
            x = torch.randint(CLASSES, (rows, 3), generator=generator)
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        return x, (labels, torch.randn(rows, CLASSES, generator=generator))

    def losses(self, heads: tuple[int, ...], side: bool | list[bool]) -> list[torch.Tensor]:
        """Return the loss of each head for a new batch. ``side`` may differ by rank."""
        x, targets = self.batch()
        losses = [torch.zeros(()) for _ in heads]
        for rank, rows in enumerate(self.rows):
            outs = self.outputs(rank, x[rows], heads, side)
            for i, head in enumerate(heads):
                measure = F.mse_loss if head else F.cross_entropy
                loss = measure(outs[i], targets[head][rows])
                losses[i] = losses[i] + loss / len(self.rows)
        return losses

    def outputs(self, rank: int, x: torch.Tensor, heads: tuple[int, ...], side: Any) -> list[Any]:
        if self.program.sequential:  # computes all heads
            out = self.forward(rank, x)
            outs = out if isinstance(out, tuple) else (out,)
            return [outs[head] for head in heads]
        out = self.forward(rank, x, heads, side[rank] if isinstance(side, list) else side)
        return list(out) if isinstance(out, tuple) else [out]

    def evaluate(self) -> torch.Tensor:
        """Return outputs in evaluation mode for a batch that all ranks have."""
        self.model.eval()
        x, _ = self.batch()
        with torch.no_grad():
            outs = self.outputs(0, x, tuple(range(self.program.heads)), side=True)
        self.model.train()
        return torch.stack(outs)

    def run_step(self, lines: tuple[str, ...]) -> dict[str, Any]:
        """Execute the lines of a step. Return everything that is compared, by name."""
        names = {name: getattr(self, name) for name in NAMES} | {"torch": torch}
        exec("\n".join(lines), names)
        seen = {name: names.get(name, 0.0) for name in ("norm", "evaluation")}
        seen["norm"] = float(seen["norm"])  # FSDP2's norm is a DTensor
        seen["model"] = self.state(self.model)
        if lines is self.program.steps[-1]:
            seen["optimizers"] = [self.state(optimizer) for optimizer in self.optimizers]
        return dict(leaves(seen))

    def train(self) -> list[dict[str, Any]]:
        return [self.run_step(lines) for lines in self.program.steps]


class Distributed(Reference):
    """A run with accel on one rank of several, on the rank's rows of each batch."""

    accel = accel

    def __init__(self, program: Program, folder: str) -> None:
        self.folder = folder
        replica, replicas = replica_of(program.backend)
        super().__init__(program, replicas)
        self.rows = [slice(replica * ROWS, (replica + 1) * ROWS)]

    def start(self) -> None:
        self.raw = build(self.program)
        self.optimizers = self.raw_optimizers = build_optimizers(self.program, self.raw)
        if self.program.scheduler_on == "raw":
            self.build_schedulers()
        self.set_up()
        if self.program.scheduler_on == "handle":
            self.build_schedulers()

    def set_up(self) -> None:
        handles = accel.setup(self.raw, self.raw_optimizers, backend=self.program.backend)
        self.model, self.optimizers = handles.model, handles.optimizers

    def forward(self, rank: int, *arguments: Any) -> Any:
        return self.model(*arguments)

    def outputs(self, rank: int, x: torch.Tensor, heads: tuple[int, ...], side: Any) -> list[Any]:
        return super().outputs(accel.rank(), x, heads, side)

    def state(self, stateful: Any) -> Any:
        return accel.full_state_dict(stateful)

    def save(self) -> None:
        accel.save({"all": self.stateful()}, self.folder)

    def load(self) -> None:
        accel.load(self.folder, {"all": self.stateful()})

    def resume(self) -> None:
        accel.teardown(self.model)
        super().resume()

    def set_up_again(self) -> None:
        accel.teardown(self.model)
        self.set_up()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in a state, with their paths."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield path, value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def difference(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> str:
    """Return the first step and name at which two runs differ, or an empty text."""
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one.keys() != other.keys():
            return f"step {number}: only one run has {sorted(one.keys() ^ other.keys())[:4]}"
        for name, value in one.items():
            if distance(value, other[name]) > TOLERANCE:
                return f"step {number}: {name} is {other[name]} instead of {value}"
    return ""


def distance(a: Any, b: Any) -> float:
    """Return the largest difference of two values; infinity if they can't be compared."""
    if not isinstance(a, float | torch.Tensor):
        return 0.0 if a == b else float("inf")
    one, other = torch.as_tensor(a), torch.as_tensor(b)
    if one.shape != other.shape or one.dtype != other.dtype or not torch.isfinite(other).all():
        return float("inf")
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


# -- many programs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    kind: str  # equal, refused or failed
    text: str = ""


def train_rank(program: Program, folder: str) -> list[dict[str, Any]]:
    return Distributed(program, folder).train()


@functools.cache
def replicas_of(backend: str, world: int) -> int:
    return int(run(world, replica_of, backend)[0][1])


def check(program: Program, world: int = 2, train: Any = train_rank) -> Result:
    """Run a program on ``world`` ranks and compare each of them with one process."""
    expected = Reference(program, replicas_of(program.backend, world)).train()
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = outcomes(world, train, program, f"{folder}/saved", timeout=TIMEOUT)
        except AssertionError as hang:
            return Result("failed", str(hang))
    return judge(expected, results)


def judge(expected: list[dict[str, Any]], results: list[Outcome]) -> Result:
    """Compare what the ranks did. A program is refused if all ranks raise an AccelError."""
    if all("AccelError" in result.error for result in results):
        return Result("refused", results[0].message)
    for rank, result in enumerate(results):
        if result.error:
            return Result("failed", f"rank {rank}: {result.trace or result.message}")
    for rank, result in enumerate(results):
        if text := difference(expected, result.value):
            return Result("failed", f"rank {rank}: {text}")
    return Result("equal")


def report(backend: str, results: dict[int, Result], seconds: float) -> bool:
    """Print a summary. Return True if no program failed and few were refused."""
    seeds: dict[str, list[int]] = {"equal": [], "refused": [], "failed": []}
    for seed, result in results.items():
        seeds[result.kind].append(seed)
        if result.kind == "refused":
            print(f"  refused {seed}: {result.text.partition(chr(10))[0][:200]}")
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in seeds.items())
    print(f"{backend}: {len(results)} programs, {counts}, {seconds:.0f} s, failed {seeds['failed']}")
    return not seeds["failed"] and len(seeds["refused"]) <= MAX_REFUSED * len(results)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated")
    parser.add_argument("--backend", nargs="+", default=["ddp"], help='such as "deepspeed:3"')
    parser.add_argument("--seeds", type=int, default=200, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--world", type=int, default=2, help="how many ranks")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a program and exit")
    options = parser.parse_args()
    if options.show is not None:
        print(draw(options.show, options.backend[0], options.world))
        return 0
    good = True
    for backend in options.backend:
        start, results = time.monotonic(), {}
        for seed in range(options.first, options.first + options.seeds):
            program = draw(seed, backend, options.world)
            result = results[seed] = check(program, options.world)
            print(result.kind[0], end="", file=sys.stderr, flush=True)
            if result.kind == "failed":
                print(f"\n{program}\n{result.text}\n", flush=True)
        good &= report(backend, results, time.monotonic() - start)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

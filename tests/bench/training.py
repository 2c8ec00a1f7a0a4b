"""Sections about a training step and single verbs: raw torch, accel, and the libraries that do the same work, in turns."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.engines.deepspeed import library as quiet
from accel.engines.deepspeed.config import Configuration
from accel.engines.fsdp.plan import blocks

from .contenders import LIBRARIES, RIVALS, by_accel, by_library, installed_rivals, plain_step
from .report import Data, Section, Verdict, judged, table
from .steps import ACCEL, Comparison, Makers, Step, Target, judge, rows_of, section
from .timing import Contender, Times, interleave, note, run, summarise
from .workloads import MANY, RATE, SMALL_GPT, TINY, WORKLOADS, Workload, with_adamw

# -- the overhead of a library -----------------------------------------------------------------------------------------

RAW = "raw torch"
CAUSE = "the calls of the handles, of the engine and of the optimizer's hooks around raw torch's own"


def libraries(workload: Workload) -> Makers:
    """All contenders. The first is raw torch with its defaults."""
    return {name: partial(by_library, name, workload) for name in (RAW, ACCEL, *RIVALS)}


def _compiled() -> Makers:
    """Raw DDP and accel, given to ``torch.compile`` by the same line after they were built."""

    def compiled(name: str) -> Step:
        model, optimizer = LIBRARIES[name]().setup(*SMALL_GPT.build())
        return plain_step(SMALL_GPT, torch.compile(model), optimizer)

    return {name: partial(compiled, name) for name in (RAW, ACCEL)}


def library_table(workload: Workload, world: int, share: float = 1.0, *targets: Target) -> Comparison:
    return Comparison(workload.title, world, libraries, (workload,), targets, workload.steps, share)


LEAST_CPU = Target("accel's default DDP step below raw DDP's, 500 tensors", 1.0, clocks=("cpu",))
ONE = {w.name: library_table(w, 1, 3.0 if w is SMALL_GPT else 1.0) for w in WORKLOADS}
TWO = {
    "tiny": library_table(TINY, 2, 0.7),
    "many": library_table(MANY, 2, 3.0, LEAST_CPU),
    "gpt": library_table(SMALL_GPT, 2, 2.0),
    "compiled gpt": Comparison("compiled GPT: both by torch.compile (inductor)", 2, _compiled, share=0.6),
}


def _judge(data: Data) -> Iterator[Verdict]:
    for name in data["tables"]:
        rows = rows_of(data, name)
        if ACCEL not in rows:
            continue
        own, again = rows[ACCEL]["thread"], rows[f"{RAW}, again"]["thread"]
        noise = 1e6 * max(own["noise"], abs(again["over"]), again["noise"])
        # 10 us, or 1 % of the step.
        limits = {f"step over raw torch, {name}": max(10.0, 1e4 * rows[RAW]["cpu"]["median"])}
        share = 0.5 if name == "tiny" else 1.0
        for rival in RIVALS:
            if rival in rows:
                limits[f"{share} of {rival}'s overhead, {name}"] = share * 1e6 * rows[rival]["thread"]["over"]
        for target, limit in limits.items():
            yield judged(target, 1e6 * own["over"], limit, "{:+.1f} us", noise, CAUSE)


SINGLE = replace(section("single", "One process", ONE, (2.0, 30.0)), judge=_judge)
DDP = section("ddp", "DDP, 2 ranks over gloo", TWO, (3.0, 60.0))
DDP = replace(DDP, judge=lambda data: [*_judge(data), *judge(TWO, data)])

# -- FSDP2, with the same modules gathered as one ----------------------------------------------------------------------

RAW_FSDP = "raw `fully_shard`"
WHOLE, STEP, CLIP = "whole step", "`optimizer.step()`", "clipping"


def _raw_fsdp(workload: Workload) -> tuple[Any, Any]:
    model, _ = workload.build()
    mesh = init_device_mesh("cpu", (2,))
    for _, block in blocks(model, None):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, workload.optimizer(model)


def _timed(workload: Workload, part: str, name: str) -> Step:
    model, optimizer = _raw_fsdp(workload) if name == RAW_FSDP else by_accel(workload, accel.FSDP())
    step = plain_step(workload, model, optimizer)
    if part == WHOLE:
        return step
    step()
    if part == STEP:
        return optimizer.step
    if name == ACCEL:
        return partial(accel.clip_grad_norm_, model, 1e9)
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()


def _fsdp(workload: Workload, part: str) -> Makers:
    return {name: partial(_timed, workload, part, name) for name in (RAW_FSDP, ACCEL)}


def _part(workload: Workload, part: str, limit: float, share: float = 1.0, **options: bool) -> Comparison:
    """A comparison by one part of a training step, with options of AdamW."""
    name = ", ".join([part, *options])
    workload = with_adamw(workload, **options)
    targets = (Target(f"{name} against raw FSDP2, {workload.name}", limit),)
    return Comparison(f"{workload.name}, {name}", 2, _fsdp, (workload, part), targets, share=share)


PARTS = {
    "many": _part(MANY, WHOLE, 1.0, 0.4),
    "gpt": _part(SMALL_GPT, WHOLE, 0.98),
    "step": _part(MANY, STEP, 0.35, 0.4, foreach=False),
    "fused": _part(MANY, STEP, 0.5, fused=True),
    "clip": _part(MANY, CLIP, 0.4, 0.4),
}
FSDP = section("fsdp", "FSDP2, 2 ranks over gloo", PARTS, (6.0, 60.0))

# -- DDP, fairscale's own wrappers, and the backend that shards the optimizer's state ----------------------------------

STOCK = "fairscale, `reduce_buffer_size=0`"
BUCKETS = "fairscale, `reduce_buffer_size=2**23` and its own `zero_grad()`"


def _by_fairscale(buffer: int) -> Step:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model, _ = MANY.build()
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=RATE)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=buffer)
    if buffer:  # The optimizer's own would take the gradients out of the buckets, and stale buckets would be sent.
        optimizer.zero_grad = wrapped.zero_grad
    return plain_step(MANY, wrapped, optimizer)


def _sharded() -> Makers:
    workload = with_adamw(MANY)
    return {
        "raw DDP": partial(by_library, RAW, workload),
        ACCEL: lambda: plain_step(workload, *by_accel(workload, "sharded")),
        STOCK: partial(_by_fairscale, 0),
        BUCKETS: partial(_by_fairscale, 2**23),
    }


def _ranks(world: int, limit: float, share: float) -> Comparison:
    targets = (
        Target(f"step of `sharded` against raw DDP, {world} ranks", limit, clocks=("cpu",)),
        Target(f"step of `sharded` against stock fairscale without buckets, {world} ranks", 1.02, STOCK),
    )
    return Comparison(f"{world} ranks: 500 tensors, AdamW", world, _sharded, targets=targets, share=share)


RANKS = {"2 ranks": _ranks(2, 0.86, 4.0), "4 ranks": _ranks(4, 0.80, 3.0)}
SHARDED = section("sharded", "Sharded optimizer state", RANKS, (8.0, 60.0))

# -- deepspeed.initialize with engine.backward and engine.step ---------------------------------------------------------

#: With ``offload_optimizer``, by DeepSpeed's Adam or by torch's.
CPU_ADAM, ADAMW = "DeepSpeed's Adam", "torch's AdamW"


def _cpu_adam(model: nn.Module) -> Any:
    adam = quiet.library("deepspeed.ops.adam").DeepSpeedCPUAdam
    return adam(model.parameters(), lr=RATE, weight_decay=0.01)


def _raw_deepspeed(workload: Workload, stage: int, offload: bool) -> Step:
    model, optimizer = workload.build()
    config = Configuration(DeepSpeed(stage=stage)).complete(list(model.parameters()))
    # accel sets this for a raw loop. DeepSpeed's own loop does without.
    del config["managed_gradient_accumulation"]
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed: Any = quiet._import()
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    if stage == 3:
        # DeepSpeed's default for the whole process, which accel's engine replaces by its own.
        torch.nn.functional.linear = quiet.library("deepspeed.runtime.zero.linear").zero3_linear_wrap
    inputs, targets = workload.batch()
    loss_of = workload.loss

    def step() -> None:
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()

    return step


def _deepspeed(workload: Workload, stage: int, offload: bool) -> Makers:
    def handle() -> Step:
        return plain_step(workload, *by_accel(workload, DeepSpeed(stage=stage, offload_optimizer=offload)))

    return {"raw DeepSpeed": partial(_raw_deepspeed, workload, stage, offload), ACCEL: handle}


def _stages() -> dict[str, Comparison]:
    found = {}
    cases = [(stage, "") for stage in (1, 2, 3)] + [
        (stage, offload) for stage in (2, 3) for offload in (CPU_ADAM, ADAMW)
    ]
    for stage, offload in cases:
        for workload in (with_adamw(MANY), SMALL_GPT):
            key = f"{workload.name}, ZeRO {stage}" + (f", offload, {offload}" if offload else "")
            targets = (Target(f"step against raw DeepSpeed, {key}", 1.05 if offload else 1.02),)
            trained = replace(workload, optimizer=_cpu_adam) if offload == CPU_ADAM else workload
            found[key] = Comparison(key, 2, _deepspeed, (trained, stage, bool(offload)), targets)
    return found


DEEPSPEED = section("deepspeed", "DeepSpeed ZeRO, 2 ranks over gloo", _stages(), (5.0, 60.0))

# -- single verbs, and the import ---------------------------------------------------------------------------------------

NUM_IMPORTS = 9
SETUP = "repeated `accel.setup(model, optimizer, loader)`"


def _setup_again(seconds: float) -> dict[str, Times]:
    model, optimizer = MANY.build()
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)))
    accel.setup(model, optimizer, loader, devices="cpu")
    again = partial(accel.setup, model, optimizer, loader)
    return interleave([Contender(SETUP, lambda: again)], seconds, 200)


def _imports(packages: list[str]) -> dict[str, Times]:
    """Import each library in fresh processes after torch, the libraries taking turns."""
    times: dict[str, Times] = {package: {} for package in packages}
    code = (
        "import torch, time\nw, c = time.perf_counter(), time.process_time()\nimport {package}\n"
        "print(time.perf_counter() - w, time.process_time() - c)"
    )
    # Python keeps bytecode unless told otherwise. The first round makes what is missing and does not count.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(NUM_IMPORTS + 1):
        for package in packages:
            command = [sys.executable, "-c", code.format(package=package)]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            wall, cpu = output.split()
            if number:
                note(times[package], {"wall": float(wall), "cpu": float(cpu)})
    return times


def _measure_costs(quick: bool) -> Data:
    packages = [ACCEL, *([] if quick else [RIVALS[name] for name in installed_rivals()])]
    setup = summarise(run(1, _setup_again, 2.0 if quick else 12.0)[0], SETUP)
    return {"rows": setup | summarise(_imports(packages), ACCEL), "failed": {}}


def _tell_costs(data: Data) -> list[str]:
    lines = []
    for name, row in data["rows"].items():
        title = name if name == SETUP else f"`import {name}`"
        lines.append([title, *(f"{1e3 * row[clock]['median']:.4f}" for clock in ("wall", "cpu"))])
    return [table(["", "wall, ms", "cpu, ms"], lines)]


def _judge_costs(data: Data) -> Iterator[Verdict]:
    """Hold milliseconds against their limits: each object is looked up again, and accel's own modules are built."""
    yield judged(SETUP, 1e3 * data["rows"][SETUP]["cpu"]["median"], 0.05, "{:.3f} ms")
    over = 1e3 * data["rows"][ACCEL]["wall"]["median"]
    yield judged("`import accel` over `import torch`", over, 50.0, "{:.3f} ms")


COSTS = Section("costs", "Costs of single verbs", _measure_costs, _tell_costs, _judge_costs)

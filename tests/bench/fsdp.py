"""Section ``fsdp``: accel beside torch's own ``fully_shard``, with the same modules gathered as one."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accel
from accel.engines.fsdp.wrap import blocks

from .contenders import by_accel, plain_step
from .section import Data, Panel, Section, Verdict
from .steps import Comparison, Makers, Step, compare, ratio_panel, ratio_verdicts, tell
from .workloads import Workload, with_adamw

RAW, AGAIN, ACCEL = "raw `fully_shard`", "raw `fully_shard`, again", 'accel, `backend="fsdp"`'
NAMES = ("many", "gpt")
WORLD = 2
ABOUT = """`fully_shard` on the modules that accel's rule chooses (the blocks of the GPT, and the whole), AdamW on the \
sharded parameters, 2 ranks over gloo, fp32; times in microseconds per step."""


def raw_fsdp(workload: Workload) -> Step:
    model, _ = workload.build()
    mesh = init_device_mesh("cpu", (WORLD,))
    for _, block in blocks(model, None):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(workload, model, workload.optimizer(model))


def _makers(name: str) -> Makers:
    workload = with_adamw(name)
    return {
        RAW: lambda: raw_fsdp(workload),
        AGAIN: lambda: raw_fsdp(workload),
        ACCEL: lambda: by_accel(workload, accel.FSDP()),
    }


def _measure(quick: bool) -> Data:
    return compare({n: Comparison(with_adamw(n).title, WORLD, _makers, (n,)) for n in NAMES}, 6.0 if quick else 60.0)


def _judge(data: Data) -> Iterator[Verdict]:
    for name in NAMES:
        yield from ratio_verdicts(data, name, f"step against raw FSDP2, {name}", ACCEL, RAW, AGAIN, 1.02)


def _draw(data: Data) -> list[Panel]:
    return [ratio_panel(data, "FSDP2, 2 ranks", [RAW, AGAIN, ACCEL], 1.02)]


SECTION = Section("fsdp", "FSDP2, 2 ranks over gloo", _measure, lambda data: [ABOUT, *tell(data)], _judge, _draw)

"""One rank of the job that section ``restart`` kills, under torchrun: notes when it comes to which phase."""

import os
import resource
import time

#: Of all processes of the machine, and since the same moment.
CLOCK = time.CLOCK_BOOTTIME
with open("/proc/self/stat") as status:
    SPAWNED = int(status.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
#: Each phase by the moment of its end, and by then this process's CPU time and pages that it was the first to touch.
MARKS = [("torchrun", SPAWNED, 0.0, 0)]


def mark(phase: str) -> None:
    """The phase has ended."""
    touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    MARKS.append((phase, time.clock_gettime(CLOCK), time.process_time(), touched))


import contextlib  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from tests.bench.workloads import GPT, adamw  # noqa: E402

mark("import torch")
#: Model, optimizer, loader, and what saves them.
Job = tuple[Any, Any, Any, Callable[[], Any]]
SAVED_AT, KILLED_AT, STEPS = 2, 3, 2
CONTEXT = 32


def build(blocks: int) -> tuple[GPT, torch.optim.Optimizer, Any]:
    """What the user's program makes, the same for all contenders."""
    torch.manual_seed(0)
    model = GPT(768, blocks, CONTEXT)
    tokens = torch.randint(256, (64, CONTEXT + 1))
    return model, adamw(model), DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 2)


def accelerated(backend: str, blocks: int, folder: Path) -> Job:
    import accel

    mark("import library")
    backend, _, deferred = backend.partition(", ")
    last = accel.latest(folder / "saved")
    with accel.deferred_init(weights=last) if deferred else contextlib.nullcontext():
        model, optimizer, loader = build(blocks)
    mark("model")
    accel.init()
    mark("process group")
    model, optimizer, loader = accel.setup(model, optimizer, loader, backend=backend, devices="cpu")
    mark("setup")
    state = {"model": model, "optimizer": optimizer}
    if last:
        # What is deferred has its weights.
        accel.load(last, {"optimizer": optimizer} if deferred else state)
    mark("load")
    return model, optimizer, loader, lambda: accel.save(state, folder / "saved")


def raw_ddp(blocks: int, folder: Path) -> Job:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    mark("import library")
    raw, optimizer, loader = build(blocks)
    mark("model")
    dist.init_process_group("gloo")
    mark("process group")
    model = DistributedDataParallel(raw, gradient_as_bucket_view=True)
    mark("setup")
    path = folder / "saved.pt"
    if path.exists():
        saved = torch.load(path, mmap=True, weights_only=True)
        raw.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    mark("load")

    def save() -> None:
        if dist.get_rank() == 0:
            torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()

    return model, optimizer, loader, save


def raw_fsdp(blocks: int, folder: Path) -> Job:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    mark("import library")
    model, optimizer, loader = build(blocks)
    mark("model")
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    mark("process group")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    mark("setup")
    path = folder / "saved"
    if path.exists():
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    mark("load")

    def save() -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)

    return model, optimizer, loader, save


def read_bytes(state: list[torch.Tensor], path: Path) -> float:
    """Seconds that as many bytes as this rank has loaded take from files into new memory."""
    import torch.distributed as dist

    sizes = [t.numel() * t.element_size() for t in state]
    files = [os.open(file, os.O_RDONLY) for file in path.iterdir() if file.suffix == ".safetensors"]
    spots = [(fd, at) for fd in files for at in range(0, os.fstat(fd).st_size, 8 << 20)]
    dist.barrier()
    begin, number, kept = time.perf_counter(), int(os.environ["RANK"]), []
    for size in sizes:
        view = memoryview(torch.empty(size, dtype=torch.uint8).numpy())
        kept.append(view)
        for at in range(0, size, 8 << 20):
            fd, offset = spots[number % len(spots)]
            os.preadv(fd, [view[at : at + (8 << 20)]], offset)
            number += 1
    return time.perf_counter() - begin


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def main() -> None:
    contender, blocks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    kind, _, backend = contender.partition(" ")
    if kind == "accel":
        model, optimizer, loader, save = accelerated(backend, blocks, folder)
    else:
        model, optimizer, loader, save = (raw_ddp if backend == "DDP" else raw_fsdp)(blocks, folder)
    step = 0
    batches = iter(loader)
    while attempt == 0 or step < STEPS:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        mark("first step" if step == 1 else "next step")
        if attempt == 0 and step == SAVED_AT:
            save()
        if attempt == 0 and step == KILLED_AT and rank == 1:
            note(folder, attempt, rank)
            os.kill(os.getpid(), signal.SIGKILL)
    parts = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    if kind == "accel":
        MARKS.append(("bytes", read_bytes([local(t) for t in parts if torch.is_tensor(t)], folder / "saved"), 0.0, 0))
    note(folder, attempt, rank)


def note(folder: Path, attempt: int, rank: int) -> None:
    (folder / f"marks-{attempt}-{rank}.json").write_text(json.dumps(MARKS))


if __name__ == "__main__":
    main()

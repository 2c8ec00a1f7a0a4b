"""docs/migrating.md: what another library trains and what accel trains are the same weights."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import accel
from tests.interpreters import executable
from tests.programs import ROOT

PAGE = ROOT / "docs/migrating.md"
PACKAGES = {"Raw DistributedDataParallel": "torch", "Accelerate": "accelerate", "Fabric": "lightning_fabric"}

#: What both sections call.
SHARED = """
import os
import tempfile
import time


def folder():
    return accel.broadcast(tempfile.mkdtemp(), objects=True)


def first(context):
    path = f"{folder()}/made"
    with context():
        time.sleep(0.3 * accel.is_main())
        made = not os.path.exists(path)
        open(path, "a").close()
    return made


def two_backwards(prepare, no_sync):
    net, optimizer = build()
    model, optimizer = prepare(net, optimizer)[:2]
    with no_sync(model):
        F.mse_loss(model(inputs + accel.rank()), data.tensors[1]).backward()
    F.mse_loss(model(inputs), data.tensors[1]).backward()
    optimizer.step()
    return [p.detach() for p in net.parameters()]
"""
#: The rows: each function gives what the library does and what accel does.
SAME = {
    "Accelerate": """

from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, broadcast, broadcast_object_list
from accelerate.utils import gather_object, set_seed
from safetensors.torch import load_file

peer = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.arange(6.0).reshape(3, 2) + 10 * accel.rank()
padded = torch.ones(2, 3 + accel.rank())


def gather_for_metrics(prepare, gather):
    loader = prepare(DataLoader(torch.arange(11.0), batch_size=2))
    return torch.cat([gather(batch) for batch in loader])


def split_by_peer():
    with peer.split_between_processes(list(range(6))) as mine:
        return mine


def trigger():
    if peer.process_index == 1:
        peer.set_trigger()
    return peer.check_trigger()


def accumulated_by_peer():
    net, optimizer = build()
    model, optimizer, loader = peer.prepare(net, optimizer, DataLoader(data, batch_size=8))
    for x, y in loader:
        with peer.accumulate(model):
            peer.backward(F.mse_loss(model(x), y))
            norm = peer.clip_grad_norm_(model.parameters(), 0.1) if peer.sync_gradients else None
            optimizer.step()
            optimizer.zero_grad()
    return norm, [p.detach() for p in net.parameters()]


def accumulated_by_accel():
    net, optimizer = build()
    model, optimizer, loader = accel.setup(net, optimizer, DataLoader(data, batch_size=8))
    for group in accel.accumulate(loader, 2):
        for x, y in group:
            (F.mse_loss(model(x), y) / len(group)).backward()
        norm = accel.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return norm, [p.detach() for p in net.parameters()]


def trained_by_peer(after=lambda model: None):
    net, optimizer = build()
    model, optimizer, loader = peer.prepare(net, optimizer, DataLoader(data, batch_size=4))
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        after(model)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def trained_by_accel(after=lambda model: None, **chosen):
    net, optimizer = build()
    model, optimizer, loader = accel.setup(net, optimizer, DataLoader(data, batch_size=4), **chosen)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        after(model)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def configured(**options):
    peer.dataloader_config = DataLoaderConfiguration(**options)
    return lambda loader: list(peer.prepare(loader))


def dealt(**options):
    options = accel.LoaderOptions(**options)
    return lambda loader: list(accel.setup(None, dataloaders=loader, loader_options=options).dataloaders)


def rest_by_accel():
    loader = accel.setup(None, dataloaders=DataLoader(torch.arange(20.0), batch_size=2)).dataloaders
    loader.skip(2)
    return list(loader)


def sent():
    words = [f"from {accel.rank()}", accel.rank()]
    broadcast_object_list(words, from_process=1)
    return words


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(24.0))


def whole():
    return DataLoader(torch.arange(11.0), batch_size=2)


def stream():
    return DataLoader(Stream(), batch_size=4)


objects = [f"of {accel.rank()}", {"rank": accel.rank()}]


def ends(loader, is_last, gather):
    found = [(is_last(), gather(batch)) for batch in loader]
    return [last for last, _ in found], len(found[-1][1])


def ends_by_peer(length):
    loader = peer.prepare(DataLoader(torch.arange(length), batch_size=4))
    state, remainder = peer.gradient_state, []

    def is_last():
        remainder.append(state.remainder)
        return state.end_of_dataloader

    lasts, rows = ends(loader, is_last, peer.gather_for_metrics)
    assert rows == remainder[-1]
    return lasts, remainder[-1]


def ends_by_accel(length):
    loader = accel.setup(None, dataloaders=DataLoader(torch.arange(length), batch_size=4)).dataloaders
    return ends(loader, lambda: loader.is_last, accel.gather_for_metrics)


def texts(loader, gather):
    return [text for batch in loader for text in gather([f"row {x:.0f}" for x in batch])]


def kept(prepare, save, load):
    net, optimizer = build()
    model, optimizer = prepare(net, optimizer)[:2]
    F.mse_loss(model(inputs), data.tensors[1]).backward()
    optimizer.step()
    path = f"{folder()}/saved"
    save(path, model, optimizer)
    state = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    load(path, model, optimizer)
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), state))
    return state


def kept_by_peer():
    alone = Accelerator(cpu=True)
    # A rank that is early would find nothing.
    save = lambda path, *_: (alone.save_state(path), alone.wait_for_everyone())
    found = kept(alone.prepare, save, lambda path, *_: alone.load_state(path))
    alone.free_memory()
    return found


def kept_by_accel():
    return kept(
        accel.setup,
        lambda path, model, optimizer: accel.save({"model": model, "optimizer": optimizer}, path),
        lambda path, model, optimizer: accel.load(path, {"model": model, "optimizer": optimizer}),
    )


def weights(prepare, write):
    net, optimizer = build()
    model = prepare(net, optimizer)[0]
    path = folder()
    write(model, path)
    accel.barrier()
    return load_file(f"{path}/model.safetensors")


def exported(model, path):
    accel.save({"model": model}, f"{path}/checkpoint")
    accel.export(f"{path}/checkpoint", path)

pairs = {
    "broadcast": (broadcast(x.clone(), from_process=1), accel.broadcast(x, src=1)),
    "broadcast_object_list": (sent() == accel.broadcast(["from 1", 1], objects=True), True),
    "gather_object": (gather_object(objects) == accel.all_gather(objects, objects=True), True),
    "even_batches": (configured(even_batches=False)(whole()), dealt(even_batches=False)(whole())),
    "split_batches": (configured(split_batches=True)(stream()), dealt(split_batches=True)(stream())),
    "dispatch_batches": (configured(dispatch_batches=True)(stream()), dealt(dispatch=True)(stream())),
    "nothing said of loaders": (configured()(whole()), dealt()(whole())),
    "skip_first_batches": (
        list(skip_first_batches(peer.prepare(DataLoader(torch.arange(20.0), batch_size=2)), 2)),
        rest_by_accel(),
    ),
    **{f"the end of {n} rows": (ends_by_peer(n), ends_by_accel(n)) for n in (10, 11, 20)},
    "gather_for_metrics of objects": (
        texts(peer.prepare(whole()), lambda rows: peer.gather_for_metrics(rows, use_gather_object=True))
        == texts(
            accel.setup(None, dataloaders=whole()).dataloaders, lambda rows: accel.gather_for_metrics(rows, objects=True)
        ),
        True,
    ),
    "main_process_first": (first(peer.main_process_first), first(accel.main_first)),
    "get_state_dict": (
        peer.get_state_dict(peer.prepare(build()[0])),
        accel.full_state_dict(accel.setup(build()[0]).model),
    ),
    "save_model": (weights(peer.prepare, peer.save_model), weights(accel.setup, exported)),
    "no_sync": (two_backwards(peer.prepare, peer.no_sync), two_backwards(accel.setup, accel.no_sync)),
    "clip_grad_value_": (
        trained_by_peer(lambda model: peer.clip_grad_value_(model.parameters(), 0.01)),
        trained_by_accel(lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)),
    ),
    "the process": (
        (peer.process_index, peer.local_process_index, peer.num_processes, peer.is_main_process, peer.is_last_process),
        (accel.rank(), accel.local_rank(), accel.world_size(), accel.is_main(), accel.rank() == accel.world_size() - 1),
    ),
    "gather": (peer.gather(x), accel.all_gather(x)),
    "gather of a number": (peer.gather(x[0, 0]), accel.all_gather(x[0, 0])),
    "gather_for_metrics": (
        gather_for_metrics(peer.prepare, peer.gather_for_metrics),
        gather_for_metrics(lambda loader: accel.setup(nn.Linear(1, 1), dataloaders=loader).dataloaders, accel.gather_for_metrics),
    ),
    "reduce": (peer.reduce(x, reduction="mean"), accel.all_reduce(x, "mean")),
    "reduce without a word": (peer.reduce(x), accel.all_reduce(x)),
    "pad_across_processes": (peer.gather(peer.pad_across_processes(padded, dim=1)), accel.all_gather(padded, pad=0)),
    "split_between_processes": (split_by_peer(), accel.split(list(range(6)))),
    "set_trigger, check_trigger": (trigger(), accel.any_rank(accel.rank() == 1)),
    "set_seed": ((set_seed(3), torch.rand(3)), (accel.seed(3), torch.rand(3))),
    "set_seed of each": (
        (set_seed(3, device_specific=True), torch.rand(3)),
        (accel.seed(3, per_rank=True), torch.rand(3)),
    ),
    "accumulate, clip_grad_norm_": (accumulated_by_peer(), accumulated_by_accel()),
    # Last: another Accelerator changes what all of them count.
    "save_state, load_state": (kept_by_peer(), kept_by_accel()),
}
""",
    "Fabric": """
from lightning_fabric import Fabric, is_wrapped

peer = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
peer.launch()
x = torch.arange(6.0).reshape(3, 2) + 10 * accel.rank()


def trained(setup, clip):
    net, optimizer = build()
    model, optimizer = setup(net, optimizer)[:2]
    F.mse_loss(model(inputs + accel.rank()), data.tensors[1]).backward()
    norm = clip(model, optimizer)
    optimizer.step()
    return norm, net, optimizer


def kept(save, load, net, optimizer):
    path = f"{folder()}/saved"
    save(path, {"net": net, "optimizer": optimizer, "step": 3})
    other, fresh = build()
    state = {"net": other, "optimizer": fresh, "step": 0}
    load(path, state)
    return state["step"], [p.detach() for p in other.parameters()], fresh.param_groups[0]["lr"]


def partly(setup, save, load):
    # Only the weights are saved, and loaded into a model that has something else beside.
    net, optimizer = build()
    path = f"{folder()}/saved"
    save(path, {"net": setup(net, optimizer)[0]})
    other = build()[0]
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(7.0)
    other.more = nn.Linear(1, 1)
    load(path, {"net": other})
    return [other.get_parameter(name).detach() for name, _ in net.named_parameters()]


def is_weight(name):
    return name.endswith("weight")


def raw(load):
    net, other = build()[0], build()[0]
    path = folder()
    torch.save(net.state_dict(), f"{path}/{accel.rank()}")
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    load(f"{path}/{accel.rank()}", other)
    return [p.detach() for p in other.parameters()]


whole = DataLoader(torch.arange(11.0), batch_size=2)


def gradient(gather):
    y = (x + 1).requires_grad_()
    gather(y).square().sum().backward()
    return y.grad


def clipped(setup, clip):
    _, net, _ = trained(setup, clip)
    return [p.detach() for p in net.parameters()]


def by_peer():
    norm, net, optimizer = trained(peer.setup, lambda model, optimizer: peer.clip_gradients(model, optimizer, max_norm=0.1))
    return norm, kept(peer.save, peer.load, net, optimizer)


def by_accel():
    norm, net, optimizer = trained(accel.setup, lambda model, _: accel.clip_grad_norm_(model, 0.1))
    return norm, kept(lambda path, state: accel.save(state, path), accel.load, net, optimizer)


pairs = {
    "all_gather": (peer.all_gather(x), accel.all_gather(x[None])),
    "all_gather with gradients": (
        gradient(lambda y: peer.all_gather(y, sync_grads=True)),
        gradient(lambda y: accel.all_gather(y, gradients=True)),
    ),
    "all_reduce of a sum": (peer.all_reduce(x.clone(), reduce_op="sum"), accel.all_reduce(x)),
    "no_backward_sync": (
        two_backwards(peer.setup, peer.no_backward_sync),
        two_backwards(accel.setup, accel.no_sync),
    ),
    "clip_gradients by value": (
        clipped(peer.setup, lambda model, optimizer: peer.clip_gradients(model, optimizer, clip_val=0.01)),
        clipped(accel.setup, lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)),
    ),
    "rank_zero_first": (first(lambda: peer.rank_zero_first(local=True)), first(lambda: accel.main_first(local=True))),
    "is_wrapped": (
        [is_wrapped(one) for net in (build()[0],) for one in (net, peer.setup_module(net))],
        [accel.unwrap(one) is not one for net in (build()[0],) for one in (net, accel.setup(net).model)],
    ),
    "save(filter), load(strict=False)": (
        partly(
            peer.setup,
            lambda path, state: peer.save(path, state, filter={"net": lambda name, value: is_weight(name)}),
            lambda path, state: peer.load(path, state, strict=False),
        ),
        partly(
            accel.setup,
            lambda path, state: accel.save(state, path, filter=is_weight),
            lambda path, state: accel.load(path, state, strict=False),
        ),
    ),
    "load_raw": (raw(peer.load_raw), raw(lambda path, model: model.load_state_dict(torch.load(path)))),
    "use_distributed_sampler": (
        list(peer.setup_dataloaders(whole, use_distributed_sampler=False)),
        list(accel.setup(None, dataloaders=whole, loader_options=accel.LoaderOptions(shard=False)).dataloaders),
    ),
    "the process": (
        (peer.global_rank, peer.local_rank, peer.world_size, peer.is_global_zero, peer.node_rank),
        (accel.rank(), accel.local_rank(), accel.world_size(), accel.is_main(), int(os.environ["GROUP_RANK"])),
    ),
    "all_reduce": (peer.all_reduce(x.clone()), accel.all_reduce(x, "mean")),
    "broadcast": (peer.broadcast(x, src=1), accel.broadcast(x, src=1)),
    "broadcast of an object": (peer.broadcast([x, "a"], src=1)[:1], accel.broadcast([x, "a"], src=1, objects=True)[:1]),
    "seed_everything": ((peer.seed_everything(3, verbose=False) and None, torch.rand(3)), (accel.seed(3), torch.rand(3))),
    "clip_gradients, save, load": (by_peer(), by_accel()),
}
""",
}
COMPARE = """
for _name, (_theirs, _ours) in pairs.items():
    try:
        torch.testing.assert_close(_ours, _theirs, check_device=False)
    except AssertionError as error:
        raise AssertionError(f"{_name}: {_theirs} and {_ours}") from error
accel.teardown()
"""
REPORT = """
import json as _json
_weights = {name: [p.detach().flatten().tolist() for p in net.parameters()] for name, net in _nets.items()}
if accel.is_main():
    print("weights:", _json.dumps(_weights))
"""


def blocks(text: str) -> list[tuple[str, str]]:
    """Kind and source of the fenced blocks."""
    return re.findall(r"^```(py|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def script_of(section: str) -> str:
    """The page's common lines, then the section before and after, and what both trained."""
    head, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = next(s for s in sections if s.startswith(f"{section}\n"))
    (_, common), (before_kind, before), (after_kind, after) = blocks(head)[0], *blocks(text)
    assert (before_kind, after_kind) == ("py", "python")
    rows = [SHARED, SAME[section], COMPARE] if section in SAME else []
    parts = [
        common,
        *rows,
        "_nets = {'start': build()[0]}",
        before,
        "_nets['before'] = net",
        after,
        "_nets['after'] = net",
    ]
    return "\n".join([*parts, REPORT])


def section_of(name: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("section", SAME)
def test_no_public_name_of_the_library_is_missing(section: str) -> None:
    owner = getattr(pytest.importorskip(PACKAGES[section]), {"Accelerate": "Accelerator"}.get(section, section))
    tables = [line for line in section_of(section).splitlines() if line.startswith("|")]
    code = " ".join(re.findall(r"`[^`]+`", "\n".join(tables)))
    names = [name for name in dir(owner) if not name.startswith("_")]
    assert len(names) > 30
    assert not [name for name in names if not re.search(rf"\.{name}\b", code)]
    assert not [name for name in list(inspect.signature(owner).parameters) if not re.search(rf"\b{name}\b", code)]


def test_names_of_accel_on_the_page_are_public() -> None:
    names = set(re.findall(r"\baccel\.(\w+)", PAGE.read_text(encoding="utf-8")))
    assert len(names) > 30
    assert names <= set(accel.__all__)


def test_each_section_is_tested() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    # tests/checkpoint/test_other_libraries.py runs the last section.
    assert headings == [*PACKAGES, "Load a checkpoint from another library"]


@pytest.mark.parametrize("section", PACKAGES)
def test_before_and_after_train_the_same_weights(section: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[section]) is None:
        pytest.skip(f"{PACKAGES[section]} is not installed")
    script = tmp_path / "both.py"
    script.write_text(script_of(section))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL_")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": executable()}
    command = [executable(), "-m", "accel", "run", "--processes", "2", str(script)]
    out = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    weights = json.loads(out.stdout.partition("weights:")[2].splitlines()[0])
    flat = {name: [x for p in parameters for x in p] for name, parameters in weights.items()}
    assert max(abs(a - b) for a, b in zip(flat["before"], flat["start"], strict=True)) > 1e-2
    assert flat["after"] == pytest.approx(flat["before"], abs=1e-6)

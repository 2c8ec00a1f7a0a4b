"""docs/migrating.md: what another library trains and what accel trains are the same weights."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
from pathlib import Path

import pytest

import accel
from tests.interpreters import executable
from tests.programs import ROOT, clean_environ

PAGE = ROOT / "docs/migrating.md"
PACKAGES = {"Raw DistributedDataParallel": "torch", "Accelerate": "accelerate", "Fabric": "lightning_fabric"}

#: What both sections call.
SHARED = """
import os


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

peer = Accelerator(cpu=True, gradient_accumulation_steps=2)


def split_by_peer():
    with peer.split_between_processes(list(range(6))) as mine:
        return mine


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


def loader_of(count):
    return DataLoader(torch.arange(float(count)), batch_size=2)


def by_accel(count):
    return accel.setup(None, dataloaders=loader_of(count)).dataloaders


skipping, metrics, peer_metrics = by_accel(20), by_accel(11), peer.prepare(loader_of(11))
skipping.skip(2)
pairs = {
    "prepare of a loader": (list(peer.prepare(loader_of(11))), list(by_accel(11))),
    "skip_first_batches": (list(skip_first_batches(peer.prepare(loader_of(20)), 2)), list(skipping)),
    "no_sync": (two_backwards(peer.prepare, peer.no_sync), two_backwards(accel.setup, accel.no_sync)),
    "gather_for_metrics": (
        torch.cat([peer.gather_for_metrics(batch) for batch in peer_metrics]),
        torch.cat([accel.gather_for_metrics(batch) for batch in metrics]),
    ),
    "split_between_processes": (split_by_peer(), accel.split(list(range(6)))),
    "accumulate, clip_grad_norm_": (accumulated_by_peer(), accumulated_by_accel()),
}
""",
    "Fabric": """
from lightning_fabric import Fabric

peer = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
peer.launch()


def trained(setup, clip):
    net, optimizer = build()
    model, optimizer = setup(net, optimizer)[:2]
    F.mse_loss(model(inputs + accel.rank()), data.tensors[1]).backward()
    norm = clip(model, optimizer)
    optimizer.step()
    return norm, [p.detach() for p in net.parameters()]


pairs = {
    "no_backward_sync": (
        two_backwards(peer.setup, peer.no_backward_sync),
        two_backwards(accel.setup, accel.no_sync),
    ),
    "clip_gradients": (
        trained(peer.setup, lambda model, optimizer: peer.clip_gradients(model, optimizer, max_norm=0.1)),
        trained(accel.setup, lambda model, _: accel.clip_grad_norm_(model, 0.1)),
    ),
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


def script_of(section: str) -> str:
    """The page's common lines, then the section before and after, and what both trained."""
    head, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = next(s for s in sections if s.startswith(f"{section}\n"))
    (common,) = re.findall(r"^```python\n(.*?)^```$", head, re.MULTILINE | re.DOTALL)
    (before,), (after,) = (
        re.findall(rf"^```{k}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for k in ("py", "python")
    )
    rows = [SHARED, SAME[section], COMPARE] if section in SAME else []
    start, middle, end = "_nets = {'start': build()[0]}", "_nets['before'] = net", "_nets['after'] = net"
    return "\n".join([common, *rows, start, before, middle, after, end, REPORT])


@pytest.mark.parametrize("section", SAME)
def test_no_public_name_is_missing(section: str) -> None:
    owner = getattr(pytest.importorskip(PACKAGES[section]), {"Accelerate": "Accelerator"}.get(section, section))
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    tables = [line for line in text.splitlines() if line.startswith("|")]
    code = " ".join(re.findall(r"`[^`]+`", "\n".join(tables)))
    names = [name for name in dir(owner) if not name.startswith("_")]
    assert len(names) > 30
    assert not [name for name in names if not re.search(rf"\.{name}\b", code)]
    assert not [name for name in list(inspect.signature(owner).parameters) if not re.search(rf"\b{name}\b", code)]


def test_names_of_accel_are_public() -> None:
    names = set(re.findall(r"\baccel\.(\w+)", PAGE.read_text(encoding="utf-8")))
    assert len(names) > 30
    assert names <= set(accel.__all__)


def test_each_section_is_tested() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    # tests/checkpoint/test_other_libraries.py runs the first, tests/public_loops.py the other.
    assert headings == [*PACKAGES, "Load a checkpoint from another library", "Public training scripts"]


@pytest.mark.parametrize("section", PACKAGES)
def test_before_and_after_train_equally(section: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[section]) is None:
        pytest.skip(f"{PACKAGES[section]} is not installed")
    script = tmp_path / "both.py"
    script.write_text(script_of(section))
    environment = clean_environ() | {"PYTHON_EXEC": executable()}
    command = [executable(), "-m", "accel", "run", "--processes", "2", str(script)]
    out = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    weights = json.loads(out.stdout.partition("weights:")[2].splitlines()[0])
    flat = {name: [x for p in parameters for x in p] for name, parameters in weights.items()}
    assert max(abs(a - b) for a, b in zip(flat["before"], flat["start"], strict=True)) > 1e-2
    assert flat["after"] == pytest.approx(flat["before"], abs=1e-6)

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
#: The classes with a table of all of their names.
CLASSES = {"Accelerate": "Accelerator", "Fabric": "Fabric"}
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
    start, middle, end = "_nets = {'start': build()[0]}", "_nets['before'] = net", "_nets['after'] = net"
    return "\n".join([common, start, before, middle, after, end, REPORT])


@pytest.mark.parametrize("section", CLASSES)
def test_no_public_name_is_missing(section: str) -> None:
    owner = getattr(pytest.importorskip(PACKAGES[section]), CLASSES[section])
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

"""docs/migrating.md: what another library trains and what accel trains are the same weights."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.interpreters import executable
from tests.programs import ROOT

PAGE = ROOT / "docs/migrating.md"
PACKAGES = {"Raw DistributedDataParallel": "torch", "Accelerate": "accelerate", "Fabric": "lightning_fabric"}

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
    parts = [common, "_nets = {'start': build()[0]}", before, "_nets['before'] = net", after, "_nets['after'] = net"]
    return "\n".join([*parts, REPORT])


def test_each_section_is_tested() -> None:
    assert re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == list(PACKAGES)


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

"""Rules for the sources: imports go one way, backends are named in one place, public names are documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import accel
from accel.engines import ENGINES, option_names

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "accel"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}

# Entries of the package, from top to bottom: each imports only from those below its own layer.
LAYERS = [
    ["__init__", "__main__"],
    ["launch"],
    ["pickling"],
    ["batches", "commands"],
    ["verbs"],
    ["memory", "setup"],
    ["checkpoint"],
    ["registry"],
    ["engines"],
    ["gradients"],
    ["handles"],
    ["data"],
    ["deferred", "precision"],
    ["process", "shard"],
    ["facts", "trees"],
    ["errors"],
]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def imported_entries(path: Path, node: ast.ImportFrom) -> list[str]:
    """Return the entries of ``accel/`` that a relative import of this file reaches."""
    package = path.relative_to(PACKAGE).parent.parts
    target = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
    names = [target[0]] if target[0] else [alias.name for alias in node.names]
    return [name for name in names if name in LEVEL]


def test_imports_go_one_way() -> None:
    for path, tree in TREES.items():
        entry = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                for other in set(imported_entries(path, node)) - {entry}:
                    assert LEVEL[other] > LEVEL[entry], f"{path}:{node.lineno} imports {other}"


def test_backends_are_named_in_engines() -> None:
    libraries = ["deepspeed", "fairscale", "DistributedDataParallel"]
    words = {"single", "sharded", "pipeline"}  # English in a sentence
    names = re.compile(rf"\b({'|'.join([*ENGINES, *option_names(), *libraries])})\b")
    for path, tree in TREES.items():
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in () if path.is_relative_to(PACKAGE / "engines") else ast.walk(tree):
            text = getattr(node, "id", "") or getattr(node, "attr", "")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                text = node.value
            found = set(names.findall(text)) - (words if " " in text else set())
            assert not found, f"{path}:{getattr(node, 'lineno', 0)} {text}"


def test_public_names_are_documented() -> None:
    reference = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: accel\.(\w+)$", reference, re.MULTILINE)
    assert sorted([*documented, *option_names()]) == sorted(accel.__all__)


def test_import_brings_nothing_heavy() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import accel; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(out.stdout.split()) <= {"accel", "torch"}

"""The rules of the house, checked on the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import accel
from accel.engines import ENGINES, option_names
from tests import house
from tests.house import ROOT

PACKAGE = ROOT / "accel"
FILES = sorted(PACKAGE.rglob("*.py"))

# Entries of the package, from top to bottom: each imports only from those below its own layer.
LAYERS = [
    ["__init__", "__main__"],
    ["launch"],
    ["api", "commands"],
    ["memory"],
    ["checkpoint", "planning"],
    ["registry"],
    ["engines"],
    ["gradients"],
    ["handles"],
    ["data"],
    ["deferred", "precision"],
    ["process", "shard"],
    ["trees"],
    ["errors"],
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}


@pytest.mark.parametrize("module", house.FILES)
def test_imports_go_one_way(module: str) -> None:
    mine = house.room_of(module)
    for other in {house.room_of(m) for m in house.imports(module, lazy=True)} - {mine}:
        assert RANK[other] > RANK[mine], f"{module} imports {other}"


def test_no_file_imports_itself_through_others() -> None:
    assert not house.circles({module: house.imports(module, lazy=False) for module in house.FILES})


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_small(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{path.name}:{node.lineno} {node.name}"


def test_no_backend_is_named_outside_its_folder() -> None:
    names = re.compile(
        rf"\b({'|'.join([*ENGINES, *option_names(), 'deepspeed', 'fairscale', 'DistributedDataParallel'])})\b"
    )
    for path in FILES:
        if path.is_relative_to(PACKAGE / "engines"):
            continue
        tree = ast.parse(path.read_text())
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            text = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                text = node.value
            assert not names.search(text), f"{path.name}:{getattr(node, 'lineno', 0)} {text}"


#: What makes a tensor on the default device, which a program may have set to another than the one that accel means.
_MAKERS = {
    f"torch.{name}"
    for name in (
        *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
        *("tensor", "zeros"),
    )
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_new_tensor_says_where_it_lies(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _MAKERS:
            assert any(keyword.arg == "device" for keyword in node.keywords), f"{path.name}:{node.lineno}"


def test_the_public_names_are_those_of_the_reference() -> None:
    public = {n for n in dir(accel) if not n.startswith("_") and not isinstance(getattr(accel, n), type(ast))}
    assert public - {"TYPE_CHECKING", "Any", "Final"} == set(accel.__all__)
    documented = re.findall(r"^::: accel\.(\w+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted([*documented, *option_names()]) == sorted(accel.__all__)


def test_an_unknown_backend_is_no_engine_and_each_file_is_one() -> None:
    entries = (PACKAGE / "engines").iterdir()
    files = {p.stem for p in entries if not p.name.startswith("_")} - {"base"}
    assert set(ENGINES) == files
    assert all(e.name == name for name, e in ENGINES.items())
    assert sorted(name.lower() for name in option_names()) == sorted(name.replace("_", "") for name in ENGINES)
    assert {getattr(accel, name) for name in option_names()} == {engine.options_type for engine in ENGINES.values()}
    shown = (PACKAGE / "engines/_option_classes.pyi").read_text(encoding="utf-8")  # what an editor sees
    assert re.findall(r"^from \.(\w+) import (\w+) as \2$", shown, re.MULTILINE) == [
        (engine.name, engine.options_type.__name__) for engine in sorted(ENGINES.values(), key=lambda e: e.name)
    ]


def test_import_brings_nothing_heavy() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import accel; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(out.stdout.split()) <= {"accel", "torch"}


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="an unpacked archive of the sources has no list of what is tracked"
)
def test_the_top_level_is_the_users_list() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    top = {f.split("/")[0] for f in tracked if f and not f.startswith(".")}
    assert top <= {"pyproject.toml", "README.md", "accel", "tests", "examples", "docs", "Makefile", "LICENSE"}

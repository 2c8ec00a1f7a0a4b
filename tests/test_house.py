"""Rules for sources and pages: imports go one way, backends are named in one place, public names and errors are
documented, and the snippets of the documentation run.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.engines import ENGINES, option_names
from tests.distributed import run
from tests.programs import ROOT

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


# -- pages ------------------------------------------------------------------------------------------------------------

PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


def snippets(page: str) -> list[tuple[int, str]]:
    """Return the Python blocks of a page with their line numbers.

    A block is fenced by ```python alone, or stands in a comment that begins with ``<!-- run`` and readers don't see.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.finditer(r"^(?:```python|<!-- run)\n(.*?)^(?:```|-->)$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in blocks]


def execute(page: str, directory: Path) -> None:
    """Run a page's snippets in order, in one namespace and in ``directory``."""
    namespace: dict[str, Any] = {"__name__": page}
    before = Path.cwd()
    os.chdir(directory)
    try:
        for line, source in snippets(page):
            exec(compile("\n" * line + source, page, "exec"), namespace)
    finally:
        os.chdir(before)


RUNNABLE = [page for page in PAGES if snippets(page)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("page", RUNNABLE)
def test_snippets(page: str, world: int, tmp_path: Path) -> None:
    run(world, execute, page, tmp_path)


def test_every_error_has_its_section() -> None:
    assert {"docs/index.md", "docs/loop.md"} <= set(RUNNABLE)
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert not [name for name in accel.__all__ if name.endswith("Error") and f"\n### {name}\n" not in text]


def test_links_lead_to_pages() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(targets) > 5
    assert not [target for target in targets if not (ROOT / target.partition("#")[0]).exists()]
    config = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    assert not [page for page in PAGES if page.startswith("docs/") and f": {Path(page).name}\n" not in config]

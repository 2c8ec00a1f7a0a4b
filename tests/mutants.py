"""Are the tests worth their time? ``python -m tests.mutants`` breaks the package in one place at a time and runs them.

A mutant has one call statement removed, one comparison or ``not`` turned round, or ``and`` for ``or``. Each is made in a
scratch copy of the tree, and the tests of its area run there; those that live are printed, with their places.
Results go to a file of JSON lines outside of the repository, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.programs import ROOT, kill

#: What tests a file of the package, fastest first; the longest prefix counts.
AREAS: dict[str, tuple[str, ...]] = {
    "accel/": ("test_setup", "test_handles", "test_summary", "test_precision", "test_loop", "test_teardown"),
    "accel/api": ("process/test_collectives", "test_setup", "process/test_process", "test_teardown"),
    "accel/checkpoint/": ("checkpoint", "commands/test_checkpoints"),
    "accel/checkpoint/layout": (
        "checkpoint/test_layout",
        "checkpoint/test_scale",
        "checkpoint/test_files",
        "checkpoint",
    ),
    "accel/commands/": ("commands", "test_memory"),
    "accel/data/": ("data",),
    "accel/deferred": ("test_deferred", "engines/fsdp/test_memory"),
    "accel/engines/": ("engines/test_contract", "test_loop", "engines", "test_memory"),
    "accel/engines/_averaging": ("engines/test_averaging", "engines/test_updates"),
    "accel/engines/_reducer": ("engines/test_ddp", "engines/test_reducer", "test_loop"),
    "accel/engines/deepspeed": ("engines/deepspeed", "engines/test_contract"),
    "accel/engines/fsdp": ("engines/fsdp", "engines/test_contract"),
    "accel/engines/pipeline": ("engines/pipeline", "engines/test_contract"),
    "accel/engines/sharded": ("engines/sharded", "engines/test_contract", "test_loop"),
    "accel/engines/base/": ("engines/test_ddp", "engines/test_reducer", "engines/test_updates", "test_loop", "engines"),
    "accel/engines/base/drift": ("engines/test_drift",),
    "accel/engines/base/memory": ("test_memory",),
    "accel/gradients/": ("gradients", "engines/test_ddp", "engines/test_reducer", "engines/test_updates", "test_loop"),
    "accel/gradients/patches": ("gradients", "engines/fsdp", "engines/deepspeed"),
    "accel/launch": ("launch", "commands/test_commands"),
    "accel/memory": ("test_memory",),
    "accel/precision": ("test_precision",),
    "accel/process/": ("process",),
}
FLIPPED = {"==": "!=", "<": ">=", ">": "<=", "in": "not in", "is": "is not"}
FLIPPED |= {after: before for before, after in FLIPPED.items()}
OPERATOR = r"is\s+not|not\s+in|is|in|[=!<>]=|<|>"


@dataclass(frozen=True)
class Mutant:
    """A change of one place: ``before`` at a byte of a file becomes ``after``."""

    file: str
    line: int
    at: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        old = self.before.encode()
        assert source[self.at : self.at + len(old)] == old, f"{self.file} has changed"
        return source[: self.at] + self.after.encode() + source[self.at + len(old) :]


def area_of(file: str) -> list[str]:
    """The files of tests of a file, each once: pytest would take a folder before what is named of it."""
    names = AREAS[max((prefix for prefix in AREAS if file.startswith(prefix)), key=len)]
    paths = [ROOT / "tests" / (f"{name}.py" if "test_" in name else name) for name in names]
    found = [each for path in paths for each in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    return [str(path.relative_to(ROOT)) for path in dict.fromkeys(found)]


def _is_text(node: ast.AST) -> bool:
    """Whether nothing but types and texts for people come of it."""
    if isinstance(node, ast.Call):
        return bool(re.match(r"_?logger\.|logging\.|warnings\.warn|print", ast.unparse(node.func)))
    return isinstance(node, ast.JoinedStr | ast.Raise) or (
        isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    )


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that do something."""
    if not _is_text(node):
        yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from _live(child)


class _Text:
    """The places of nodes in a source."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.rows = [0]
        for row in source.splitlines(keepends=True):
            self.rows.append(self.rows[-1] + len(row))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.rows[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self.rows[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def between(self, left: ast.expr, right: ast.expr, pattern: str) -> tuple[int, str]:
        """Where an operator is, and how it is written."""
        found = re.search(pattern, self.source[self.end(left) : self.start(right)].decode())
        assert found is not None
        return self.end(left) + found.start(), found[0]

    def changes(self, node: ast.AST) -> Iterator[tuple[int, str, str]]:
        """What can be changed at a node: the place, what is there, and what will be."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_text(node.value):
            yield self.start(node), self.source[self.start(node) : self.end(node)].decode(), "pass"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            at, operator = self.between(node.left, node.comparators[0], OPERATOR)
            yield at, operator, FLIPPED[" ".join(operator.split())]
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield self.between(left, right, rf"\b{word}\b")[0], word, other
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self.start(node), "not", ""


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """All that can be made of a file."""
    text = _Text(source)
    changes = [change for node in _live(ast.parse(source)) for change in text.changes(node)]
    return [Mutant(file, source[:at].count(b"\n") + 1, at, before, after) for at, before, after in changes]


def copy_tree(target: Path) -> None:
    """What git tracks, as it is in the checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def test(tree: Path, paths: list[str], timeout: float) -> tuple[str, str]:
    """``lived``, ``killed`` or ``hung``; and by which test it was killed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
    environ = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as out:
        process = psutil.Popen(command, cwd=tree, env=environ, stdout=out, stderr=subprocess.STDOUT)
        try:
            status = process.wait(timeout)
        except psutil.TimeoutExpired:
            return "hung", ""
        finally:
            kill(process)
        out.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", out.read(), re.MULTILINE)
    return ("lived" if status == 0 else "killed"), failed[1] if failed else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--only", default="accel/", help="a file or folder, as accel/gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the tests of one mutant")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "accel-mutants.jsonl"))
    options = parser.parse_args(arguments)
    if options.results.resolve().is_relative_to(ROOT):
        parser.error(f"--results {options.results}: expected a file outside of the repository")

    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "accel").rglob("*.py"))
    possible = [m for f in files if f.startswith(options.only) for m in mutants_of(f, (ROOT / f).read_bytes())]
    chosen = random.Random(options.seed).sample(possible, min(options.count, len(possible)))
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {json.dumps(row["mutant"]): row for row in map(json.loads, lines)}
    print(f"{len(chosen)} of {len(possible)} mutants", flush=True)
    with tempfile.TemporaryDirectory(prefix="accel-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for mutant in chosen:
            key = json.dumps(asdict(mutant))
            if key not in done:
                done[key] = _try(tree, mutant, options.timeout)
                with options.results.open("a") as file:
                    file.write(json.dumps(done[key]) + "\n")
            row = done[key]
            if row["result"] not in ("killed", "hung"):
                print(
                    f"{mutant.file}:{mutant.line}: {row['result']}: {mutant.before!r} -> {mutant.after!r}", flush=True
                )
    results = [done[json.dumps(asdict(mutant))]["result"] for mutant in chosen]
    print(", ".join(f"{results.count(name)} {name}" for name in ("killed", "hung", "lived", "unknown")))
    return 0


def _try(tree: Path, mutant: Mutant, timeout: float) -> dict[str, object]:
    path, begin = tree / mutant.file, time.monotonic()
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        result, by = test(tree, area_of(mutant.file), timeout)
    finally:
        path.write_bytes(source)
    if result == "killed" and not _passes(tree, by, timeout):
        result = "unknown"  # the test fails without the mutant too
    return {"mutant": asdict(mutant), "result": result, "by": by, "seconds": round(time.monotonic() - begin, 1)}


@functools.cache
def _passes(tree: Path, name: str, timeout: float) -> bool:
    """Whether a test passes in an unchanged tree; one that could not be collected has no name of its own."""
    return not name or test(tree, [name], timeout)[0] == "lived"


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # background jobs of a shell begin with the latter ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())

"""Are the tests worth their time? ``python -m tests.mutants`` breaks the package in one place at a time and runs them.

A mutant has one call statement removed, one comparison or ``not`` turned round, or ``and`` for ``or``. Each is made in a
copy of the checkout, and tests that run its line run there; those that live are printed, with their places.
Copies and results lie in a folder outside of the repository: a run that was cut off goes on where it was, with the checkout
as it was. A new folder begins with a run of all tests that records which lines each of them runs (``tests/lines.py``).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pickle
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import lines
from tests.programs import ROOT, kill

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


def test(tree: Path, tests: list[str], timeout: float) -> tuple[str, str]:
    """``lived``, ``killed`` or ``hung``; and by which test it was killed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
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


def judge(tree: Path, mutant: Mutant, tests: list[str], timeout: float) -> dict[str, Any]:
    """What the tests say of a mutant, in a copy of the checkout."""
    path, begin = tree / mutant.file, time.monotonic()
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        result, by = test(tree, tests, timeout) if tests else ("unseen", "")
    finally:
        path.write_bytes(source)
    return {"mutant": asdict(mutant), "result": result, "by": by, "seconds": round(time.monotonic() - begin, 1)}


def judge_all(
    trees: list[Path], chosen: list[Mutant], record: lines.Record, options: argparse.Namespace
) -> Counter[str]:
    """Judge those that have no result yet, some at a time; print those that no test kills."""
    log = options.results / "mutants.jsonl"
    rows = [json.loads(row) for row in log.read_text().splitlines()] if log.exists() else []
    done = {Mutant(**row["mutant"]): row for row in rows}
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def take(mutant: Mutant) -> dict[str, Any]:
        if mutant in done:
            return done[mutant]
        tree = free.get()
        try:
            tests = record.select(mutant.file, mutant.line, options.seconds)
            row = judge(tree, mutant, tests, options.timeout)
        finally:
            free.put(tree)
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    results: Counter[str] = Counter()
    with ThreadPoolExecutor(len(trees)) as pool:
        for mutant, row in zip(chosen, pool.map(take, chosen), strict=True):
            results[row["result"]] += 1
            if row["result"] not in ("killed", "hung"):
                change = f"{mutant.before!r} -> {mutant.after!r}"
                print(f"{mutant.file}:{mutant.line}: {row['result']}: {change}", flush=True)
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--only", default="accel/", help="a file or folder, as accel/gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="what the tests of one mutant take, when none fails")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which they hang")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "accel-mutants"), help="a folder")
    options = parser.parse_args(arguments)
    if options.results.resolve().is_relative_to(ROOT):
        parser.error(f"--results {options.results}: expected a folder outside of the repository")

    options.results.mkdir(exist_ok=True)
    trees = [options.results / f"tree{index}" for index in range(options.workers)]
    for tree in trees:
        if not tree.exists():
            copy_tree(tree)
    recorded = options.results / "lines"
    if not recorded.exists():
        recorded.write_bytes(pickle.dumps(lines.record(trees[0], options.workers + 1)))
    names = sorted(str(path.relative_to(trees[0])) for path in (trees[0] / "accel").rglob("*.py"))
    possible = [m for n in names if n.startswith(options.only) for m in mutants_of(n, (trees[0] / n).read_bytes())]
    chosen = random.Random(options.seed).sample(possible, min(options.count, len(possible)))
    print(f"{len(chosen)} of {len(possible)} mutants", flush=True)
    results = judge_all(trees, chosen, pickle.loads(recorded.read_bytes()), options)
    print(", ".join(f"{count} {result}" for result, count in results.most_common()))
    return 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # background jobs of a shell begin with the latter ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())

"""The measures of the house: ``python -m tests.house`` reads the sources, counts and prints.

python -m tests.house -v        with the names behind the numbers
python -m tests.house --calls   instead, runs: the calls that a save, a load and a training step make; -v lists them
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "accel"


def module_of(path: Path) -> str:
    """A file's name as it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """What is in the files."""
    return {module: ast.parse(path.read_text()) for module, path in FILES.items()}


def room_of(module: str) -> str:
    """The entry of ``accel/`` that a module is, or lies in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(module: str, *, lazy: bool) -> set[str]:
    """The modules of accel that one imports: at its start, and with ``lazy`` also in functions and for types."""
    found: set[str] = set()
    top = [n for n in trees()[module].body if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in ast.walk(trees()[module]) if lazy else top:
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name in FILES}
        elif isinstance(node, ast.ImportFrom):
            package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            base = ".".join(filter(None, (package if node.level else "", node.module or "")))
            inner = {f"{base}.{a.name}" for a in node.names} & FILES.keys()
            found |= inner
            if base in FILES and len(inner) < len(node.names):
                found.add(base)
    return found - {module}


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other (Tarjan's strongly connected components of two or more)."""
    numbers: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        numbers[node] = low[node] = len(numbers)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in numbers:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == numbers[node]:
            group = stack[stack.index(node) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(arrows):
        if node not in numbers:
            visit(node)
    return found


def rooms() -> dict[str, set[str]]:
    """The entries of ``accel/``, and which of the others each imports."""
    arrows: dict[str, set[str]] = {room_of(m): set() for m in FILES}
    for module in FILES:
        arrows[room_of(module)] |= {room_of(other) for other in imports(module, lazy=True)} - {room_of(module)}
    return arrows


def floors(arrows: Mapping[str, Iterable[str]]) -> int:
    """How many rooms the longest way down passes; where there is a circle, that of what is left without it."""
    inside = {room for circle in circles(arrows) for room in circle}
    heights: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max((height(o) for o in arrows[room] if o not in inside), default=0)
        return heights[room]

    return max(height(room) for room in arrows if room not in inside)


def classes_defined_again() -> dict[str, int]:
    """Names of classes at the top of more than one file."""
    names = Counter(n.name for tree in trees().values() for n in tree.body if isinstance(n, ast.ClassDef))
    return {name: count for name, count in sorted(names.items()) if count > 1}


def one_importer() -> list[str]:
    """Files that one other file alone imports; backends are found by their names."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in FILES:
        for other in imports(module, lazy=True):
            importers[other].add(module)
    backends = {m for m in FILES if re.fullmatch(r"accel\.engines\.[a-z]\w*", m)}
    return sorted(m for m in FILES if len(importers[m]) == 1 and m not in backends)


def engine_members() -> list[str]:
    """The public names of Engine."""
    from accel.engines import Engine

    own = {name for cls in Engine.__mro__ if cls.__module__.startswith("accel.") for name in vars(cls)}
    declared = {n for cls in Engine.__mro__ for n in vars(cls).get("__annotations__", {})}
    return sorted(n for n in own | declared if not n.startswith("_"))


def measures() -> dict[str, int]:
    arrows = rooms()
    return {
        "files": len(FILES),
        "entries at the top": len(arrows),
        "lines": sum(path.read_text().count("\n") for path in FILES.values()),
        "floors": floors(arrows),
        "arrows between entries": sum(map(len, arrows.values())),
        "circles of entries": len(circles(arrows)),
        "circles of files at import": len(circles({m: imports(m, lazy=False) for m in FILES})),
        "public members of Engine": len(engine_members()),
        "class names defined twice or more": len(classes_defined_again()),
        "files with one importer": len(one_importer()),
    }


# -- Calls at run time -------------------------------------------------------------------------------------------------

#: A call of one of accel's functions: its file, in the package, and its name.
Call = tuple[str, str]


def calls_of(act: Callable[[], object]) -> list[Call]:
    """The calls of accel's functions in this thread while ``act`` runs, in order; comprehensions are none."""
    found: list[Call] = []
    package = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        named = code.co_name == "<lambda>" or not code.co_name.startswith("<")
        if event == "call" and named and code.co_filename.startswith(package):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified ones
            found.append((code.co_filename.removeprefix(package), name))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def moves(calls: list[Call]) -> int:
    """How often a call is in another file than the one before it."""
    return sum(one[0] != other[0] for one, other in zip(calls, calls[1:], strict=False))


def _trained(backend: str) -> tuple[Any, Any, Callable[[], Any]]:
    """A small model and its optimizer, set up and trained for some steps, and what makes a loss."""
    import torch
    from torch import nn

    import accel

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    made = accel.setup(model, torch.optim.AdamW(model.parameters()), backend=backend)
    rows = torch.ones(3, 4)
    for _ in range(3):
        made[0](rows).sum().backward()
        made[1].step()
        made[1].zero_grad()
    return made[0], made[1], lambda: made[0](rows).sum()


def checkpoint_calls() -> dict[str, list[Call]]:
    """Of a save and a load of a model and its optimizer by one rank."""
    import accel

    model, optimizer, _ = _trained("single")
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    with tempfile.TemporaryDirectory() as place:
        accel.save(state, f"{place}/first")  # imports, and what is made once
        accel.load(f"{place}/first", state)
        saving = calls_of(lambda: accel.save(state, f"{place}/second"))
        loading = calls_of(lambda: accel.load(f"{place}/second", state))
    accel.teardown()
    return {"save, 1 rank": saving, "load, 1 rank": loading}


def step_calls() -> dict[str, list[Call]]:
    """Of a forward, a backward and an optimizer's step on one of two ranks, without the hook that notes each gradient."""
    import accel

    _, optimizer, loss_of = _trained("ddp")
    losses: list[Any] = []
    forward = calls_of(lambda: losses.append(loss_of()))
    backward = [c for c in calls_of(losses[0].backward) if c[0] != "gradients/log.py" or not c[1].endswith("note")]
    step = calls_of(optimizer.step)
    accel.teardown()
    return {"ddp forward": forward, "ddp backward": backward, "ddp step": step}


def print_calls(verbose: bool) -> None:
    """All of these, as numbers and with ``verbose`` one by one."""
    from . import distributed

    found = checkpoint_calls() | distributed.run(2, step_calls)[0]
    for name, calls in found.items():
        files = len({file for file, _ in calls})
        print(f"{name:14} {len(calls):5} calls in {files:3} files, {moves(calls):4} moves between files")
        if verbose:
            print(*(f"    {file}: {function}" for file, function in calls), sep="\n")


if __name__ == "__main__" and "--calls" in sys.argv:
    from tests import house

    house.print_calls("-v" in sys.argv)
elif __name__ == "__main__":
    for name, value in measures().items():
        print(f"{name:36} {value:6}")
    if "-v" in sys.argv:
        print("classes:", classes_defined_again())
        print("one importer:", *one_importer())
        print("circles:", circles(rooms()), circles({m: imports(m, lazy=False) for m in FILES}))
        print("Engine:", *engine_members())

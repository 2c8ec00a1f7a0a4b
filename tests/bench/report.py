"""The page, and what was measured, kept so that one section can be taken again without the others."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from . import picture
from .section import Data, Section, table

ROOT = Path(__file__).parents[2]
PAGE, PICTURES, KEPT = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks", ROOT / "build" / "bench"

METHOD = """Every comparison of times comes from one run in which the contenders take turns in the same processes: a round \
is one short block of work of each, and each round has an order of its own. A ratio or an overhead is the median over the \
rounds of what is computed within one round, so that a disturbance hits both sides; *best* is the shortest \
block. Times of several ranks are their mean, a barrier starts each block. *cpu* is the process's own time with all \
its threads (`time.process_time`), *thread* is that of the thread that runs the loop (`time.thread_time`), \
*wall* is what the clock says. All with `OMP_NUM_THREADS=1` and without garbage \
collection inside a block. What is called "again" is the first contender once more: what it shows is noise. \
± is half the 95 % interval of a median. What a library changes for the whole process \
(optimizer hooks, for example) is in place during its own blocks only. A contender that fails is named with its error. \
The dashed line of a picture is the target, or the contender that the others are held against.

`make bench` takes all sections, `python -m tests.bench --only fsdp,deepspeed` takes some again and leaves the others as they \
are, `--render` writes them anew from the figures of their last run (`build/bench`), `--quick` prints a short try and \
leaves the page."""
HEAD = ("target", "limit", "figure", "verdict")


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores, {model}, torch {torch.__version__}"


def taken(data: Data, seconds: float) -> Data:
    """What is kept of a section: where and when it was measured, and what."""
    return {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds), "data": data}


def keep(section: Section, record: Data) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{section.name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def text(section: Section, record: Data) -> str:
    """A section of the page."""
    data = record["data"]
    verdicts = [[v.what, v.limit, v.figure, v.answer] for v in section.judge(data)]
    parts = [f"## {section.title}", f"Taken {record['date']} in {record['seconds']} s on {record['machine']}."]
    parts += [table(HEAD, verdicts)] if verdicts else []
    if section.draw(data):
        parts.append(f"![{section.title}](benchmarks/{section.name}.png)")
    return "\n\n".join([*parts, *section.tell(data)])


def _marked(name: str, content: str) -> str:
    return f"<!-- section: {name} -->\n\n{content}\n\n<!-- end: {name} -->"


def _on_page(name: str) -> str | None:
    """The section as the page has it, for a checkout that has not measured it."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    found = re.search(rf"<!-- section: {name} -->\n\n(.*?)\n\n<!-- end: {name} -->", page, re.DOTALL)
    return found[1] if found else None


#: How the answers to targets begin.
KINDS = ("met", "not decided", "missed", "not measured")


def _counted(title: str, content: str) -> list[str]:
    """A line of the summary, from the section's own table of targets."""
    _, _, below = content.partition(f"| {' | '.join(HEAD)} |\n")
    lines = below.partition("\n\n")[0].splitlines()[1:]
    answers = [line.rstrip(" |").rpartition(" | ")[2].strip("*") for line in lines]
    count = Counter(re.split(r"[,:*]", answer)[0] for answer in answers)
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return [f"[{title}](#{anchor})", *(str(count[kind]) for kind in KINDS)]


def _content(section: Section, again: bool) -> str:
    """From what was kept, drawn too, where that is asked for; else as the page has it."""
    kept = KEPT / f"{section.name}.json"
    if not (again and kept.exists()):
        return _on_page(section.name) or f"## {section.title}\n\nNot measured yet."
    record = json.loads(kept.read_text(encoding="utf-8"))
    panels = section.draw(record["data"])
    if panels:
        picture.draw(panels, PICTURES / f"{section.name}.png")
    return text(section, record)


def write(sections: Sequence[Section], again: Sequence[str]) -> None:
    """The page of all sections; those named in ``again`` anew, the others as they are."""
    contents = {section: _content(section, section.name in again) for section in sections}
    summary = table(["section", *KINDS], [_counted(section.title, content) for section, content in contents.items()])
    top = ["# Benchmarks", "Written by `make bench`.", METHOD, "## Targets", summary]
    parts = [_marked(section.name, content) for section, content in contents.items()]
    PAGE.write_text("\n\n".join([*top, *parts]) + "\n", encoding="utf-8")

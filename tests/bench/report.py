"""Figures of sections in docs/benchmarks.md, which are kept so that one can be measured again without the others."""

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
from .section import Data, Section, Verdict, table

ROOT = Path(__file__).parents[2]
PAGE, PICTURES, KEPT = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks", ROOT / "build" / "bench"
HEAD = ("target", "limit", "figure", "verdict")
#: The answers to targets begin like this.
KINDS = ("met", "not decided", "missed", "not measured")


def taken(data: Data, seconds: float) -> Data:
    """Add place, time and duration to the figures of a section."""
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = named[1] if named else platform.machine()
    machine = f"{os.cpu_count()} cores, {model}, torch {torch.__version__}"
    return {"machine": machine, "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds), "data": data}


def keep(section: Section, record: Data) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{section.name}.json").write_text(json.dumps(record, indent=1))


def text(section: Section, record: Data) -> str:
    """Write the figures of a section."""
    data = record["data"]
    verdicts = list(section.judge(data))
    verdicts += [Verdict(name, "", "none", f"**not measured**: `{e}`") for name, e in data["failed"].items()]
    parts = [f"Taken {record['date']} in {record['seconds']} s on {record['machine']}."]
    parts += [table(HEAD, [[v.target, v.limit, v.figure, v.answer] for v in verdicts])] if verdicts else []
    if section.draw(data):
        parts.append(f"![{section.title}](benchmarks/{section.name}.png)")
    return "\n\n".join([*parts, *section.tell(data)])


def _counted(section: Section, page: str) -> list[str]:
    """Count the verdicts of a section on the page, for the summary."""
    content = _place(section.name).search(page)
    _, _, below = (content[2] if content else "").partition(f"| {' | '.join(HEAD)} |\n")
    lines = below.partition("\n\n")[0].splitlines()[1:]
    answers = [line.rstrip(" |").rpartition(" | ")[2].strip("*") for line in lines]
    count = Counter(re.split(r"[,:*]", answer)[0] for answer in answers)
    anchor = re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
    return [f"[{section.title}](#{anchor})", *(str(count[kind]) for kind in KINDS)]


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- section: {name} -->\n\n)(.*?)(\n\n<!-- end: {name} -->)", re.DOTALL)


def _put(page: str, name: str, content: str) -> str:
    page, number = _place(name).subn(lambda match: match[1] + content + match[3], page)
    assert number == 1, f"{PAGE} has no place for section {name}"
    return page


def write(sections: Sequence[Section], again: Sequence[str]) -> None:
    """Put kept figures of the sections named in ``again`` on the page, draw their pictures, and count all verdicts."""
    page = PAGE.read_text(encoding="utf-8")
    for section in sections:
        kept = KEPT / f"{section.name}.json"
        if section.name in again and kept.exists():
            record = json.loads(kept.read_text())
            page = _put(page, section.name, text(section, record))
            if panels := section.draw(record["data"]):
                picture.draw(panels, PICTURES / f"{section.name}.png")
    page = _put(page, "targets", table(["section", *KINDS], [_counted(section, page) for section in sections]))
    PAGE.write_text(page, encoding="utf-8")

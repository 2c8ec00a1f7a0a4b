"""``python -m tests.bench`` measures all sections and writes docs/benchmarks.md with its pictures.

python -m tests.bench --only fsdp,deepspeed
python -m tests.bench --quick
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
import warnings

# Before torch is imported, here and in the worker processes.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["PYTHONWARNINGS"] = "ignore"
warnings.filterwarnings("ignore")

from . import (  # noqa: E402
    checkpoints,
    costs,
    during,
    fsdp,
    loops,
    memory,
    pipeline,
    report,
    restart,
    rivals,
    scale,
    settings,
    sharded,
    zero,
)
from .section import Section  # noqa: E402

SECTIONS = {
    section.name: section
    for section in (
        loops.SINGLE,
        loops.DDP,
        settings.SECTION,
        costs.SECTION,
        fsdp.SECTION,
        sharded.SECTION,
        zero.SECTION,
        checkpoints.SECTION,
        during.SECTION,
        scale.SECTION,
        restart.SECTION,
        memory.SECTION,
        pipeline.SECTION,
        rivals.SECTION,
    )
}


def take(section: Section, quick: bool) -> bool:
    """Measure a section, print it, and keep it unless it was a try; whether it worked."""
    print(f"{section.name}: measuring", flush=True)
    start = time.perf_counter()
    try:
        record = report.taken(section.measure(quick), time.perf_counter() - start)
        print(report.text(section, record), flush=True)
    except Exception:
        traceback.print_exc()
        return False
    if not quick:
        report.keep(section, record)
    return True


def _names(value: str) -> list[str]:
    names = value.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(SECTIONS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short; prints rough figures and leaves the page as it is")
    parser.add_argument("--only", type=_names, default=list(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--render", action="store_true", help="measure nothing: the page from the last figures")
    arguments = parser.parse_args()
    sections = list(SECTIONS.values())
    if arguments.render:
        report.write(sections, arguments.only)
        return
    failed = []
    for name in arguments.only:
        if not take(SECTIONS[name], arguments.quick):
            failed.append(name)
        elif not arguments.quick:
            report.write(sections, [name])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

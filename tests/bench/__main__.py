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
os.environ["DS_ACCELERATOR"] = "cpu"
warnings.filterwarnings("ignore")

from . import checkpoints, memory, report, restart, rivals, scale, training  # noqa: E402
from .report import Section  # noqa: E402

ALL = [training.SINGLE, training.DDP, training.COSTS, training.FSDP, training.SHARDED, training.DEEPSPEED]
ALL += [checkpoints.SECTION, checkpoints.DURING, scale.SECTION, restart.SECTION]
ALL += [memory.SECTION, memory.PIPELINE, rivals.SECTION]


def measure(section: Section, quick: bool) -> bool:
    """Measure a section and print it. Unless it was a try, keep it and put it on the page. Return whether it failed."""
    print(f"{section.name}: measuring", flush=True)
    start = time.perf_counter()
    try:
        record = report.taken(section.measure(quick), time.perf_counter() - start)
        print(report.text(section, record), flush=True)
    except Exception:
        traceback.print_exc()
        return True
    if not quick:
        report.keep(section, record)
        report.write(ALL, [section.name])
    return False


def main() -> None:
    names = [section.name for section in ALL]
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short; prints rough figures and leaves the page as it is")
    parser.add_argument("--only", default=",".join(names), help="some of %(default)s")
    parser.add_argument("--render", action="store_true", help="measure nothing: the page from the last figures")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if not set(only) <= set(names):
        parser.error(f"expected some of {', '.join(names)}")
    if arguments.render:
        report.write(ALL, only)
        return
    failed = [section.name for section in ALL if section.name in only and measure(section, arguments.quick)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""``python -m tests.bench`` writes docs/benchmarks.md; a part or a short run only prints its tables.

python -m tests.bench --quick
python -m tests.bench --only ddp
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

# Before torch is imported, here and in the worker processes.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
warnings.filterwarnings("ignore")

from . import measure, picture, report  # noqa: E402
from .contenders import missing_rivals  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ("single", "ddp", "settings", "costs")


def collect(sections: tuple[str, ...], quick: bool) -> report.Results:
    results = report.Results(quick=quick, missing=missing_rivals())
    for name in results.missing:
        print(f"{name} is not installed: it does not take part")
    for name in sections:
        start = time.perf_counter()
        if name == "single":
            results.single = measure.steps(1, 3 if quick else 30)
        elif name == "ddp":
            results.ddp = measure.steps(2, 4 if quick else 60)
        elif name == "settings":
            results.settings = measure.settings(8 if quick else 150)
        else:
            results.costs = measure.costs(1 if quick else 6)
            results.costs["import"] = measure.imports(rivals=not quick)
        print(f"{name}: measured in {time.perf_counter() - start:.0f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes; figures that are only rough")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    arguments = parser.parse_args()
    results = collect((arguments.only,) if arguments.only else SECTIONS, arguments.quick)
    text = report.page(results)
    if arguments.quick or arguments.only:
        print(text)
        return
    (DOCS / "benchmarks.md").write_text(text)
    picture.draw(results, DOCS / "benchmarks.png")
    print("wrote docs/benchmarks.md and docs/benchmarks.png")


if __name__ == "__main__":
    main()

"""The picture: a step's cpu time relative to raw torch."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .contenders import ACCEL, RAW
from .report import Results
from .timing import Row
from .workloads import WORKLOADS

COLOURS = {ACCEL: "#c2410c", "Accelerate": "#64748b", "Fabric": "#a8b3c4"}


def _panel(axes: Axes, title: str, tables: dict[str, list[Row]]) -> None:
    names = [name for name in COLOURS if any(r.name == name for r in tables[WORKLOADS[0].name])]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        for k, workload in enumerate(WORKLOADS):
            row = next(r for r in tables[workload.name] if r.name == name)
            percent = 100 * (row.cpu_ratio - 1)
            label = name if k == 0 else None
            axes.bar(k + (i - (len(names) - 1) / 2) * width, percent, width * 0.92, color=COLOURS[name], label=label)
            axes.annotate(
                f"{percent:+.1f}",
                (k + (i - (len(names) - 1) / 2) * width, percent),
                (0, 3 if percent >= 0 else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if percent >= 0 else "top",
                fontsize=8,
            )
    axes.axhline(0, color="black", linewidth=0.8)
    # A tiny model's bars may be a hundred times those of a large one.
    axes.set_yscale("symlog", linthresh=10)
    axes.set_yticks(
        [-20, -10, -5, 0, 5, 10, 20, 50, 100, 200], [str(y) for y in (-20, -10, -5, 0, 5, 10, 20, 50, 100, 200)]
    )
    axes.minorticks_off()
    axes.set_xticks(range(len(WORKLOADS)), [w.title.partition(":")[0] for w in WORKLOADS])
    axes.set_title(title, fontsize=11)
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw(results: Results, path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, "one process", results.single)
    _panel(right, "DDP, 2 ranks", results.ddp)
    left.set_ylabel(f"cpu time of a step over {RAW}, %")
    left.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=130)

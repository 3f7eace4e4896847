"""What the notebooks' figures and tables have in common: one style, and a line under each figure
that says what machine and command made it."""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.display import Image, Markdown, display
from matplotlib import rcParams
from matplotlib.figure import Figure

COMMAND = "make notebooks"
OURS, THEIRS = "#1f6f8b", "#d1603d"  # this engine; whatever it is held against
COLORS = (OURS, THEIRS, "#6a994e", "#8e6c8a", "#c9a227", "#555555")
STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "figure.titlesize": 11,
    "font.size": 9,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "savefig.dpi": 110,
}
rcParams.update(STYLE)


def machine() -> str:
    """The device that JAX computes on, and the versions that matter.

    JAX is imported here, so that a notebook that only simulates never starts it."""
    import jax

    device = jax.devices()[0]
    name = device.device_kind
    if device.platform == "cpu":
        name = f"{os.cpu_count()} cores of {_processor()}"
    return f"{name}, JAX {jax.__version__}"


def simulated(hardware: str) -> str:
    """For figures of the simulator: the machine that it models."""
    return f"simulated, {hardware}"


def axes(
    columns: int = 1, rows: int = 1, width: float = 4.6, height: float = 3.2, **options: Any
) -> tuple[Figure, Any]:
    """A figure in the common style and its axes; sizes in inches, of one axes. options: as of
    `Figure.subplots`."""
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def cell(panel: Any, column: int, row: int, text: str, color: str) -> None:
    """A labelled cell of a grid whose columns begin at 0, 1, 2, ... and whose rows are centred
    there."""
    panel.barh(row, 0.94, left=column + 0.03, height=0.9, color=color, alpha=0.3)
    panel.text(column + 0.5, row, text, ha="center", va="center", fontsize=7)


def show(figure: Figure, made_on: str) -> None:
    """Displays a figure. made_on: `machine()` or `simulated(...)`, written under it."""
    figure.supxlabel(f"{made_on} · {COMMAND}", fontsize=7, color="#777777", x=0.01, ha="left")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    display(Image(data=out.getvalue()))


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], made_on: str) -> None:
    """Displays a table; numbers are printed with three digits, text as it is."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join(["---"] * len(header)) + " |"]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    display(Markdown("\n".join(lines) + f"\n\n<sub>{made_on} · {COMMAND}</sub>"))


def note(text: str) -> None:
    """Displays a sentence whose numbers were just measured."""
    display(Markdown(text))


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

"""Runs notebooks from top to bottom: each `x.py` beside this file becomes `x.ipynb` with outputs.

    python notebooks/run.py [--check] [NAME ...]

A cell that fails ends it with that cell's error, and nothing is written. What goes to stderr
(progress, warnings) is not kept: it differs from machine to machine. With --check the notebooks run
in small sizes (`sizes.py`) and nothing is written at all.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

from sizes import VARIABLE

HERE = Path(__file__).parent
NOTEBOOKS = ("xla_vs_torch", "attention_split", "latency_fit", "when_does_it_pay")
CELL_TIMEOUT_S = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="small sizes, and nothing is written")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NOTEBOOKS)} (default: all)"
    )
    options = parser.parse_args()
    names = options.names or NOTEBOOKS
    if unknown := set(names) - set(NOTEBOOKS):
        parser.error(f"NAME: must be one of {', '.join(NOTEBOOKS)}, got {min(unknown)}")
    if options.check:
        os.environ[VARIABLE] = "1"  # kernels inherit it
    elif os.environ.get(VARIABLE, "0") != "0":
        parser.error(f"{VARIABLE}: small sizes are not to be written, use --check")
    for name in names:
        script = HERE / f"{name}.py"
        notebook = run(script)
        if not options.check:
            write(notebook, script.with_suffix(".ipynb"))
    return 0


def run(script: Path) -> Any:
    """Executes a percent script in a kernel of this Python; the notebook with its outputs."""
    notebook = jupytext.read(script)
    began_s = time.perf_counter()

    def note(cell_index: int, **_: Any) -> None:
        cells, seconds = len(notebook.cells), time.perf_counter() - began_s
        print(f"{script.stem}: {cell_index + 1} of {cells} cells, {seconds:.0f} s", flush=True)

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        on_cell_executed=note,
        resources={"metadata": {"path": str(HERE)}},
    )
    client.execute()
    return notebook


def write(notebook: Any, path: Path) -> None:
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"  # random otherwise, and every line would differ from run to run
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    sys.exit(main())

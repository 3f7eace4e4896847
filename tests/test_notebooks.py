"""The notebooks that are committed: run to their end, from the scripts beside them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
MARKER = "# %%"
SCRIPTS = sorted(p for p in NOTEBOOKS.glob("*.py") if f"\n{MARKER}" in p.read_text("utf-8"))
MOST_BYTES = 1_000_000


def cells_of_script(text: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a percent script."""
    cells = []
    for part in text.split(f"\n{MARKER}")[1:]:
        title, _, body = part.partition("\n")
        lines = body.strip("\n").split("\n")
        if title.strip() == "[markdown]":
            cells.append(("markdown", "\n".join(line.removeprefix("#")[1:] for line in lines)))
        else:
            assert title == "", f"a cell of a kind that is not known: {title}"
            cells.append(("code", "\n".join(lines)))
    return cells


def cells_of_notebook(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text("utf-8"))["cells"]


def test_cells_of_a_script_are_told_apart():
    text = "# header\n\n# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\n\n# %%\ny = 2\n"
    assert cells_of_script(text) == [
        ("markdown", "# Title\n\ntext"),
        ("code", "x = 1"),
        ("code", "y = 2"),
    ]


def test_every_notebook_has_its_script():
    assert SCRIPTS
    assert [p.stem for p in SCRIPTS] == sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_is_a_whole_run_of_its_script(script: Path):
    """`make notebooks` writes it; after a change of the script it has to run again."""
    notebook = script.with_suffix(".ipynb")
    cells = cells_of_notebook(notebook)
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == cells_of_script(script.read_text("utf-8"))
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    images = [o for o in outputs if "image/png" in o.get("data", {})]
    assert images, "a notebook without a figure"
    assert notebook.stat().st_size < MOST_BYTES


def test_small_sizes_are_taken_when_asked_for(monkeypatch):
    sizes = runpy.run_path(str(NOTEBOOKS / "sizes.py"))
    sized, variable = sizes["sized"], sizes["VARIABLE"]
    monkeypatch.delenv(variable, raising=False)
    assert sized(200, quick=20) == 200
    monkeypatch.setenv(variable, "1")
    assert sized(200, quick=20) == 20
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=f"{variable}: must be 0 or 1, got 'yes'"):
        sized(200, quick=20)

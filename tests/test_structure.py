"""The repository itself: what may not be in a tracked file, links that lead nowhere, commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 450
MARKER_LINES = 30  # an `__init__.py` up to here needs no line of its own
COMMANDS = (
    "conflux_jax.calibrate",
    "conflux_jax.serve",
    "conflux_jax.client",
    "conflux_jax.convert",
    "conflux_jax.goodput",
    "conflux_jax.simulate",
    "conflux_jax.traffic",
    "bench.goodput_tables",
    "bench.h100",
    "bench.hardware",
    "bench.long_prefill",
    "bench.overlap_host",
    "bench.paper",
    "bench.replay",
    "bench.scheduler",
    "bench.serving",
    "bench.simulator",
    "bench.tbt_guard",
    "bench.throughput",
    "bench.warmup",
)
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")
# Written with a character class each, so that this file does not match itself.
HOSTS = r"py[p]i\.org|python[h]osted|registry\.[n]pmjs|deb\.[d]ebian"
MACHINE_PATHS = r"/wor[k]/|/far[m]/|/roo[t]/|/hom[e]/\w|/tm[p]/bash_jobs"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def tracked_files() -> list[Path]:
    """What git has, or would take with the next `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = {ROOT / name for name in listed.stdout.split("\0") if name}
    return sorted(path for path in paths if path.is_file())


def lines_that_match(pattern: str) -> list[str]:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return found


def prose(text: str) -> str:
    """Markdown without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(text: str) -> set[str]:
    """The anchors that GitHub makes of a Markdown text's headings."""
    titles = re.findall(r"^#{1,6} +(.+?) *$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(document: Path, text: str) -> list[str]:
    """Targets in a Markdown text at `document`'s place that are no file, or no heading of one."""
    broken = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        found = path.exists() if name else True
        if not found or (anchor and anchor not in headings(path.read_text() if name else text)):
            broken.append(f"{document.relative_to(ROOT)}: {target}")
    return broken


def test_tracked_files_name_no_registry_host():
    assert lines_that_match(HOSTS) == []


def test_tracked_files_name_no_path_of_a_machine():
    assert lines_that_match(MACHINE_PATHS) == []


def test_no_long_python_file():
    """A file past the limit is two files."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in tracked_files()
        if path.suffix == ".py" and not path.name.endswith(GENERATED)
    }
    assert "conflux_jax/config.py" in lengths
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_links_of_documents_lead_somewhere():
    """Markdown files anywhere, and the text of the notebooks."""
    texts = {path: path.read_text() for path in tracked_files() if path.suffix == ".md"}
    assert {ROOT / "README.md", ROOT / "docs" / "goodput" / "README.md"} <= texts.keys()
    for notebook in (path for path in tracked_files() if path.suffix == ".ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        texts[notebook] = "\n\n".join(sources)
    assert [link for path, text in texts.items() for link in broken_links(path, text)] == []


@pytest.mark.parametrize(
    ("target", "leads"),
    [
        ("../README.md", True),
        ("../READ.md", False),
        ("../README.md#start", True),
        ("../README.md#stop", False),
        ("#what-it-is-really", True),
        ("#no-heading-but-code", False),
        ("https://example.org/#anything", True),
    ],
)
def test_links_that_lead_nowhere_are_found(target, leads):
    text = f"# What it *is*, really\n\n```sh\n# no heading but code\n```\n\n[a]({target})\n"
    assert broken_links(ROOT / "docs" / "page.md", text) == (
        [] if leads else [f"docs/page.md: {target}"]
    )


def test_every_module_has_its_line_in_the_structure_document():
    document = (ROOT / "docs" / "structure.md").read_text()
    modules = {
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in ("conflux_jax", "pallas_kernels", "bench")
        and not path.name.endswith(GENERATED)
        and (path.name != "__init__.py" or len(path.read_text().splitlines()) > MARKER_LINES)
    }
    named = set(re.findall(r"^\| `([^`]+\.py)` \|", document, re.MULTILINE))
    assert modules - named == set()
    assert named - modules == set()


def test_make_targets_named_in_the_readme_exist():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE))
    assert {"serve", "test", "lint"} <= named
    assert named - targets == set()


@pytest.mark.parametrize("module", COMMANDS)
def test_public_commands_have_help(module):
    command = [sys.executable, "-m", module, "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage:")
    assert module in result.stdout.splitlines()[0]

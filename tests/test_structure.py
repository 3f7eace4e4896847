"""The repository itself: what may not be in a tracked file, links that lead nowhere, commands."""

from __future__ import annotations

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


def headings(path: Path) -> set[str]:
    """The anchors that GitHub makes of a Markdown file's headings."""
    titles = re.findall(r"^#+ +(.+?) *$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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
    documents = [path for path in tracked_files() if path.suffix == ".md"]
    assert ROOT / "README.md" in documents
    broken = []
    for document in documents:
        for target in LINK.findall(document.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (document.parent / name).resolve() if name else document
            if not path.exists() or (anchor and anchor not in headings(path)):
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []


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

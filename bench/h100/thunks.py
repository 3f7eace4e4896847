"""XLA's dump of what a program launches, read into a tree.

`*.thunk_sequence_after_thunk_passes.txt` has a line for each thunk, nested by indentation; what is
inside a `kCommandBuffer` becomes one CUDA graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LINE = re.compile(r"(\s*)\d+: (k\w+)\s+\[[^\]]*\]\s*(.*)$")
SECTION = re.compile(r"\s*(\w+):\s*$")
COLLECTIVES = ("kAllToAll", "kAllReduce", "kAllGather", "kReduceScatter", "kCollectivePermute")
GROUPS = ("kAsyncStart", "kAsyncDone", "kDynamicSliceFusion", "kCommandBuffer")  # launch nothing


@dataclass
class Thunk:
    """section: `body`, `condition`, `true_branch`... of the parent. detail: a kernel's name and
    grid, an asynchronous thunk's stream."""

    kind: str
    section: str
    detail: str
    children: list[Thunk] = field(default_factory=list)


def parse_thunks(text: str) -> list[Thunk]:
    roots: list[Thunk] = []
    open_thunks: list[tuple[int, Thunk]] = []
    section = ""
    for line in text.splitlines():
        if found := LINE.match(line):
            indent = len(found[1])
            while open_thunks and open_thunks[-1][0] >= indent:
                open_thunks.pop()
            thunk = Thunk(found[2], section if open_thunks else "", found[3])
            siblings = open_thunks[-1][1].children if open_thunks else roots
            siblings.append(thunk)
            open_thunks.append((indent, thunk))
        elif found := SECTION.match(line):
            section = found[1]
    return roots


def descendants(thunks: Sequence[Thunk]) -> Iterator[Thunk]:
    for thunk in thunks:
        yield thunk
        yield from descendants(thunk.children)


def layers(roots: Sequence[Thunk]) -> list[Thunk]:
    """The body of the loop with the attention kernels."""
    loops = [thunk for thunk in roots if thunk.kind == "kWhile"]
    for loop in loops:
        body = [child for child in loop.children if child.section == "body"]
        if any(thunk.kind == "kCustomCall" for thunk in descendants(body)):
            return body
    raise ValueError("no loop with attention kernels")


def launched(thunks: Sequence[Thunk]) -> list[Thunk]:
    return [thunk for thunk in descendants(thunks) if thunk.kind not in GROUPS]


def always(thunks: Sequence[Thunk]) -> list[Thunk]:
    """Those that every run launches once: branches and loops left out."""
    found: list[Thunk] = []
    for thunk in thunks:
        if thunk.kind in GROUPS:
            found += always(thunk.children)
        elif thunk.kind not in ("kWhile", "kConditional"):
            found.append(thunk)
    return found

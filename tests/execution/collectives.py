"""The collectives of a compiled program, read from its HLO text."""

from __future__ import annotations

import re
from dataclasses import dataclass

OPCODES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|ragged-all-to-all"
INSTRUCTION = re.compile(rf"= (.*?) ({OPCODES}|collective-broadcast)(?:-start)?\(")
GROUPS = re.compile(r"replica_groups=mesh\[[^\]]*\] \{'(\w+)'\}")
ALONE = re.compile(r"replica_groups=\{(\{\d+\},?)*\}")  # every device with itself
PLACE = re.compile(r'op_name="([^"]*)"')
SHAPE = re.compile(r"\w+\[([\d,]*)\]")
LAYER = re.compile(r"^jit\(step\)/(shard_map/)?while/body/")  # the scan over the layers


@dataclass(frozen=True)
class Collective:
    """opcode: all-reduce and so on. axis: of the mesh, "" where each device is by itself. shapes:
    of the results. in_layer: inside the scan over the layers."""

    opcode: str
    axis: str
    in_layer: bool
    shapes: tuple[tuple[int, ...], ...]


def collectives(hlo: str) -> list[Collective]:
    """All of them, in the order of the text. Raises ValueError for one that cannot be read."""
    found = []
    for line in hlo.splitlines():
        instruction = INSTRUCTION.search(line)
        if instruction is None:
            continue
        axis, place = GROUPS.search(line), PLACE.search(line)
        if place is None or (axis is None and not ALONE.search(line)):
            raise ValueError(f"no mesh axis or op_name in: {line.strip()}")
        shapes = tuple(
            tuple(int(n) for n in dims.split(",") if n)
            for dims in SHAPE.findall(instruction.group(1))
        )
        in_layer = LAYER.match(place.group(1)) is not None
        found.append(
            Collective(instruction.group(2), axis.group(1) if axis else "", in_layer, shapes)
        )
    return found

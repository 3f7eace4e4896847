"""What a compiled step does, counted in XLA's own text: launches, collectives, matrix products.

Reads `compiled.as_text()` of a program for GPUs, scheduled HLO, which also comes from compiling for
GPUs that are not there. Counts are of one device. `work(module, module.entry)` is an iteration,
`work(module, layer_loop(module).body)` one layer of it:

    module = parse(compiled.as_text())
    layer = work(module, layer_loop(module).body)
    print(layer.launches, layer.flops, [(c.kind, c.bytes_sent) for c in layer.collectives])

Work that only some iterations have (branches, such as the sampler's, and loops whose trip count the
compiler does not know) is left out. What a custom call computes (attention) is one launch and no
FLOPs: the text does not say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ITEM_BITS = {"pred": 8, "token": 0}
COLLECTIVES = (
    "all-to-all",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
)
# Views and names: nothing runs.
FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
)
CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=\{?%([\w.-]+)")
ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """`name = shape opcode(operands), attributes`; names without their %. literal: what stands in
    the place of operands where there are none, such as a parameter's number. is_root: whether it is
    the computation's result."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""
    is_root: bool = False

    @property
    def base(self) -> str:
        """The opcode of the operation itself, where this is its asynchronous half."""
        return self.opcode.removesuffix("-start").removesuffix("-done")

    @property
    def bytes(self) -> int:
        """Of the result; of a tuple all of its arrays."""
        return array_bytes(self.shape)


@dataclass(frozen=True)
class Module:
    """computations: instructions in the order in which they are launched."""

    computations: dict[str, tuple[Instruction, ...]]
    entry_name: str

    @property
    def entry(self) -> tuple[Instruction, ...]:
        return self.computations[self.entry_name]

    def called(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The computation of a fusion or call; empty where there is none."""
        found = CALLED.search(instruction.attributes)
        return self.computations[found[1]] if found else ()


@dataclass(frozen=True)
class Collective:
    """operand_bytes: what one device brings. asynchronous: whether compute may run meanwhile."""

    name: str
    kind: str
    operand_bytes: int
    group_size: int
    asynchronous: bool

    @property
    def bytes_sent(self) -> int:
        """What one device sends to others, by the usual ring or pairwise algorithm."""
        others, size = self.group_size - 1, self.group_size
        if self.kind == "all-gather":
            return self.operand_bytes * others
        if self.kind == "collective-permute":
            return self.operand_bytes
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.operand_bytes * others // size


@dataclass(frozen=True)
class Work:
    """launches: kernels and device copies, collectives included (one each)."""

    launches: int = 0
    flops: int = 0
    collectives: tuple[Collective, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(
            self.launches + other.launches,
            self.flops + other.flops,
            self.collectives + other.collectives,
        )

    def times(self, count: int) -> Work:
        return Work(self.launches * count, self.flops * count, self.collectives * count)


@dataclass(frozen=True)
class Loop:
    body: tuple[Instruction, ...]
    trip_count: int


def parse(text: str) -> Module:
    """Raises ValueError when the text holds no entry computation."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = None, None, []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}") and name is not None:
            computations[name], name = tuple(lines), None
        elif name is not None and " = " in line:
            lines.append(_instruction(line))
    if entry is None:
        raise ValueError("no ENTRY computation: this is no HLO text")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].strip()
    opcode, rest = rest[: rest.index("(")], rest[rest.index("(") :]
    end = _closing(rest)
    operands = tuple(re.findall(r"%([\w.-]+)", rest[:end]))
    literal = "" if operands else rest[1 : end - 1]
    is_root = line.strip().startswith("ROOT ")
    return Instruction(name.lstrip("%"), shape, opcode, operands, rest[end:], literal, is_root)


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with is closed, plus one."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"unbalanced: {text[:80]}")


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(type, dimensions) of each array in a shape's text."""
    return [(kind, _dims(dims)) for kind, dims in ARRAY.findall(shape)]


def array_bytes(shape: str) -> int:
    """
    >>> array_bytes("(bf16[4,512]{1,0}, s32[])")
    4100
    """
    return sum(math.prod(dims) * _item_bits(kind) // 8 for kind, dims in arrays(shape))


def _item_bits(kind: str) -> int:
    """
    >>> _item_bits("bf16"), _item_bits("f8e4m3fn"), _item_bits("pred")
    (16, 8, 8)
    """
    found = re.match(r"[a-z]+(\d+)", kind)
    return ITEM_BITS[kind] if kind in ITEM_BITS else int(found[1]) if found else 0


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def launches(module: Module, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions that the device gets a kernel, copy or collective for, calls looked into;
    branches and loops left out."""
    for instruction in instructions:
        if instruction.opcode.endswith("-done") or instruction.base in (*FREE, "while"):
            continue
        if instruction.base == "call":
            yield from launches(module, module.called(instruction))
        elif instruction.base != "conditional":
            yield instruction


def work(module: Module, instructions: Sequence[Instruction]) -> Work:
    """What always runs of a computation: loops by their known trip count, no branches."""
    by_name = {instruction.name: instruction for instruction in instructions}
    total = Work()
    for instruction in instructions:
        if instruction.base == "while":
            loop = known_loop(module, instruction)
            total += work(module, loop.body).times(loop.trip_count) if loop else Work()
        elif instruction.opcode.endswith("-done"):
            continue
        elif instruction.base == "call":
            total += work(module, module.called(instruction))
        elif instruction.base in COLLECTIVES:
            total += Work(launches=1, collectives=(_collective(instruction, by_name),))
        elif instruction.base not in (*FREE, "conditional"):
            total += Work(launches=1, flops=_flops(module, instruction, by_name))
    return total


def layer_loop(module: Module) -> Loop:
    """The loop of the entry whose body multiplies the most. Raises ValueError without one."""
    loops = [known_loop(module, i) for i in module.entry if i.base == "while"]
    known = [loop for loop in loops if loop is not None]
    if not known:
        raise ValueError("the entry computation has no loop of known trip count")
    return max(known, key=lambda loop: work(module, loop.body).flops)


def until_done(instructions: Sequence[Instruction], start: Instruction) -> tuple[Instruction, ...]:
    """What is launched between an asynchronous operation's start and its end."""
    first = instructions.index(start)
    for at in range(first + 1, len(instructions)):
        done = instructions[at]
        if done.opcode.endswith("-done") and start.name in done.operands:
            return tuple(instructions[first + 1 : at])
    raise ValueError(f"{start.name} is never done")


def known_loop(module: Module, instruction: Instruction) -> Loop | None:
    """None where the compiler does not know the trip count."""
    body = re.search(r"\bbody=%([\w.-]+)", instruction.attributes)
    count = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
    return Loop(module.computations[body[1]], int(count[1])) if body and count else None


def _collective(instruction: Instruction, by_name: dict[str, Instruction]) -> Collective:
    operands = [by_name[name].bytes for name in instruction.operands]
    return Collective(
        name=instruction.name,
        kind=instruction.base,
        operand_bytes=sum(operands),
        group_size=_group_size(instruction.attributes),
        asynchronous=instruction.opcode.endswith("-start")
        and '"is_sync":true' not in instruction.attributes,
    )


def _group_size(attributes: str) -> int:
    """Of `replica_groups` in any of its three spellings.

    >>> _group_size("replica_groups={{0,2},{1,3}}"), _group_size("replica_groups=[2,4]<=[8]")
    (2, 4)
    >>> _group_size("replica_groups=mesh['sp'=4,'tp'=2] {'sp'}")
    4
    """
    if lists := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(lists[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    raise ValueError(f"replica_groups not understood: {attributes[:120]}")


def _flops(module: Module, instruction: Instruction, by_name: dict[str, Instruction]) -> int:
    """2 * outputs * contracted size of a matrix product, or of those inside a fusion."""
    if instruction.base == "fusion":
        inner = module.called(instruction)
        names = {i.name: i for i in inner}
        return sum(_flops(module, i, names) for i in inner)
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    elif instruction.opcode == "custom-call" and "__cublas" in instruction.attributes:
        quoted = r'"lhs_contracting_dimensions":\[([^\]]*)\]'
        contracted = re.search(quoted, instruction.attributes)
    else:
        return 0
    if contracted is None:
        raise ValueError(f"{instruction.name}: a product without contracting dimensions")
    lhs = arrays(by_name[instruction.operands[0]].shape)[0][1]
    out = arrays(instruction.shape)[0][1]
    axes = _dims(contracted[1].replace('"', ""))
    return 2 * math.prod(out) * math.prod(lhs[axis] for axis in axes)

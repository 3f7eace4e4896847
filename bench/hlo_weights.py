"""How many bytes of weights the matrix products of a compiled step read.

A product's operand is a weight where it is an argument of the program, or a slice or copy of one:
what has been computed by then is an activation. Names are followed through views, tuples, fusions,
calls and loops, so a layer's slice of a stack counts as what it is, once for each layer; a product
that is done twice reads its weight twice. As in `hlo_counts`, branches are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.hlo_counts import Instruction, Module, known_loop

# Of a name: whether it is an argument of the program; of a tuple: of each element.
Held = bool | tuple["Held", ...]

SAME_VALUES = ("bitcast", "copy", "dynamic-slice", "opt-barrier", "reshape", "slice", "transpose")


def weight_bytes(module: Module) -> int:
    """Of one iteration on one device."""
    return _follow(module, module.entry, None)[0]


def _follow(
    module: Module, instructions: Sequence[Instruction], arguments: Sequence[Held] | None
) -> tuple[int, Held]:
    """Weight bytes that a computation's products read, and what its result holds. arguments: what
    each of its parameters holds; None where it is the program itself."""
    held: dict[str, Held] = {}
    by_name = {instruction.name: instruction for instruction in instructions}
    total, result = 0, False
    for instruction in instructions:
        operands = [held[name] for name in instruction.operands]
        read, holds = 0, _holds(instruction, operands, arguments)
        loop = known_loop(module, instruction) if instruction.base == "while" else None
        if loop is not None:
            carried = _carried(loop.body, operands[0])
            read = _follow(module, loop.body, [carried])[0] * loop.trip_count
        elif instruction.base in ("fusion", "call") and not instruction.opcode.endswith("-done"):
            read, holds = _follow(module, module.called(instruction), operands)
        elif _is_product(instruction):
            weights = [name for name in instruction.operands[:2] if held[name] is True]
            read = sum(by_name[name].bytes for name in weights)
        total, held[instruction.name] = total + read, holds
        result = holds if instruction.is_root else result
    return total, result


def _is_product(instruction: Instruction) -> bool:
    is_cublas = instruction.opcode == "custom-call" and "__cublas" in instruction.attributes
    return instruction.opcode == "dot" or is_cublas


def _holds(
    instruction: Instruction, operands: Sequence[Held], arguments: Sequence[Held] | None
) -> Held:
    if instruction.opcode == "parameter":
        return True if arguments is None else arguments[int(instruction.literal)]
    if instruction.opcode in SAME_VALUES:
        return operands[0]
    if instruction.opcode == "tuple":
        return tuple(operands)
    index = _index(instruction)
    if instruction.opcode == "get-tuple-element" and index is not None:
        return operands[0][index] if isinstance(operands[0], tuple) else False
    return False


def _carried(body: Sequence[Instruction], start: Held) -> Held:
    """Of what a loop starts with, that which every turn hands on as it was."""
    if not isinstance(start, tuple):
        return False
    (carry,) = (i.name for i in body if i.opcode == "parameter")
    (result,) = (i.operands for i in body if i.is_root)
    element = {i.name: _index(i) for i in body if i.operands == (carry,)}
    return tuple(
        element.get(name) == at and held
        for at, (held, name) in enumerate(zip(start, result, strict=True))
    )


def _index(instruction: Instruction) -> int | None:
    """Of the element that a get-tuple-element takes."""
    found = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(found[1]) if found else None

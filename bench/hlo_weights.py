"""How many bytes of weights the matrix products of a compiled step read.

A product's operand is a weight where it is an argument of the program, or a slice of one: what has
been computed by then is an activation. Names are followed through views, tuples, fusions, calls
and loops, so a layer's slice of a stack counts as what it is, once for each layer; a product that
is done twice reads its weight twice. As in `hlo_counts`, branches are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.hlo_counts import Instruction, Module, known_loop

# For each name: whether it holds an argument of the program; of a tuple, for each element.
Held = bool | tuple["Held", ...]

VIEWS = ("bitcast", "dynamic-slice", "slice", "opt-barrier")


def weight_bytes(module: Module) -> int:
    """Of one iteration on one device."""
    return _read(module, module.entry, None)


def _read(
    module: Module, instructions: Sequence[Instruction], arguments: Sequence[Held] | None
) -> int:
    """arguments: what each parameter of the computation holds; None where it is the program."""
    held: dict[str, Held] = {}
    by_name = {instruction.name: instruction for instruction in instructions}
    total = 0
    for instruction in instructions:
        operands = [held[name] for name in instruction.operands]
        held[instruction.name] = _holds(instruction, operands, arguments)
        if instruction.base == "while":
            loop = known_loop(module, instruction)
            total += _read(module, loop.body, operands) * loop.trip_count if loop else 0
        elif instruction.base in ("fusion", "call") and not instruction.opcode.endswith("-done"):
            total += _read(module, module.called(instruction), operands)
        elif is_product(instruction):
            weights = [name for name in instruction.operands[:2] if held[name] is True]
            total += sum(by_name[name].bytes for name in weights)
    return total


def is_product(instruction: Instruction) -> bool:
    is_cublas = instruction.opcode == "custom-call" and "__cublas" in instruction.attributes
    return instruction.opcode == "dot" or is_cublas


def _holds(
    instruction: Instruction, operands: Sequence[Held], arguments: Sequence[Held] | None
) -> Held:
    if instruction.opcode == "parameter":
        return True if arguments is None else arguments[int(instruction.literal)]
    if instruction.opcode in VIEWS:
        return operands[0]
    if instruction.opcode == "tuple":
        return tuple(operands)
    if instruction.opcode == "get-tuple-element" and isinstance(operands[0], tuple):
        index = re.search(r"index=(\d+)", instruction.attributes)
        return operands[0][int(index[1])] if index else False
    return False

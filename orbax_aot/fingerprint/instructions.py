"""Bytecode without layout: the same instructions however the lines of the source are broken.

Where the compiler puts an expression on one line or on two, it leaves NOPs behind, jumps over a
jump or straight to its goal, needs wider arguments or not, and loads variables in pairs or one by
one. None of this changes what runs, so all of it is undone here before the instructions are
numbered.
"""

from __future__ import annotations

import dataclasses
import dis
import itertools
import types
from collections.abc import Iterator

CACHE = dis.opmap["CACHE"]  # `co_code` holds the inline caches of instructions, zeroed
_NOP = dis.opmap["NOP"]
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_JUMPS = frozenset(dis.hasjrel)
_BACK = frozenset(op for name, op in dis.opmap.items() if "JUMP_BACKWARD" in name)
_ALWAYS = frozenset(
    dis.opmap[name] for name in ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
)
# Python 3.13 and later load or store two variables at once, where both stand on one line.
_PAIRS = {
    dis.opmap[f"{first}_{second}"]: (dis.opmap[first], dis.opmap[second])
    for first in ("LOAD_FAST", "STORE_FAST", "LOAD_FAST_BORROW")
    for second in ("LOAD_FAST", "STORE_FAST", "LOAD_FAST_BORROW")
    if f"{first}_{second}" in dis.opmap
}
_OPPOSITES = {"IF_FALSE": "IF_TRUE", "IF_TRUE": "IF_FALSE",
              "IF_NONE": "IF_NOT_NONE", "IF_NOT_NONE": "IF_NONE"}  # fmt: skip


@dataclasses.dataclass(slots=True)
class Instruction:
    """One instruction. A jump has a `kind` instead of its direction, and the index it goes to."""

    opcode: int
    argument: int
    kind: str = ""
    target: int = -1

    @property
    def always_jumps(self) -> bool:
        return self.opcode in _ALWAYS


class Layout:
    """The instructions of a code object and its exception table, numbered without layout."""

    def __init__(self, code: types.CodeType) -> None:
        self._index_of_unit: list[int] = []
        raw = _read(code.co_code, self._index_of_unit)
        self._straighten(raw)
        removed = _turn_jumps_over_jumps(raw, self._starts_of_handlers(code))
        self._renumber(raw, removed)
        self.instructions = [i for index, i in enumerate(raw) if index not in removed]
        self.exceptions = self._merge(self._exceptions(code))

    def _straighten(self, raw: list[Instruction]) -> None:
        """Gives jumps the index they go to, past other jumps."""
        for instruction in raw:
            if instruction.target >= 0:
                instruction.target = self._index(instruction.target)
        for instruction in raw:
            for _ in range(len(raw)):
                goal = instruction.target
                if goal < 0 or goal >= len(raw) or not raw[goal].always_jumps:
                    break
                instruction.target = raw[goal].target

    def _renumber(self, raw: list[Instruction], removed: set[int]) -> None:
        if not removed:
            return
        new = []
        count = 0
        for index in range(len(raw) + 1):
            new.append(count)
            count += index not in removed
        for instruction in raw:
            if instruction.target >= 0:
                instruction.target = new[instruction.target]
        self._index_of_unit = [new[index] for index in self._index_of_unit]

    def _index(self, unit: int) -> int:
        """The number of the instruction that a two-byte unit of the code belongs to."""
        return self._index_of_unit[min(unit, len(self._index_of_unit) - 1)]

    def _starts_of_handlers(self, code: types.CodeType) -> set[int]:
        return {handler for _, _, handler, _ in self._exceptions(code)}

    def _exceptions(self, code: types.CodeType) -> list[tuple[int, int, int, int]]:
        """The exception table: first and last (excluded) instruction, handler, stack depth."""
        numbers = list(_read_numbers(code.co_exceptiontable))
        rows = zip(*[iter(numbers)] * 4, strict=False)
        return [
            (self._index(start), self._index(start + length), self._index(handler), depth)
            for start, length, handler, depth in rows
        ]

    @staticmethod
    def _merge(rows: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        """Joins rows that only a removed instruction kept apart."""
        merged: list[tuple[int, int, int, int]] = []
        for row in rows:
            if merged and merged[-1][1] == row[0] and merged[-1][2:] == row[2:]:
                merged[-1] = (merged[-1][0], *row[1:])
            elif row[0] != row[1]:
                merged.append(row)
        return merged


def _read(raw: bytes, index_of_unit: list[int]) -> list[Instruction]:
    """The instructions, jumps with the two-byte unit they go to; fills the index of each unit."""
    found: list[Instruction] = []
    ends: list[int] = []  # the unit after each instruction and its caches
    wide = 0
    for unit, (opcode, argument) in enumerate(zip(raw[::2], raw[1::2], strict=True)):
        index_of_unit.append(len(found))
        if opcode == CACHE:
            if ends:
                ends[-1] = unit + 1
        elif opcode == _EXTENDED_ARG:
            wide = (wide | argument) << 8
        elif opcode in _PAIRS:
            first, second = _PAIRS[opcode]
            found += [Instruction(first, argument >> 4), Instruction(second, argument & 15)]
            ends += [unit + 1, unit + 1]
        elif opcode != _NOP:
            found.append(Instruction(opcode, argument | wide))
            ends.append(unit + 1)
            wide = 0
    index_of_unit.append(len(found))
    for instruction, end in zip(found, ends, strict=True):
        if instruction.opcode in _JUMPS:
            back = instruction.opcode in _BACK
            instruction.target = end - instruction.argument if back else end + instruction.argument
            name = dis.opname[instruction.opcode]
            instruction.kind = name.replace("FORWARD_", "").replace("BACKWARD_", "")
            instruction.argument = 0
    return found


def _turn_jumps_over_jumps(raw: list[Instruction], handlers: set[int]) -> set[int]:
    """Turns "unless x go on; go away" into "if x go away"; says which jumps that makes needless."""
    goals = {i.target for i in raw if i.target >= 0} | handlers
    removed = set()
    for index, (test, jump) in enumerate(itertools.pairwise(raw)):
        prefix, _, condition = test.kind.partition("POP_JUMP_")
        if prefix or condition not in _OPPOSITES or test.target != index + 2:
            continue
        if jump.always_jumps and index + 1 not in goals:
            test.kind = "POP_JUMP_" + _OPPOSITES[condition]
            test.opcode = dis.opmap.get(test.kind, test.opcode)
            test.target = jump.target
            removed.add(index + 1)
    return removed


def _read_numbers(table: bytes) -> Iterator[int]:
    """The numbers of an exception table, stored six bits to the byte, highest first."""
    number = 0
    for byte in table:
        number = number << 6 | byte & 0x3F
        if not byte & 0x40:
            yield number
            number = 0

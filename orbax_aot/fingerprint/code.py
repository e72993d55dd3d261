"""Code objects: what one says, whatever its file, its lines and its docstring are."""

from __future__ import annotations

import dataclasses
import dis
import sys
import types

from orbax_aot.fingerprint.instructions import CACHE, Instruction, Layout

_OPCODES = dis.opmap
_TAKES_CONSTANT = frozenset(dis.hasconst)
_TAKES_NAME = frozenset(dis.hasname)
_LOAD_GLOBAL = _OPCODES["LOAD_GLOBAL"]
_LOAD_NAME = _OPCODES["LOAD_NAME"]
_LOAD_NAMES = frozenset(
    _OPCODES[name]
    for name in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
    if name in _OPCODES
)
_LOAD_ATTRIBUTES = frozenset(
    _OPCODES[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in _OPCODES
)
_LOAD_SUPER_ATTR = _OPCODES.get("LOAD_SUPER_ATTR")
# The lowest bit tells whether a method is loaded.
_LOAD_ATTR_IS_SHIFTED = sys.version_info >= (3, 12)
_IMPORT_NAME = _OPCODES["IMPORT_NAME"]
_STORE_NAME = _OPCODES["STORE_NAME"]

_HAS_DOCSTRING_FLAG = 0x4000000  # since Python 3.13
# A class body stores these itself; what it stores there depends on lines and docstrings,
# or (the static attributes) on the hash seed.
_WRITTEN_BY_THE_COMPILER = frozenset(
    {"__doc__", "__firstlineno__", "__static_attributes__", "__module__", "__qualname__"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedCode:
    """One code object, read.

    `text` is its instructions with constants numbered by first use. `constants` are these constants
    in that order. `references` are the global names it loads, each with the attributes
    loaded from it right away. `imports` are the imports it makes, as (name, level, names taken).
    `names` are all names that it loads, for gating attributes by name.
    """

    code: types.CodeType
    text: str
    constants: tuple[object, ...]
    references: tuple[tuple[str, ...], ...]
    imports: tuple[tuple[str, int, tuple[str, ...]], ...]
    names: tuple[str, ...]


def _name_of(code: types.CodeType, opcode: int, argument: int) -> str:
    if opcode == _LOAD_GLOBAL or (opcode in _LOAD_ATTRIBUTES and _LOAD_ATTR_IS_SHIFTED):
        argument >>= 1
    elif opcode == _LOAD_SUPER_ATTR:
        argument >>= 2
    return code.co_names[argument]


class _Reader:
    """Reads one code object from its first instruction to its last."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.tokens: list[str] = []
        self.slots: dict[int, int] = {}
        self.constants: list[object] = []
        self.references: list[list[str]] = []
        self.imports: list[tuple[str, int, tuple[str, ...]]] = []
        self.exceptions: list[tuple[int, int, int, int]] = []
        self.names: dict[str, None] = {}
        self._chain: list[str] | None = None

    def read(self) -> ScannedCode:
        layout = Layout(self.code)
        instructions = [*layout.instructions, Instruction(CACHE, 0)]
        for index, instruction in enumerate(layout.instructions):
            following = instructions[index + 1]
            opcode, argument = instruction.opcode, instruction.argument
            if opcode in _TAKES_CONSTANT:
                self._constant(opcode, argument, following)
            elif opcode in _TAKES_NAME:
                before = [i.argument for i in instructions[max(0, index - 2) : index]]
                self._name(opcode, argument, following, before)
            else:
                self._chain = None
                if instruction.kind:
                    self.tokens.append(f"{instruction.kind}>{instruction.target}")
                else:
                    self.tokens.append(f"{opcode}.{argument}")
        self.exceptions = layout.exceptions
        return ScannedCode(
            code=self.code,
            text=" ".join(self.tokens) + self._header(),
            constants=tuple(self.constants),
            references=tuple(map(tuple, self.references)),
            imports=tuple(self.imports),
            names=tuple(self.names),
        )

    def _constant(self, opcode: int, argument: int, following: Instruction) -> None:
        self._chain = None
        if following.opcode == _STORE_NAME and self._is_compilers(following.argument):
            self.tokens.append(f"{opcode}.-")
            return
        if argument not in self.slots:
            self.slots[argument] = len(self.constants)
            self.constants.append(self.code.co_consts[argument])
        self.tokens.append(f"{opcode}.{self.slots[argument]}")

    def _is_compilers(self, name_index: int) -> bool:
        return self.code.co_names[name_index] in _WRITTEN_BY_THE_COMPILER

    def _name(
        self,
        opcode: int,
        argument: int,
        following: Instruction,
        before: list[int],
    ) -> None:
        name = _name_of(self.code, opcode, argument)
        self.tokens.append(f"{opcode}.{argument}")
        if opcode in _LOAD_NAMES:
            if following.opcode == _STORE_NAME and self._is_compilers(following.argument):
                return  # a class body that stores the name of its module
            self._chain = [name]
            self.references.append(self._chain)
        elif opcode in _LOAD_ATTRIBUTES and self._chain is not None:
            self._chain.append(name)
        else:
            self._chain = None
        if opcode == _IMPORT_NAME:
            level, taken = (self.code.co_consts[constant] for constant in before)
            self.imports.append((name, level, taken or ()))
        if opcode != _STORE_NAME:
            self.names[name] = None

    def _header(self) -> str:
        code = self.code
        arguments = code.co_argcount + code.co_kwonlyargcount
        arguments += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
        names = code.co_varnames[:arguments]
        if not self.names.keys().isdisjoint({"vars", "dir"}):
            names = code.co_varnames  # without an argument these tell the names of local variables
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        flags = code.co_flags & ~_HAS_DOCSTRING_FLAG
        free = ("__class__" in code.co_freevars, len(code.co_freevars), len(code.co_cellvars))
        return repr((code.co_name, code.co_names, names, counts, flags, free, self.exceptions))


# By identity, keeping the code alive: equality of code objects ignores what matters here.
_scanned: dict[int, ScannedCode] = {}
_MOST_SCANNED = 50_000


def scan(code: types.CodeType) -> ScannedCode:
    """Reads `code`; what was read once in this process is kept, code objects being immutable."""
    known = _scanned.get(id(code))
    if known is not None and known.code is code:
        return known
    if len(_scanned) >= _MOST_SCANNED:
        _scanned.clear()
    known = _scanned[id(code)] = _Reader(code).read()
    return known

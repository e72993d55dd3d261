"""What the compiled file of a library module says its names are bound to.

The answer comes from the module's top-level bytecode, as Python has cached it beside the source: no
source is read and nothing runs. It is what a module's namespace is held against to find out
whether somebody has replaced a part of the library since.
"""

from __future__ import annotations

import dis
import importlib.util
import marshal
import re
import sys
import types
from typing import NamedTuple

_OPCODES = dis.opmap
_EXTENDED_ARG = _OPCODES["EXTENDED_ARG"]
_CACHE = _OPCODES["CACHE"]
_STORE_NAME = _OPCODES["STORE_NAME"]
_STORE_GLOBAL = _OPCODES["STORE_GLOBAL"]
_IMPORT_NAME = _OPCODES["IMPORT_NAME"]
_IMPORT_FROM = _OPCODES["IMPORT_FROM"]
_LOAD_CONST = _OPCODES["LOAD_CONST"]
_LOAD_NAME = _OPCODES["LOAD_NAME"]
_LOAD_ATTR = _OPCODES["LOAD_ATTR"]
_LOAD_ATTR_IS_SHIFTED = sys.version_info >= (3, 12)
_LOAD_BUILD_CLASS = _OPCODES["LOAD_BUILD_CLASS"]
_NO_INSTRUCTIONS = frozenset({_CACHE, _EXTENDED_ARG})
_LANDMARKS = re.compile(b"[" + re.escape(bytes([_STORE_NAME, _IMPORT_NAME])) + b"]", re.DOTALL)
_PYC_HEADER_BYTES = 16


class Import(NamedTuple):
    """`from module import name`."""

    module: str
    name: str


class Definition(NamedTuple):
    """`def` or `class`, decorated or not; `codes` are those it may come from."""

    codes: tuple[types.CodeType, ...]
    is_class: bool


class Constant(NamedTuple):
    """A literal."""

    value: object


class Alias(NamedTuple):
    """Another name of this module, or an attribute of what it stands for."""

    path: tuple[str, ...]


class Unknown(NamedTuple):
    """What the bytecode alone does not tell: the result of a call, for the most part."""


Binding = Import | Definition | Constant | Alias | Unknown


class _Bytecode:
    """The instructions of one code object, walked backwards from the few that matter.

    Positions count two-byte units, inline caches and wide-argument prefixes included; reading only
    around imports and stores is what keeps half a thousand modules within a tenth of a second.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        raw = code.co_code
        self.opcodes = raw[::2]
        self._arguments = raw[1::2]

    def argument(self, position: int) -> int:
        value = self._arguments[position]
        shift = 8
        while position and self.opcodes[position - 1] == _EXTENDED_ARG:
            position -= 1
            value |= self._arguments[position] << shift
            shift += 8
        return value

    def before(self, position: int) -> int:
        """The position of the instruction before; -1 at the beginning."""
        position -= 1
        while position >= 0 and self.opcodes[position] in _NO_INSTRUCTIONS:
            position -= 1
        return position

    def name(self, position: int) -> str:
        return self.code.co_names[self.argument(position)]

    def attribute_name(self, position: int) -> str:
        argument = self.argument(position)
        return self.code.co_names[argument >> 1 if _LOAD_ATTR_IS_SHIFTED else argument]

    def constant(self, position: int) -> object:
        return self.code.co_consts[self.argument(position)]


class Bindings:
    """What one module or class body binds; a name may be bound several times, as in branches.

    `package` resolves relative imports. A name is looked into only when it is asked for.
    """

    def __init__(self, code: types.CodeType, package: str | None) -> None:
        self._bytecode = _Bytecode(code)
        self._package = package
        # Where each name is stored: begin of the statement, roughly; the store; the last import.
        self._stores: dict[str, list[tuple[int, int, int]]] = {}
        opcodes = self._bytecode.opcodes
        start, last_import = 0, -1
        for match in _LANDMARKS.finditer(opcodes):
            position = match.start()
            if opcodes[position] == _IMPORT_NAME:
                last_import = position
                continue
            stores = self._stores.setdefault(self._bytecode.name(position), [])
            stores.append((start, position, last_import))
            start = position + 1

    def of(self, name: str) -> list[Binding]:
        """All that the body binds to `name`, in order."""
        return [self._read(name, *store) for store in self._stores.get(name, ())]

    def _read(self, name: str, start: int, position: int, last_import: int) -> Binding:
        bytecode = self._bytecode
        last = bytecode.before(position)
        opcode = bytecode.opcodes[last] if last >= start else _CACHE
        if opcode == _IMPORT_FROM:
            module = _imported_module(bytecode, last_import, self._package)
            return Import(module, bytecode.name(last))
        if opcode == _LOAD_CONST:
            value = bytecode.constant(last)
            return Unknown() if isinstance(value, types.CodeType) else Constant(value)
        if opcode == _LOAD_NAME:
            return Alias((bytecode.name(last),))
        if opcode == _LOAD_ATTR:
            return _alias_of_attribute(bytecode, last)
        return _definition(bytecode, start, position, name)


def _imported_module(bytecode: _Bytecode, position: int, package: str | None) -> str:
    name = bytecode.name(position)
    level = bytecode.constant(bytecode.before(bytecode.before(position)))
    if not isinstance(level, int) or not level:
        return name
    parts = (package or "").split(".")
    return ".".join(parts[: len(parts) - level + 1] + ([name] if name else []))


def _definition(bytecode: _Bytecode, start: int, position: int, name: str) -> Binding:
    codes = []
    is_class = False
    for current in range(start, position):
        opcode = bytecode.opcodes[current]
        if opcode == _LOAD_CONST:
            value = bytecode.constant(current)
            if isinstance(value, types.CodeType) and value.co_name == name:
                codes.append(value)
        elif opcode == _LOAD_BUILD_CLASS:
            is_class = True
    return Definition(tuple(codes), is_class) if codes else Unknown()


def _alias_of_attribute(bytecode: _Bytecode, position: int) -> Binding:
    path: list[str] = []
    while position >= 0 and bytecode.opcodes[position] == _LOAD_ATTR:
        path.append(bytecode.attribute_name(position))
        position = bytecode.before(position)
    if position < 0 or bytecode.opcodes[position] != _LOAD_NAME:
        return Unknown()
    path.append(bytecode.name(position))
    return Alias(tuple(reversed(path)))


def class_body(code: types.CodeType, qualified_name: str) -> types.CodeType | None:
    """The code of a class body inside a module's code."""
    for part in qualified_name.split("."):
        bodies = [c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == part]
        if len(bodies) != 1:
            return None
        code = bodies[0]
    return code


def stores_global(code: types.CodeType, name: str) -> bool:
    """Whether any function inside a module's code assigns the global `name`."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if name in constant.co_names:
                bytecode = _Bytecode(constant)
                for position, opcode in enumerate(bytecode.opcodes):
                    if opcode == _STORE_GLOBAL and bytecode.name(position) == name:
                        return True
            if stores_global(constant, name):
                return True
    return False


def collect_names(code: types.CodeType, names: set[str]) -> None:
    """Adds all names that a module's functions look up, and the strings that look like names."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(constant.co_names)
            collect_names(constant, names)
        elif type(constant) is str and constant.isidentifier():
            names.add(constant)


def compiled_code(module: types.ModuleType) -> types.CodeType | None:
    """The code of a module's body from Python's cache, or None where there is no cache of it."""
    spec = getattr(module, "__spec__", None)
    path = getattr(spec, "cached", None) or getattr(module, "__cached__", None)
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            data = file.read()
        if data[:4] != importlib.util.MAGIC_NUMBER:
            return None
        code = marshal.loads(memoryview(data)[_PYC_HEADER_BYTES:])
    except (OSError, ValueError, EOFError, TypeError):
        return None
    return code if isinstance(code, types.CodeType) else None

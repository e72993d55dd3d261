"""Functions and modules: code, and what its names stand for now."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

from orbax_aot.fingerprint import code as codes
from orbax_aot.fingerprint import libraries
from orbax_aot.fingerprint.libraries import Kind, words
from orbax_aot.fingerprint.walk import Walk

# Code that looks these up tells apart what this fingerprint takes for the same: files, lines,
# docstrings, annotations, module names, frames.
_UNSEEN_NAMES = words(
    "__doc__ __file__ __cached__ __spec__ __loader__ __module__ __qualname__ __annotations__"
    " __annotate__ annotation return_annotation __subclasses__ __globals__ __closure__ __code__"
    " __builtins__ cell_contents f_globals f_locals f_back f_lineno f_code gi_frame co_consts"
    " co_code co_filename co_firstlineno tb_frame tb_lineno _getframe __firstlineno__"
    " __static_attributes__ __dataclass_params__ __type_params__"
)
_COMPUTED_NAMES = frozenset({"__dict__", "__getattribute__", "__getstate__", "__reduce_ex__"})
_MODULE_NAMES_OF_THE_IMPORT_SYSTEM = words(
    "__builtins__ __loader__ __spec__ __file__ __cached__ __path__ __doc__ __annotations__ __name__"
    " __package__ __annotate__ __conditional_annotations__"
)
# What decorators copy from one function to another, and nothing that runs looks at.
SILENT_ATTRIBUTES = frozenset(
    {"__doc__", "__module__", "__qualname__", "__annotations__", "__type_params__"}
)
_MISSING = object()


def write_function(walk: Walk, function: types.FunctionType) -> None:
    """Writes the content of a function that has no name in a library."""
    found = libraries.library_file(function.__code__.co_filename)
    if found is not None:
        _write_library_function(walk, function, *found)
    else:
        _write_user_code(walk, function.__code__, _Scope.of(function))
        walk.write(function.__name__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        _write_cell(walk, function, name, cell)
    walk.visit(function.__defaults__)
    walk.visit(function.__kwdefaults__)
    attributes = {k: v for k, v in function.__dict__.items() if k not in SILENT_ATTRIBUTES}
    if function.__code__.co_qualname == "singledispatch.<locals>.wrapper":
        attributes.pop("_clear_cache", None)
    if attributes:
        walk.visit(attributes)


# Integers that a library turns into floats in its own closure when it is first called.
_TURNED_INTO_FLOATS = frozenset(
    [("optax.schedules._schedule", "cosine_decay_schedule.<locals>.schedule", "decay_steps")]
)
# What the functions that `functools.singledispatch` makes remember of their registry.
_DISPATCH_CACHES = frozenset({"dispatch_cache", "cache_token"})


def _write_cell(walk: Walk, function: types.FunctionType, name: str, cell: types.CellType) -> None:
    made = function.__code__.co_qualname
    if made.startswith("singledispatch.<locals>.") and name in _DISPATCH_CACHES:
        return
    if made == "_shard_map.<locals>.wrapped" and name == "axis_names":
        walk.visit(types.CellType(_manual_axes(function, cell)))
        return
    if (function.__module__, made, name) in _TURNED_INTO_FLOATS:
        value = cell.cell_contents
        if isinstance(value, int):
            walk.visit(types.CellType(float(value)))
            return
    walk.visit(cell)


def _manual_axes(function: types.FunctionType, cell: types.CellType) -> frozenset[str]:
    """Returns the axes that a `jax.shard_map` maps over: none named are all, filled in when it is first traced."""
    names = cell.cell_contents
    if not names:
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        mesh = dict(closure)["mesh"].cell_contents
        names = getattr(mesh, "axis_names", ())
    return frozenset(names)


def _write_library_function(
    walk: Walk, function: types.FunctionType, file: str, kind: Kind
) -> None:
    """A function made in a library: the build pins its code, but not what it closes over."""
    code = function.__code__
    if kind is Kind.IMPURE or libraries.is_impure(function.__module__ or "", code.co_qualname):
        walk.undecidable(f"uses {function.__module__}.{code.co_qualname}")
    walk.write("library code", file, code.co_qualname, str(code.co_firstlineno))


def write_bare_code(walk: Walk, code: types.CodeType) -> None:
    """Code as a value, without the module that would give its names a meaning."""
    walk.undecidable(f"a code object {code.co_name} as a value")


# -- code -----------------------------------------------------------------------------------------


class _Scope:
    """What global names mean to one function."""

    def __init__(self, namespace: dict[str, Any], builtins: Mapping[str, Any]) -> None:
        self.namespace = namespace
        self.builtins = builtins

    @staticmethod
    def of(function: types.FunctionType) -> _Scope:
        builtins: Any = function.__builtins__
        if isinstance(builtins, types.ModuleType):
            builtins = vars(builtins)
        return _Scope(function.__globals__, builtins)

    def look_up(self, name: str) -> object:
        return self.namespace.get(name, self.builtins.get(name, _MISSING))


def _write_user_code(walk: Walk, code: types.CodeType, scope: _Scope) -> None:
    scanned = codes.scan(code)
    walk.write("code", scanned.text)
    _note_names(walk, code, scanned.names)
    for constant in scanned.constants:
        if isinstance(constant, types.CodeType):
            _write_user_code(walk, constant, scope)
        else:
            walk.visit(constant)
    for name, level, taken in scanned.imports:
        _write_import(walk, name, level, taken, scope)
    for chain in scanned.references:
        _write_reference(walk, chain, scope)


def _note_names(walk: Walk, code: types.CodeType, names: tuple[str, ...]) -> None:
    for name in names:
        if name in _UNSEEN_NAMES:
            walk.undecidable(f"looks up {name}")
        elif name in _COMPUTED_NAMES:
            walk.mentions.add_everything()
        elif name == "__class__":
            walk.mentions.add_any_constructor()
    walk.mentions.add(names)


def _write_reference(walk: Walk, chain: tuple[str, ...], scope: _Scope) -> None:
    """Writes what a global name, and the attributes of modules that follow it, stand for."""
    value = scope.look_up(chain[0])
    walk.write("name", chain[0])
    if value is _MISSING:
        walk.write("unbound")
        return
    for attribute in chain[1:]:
        if not isinstance(value, types.ModuleType):
            break
        value = _module_attribute(walk, value, attribute)
        if value is _MISSING:
            return
    walk.visit(value)


def _module_attribute(walk: Walk, module: types.ModuleType, name: str) -> object:
    """The attribute of a module, or `_MISSING` where it is written already or cannot be had."""
    kind = libraries.kind_of_module(module.__name__)
    value = vars(module).get(name, _MISSING)
    if value is _MISSING:
        if kind is Kind.USER:
            if "__getattr__" in vars(module):
                walk.undecidable(f"{module.__name__} computes its attributes")
            walk.write("no attribute", name)
            return _MISSING
        value = getattr(module, name, _MISSING)  # libraries load some of theirs when asked
    if kind in (Kind.USER, Kind.OWN):
        return value
    if libraries.is_impure(module.__name__, name):
        verb = "reads" if module.__name__ == "os" else "uses"
        walk.undecidable(f"{verb} {module.__name__}.{name}")
        return _MISSING
    if value is _MISSING:
        walk.write("no attribute", name)
    elif is_fixed_part_of_library(value):
        walk.write("library", f"{module.__name__}:{name}")
        return _MISSING
    return value


def is_fixed_part_of_library(value: object) -> bool:
    """Whether an object that a library module holds is known by its place there.

    True of instances of the library's own classes; what could hold something of the user's
    (functions, partials, containers, arrays) is looked at.
    """
    kind = type(value)
    if isinstance(value, types.ModuleType | types.FunctionType | type) or callable(value):
        return False
    if kind.__module__ == "builtins":
        return False
    return libraries.kind_of_module(kind.__module__) is Kind.NAMED and not hasattr(value, "dtype")


def _write_import(walk: Walk, name: str, level: int, taken: tuple[str, ...], scope: _Scope) -> None:
    """Writes what an import inside a function gives; it must have been made before."""
    full_name = name
    if level:
        package = scope.namespace.get("__package__") or ""
        base = package.split(".")
        full_name = ".".join(base[: len(base) - level + 1] + ([name] if name else []))
    module = sys.modules.get(full_name)
    if module is None:
        if libraries.kind_of_module(full_name) is Kind.NAMED:
            walk.write("import", full_name)
            for attribute in taken:
                if libraries.is_impure(full_name, attribute):
                    walk.undecidable(f"uses {full_name}.{attribute}")
            note_library_module(walk, full_name)
        else:
            walk.undecidable(f"imports {full_name}, which is not loaded yet")
        return
    if level == 0:
        walk.write("import", full_name)
    if not taken:
        parts = full_name.split(".")
        for count in range(1, len(parts) + 1):
            walk.visit(sys.modules.get(".".join(parts[:count])))
    for attribute in taken:
        if attribute == "*":
            walk.undecidable(f"imports everything from {full_name}")
            continue
        value = _module_attribute(walk, module, attribute)
        if value is not _MISSING:
            walk.visit(value)


# -- modules --------------------------------------------------------------------------------------


def write_module(walk: Walk, module: types.ModuleType) -> None:
    """Writes a module as a value: which one, and of the user's those attributes that are named."""
    name = module.__name__
    kind = libraries.kind_of_module(name)
    if kind is Kind.USER:
        if "__getattr__" in vars(module):
            walk.undecidable(f"{name} computes its attributes")
        for attribute, value in sorted(vars(module).items()):
            if attribute not in _MODULE_NAMES_OF_THE_IMPORT_SYSTEM:
                walk.attribute(module, attribute, value)
        return
    walk.write("library", name)
    if kind is Kind.IMPURE:
        walk.undecidable(f"uses the module {name}")
    elif kind is Kind.NAMED:
        note_library_module(walk, name)


def note_library_module(walk: Walk, name: str) -> None:
    """Watches for the few attributes of a library module that read the outer world."""
    for attribute in libraries.impure_names_in(name):

        def report(path: str = f"{name}.{attribute}") -> None:
            walk.undecidable(f"uses {path}")

        walk.mentions.when(attribute, report, of_module=True)

"""Patched libraries: what somebody has put in place of a part of a trusted library.

Library code is not walked, so a function that was replaced inside a library would go unnoticed.
Each loaded module of the trusted libraries is therefore held against what its own compiled file
binds (see `bindings`), once per process; from then on only namespaces that have changed are
looked at again, which an identity comparison of dictionaries finds in about a millisecond.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import gc
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from orbax_aot._jax import hooks
from orbax_aot.fingerprint import bindings, libraries
from orbax_aot.fingerprint.bindings import Alias, Bindings, Constant, Definition, Import, Unknown
from orbax_aot.fingerprint.libraries import Kind

_MISSING = object()
_NOTHING: dict[str, Any] = {}
# Unwrapping ends here, so that no chain of wrappers runs in a circle.
_MOST_LAYERS = 20
_HEAP_TYPE = 1 << 9  # of a class: it is made by a class statement, and can be changed
_BOUND = (types.MethodType, types.BuiltinMethodType)
_NUMBERS = frozenset({bool, int, float, complex})
_SIMPLE = _NUMBERS | {type(None), str, bytes, tuple, frozenset}
# Containers and slots of values are no code, and modules are looked at by themselves.
_UNCHECKED = frozenset(
    {types.ModuleType, dict, list, set, types.MemberDescriptorType, types.GetSetDescriptorType}
)
_METHOD_WRAPPERS = frozenset({property, staticmethod, classmethod, functools.cached_property})
_MADE_IN_C = frozenset(
    {types.WrapperDescriptorType, types.MethodDescriptorType, types.BuiltinFunctionType}
)
# Set by libraries on each other while they are imported, or by the import system.
_NAMES_OF_THE_IMPORT_SYSTEM = frozenset(
    [
        "__builtins__",
        "__loader__",
        "__spec__",
        "__file__",
        "__cached__",
        "__path__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__name__",
        "__package__",
    ]
)

Patch = tuple[str, object]


def _layers(value: Any) -> Iterator[Any]:
    """A callable and what it wraps, outermost first; stops at what is no wrapper."""
    for _ in range(_MOST_LAYERS):
        yield value
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial | functools.cached_property):
            value = value.func
        elif isinstance(value, type):
            return
        else:
            value = getattr(value, "__dict__", _NOTHING).get("__wrapped__")
        if value is None:
            return


def _codes(value: Any, depth: int = 3) -> Iterator[types.CodeType]:
    """The codes of the functions that a callable consists of, as far as decorators show them."""
    for layer in _layers(value):
        inner: tuple[object, ...] = ()
        if isinstance(layer, types.FunctionType):
            yield layer.__code__
            inner = tuple(_cell_contents(layer))
        elif isinstance(layer, functools.partial):
            inner = layer.args
        if depth:
            for part in inner:
                if callable(part) and not isinstance(part, type):
                    yield from _codes(part, depth - 1)


def _cell_contents(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _holds_foreign(value: Any) -> bool:
    """Whether a rule, or something that it closes over, is the user's."""
    if type(value) is types.FunctionType and not value.__closure__ and not value.__dict__:
        return _is_foreign_file(value.__code__.co_filename)
    return any(_is_foreign_file(code.co_filename) for code in _codes(value, depth=2))


def _is_foreign_file(path: str) -> bool:
    return not path.startswith("<") and libraries.library_file(path) is None


def is_foreign(value: Any) -> bool:
    """Whether a function, or a class, that a library holds is the user's (or another library's)."""
    if isinstance(value, type):
        return _is_user_module(value.__module__)
    for layer in _layers(value):
        if isinstance(layer, types.FunctionType):
            if _is_foreign_code(layer):
                return True
        elif not isinstance(layer, types.BuiltinFunctionType) and _is_user_module(
            type(layer).__module__
        ):
            return True
    return False


def _is_foreign_code(function: types.FunctionType) -> bool:
    path = function.__code__.co_filename
    if path.startswith("<"):  # generated: by whom, its module tells
        module = function.__globals__.get("__name__")
        if isinstance(module, str) and module.startswith("namedtuple_"):
            return False
        return not path.startswith("<frozen ") and _is_user_module(module)
    return libraries.library_file(path) is None


def _is_user_module(name: object) -> bool:
    """Whether a loaded module is not a library's; names that no module has say nothing."""
    if not isinstance(name, str):
        return False
    module = sys.modules.get(name)
    if module is None or libraries.kind_of_module(name) is not Kind.USER:
        return False
    return name == "__main__" or getattr(module, "__file__", None) is not None


def _functions_of(value: Any) -> tuple[Any, ...]:
    """The functions of a method, in whatever it is wrapped."""
    if isinstance(value, property):
        return tuple(f for f in (value.fget, value.fset, value.fdel) if f is not None)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    return (value.__func__,) if isinstance(value, staticmethod | classmethod) else (value,)


class _Namespace:
    """One module of a library, or one of its classes: its names as last seen, and its patches."""

    def __init__(self, holder: Any, module: types.ModuleType, body: _Body) -> None:
        self.holder = holder
        self.module = module
        self.patches: list[Patch] = []
        self._body = body
        self._seen: dict[str, Any] | None = None
        inside = holder.__qualname__ if isinstance(holder, type) else ""
        self._prefix = f"{inside}." if inside else ""
        self.path = ".".join(part for part in (module.__name__, inside) if part)

    def refresh(self) -> bool:
        """Looks again if any name has been bound to something else; says whether it looked."""
        names = vars(self.holder)
        try:
            if self._seen == names:
                return False
        except Exception:  # comparing arrays that have changed gives no truth value
            pass
        self._seen = dict(names)
        self.patches = [
            (f"{self.path}.{name}", value)
            for name, value in self._seen.items()
            if self._is_patched(name, value)
        ]
        return True

    def classes(self) -> Iterator[type]:
        """The classes that the module defines."""
        for value in (self._seen or {}).values():
            if (
                isinstance(value, type)
                and value.__module__ == self.module.__name__
                and value.__flags__ & _HEAP_TYPE
            ):
                yield value

    def _is_patched(self, name: str, value: Any) -> bool:
        kind = type(value)
        if kind in _UNCHECKED or name in _NAMES_OF_THE_IMPORT_SYSTEM:
            return False
        if isinstance(value, type):
            home = (value.__module__, value.__qualname__)
            if home == (self.module.__name__, self._prefix + name):
                return False
        elif kind in _SIMPLE:
            if self._prefix and (kind not in _NUMBERS or name.startswith("_")):
                return False  # names of fields and slots, and what enums keep
        elif kind is types.FunctionType or kind in _METHOD_WRAPPERS:
            # Most names, and fast: a function in the file and of the name it should have.
            if all(self._is_at_home(name, function) for function in _functions_of(value)):
                return False
        elif not callable(value) or (self._prefix and kind in _MADE_IN_C):
            return False
        expected = self._body.bindings_of(self.holder)
        known = expected.of(name) if expected is not None else []
        if any(isinstance(b, Import | Alias) and self._fits(name, value, b) for b in known):
            return False  # taken from where the library takes it, even if that is another package
        if kind not in _SIMPLE and is_foreign(value):
            return True
        return bool(known) and not any(self._fits(name, value, binding) for binding in known)

    def _is_at_home(self, name: str, function: Any) -> bool:
        """Whether a function comes from where one of this name should come from."""
        code = getattr(function, "__code__", None)
        if code is None:
            return False
        made = code.co_qualname
        if made == self._prefix + name:
            return code.co_filename == self._body.file
        if not self._prefix or "<locals>" not in made:
            return False
        # A method that something made for the class.
        if made == "wrap_method_once.<locals>.wrapped_module_method":
            return self._is_at_home(name, function.__wrapped__)
        return not is_foreign(function)

    def _fits(self, name: str, value: Any, binding: bindings.Binding) -> bool:
        """Whether a name that the library bound like this could hold this value."""
        if isinstance(binding, Unknown):
            return True
        if isinstance(binding, Definition):
            return _fits_definition(value, binding)
        if isinstance(binding, Constant):
            if type(value) is type(binding.value) and repr(value) == repr(binding.value):
                return True
            return isinstance(value, enum.Enum) or self._body.assigns(name)
        if isinstance(binding, Import):
            found = getattr(sys.modules.get(binding.module), binding.name, _MISSING)
        else:
            found = self._look_up(binding.path[0])
            for attribute in binding.path[1:]:
                found = found if found is _MISSING else getattr(found, attribute, _MISSING)
            if getattr(builtins, binding.path[0], _MISSING) is value:
                return True  # taken before the module defined a name like it
        if found is _MISSING or found is value or isinstance(found, types.ModuleType):
            return True
        # A method gets another identity each time it is taken from its object.
        return isinstance(value, _BOUND) and isinstance(found, _BOUND) and found == value

    def _look_up(self, name: str) -> Any:
        for names in (vars(self.holder), vars(self.module), vars(builtins)):
            if name in names:
                return names[name]
        return _MISSING


class _Body:
    """The compiled code of one module, from which its names and those of its classes come."""

    def __init__(self, module: types.ModuleType) -> None:
        self.file = str(getattr(module, "__file__", ""))
        self.code = bindings.compiled_code(module)
        self._module = module
        self._package = module.__package__
        self._of_module: Bindings | None = None
        self._of_classes: dict[str, Bindings | None] = {}

    def bindings_of(self, holder: object) -> Bindings | None:
        """What the module, or one of its classes, binds."""
        if self.code is None:
            return None
        if holder is self._module:
            if self._of_module is None:
                self._of_module = Bindings(self.code, self._package)
            return self._of_module
        name: str = holder.__qualname__  # type: ignore[attr-defined]
        if name not in self._of_classes:
            body = bindings.class_body(self.code, name)
            read = None if body is None else Bindings(body, self._package)
            self._of_classes[name] = read
        return self._of_classes[name]

    def assigns(self, name: str) -> bool:
        """Whether a function of the module assigns this global name."""
        return self.code is None or bindings.stores_global(self.code, name)


def _fits_definition(value: Any, binding: Definition) -> bool:
    if binding.is_class:
        if not isinstance(value, type):
            return True  # a decorator has made something else of it
        return value.__name__ == binding.codes[0].co_name
    codes = list(_codes(value))
    if not codes:
        name = getattr(value, "__name__", None)
        return name is None or name == binding.codes[0].co_name
    wanted = {(code.co_name, code.co_firstlineno) for code in binding.codes}
    return any((code.co_name, code.co_firstlineno) in wanted for code in codes)


class _Rules:
    """The tables in which JAX keeps how its primitives are differentiated, batched and lowered."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, dict[Any, Any]]] = []
        self.patches: list[Patch] = []

    def refresh(self) -> bool:
        """Looks again if any rule was set; says whether it looked."""
        tables = [(name, dict(table)) for name, table in hooks.rule_tables()]
        if tables == self._seen:
            return False
        self._seen = tables
        primitives = hooks.primitives_of_jax()
        self.patches = [
            (f"{name}[{primitive}]", rule)
            for name, table in tables
            for primitive, entry in table.items()
            if id(primitive) in primitives
            for rule in hooks.functions_of_rule(entry)
            if callable(rule) and _holds_foreign(rule)
        ]
        return True


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps garbage collection from going through all of JAX during the first look."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Watch:
    """All loaded modules of the trusted libraries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._namespaces: list[_Namespace] = []
        self._modules: dict[str, types.ModuleType] = {}
        self._bodies: dict[str, _Body] = {}
        self._classes: dict[int, type] = {}
        self._patches: list[Patch] = []
        self._uncompiled: list[str] = []
        self._rules = _Rules()
        self._names: set[str] = set()
        self._named: set[str] = set()  # modules whose names are among them

    def patches(self) -> tuple[list[Patch], list[str]]:
        """(what is patched now, modules that could not be checked)."""
        with self._lock, _no_collection():
            changed = self._add_new_modules()
            index = 0
            while index < len(self._namespaces):  # grows by the classes that are found
                namespace = self._namespaces[index]
                if namespace.refresh():
                    changed = True
                    if namespace.holder is namespace.module:
                        self._add_classes(namespace)
                index += 1
            rules = self._rules.refresh()
            if changed or rules:
                found = [patch for n in self._namespaces for patch in n.patches]
                found += self._rules.patches
                self._patches = sorted(found, key=lambda patch: patch[0])
            return self._patches, self._uncompiled

    def names_looked_up(self) -> frozenset[str]:
        """The names that the code of the watched modules looks up in any object."""
        with self._lock:
            for name, body in self._bodies.items():
                if name not in self._named and body.code is not None:
                    self._named.add(name)
                    bindings.collect_names(body.code, self._names)
            return frozenset(self._names)

    def _add_new_modules(self) -> bool:
        added = False
        for name, module in list(sys.modules.items()):
            if self._modules.get(name) is module or not _is_watched(name, module):
                continue
            self._modules[name] = module
            added = True
            body = _Body(module)
            if body.code is None:
                self._uncompiled.append(name)
            self._bodies[name] = body
            self._namespaces.append(_Namespace(module, module, body))
        return added

    def _add_classes(self, namespace: _Namespace) -> None:
        for cls in namespace.classes():
            if id(cls) not in self._classes:
                self._classes[id(cls)] = cls
                body = self._bodies[namespace.module.__name__]
                self._namespaces.append(_Namespace(cls, namespace.module, body))


# Parts of trusted libraries that no traced function runs, but that much time would go into.
_NOT_WATCHED = (
    "absl.", "flax.errors", "jax._src.clusters", "jax._src.debugger",
    "jax._src.export.serialization",
    "jax._src.xla_bridge", "jax.experimental.array_serialization", "jaxlib.", "numpy.distutils",
    "numpy.dtypes", "numpy.f2py", "numpy.lib._datasource", "numpy.ma", "numpy.random",
    "numpy.testing", "numpy.typing", "numpy._typing", "scipy", "typing_extensions",
)  # fmt: skip


def _is_watched(name: str, module: object) -> bool:
    top = name.partition(".")[0]
    if top not in libraries.TRUSTED_DISTRIBUTIONS or not isinstance(module, types.ModuleType):
        return False
    if name.startswith(_NOT_WATCHED):
        return False
    return str(getattr(module, "__file__", "")).endswith(".py")


_watch = _Watch()


def find_patches() -> tuple[list[Patch], list[str]]:
    """What is bound in a trusted library to something else than the library binds it to.

    Returns:
      (path, object now there) of each, sorted; and the modules for which there is nothing to
      compare with, because Python keeps no compiled file of them.
    """
    return _watch.patches()


def names_looked_up() -> frozenset[str]:
    """The names of attributes that the code of trusted libraries looks up."""
    return _watch.names_looked_up()


def forget() -> None:
    """Forgets what was seen; for tests."""
    global _watch
    _watch = _Watch()

"""Plain values: how each kind is written, and who writes the others.

Values without an identity that could matter (numbers, strings, tuples, what a library offers under
a name) are written in place. All others are numbered by the walk and their content follows.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import operator
import re
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from orbax_aot._jax import hooks
from orbax_aot.fingerprint import classes, functions, jax_values, libraries
from orbax_aot.fingerprint.libraries import Kind
from orbax_aot.fingerprint.walk import Walk

_MOST_ARRAY_BYTES = 1 << 28  # hashing takes about 0.15 s for this much


def write_value(walk: Walk, value: object) -> None:
    """Writes any value at all, or says why it cannot be decided."""
    kind = type(value)
    in_place = _IN_PLACE.get(kind)
    if in_place is not None:
        in_place(walk, value)
    elif walk.number_of(value) is not None:
        if isinstance(value, type):
            classes.note_constructed(walk, value)
        walk.write("ref", str(walk.number_of(value)))
    elif isinstance(value, type):
        classes.write_class(walk, value, constructed=True)
    elif not _write_library_object(walk, value):
        _write_object(walk, value)


# -- in place -------------------------------------------------------------------------------------


def _write_repr(walk: Walk, value: object) -> None:
    walk.write(type(value).__name__, repr(value))


def _write_float(walk: Walk, value: float) -> None:
    walk.write("float", value.hex())


def _write_complex(walk: Walk, value: complex) -> None:
    walk.write("complex", value.real.hex(), value.imag.hex())


def _write_str(walk: Walk, value: str) -> None:
    walk.mentions.add_text(value)
    walk.write("str", value)


def _write_bytes(walk: Walk, value: bytes | bytearray) -> None:
    walk.write(type(value).__name__, hashlib.sha256(value).hexdigest())


def _write_tuple(walk: Walk, value: tuple[object, ...]) -> None:
    walk.write("tuple", str(len(value)))
    for item in value:
        walk.visit(item)


def _write_slice(walk: Walk, value: slice) -> None:
    walk.write("slice")
    _write_tuple(walk, (value.start, value.stop, value.step))


def _sort_key(value: object) -> str | None:
    """What a value of a set sorts by, or None where only its address could order it."""
    if isinstance(value, type) or callable(value):
        name = libraries.name_in_library(value)
        return None if name is None else f"library {name}"
    if isinstance(value, enum.Enum):
        return f"enum {type(value).__qualname__} {value.name}"
    if isinstance(value, tuple) and type(value) is tuple:
        keys = [_sort_key(item) for item in value]
        return None if None in keys else f"tuple {keys}"
    if type(value) in (type(None), bool, int, float, complex, str, bytes):
        return f"{type(value).__name__} {value!r}"
    return None


def _write_set(walk: Walk, value: set[object] | frozenset[object]) -> None:
    keyed = [(_sort_key(item), item) for item in value]
    if any(key is None for key, _ in keyed):
        walk.undecidable("a set whose order is that of addresses")
        return
    walk.write(type(value).__name__, str(len(value)))
    for _, item in sorted(keyed, key=operator.itemgetter(0)):  # type: ignore[arg-type]
        walk.visit(item)


def _write_dtype(walk: Walk, value: np.dtype) -> None:
    walk.write("dtype", value.name, str(value.descr) if value.fields else value.str)


def _write_generic_alias(walk: Walk, value: Any) -> None:
    origin = typing.get_origin(value)
    walk.write("typing", getattr(value, "_name", None) or type(value).__name__)
    walk.visit(origin)
    for argument in typing.get_args(value):
        walk.visit(argument)


def _write_method(walk: Walk, value: types.MethodType) -> None:
    _note_traced(walk, value)
    walk.write("method")
    walk.visit(value.__func__)
    walk.visit(value.__self__)


_IN_PLACE: dict[type, Callable[[Walk, Any], None]] = {
    type(None): _write_repr,
    bool: _write_repr,
    int: _write_repr,
    type(...): _write_repr,
    type(NotImplemented): _write_repr,
    range: _write_repr,
    float: _write_float,
    complex: _write_complex,
    str: _write_str,
    bytes: _write_bytes,
    tuple: _write_tuple,
    slice: _write_slice,
    frozenset: _write_set,
    types.CodeType: functions.write_bare_code,
    types.MethodType: _write_method,
    types.GenericAlias: _write_generic_alias,
    types.UnionType: _write_generic_alias,
}


# -- by name --------------------------------------------------------------------------------------

_NAMED_TYPES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)


def _write_library_object(walk: Walk, value: object) -> bool:
    """Writes what a library offers under a name by that name; says whether it could."""
    if isinstance(value, types.ModuleType):
        return False
    if not isinstance(value, _NAMED_TYPES):
        module_name = type(value).__module__
        if not isinstance(module_name, str) or libraries.kind_of_module(module_name) is Kind.USER:
            return False
    name = libraries.name_in_library(value)
    if name is None:
        return False
    libraries_write_name(walk, *name)
    if isinstance(value, types.FunctionType):
        _write_simple_defaults(walk, value)
    return True


def _write_simple_defaults(walk: Walk, function: types.FunctionType) -> None:
    """Default values of a library function, which somebody may have set to others."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    for default in defaults:
        name, value = default if type(default) is tuple and len(default) == 2 else ("", default)
        if type(value) in (bool, int, float, str):
            walk.write(str(name), repr(value))


def libraries_write_name(walk: Walk, module_name: str, name: str) -> None:
    """Writes an object of a library by its name, unless it reads the outer world."""
    path = f"{module_name}:{name}"
    if libraries.is_impure(module_name, name):
        walk.undecidable(f"uses {module_name}.{name}")
    if path in libraries.COMPUTED_ACCESS:
        walk.mentions.add_everything()
    if path in libraries.CLASS_ACCESS:
        walk.mentions.add_any_constructor()
    walk.write("library", path)


# -- numbered -------------------------------------------------------------------------------------


def _write_list(walk: Walk, value: list[object]) -> None:
    walk.write(str(len(value)))
    for item in value:
        walk.visit(item)


def _write_dict(walk: Walk, value: Mapping[Any, Any]) -> None:
    walk.write(str(len(value)))
    for key, item in value.items():
        walk.visit(key)
        walk.visit(item)


def _write_cell(walk: Walk, value: types.CellType) -> None:
    try:
        content = value.cell_contents
    except ValueError:  # the variable is not bound yet
        walk.write("empty")
    else:
        walk.visit(content)


def _write_partial(walk: Walk, value: Any) -> None:
    walk.visit(type(value))
    walk.visit(value.func)
    walk.visit(value.args)
    walk.visit(dict(value.keywords))
    walk.visit(dict(vars(value)))


def _write_property(walk: Walk, value: property) -> None:
    walk.visit((value.fget, value.fset, value.fdel))


def _write_wrapped_method(walk: Walk, value: staticmethod | classmethod) -> None:
    walk.visit(value.__func__)


def _write_weakref(walk: Walk, value: weakref.ref) -> None:
    walk.visit(value())


def _write_builtin(walk: Walk, value: types.BuiltinFunctionType) -> None:
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        walk.undecidable(f"uses the extension code {value.__qualname__}")
        return
    walk.write(value.__qualname__)
    walk.visit(owner)


def _write_descriptor(walk: Walk, value: Any) -> None:
    walk.write(value.__name__)
    owner = value.__objclass__
    if libraries.name_in_library(owner) is not None:
        walk.visit(owner)


def _write_array(walk: Walk, value: np.ndarray) -> None:
    walk.write(value.dtype.name, str(value.dtype.str), str(value.shape), str(value.strides))
    if value.dtype.hasobject:
        walk.visit(value.tolist())
    elif value.nbytes > _MOST_ARRAY_BYTES:
        walk.undecidable(f"an array of {value.nbytes} bytes")
    else:
        walk.write(hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())


def _write_lru_cache(walk: Walk, value: Any) -> None:
    walk.visit(value.__wrapped__)
    walk.visit(dict(value.cache_parameters()))
    filled = value.cache_info().currsize > 0
    name = value.__wrapped__.__qualname__
    walk.note_cacheable(
        value, f"{name} has cached results from before it was seen" if filled else None
    )


_NAMED_TUPLE_FIELD: Any = type(collections.namedtuple("_Probe", "field").field)  # type: ignore


def _write_named_tuple_field(walk: Walk, value: Any) -> None:
    walk.write(repr(value.__reduce__()[1][0]))  # its index; the rest is a docstring


def _write_ordered_dict(walk: Walk, value: collections.OrderedDict) -> None:
    _write_list(walk, [item for key in value for item in (key, value[key])])


def _write_default_dict(walk: Walk, value: collections.defaultdict) -> None:
    walk.visit(value.default_factory)
    _write_dict(walk, value)


def _write_deque(walk: Walk, value: collections.deque) -> None:
    walk.write(str(value.maxlen))
    _write_list(walk, list(value))


def _write_namespace(walk: Walk, value: types.SimpleNamespace) -> None:
    _write_dict(walk, dict(vars(value)))


def _write_pattern(walk: Walk, value: re.Pattern) -> None:
    walk.write(repr(value.pattern), str(value.flags))


_NUMBERED: dict[type, Callable[[Walk, Any], None]] = {
    list: _write_list,
    dict: _write_dict,
    types.MappingProxyType: _write_dict,
    set: _write_set,
    bytearray: _write_bytes,
    types.CellType: _write_cell,
    types.FunctionType: functions.write_function,
    property: _write_property,
    staticmethod: _write_wrapped_method,
    classmethod: _write_wrapped_method,
    weakref.ref: _write_weakref,
    types.BuiltinFunctionType: _write_builtin,
    types.MethodWrapperType: _write_builtin,
    types.MethodDescriptorType: _write_descriptor,
    types.WrapperDescriptorType: _write_descriptor,
    types.ClassMethodDescriptorType: _write_descriptor,
    types.GetSetDescriptorType: _write_descriptor,
    types.MemberDescriptorType: _write_descriptor,
    np.ndarray: _write_array,
    types.ModuleType: functions.write_module,
    _NAMED_TUPLE_FIELD: _write_named_tuple_field,
    functools._lru_cache_wrapper: _write_lru_cache,
    collections.OrderedDict: _write_ordered_dict,
    collections.defaultdict: _write_default_dict,
    collections.deque: _write_deque,
    types.SimpleNamespace: _write_namespace,
    re.Pattern: _write_pattern,
    object: lambda walk, value: None,
}


def _write_object(walk: Walk, value: object) -> None:
    kind = type(value)
    if isinstance(value, np.generic):
        walk.write("scalar", value.dtype.name, value.tobytes().hex())
        return
    if isinstance(value, np.dtype):
        _write_dtype(walk, value)
        return
    if isinstance(value, np.ufunc):
        _write_ufunc(walk, value)
        return
    if isinstance(value, enum.Enum):
        _write_enum_member(walk, value)
        return
    if kind.__module__ == "typing":
        _write_typing(walk, value)
        return
    if isinstance(value, types.ModuleType):
        walk.number(value, "module", value.__name__, lambda: functions.write_module(walk, value))
        return
    writer: Callable[[Walk, Any], None] | None = _NUMBERED.get(kind)
    if writer is None and isinstance(value, functools.partial):
        writer = _write_partial
    if writer is None:
        writer = jax_values.find_writer(walk, value)
    if writer is None:
        writer = classes.write_instance
    if callable(value) and kind is not functools._lru_cache_wrapper:
        _note_traced(walk, value)
    chosen: Callable[[Walk, Any], None] = writer
    walk.number(value, kind.__qualname__, place_of(value), lambda: chosen(walk, value))


def _note_traced(walk: Walk, value: object) -> None:
    if type(value).__weakrefoffset__ == 0:
        return  # JAX remembers functions by weak references only
    if _is_plain_library_function(value):
        return  # it holds no state that could have changed
    if hooks.was_traced(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        walk.note_cacheable(value, f"{name} was traced before it was seen")
    else:
        walk.note_cacheable(value, None)


def _is_plain_library_function(value: object) -> bool:
    if not isinstance(value, types.FunctionType) or value.__closure__:
        return False
    return libraries.library_file(value.__code__.co_filename) is not None


def place_of(value: object) -> str | None:
    """What a reader would call this object, if it has a name."""
    if isinstance(value, types.FunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    return None


def _write_ufunc(walk: Walk, value: np.ufunc) -> None:
    if getattr(np, value.__name__, None) is value:
        walk.write("ufunc", value.__name__)
    else:
        walk.undecidable(f"a ufunc {value.__name__} that is not numpy's")


def _write_enum_member(walk: Walk, value: enum.Enum) -> None:
    walk.write("member", str(value.name))
    classes.write_class(walk, type(value), constructed=False)
    walk.visit(value._value_)


def _write_typing(walk: Walk, value: Any) -> None:
    if typing.get_origin(value) is not None:
        _write_generic_alias(walk, value)
    else:
        walk.write("typing", getattr(value, "__name__", None) or getattr(value, "_name", "?"))

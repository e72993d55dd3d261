"""Classes and their instances."""

from __future__ import annotations

import abc
import dataclasses
import enum
import logging
import types
import typing
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend

from orbax_aot._jax import hooks
from orbax_aot.fingerprint import libraries
from orbax_aot.fingerprint.functions import SILENT_ATTRIBUTES
from orbax_aot.fingerprint.libraries import Kind, words
from orbax_aot.fingerprint.walk import Walk

# What a class body or its decorators leave in a class that says nothing of what it does.
_SILENT_ATTRIBUTES = words(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__"
    " __annotate_func__ __annotations_cache__ __static_attributes__ __firstlineno__ __slotnames__"
    " __abstractmethods__ _abc_impl __orig_bases__ __parameters__ __type_params__"
)
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
# What `enum` keeps in its classes and members, all of which follows from names and values.
_ENUM_STATE = words(
    "_member_names_ _member_map_ _value2member_map_ _unhashable_values_ _hashable_values_"
    " _unhashable_values_map_ _member_type_ _value_repr_ _use_args_ _new_member_ _flag_mask_"
    " _singles_mask_ _all_bits_ _boundary_ _inverted_"
)
_ENUM_MEMBER_STATE = frozenset(
    {"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_", "_hash_"}
)
# The state of a linen module while it runs; a module that is bound cannot be decided.
_LINEN_STATE = frozenset({"_id", "_state", "_parent_ref", "parent", "scope"})
# Remember in which trace an object was made; nothing of them reaches a program.
_TRACE_BOOKKEEPING = frozenset({"OpaqueTraceState", "TraceState", "PytreeState"})
_BUILTIN_BASES = (tuple, list, dict, str, bytes, int, float, complex)
_HEAP_TYPE = 1 << 9
_IMMUTABLE_TYPE = 1 << 8
_POINTER = 8


# -- classes --------------------------------------------------------------------------------------


def write_class(walk: Walk, cls: type, *, constructed: bool) -> None:
    """Writes a class; `constructed` says that reached code holds it, and so may call it."""
    if constructed:
        note_constructed(walk, cls)
    if walk.number_of(cls) is not None:
        walk.write("ref", str(walk.number_of(cls)))
        return
    name = libraries.name_in_library(cls)
    if name is None and cls.__module__ == "jax.numpy" and type(cls).__name__ == "_ScalarMeta":
        name = ("jax.numpy", cls.__name__)
    if name is not None:
        _write_library_class(walk, cls, *name)
    else:
        place = f"{cls.__module__}.{cls.__qualname__}"
        walk.number(cls, "class", place, lambda: _write_content(walk, cls))


def note_constructed(walk: Walk, cls: type) -> None:
    """Notes that reached code may call `cls`."""
    walk.mentions.add_constructed(type.mro(cls) if type(cls) is type else cls.__mro__)


def _write_library_class(walk: Walk, cls: type, module_name: str, name: str) -> None:
    if libraries.is_impure(module_name, name):
        walk.undecidable(f"uses {module_name}.{name}")
    path = f"{module_name}:{name}"
    if path in libraries.COMPUTED_ACCESS:
        walk.mentions.add_everything()
    if path in libraries.CLASS_ACCESS:
        walk.mentions.add_any_constructor()
    walk.write("library", path)
    _write_registration(walk, cls)


def _write_registration(walk: Walk, cls: type) -> None:
    """How JAX takes objects of the class apart, where the user told it how."""
    functions = hooks.pytree_functions(cls)
    for function in functions or ():
        if libraries.name_in_library(function) is None and (
            libraries.name_in_library(cls) is None or _is_users(function)
        ):
            walk.write("pytree")
            walk.visit(function)


def _is_users(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is None or libraries.library_file(code.co_filename) is None


def _write_content(walk: Walk, cls: type) -> None:
    walk.write(cls.__name__)
    for base in cls.__bases__:
        write_class(walk, base, constructed=False)
    if type(cls) is not type:
        write_class(walk, type(cls), constructed=True)
    _write_registration(walk, cls)
    _write_virtual_subclasses(walk, cls)
    if issubclass(cls, enum.Enum):
        _write_members(walk, cls)
    always = _libraries_look_inside(cls)
    walk.attribute_order(cls, [name for name in vars(cls) if name not in _SILENT_ATTRIBUTES])
    for name, value in sorted(vars(cls).items()):
        if name in _SILENT_ATTRIBUTES or _is_generated(name, value):
            continue
        if name == "__dataclass_fields__":
            _write_fields(walk, value)
        elif name == "__dataclass_params__":
            walk.write("dataclass", repr(value))
        elif issubclass(cls, enum.Enum) and (name in _ENUM_STATE or name in cls.__members__):
            continue
        elif name in _CONSTRUCTORS and not always:
            walk.constructor(cls, name, value)
        else:
            walk.attribute(cls, name, value)


def _write_virtual_subclasses(walk: Walk, cls: type) -> None:
    """Classes registered with an abstract base class, which `isinstance` then takes for its own."""
    if not isinstance(cls, abc.ABCMeta):
        return
    import _abc  # pyright: ignore[reportMissingImports]

    registered = [reference() for reference in _abc._get_dump(cls)[0]]  # type: ignore[attr-defined]
    classes = [c for c in registered if c is not None]
    for other in sorted(classes, key=lambda c: (c.__qualname__, c.__module__)):
        walk.write("registered")
        write_class(walk, other, constructed=False)


def _write_members(walk: Walk, cls: type[enum.Enum]) -> None:
    for name, member in cls.__members__.items():
        walk.write("member", name, str(member.name))
        walk.visit(member._value_)
        for attribute, value in vars(member).items():
            if attribute not in _ENUM_MEMBER_STATE:
                walk.write("attribute", attribute)
                walk.visit(value)


def _is_generated(name: str, value: object) -> bool:
    """Whether `dataclasses` wrote this method, which then says no more than the fields do."""
    function = getattr(value, "__wrapped__", value)  # __repr__ is wrapped against recursion
    code = getattr(function, "__code__", None)
    return (
        isinstance(code, types.CodeType)
        and code.co_filename == "<string>"
        and code.co_qualname == f"__create_fn__.<locals>.{name}"
    )


def _write_fields(walk: Walk, fields: dict[str, Any]) -> None:
    """The fields of a dataclass in order, without their annotated types."""
    walk.write("fields", str(len(fields)))
    for name, field in fields.items():
        walk.mentions.add([name])
        walk.write(name, str(field._field_type), str(field.init), str(field.kw_only))
        walk.write(str(field.repr), str(field.compare), str(field.hash))
        _write_default(walk, field.default)
        _write_default(walk, field.default_factory)
        walk.visit(dict(field.metadata))
        _write_annotation(walk, name, field.type)


def _write_annotation(walk: Walk, name: str, annotation: object) -> None:
    """The annotated type of a field, for code that looks at types of fields."""

    def write() -> None:
        walk.write("type", name)
        walk.visit(annotation)

    walk.mentions.when("type", write, of_module=True)


def _write_default(walk: Walk, value: object) -> None:
    if value is dataclasses.MISSING:
        walk.write("missing")
    else:
        walk.visit(value)


def _libraries_look_inside(cls: type) -> bool:
    """Whether library code may take objects of the class apart without naming attributes."""
    if "__dataclass_fields__" in vars(cls) or hooks.pytree_functions(cls) is not None:
        return True
    plain = (object, typing.Generic, typing.Protocol, abc.ABC)
    for base in (*cls.__mro__, type(cls)):
        if base in plain or base in (type, abc.ABCMeta):
            continue
        if libraries.kind_of_module(base.__module__) is not Kind.USER:
            return True
    return False


# -- instances ------------------------------------------------------------------------------------


def write_instance(walk: Walk, value: Any) -> None:
    """Writes an object by its class and its attributes."""
    cls = type(value)
    if cls.__name__ in _TRACE_BOOKKEEPING and libraries.name_in_library(cls) is not None:
        return
    write_class(walk, cls, constructed=False)
    if isinstance(value, logging.Logger | logging.LoggerAdapter):
        walk.write("level", str(value.getEffectiveLevel()))
        return
    if libraries.kind_of_module(cls.__module__) is Kind.OWN:
        _write_own_wrapper(walk, value)
        return
    if _has_hidden_state(cls):
        walk.undecidable(f"an object of the extension class {cls.__module__}.{cls.__qualname__}")
        return
    _write_builtin_part(walk, value)
    if isinstance(value, BaseException):
        walk.visit(value.args)
    if isinstance(value, jax.extend.core.Primitive):
        _write_primitive(walk, value)
        return
    linen = any(base.__module__ == "flax.linen.module" for base in cls.__mro__)
    if linen and getattr(value, "scope", None) is not None:
        walk.undecidable(f"a bound linen module {cls.__qualname__}")
    always = _libraries_look_inside(cls)
    walk.attribute_order(value, [name for name, _ in _state(value)])
    for name, attribute in _state(value):
        if name not in SILENT_ATTRIBUTES and not (linen and name in _LINEN_STATE):
            walk.attribute(value, name, attribute, always=always)


def _write_primitive(walk: Walk, value: Any) -> None:
    """A primitive; its rules are in tables of JAX's, which are watched for JAX's own only."""
    if getattr(jax.lax, f"{value.name}_p", None) is value:
        walk.write("primitive", value.name)
    else:
        walk.undecidable(f"the primitive {value.name}")


def _write_own_wrapper(walk: Walk, value: Any) -> None:
    """A function wrapped by this package is the function."""
    inner = getattr(value, "__wrapped__", None)
    if inner is None:
        walk.undecidable(f"an object of {type(value).__module__}.{type(value).__qualname__}")
    else:
        walk.visit(inner)


def _write_builtin_part(walk: Walk, value: Any) -> None:
    for base in _BUILTIN_BASES:
        if isinstance(value, base):
            break
    else:
        if isinstance(value, set | frozenset):
            walk.visit(frozenset(frozenset.__iter__(value) if isinstance(value, frozenset)
                                 else set.__iter__(value)))  # fmt: skip
        return
    walk.write(base.__name__)
    if isinstance(value, tuple):
        walk.visit(tuple(tuple.__iter__(value)))
    elif isinstance(value, list):
        walk.visit(list(list.__iter__(value)))
    elif isinstance(value, dict):
        walk.visit(dict(dict.items(value)))
    else:
        walk.visit(base.__getnewargs__(value))  # type: ignore[attr-defined]


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that the object itself holds, in the order in which they were set."""
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict):
        yield from list(state.items())
    for cls in type(value).__mro__:
        for name, descriptor in sorted(vars(cls).items()):
            if not isinstance(descriptor, types.MemberDescriptorType):
                continue
            if descriptor.__objclass__ is cls and name not in ("__dict__", "__weakref__"):
                try:
                    yield name, descriptor.__get__(value, type(value))
                except AttributeError:
                    continue  # a slot that is not set


def _has_hidden_state(cls: type) -> bool:
    """Whether objects of the class hold more than their attributes: those of extensions do."""
    for base in cls.__mro__:
        if base is object or base in (*_BUILTIN_BASES, set, frozenset, BaseException, Exception):
            continue
        if not base.__flags__ & _HEAP_TYPE:
            if issubclass(base, BaseException) and base.__basicsize__ <= Exception.__basicsize__:
                continue
            return True
        if base.__flags__ & _IMMUTABLE_TYPE or type(base).__name__.startswith(
            ("nb_type", "pybind11")
        ):
            return True
        inherited = base.__base__.__basicsize__ if base.__base__ is not None else 0
        slots = sum(isinstance(d, types.MemberDescriptorType) for d in vars(base).values())
        # Two more pointers: the attribute dictionary and the list of weak references.
        if base.__basicsize__ - inherited > _POINTER * (slots + 2):
            return True
    return False

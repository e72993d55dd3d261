"""Pytrees by key path: describe them without their types, match them, and build results of them.

No tree definition is stored. The leaves of a call are named by key path below the argument they belong to
(`0/params/w` lies in the first positional argument, `batch/x` in the keyword argument `batch`), so that any tree of
the same paths can take the place of the saved one, in any order.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from orbax_aot._jax import trees as trees_lib
from orbax_aot.errors import SignatureError

_LEAF = "*"
_SHOWN = 5


def argument_paths(
    args_and_kwargs: tuple[tuple[Any, ...], dict[str, Any]], is_leaf: Any = None
) -> tuple[str, ...]:
    """Returns the paths of the leaves of `(args, kwargs)`, flat."""
    flat, _ = jax.tree_util.tree_flatten_with_path(args_and_kwargs, is_leaf=is_leaf)
    return tuple(join(path[1:]) for path, _ in flat)


def leaf_paths(tree: Any, is_leaf: Any = None) -> tuple[str, ...]:
    """Returns the paths of the leaves of a tree, flat; `` for a tree that is one leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return tuple(join(path) for path, _ in flat)


def join(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def dummy(treedef: Any) -> Any:
    """Returns a tree of that definition whose leaves are their own flat indices."""
    return jax.tree.unflatten(treedef, list(range(treedef.num_leaves)))


@dataclasses.dataclass(frozen=True)
class Subtree:
    """A part of a caller's arguments: its definition, and where its leaves lie among all."""

    treedef: Any
    start: int


def _subtrees(treedef: Any, paths: Sequence[str], parts: int) -> dict[str, Subtree]:
    """Returns the inner nodes of a call's tree by path, those with leaves.

    `parts` is how many leading keys of the full path `(args, kwargs)` the names leave out (one).
    """
    example = dummy(treedef)
    found: dict[str, Subtree] = {}

    def visit(node: Any, path: tuple[Any, ...], start: int) -> int:
        """Registers `node` and all below it; returns the number of leaves."""
        definition = jax.tree.structure(node)
        if jax.tree_util.treedef_is_leaf(definition) and definition.num_leaves == 1:
            return 1
        if len(path) > parts and definition.num_leaves:
            found.setdefault(join(path[parts:]), Subtree(definition, start))
        count = 0
        children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        for key, child in children:
            count += visit(child, (*path, *key), start + count)
        return count

    visit(example, (), 0)
    return found


def describe_result(out_tree: Any, in_tree: Any, input_paths: Sequence[str]) -> Any:
    """Describes the tree of a result as JSON data.

    A part with the structure of a part of the arguments is described by that part's path (`{"like": path}`), so that
    it comes back in the caller's own types. Other nodes are described by kind and keys.
    """
    inputs = _subtrees(in_tree, input_paths, parts=1)
    by_definition: dict[Any, str] = {}
    unhashable: list[tuple[Any, str]] = []
    for path, subtree in inputs.items():
        try:
            by_definition.setdefault(subtree.treedef, path)
        except TypeError:  # auxiliary data need not be hashable
            unhashable.append((subtree.treedef, path))

    def find_like(node: Any) -> str | None:
        definition = jax.tree.structure(node)
        try:
            found = by_definition.get(definition)
        except TypeError:
            found = None
        if found is None:
            found = next((p for d, p in unhashable if d == definition), None)
        return found

    def visit(node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, int):  # a dummy's leaf
            return _LEAF
        if jax.tree.structure(node).num_leaves and (like := find_like(node)) is not None:
            return {"like": like}
        if type(node) in (dict, collections.OrderedDict, collections.defaultdict):
            return _describe_dict(node, visit)
        if type(node) in (list, tuple):
            return {type(node).__name__: [visit(child) for child in node]}
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return {
                "namedtuple": _type_name(type(node)),
                "fields": list(getattr(node, "_fields", ())),
                "children": [visit(child) for child in node],
            }
        flat = trees_lib.flatten_node(node)
        if flat is None:
            raise TypeError(f"cannot describe a {type(node).__name__} in a result")
        children, aux = flat
        keyed, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        description = {
            "node": _type_name(type(node)),
            "keys": [trees_lib.key_name(path[0]) for path, _ in keyed],
            "children": [visit(child) for child in children],
        }
        plain = _plain_aux(aux)
        return {**description, "aux": plain[0]} if plain else description

    return visit(dummy(out_tree))


def _describe_dict(node: Mapping[Any, Any], visit: Any) -> Any:
    """Describes a dictionary in the order of its leaves, which for an `OrderedDict` is its own."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    keys = [path[0].key for path, _ in keyed]
    if not all(isinstance(key, str | int | bool) for key in keys):
        return {
            "node": _type_name(dict),
            "keys": [trees_lib.key_name(path[0]) for path, _ in keyed],
            "children": [visit(child) for _, child in keyed],
        }
    kind = type(node).__name__
    described = {"dict": [[key, visit(child)] for key, (_, child) in zip(keys, keyed, strict=True)]}
    return described if kind == "dict" else {**described, "kind": kind}


def _type_name(node_type: type) -> str:
    return f"{node_type.__module__}:{node_type.__qualname__}"


def _plain_aux(aux: Any) -> list[Any]:
    """Returns `[data]` where auxiliary data survives JSON, else `[]`. Tuples are marked."""
    try:
        return [_encode_aux(aux)]
    except TypeError:
        return []


def _encode_aux(aux: Any) -> Any:
    if aux is None or isinstance(aux, bool | int | str):
        return aux
    if type(aux) in (tuple, list):
        return {type(aux).__name__: [_encode_aux(a) for a in aux]}
    if type(aux) is dict and all(isinstance(k, str) for k in aux):
        return {"dict": [[k, _encode_aux(v)] for k, v in aux.items()]}
    raise TypeError(type(aux).__name__)


def _decode_aux(aux: Any) -> Any:
    if isinstance(aux, dict):
        if "dict" in aux:
            return {k: _decode_aux(v) for k, v in aux["dict"]}
        kind, items = next(iter(aux.items()))
        return {"tuple": tuple, "list": list}[kind](_decode_aux(a) for a in items)
    return aux


@dataclasses.dataclass(frozen=True)
class Result:
    """How to make a caller's result of flat outputs.

    Leaf `i` of `treedef` is output `order[i]`; `order` is None where that is the outputs' own order.
    """

    treedef: Any
    order: tuple[int, ...] | None

    def build(self, outputs: Sequence[Any]) -> Any:
        if self.order is not None:
            outputs = [outputs[i] for i in self.order]
        return jax.tree.unflatten(self.treedef, outputs)


@dataclasses.dataclass(frozen=True)
class Binding:
    """How a caller's arguments take the place of the saved ones, and how the result comes back.

    Saved input `i` is the caller's leaf `order[i]`; `order` is None where the orders agree.
    """

    in_tree: Any
    order: tuple[int, ...] | None
    result: Result


class UnknownNode(Exception):
    """A result holds a node of a type that cannot be made here as it was; only tracing tells its tree."""


def find_order(saved: Sequence[str], caller: Sequence[str]) -> tuple[int, ...] | None:
    """Returns where each saved path lies among the caller's; None where both orders agree.

    Raises:
      SignatureError: the paths differ, or the caller's order differs and a path stands there twice.
    """
    if tuple(saved) == tuple(caller):
        return None
    where = {path: i for i, path in enumerate(caller)}
    missing = [p for p in saved if p not in where]
    extra = sorted(set(caller) - set(saved))
    if missing or extra or len(where) != len(caller) or len(set(saved)) != len(saved):
        raise SignatureError(
            "The arguments do not have the leaves of the saved signature. "
            + "; ".join(
                _listed(what, names)
                for what, names in (("missing", missing), ("extra", extra))
                if names
            )
            + ("" if missing or extra else "A path stands for several leaves.")
        )
    return tuple(where[p] for p in saved)


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(names[:_SHOWN])}{more}"


def bind(
    in_tree: Any,
    caller_paths: Sequence[str],
    saved_paths: Sequence[str],
    result: Any,
    n_outputs: int,
    *,
    exact: bool,
) -> Binding:
    """Binds a caller's tree of `(args, kwargs)` to a saved signature.

    `result` is what `describe_result` returned. With `exact`, for a caller who also has the live function, a node
    that cannot be made as it was raises `UnknownNode`; otherwise a plain container takes its place.

    Raises:
      SignatureError: the paths differ.
    """
    order = find_order(saved_paths, caller_paths)
    return Binding(
        in_tree,
        order,
        build_result(result, in_tree, caller_paths, saved_paths, n_outputs, exact=exact),
    )


def build_result(
    description: Any,
    in_tree: Any,
    caller_paths: Sequence[str],
    saved_paths: Sequence[str],
    n_outputs: int,
    *,
    exact: bool,
) -> Result:
    """Makes the tree of a result from its description and the caller's own arguments."""
    subtrees = _subtrees(in_tree, caller_paths, parts=1)
    taken = 0

    def take() -> int:
        nonlocal taken
        taken += 1
        return taken - 1

    def like(path: str) -> Any:
        prefix = path + "/"
        saved = [p for p in saved_paths if p.startswith(prefix)]
        subtree = subtrees.get(path)
        numbers = {p: take() for p in saved}
        if subtree is None:
            return _nested(numbers, prefix)
        own = caller_paths[subtree.start : subtree.start + subtree.treedef.num_leaves]
        return jax.tree.unflatten(subtree.treedef, [numbers[p] for p in own])

    def visit(node: Any) -> Any:
        if node is None:
            return None
        if node == _LEAF:
            return take()
        if "like" in node:
            return like(node["like"])
        if "dict" in node:
            made = {key: visit(child) for key, child in node["dict"]}
            kind = node.get("kind", "dict")
            if exact and kind == "defaultdict":
                raise UnknownNode(kind)  # its factory is a function
            return collections.OrderedDict(made) if kind == "OrderedDict" else made
        for kind, make in (("list", list), ("tuple", tuple)):
            if kind in node:
                return make([visit(child) for child in node[kind]])
        children = [visit(child) for child in node["children"]]
        if "namedtuple" in node:
            return _make_namedtuple(node, children, exact)
        return _make_node(node, children, exact)

    tree = visit(description)
    leaves, treedef = jax.tree.flatten(tree)
    if sorted(leaves) != list(range(n_outputs)):
        raise UnknownNode("the result's tree does not hold each output once")
    order = tuple(leaves)
    return Result(treedef, None if order == tuple(range(n_outputs)) else order)


def _nested(numbers: Mapping[str, int], prefix: str) -> dict[str, Any]:
    """Returns plain dictionaries for paths whose own subtree the caller has spread over other nodes."""
    tree: dict[str, Any] = {}
    for path, number in numbers.items():
        *parents, last = path[len(prefix) :].split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = number
    return tree


def _make_namedtuple(node: Mapping[str, Any], children: list[Any], exact: bool) -> Any:
    module, _, qualname = node["namedtuple"].partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if (
        isinstance(found, type)
        and issubclass(found, tuple)
        and list(getattr(found, "_fields", ())) == list(node["fields"])
    ):
        return tuple.__new__(found, children)
    if exact:
        raise UnknownNode(node["namedtuple"])
    return dict(zip(node["fields"], children, strict=True))


def _make_node(node: Mapping[str, Any], children: list[Any], exact: bool) -> Any:
    node_type = trees_lib.find_node_type(node["node"])
    if node_type is not None and "aux" in node:
        try:
            return trees_lib.unflatten_node(node_type, _decode_aux(node["aux"]), children)
        except Exception as e:
            if exact:
                raise UnknownNode(f"{node['node']}: {e}") from e
    if exact:
        raise UnknownNode(node["node"])
    return dict(zip(node["keys"], children, strict=True))

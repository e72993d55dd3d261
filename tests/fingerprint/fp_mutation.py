"""A small mutation tool: changes one constant, operator, branch or attribute of a source text."""

from __future__ import annotations

import ast
import copy
import dataclasses
import random
from collections.abc import Collection, Iterator

_OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_ATTRIBUTES = {
    "exp": "sin", "log": "cos", "tanh": "sin", "sqrt": "square", "square": "sqrt", "sum": "max",
    "mean": "sum", "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum",
    "add": "subtract", "sub": "add", "mul": "add", "log1p": "expm1", "expm1": "log1p",
    "logaddexp": "maximum", "zeros_like": "ones_like", "ones_like": "zeros_like", "zeros": "ones",
    "ones": "zeros", "sin": "cos", "abs": "square", "rsqrt": "sqrt", "erf": "tanh",
    "div": "mul", "reciprocal": "square", "pow": "multiply", "float32": "int32",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed source text, and a description of the change."""

    text: str
    what: str


class _Docstrings(ast.NodeVisitor):
    """Collects the nodes that are docstrings, which are no code to mutate."""

    def __init__(self) -> None:
        self.found: set[int] = set()

    def generic_visit(self, node: ast.AST) -> None:
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            self.found.add(id(body[0].value))
        super().generic_visit(node)


def _sites(tree: ast.AST, names: Collection[str]) -> Iterator[ast.AST]:
    """The nodes inside the functions and classes of these names that can be changed."""
    docstrings = _Docstrings()
    docstrings.visit(tree)
    roots = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    for root in roots:
        annotations = {
            id(inner)
            for node in ast.walk(root)
            for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
            if annotation is not None
            for inner in ast.walk(annotation)
        }
        for node in ast.walk(root):
            if id(node) not in docstrings.found and id(node) not in annotations:
                yield node


def _change(node: ast.AST) -> str | None:
    """Changes a node in place; says how, or None where there is nothing to change."""
    if isinstance(node, ast.Constant):
        return _change_constant(node)
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in _OPERATORS:
        old = type(node.op)
        node.op = _OPERATORS[old]()
        return f"operator {old.__name__} to {type(node.op).__name__}"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        old = type(node.ops[0])
        node.ops[0] = _OPERATORS[old]()
        return f"comparison {old.__name__} to {type(node.ops[0]).__name__}"
    if isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return "branch taken the other way"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
        return "sign dropped"
    if isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
        old = node.attr
        node.attr = _ATTRIBUTES[old]
        return f"attribute {old} to {node.attr}"
    return None


def _change_constant(node: ast.Constant) -> str | None:
    old = node.value
    if isinstance(old, bool):
        node.value = not old
    elif isinstance(old, int):
        node.value = old + 1
    elif isinstance(old, float):
        node.value = old * 1.5 + 0.25
    else:
        return None
    return f"constant {old!r} to {node.value!r}"


def mutants(text: str, names: Collection[str], count: int, seed: int) -> list[Mutant]:
    """Up to `count` mutants of a source text, changed inside the functions of these names."""
    tree = ast.parse(text)
    total = sum(1 for _ in _sites(tree, names))
    order = list(range(total))
    random.Random(seed).shuffle(order)
    found: list[Mutant] = []
    for index in order:
        if len(found) == count:
            break
        changed = copy.deepcopy(tree)
        node = next(n for i, n in enumerate(_sites(changed, names)) if i == index)
        line = getattr(node, "lineno", 0)
        what = _change(node)
        if what is not None:
            found.append(
                Mutant(ast.unparse(ast.fix_missing_locations(changed)), f"line {line}: {what}")
            )
    return found

"""Code objects: the same however they are laid out, different whenever they do something else."""

from __future__ import annotations

import ast
import itertools
import types

import fp_mutation
import pytest

from orbax_aot.fingerprint.code import scan

_FUNCTION = '''
def f(xs, limit, *rest, flag=True, **options):
    """Docstring."""
    total = 0
    for i, x in enumerate(xs):
        if x is None and not flag or (
                x > limit):
            continue
        try:
            total += x * 2 - options["a"]
        except (KeyError,
                ValueError) as error:
            print("no", error)
            raise
        finally:
            total -= 1
    while total > 10:
        total //= 2
        if total == 3 and rest:
            break
    else:
        total = sum(d for i, d in enumerate(rest)
                    if i not in xs and
                    d > 3)
    with limit as l:
        match total:
            case [1, *others]:
                return others
            case {"k": v}:
                return lambda: v
    return total if flag else [y ** 2 for y in xs if y]
'''


def describe(text: str) -> list:
    return _describe(compile(text, "file.py", "exec"))


def _describe(code: types.CodeType) -> list:
    scanned = scan(code)
    inner = [
        _describe(c) if isinstance(c, types.CodeType) else (type(c).__name__, repr(c))
        for c in scanned.constants
    ]
    return [scanned.text, inner, scanned.references, scanned.imports]


def test_code_is_the_same_on_other_lines():
    assert describe(_FUNCTION) == describe("# comment\n\n\n\n" + _FUNCTION)


def test_code_is_the_same_without_docstrings_comments_and_line_breaks():
    tree = ast.parse(_FUNCTION)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = function.body[1:]
    assert describe(_FUNCTION) == describe(ast.unparse(tree))


def test_a_docstring_added_changes_nothing_even_behind_many_constants():
    body = "".join(f"    x += {i}.5\n" for i in range(300))
    assert describe(f"def f(x):\n{body}") == describe(f"def f(x):\n    'Text.'\n{body}")


def test_a_nested_class_is_the_same_on_other_lines_and_with_another_docstring():
    text = (
        "def f():\n    class C:\n        '''{}'''\n        def g(self): self.a = 1\n    return C\n"
    )
    assert describe(text.format("a")) == describe("\n\n" + text.format("b"))


def test_a_renamed_local_variable_changes_nothing_but_a_renamed_parameter_does():
    text = "def f(a):\n    b = a\n    return b\n"
    assert describe(text) == describe(text.replace("b", "c"))
    assert describe(text) != describe(text.replace("a", "c").replace("def", "def"))


def test_every_mutant_of_the_function_is_seen():
    found = fp_mutation.mutants(_FUNCTION, ["f"], count=200, seed=1)
    assert len(found) >= 20
    texts = [_FUNCTION, *(mutant.text for mutant in found)]
    descriptions = [describe(text) for text in texts]
    for (one, first), (two, second) in itertools.combinations(
        zip(texts, descriptions, strict=True), 2
    ):
        if ast.dump(ast.parse(one)) != ast.dump(ast.parse(two)):
            assert first != second


@pytest.mark.parametrize(
    "one, two",
    [
        ("if a: b()\nelse: c()", "if not a: b()\nelse: c()"),
        ("for x in a:\n  if x: continue\n  b()", "for x in a:\n  if not x: continue\n  b()"),
        ("for x in a:\n  if x: continue\n  b()", "for x in a:\n  if x: break\n  b()"),
        ("while a():\n  if b(): break\n  c()", "while a():\n  if b(): continue\n  c()"),
        ("try: a()\nexcept E: b()", "try: a()\nexcept F: b()"),
        ("try:\n  a()\n  b()\nexcept E: pass", "try:\n  a()\nexcept E: pass\nb()"),
        ("try: a()\nfinally: b()", "a()\nb()"),
        ("x = a and b or c", "x = a and (b or c)"),
        ("x = a.b", "x = a.c"),
        ("x = f(k=1)", "x = f(j=1)"),
        ("x = {'a': 1}", "x = {'a': 1.0}"),
        ("x = a[1:2]", "x = a[1:3]"),
        ("x = a is None", "x = a is not None"),
        ("async def f(): await a", "async def f(): return a"),
        ("def f(): yield a", "def f(): return a"),
        ("import a", "import a as b"),
        ("from . import a", "from .. import a"),
        ("f'{x}'", "f'{x!r}'"),
        ("f'{x:3}'", "f'{x:4}'"),
        ("def f(*, a): pass", "def f(a): pass"),
        ("def f(a, /): pass", "def f(a): pass"),
        ("def f(*a): pass", "def f(**a): pass"),
    ],
)
def test_code_that_does_something_else_differs(one, two):
    assert describe(one) != describe(two)


def test_references_are_names_with_the_attributes_that_follow_at_once():
    function = compile("def f(x):\n    return a.b.c(x.d) + e(a).g", "m", "exec").co_consts[0]
    assert scan(function).references == (("a", "b", "c"), ("e",), ("a",))
    assert {"a", "b", "c", "d", "e", "g"} <= set(scan(function).names)


def test_imports_are_read_with_level_and_names():
    code = compile("from ..a.b import c as d, e\nimport f.g", "m", "exec")
    assert scan(code).imports == (("a.b", 2, ("c", "e")), ("f.g", 0, ()))

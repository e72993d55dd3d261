"""Libraries: named, pinned by their installed files, and watched for patches."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from orbax_aot.fingerprint import (
    bindings,
    fingerprint_function,
    invalidate_library_cache,
    libraries,
    patches,
)
from orbax_aot.fingerprint.libraries import Kind


@pytest.fixture
def f(load):
    return load("def f(x): return jnp.sum(x)").f


def digest(function) -> str:
    found = fingerprint_function(function)
    assert found.undecidable == ()
    return found.digest


@pytest.mark.parametrize(
    "name, kind",
    [
        ("jax.numpy", Kind.NAMED),
        ("optax._src.alias", Kind.NAMED),
        ("functools", Kind.NAMED),
        ("os", Kind.IMPURE),
        ("numpy.random", Kind.IMPURE),
        ("numpy.random.mtrand", Kind.IMPURE),
        ("orbax_aot.fingerprint", Kind.OWN),
        ("sklearn.svm", Kind.USER),
        ("pytest", Kind.USER),
        ("my_model", Kind.USER),
    ],
)
def test_modules_are_told_apart(name, kind):
    assert libraries.kind_of_module(name) is kind


def test_a_file_of_the_users_that_hides_a_standard_module_is_the_users(tmp_path):
    script = (
        "import statistics\nfrom orbax_aot.fingerprint import libraries\n"
        "print(statistics.__file__, libraries.kind_of_module('statistics').name)\n"
    )
    (tmp_path / "statistics.py").write_text("x = 1\n")
    (tmp_path / "main.py").write_text(script)
    output = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ).stdout  # fmt: skip
    assert output.split()[-1] == "USER"


def test_library_objects_are_named_where_they_live():
    assert libraries.name_in_library(jnp.sum) is not None
    assert libraries.name_in_library(nn.Dense) == ("flax.linen.linear", "Dense")
    assert libraries.name_in_library(optax.adam(1e-3).update) is None  # a closure has no name
    assert libraries.name_in_library(digest) is None


def test_another_build_of_a_library_is_another_fingerprint(f, monkeypatch):
    before = digest(f)
    builds = libraries._Builds()
    builds._builds["flax"].digest = "0" * 64
    monkeypatch.setattr(libraries, "_builds", builds)
    assert digest(f) != before


def test_a_library_file_edited_after_its_installation_is_another_build(tmp_path):
    build = libraries.Build("optax", "optax")
    assert build.problem is None
    name = "optax/_src/alias.py"
    original = os.path.join(build.root, name)
    assert build.edited_files([original]) == []
    copy = tmp_path / name
    copy.parent.mkdir(parents=True)
    with open(original) as file:
        copy.write_text(file.read() + "\n# edited\n")
    build.root = str(tmp_path)
    assert [edited for edited, _ in build.edited_files([str(copy)])] == [name]


def test_a_library_that_is_not_an_installed_build_is_undecidable(f, monkeypatch):
    builds = libraries._Builds()
    builds._builds["flax"].problem = "flax is loaded but is no installed distribution"
    monkeypatch.setattr(libraries, "_builds", builds)
    assert "flax is loaded but is no installed" in fingerprint_function(f).undecidable[0]


# -- patches --------------------------------------------------------------------------------------


def mine(*args, **kwargs):
    return args[-1]


@pytest.mark.parametrize(
    "holder, name, value",
    [
        (jnp, "sum", mine),
        (jax.nn, "relu", mine),
        (jax.nn, "relu", jax.nn.gelu),
        (jnp, "add", jax.lax.add),
        (nn.Dense, "__call__", mine),
        (nn.Dense, "__call__", nn.DenseGeneral.__call__),
        (optax, "adam", optax.sgd),
        (sys.modules["optax._src.numerics"], "safe_increment", mine),
        (sys.modules["jax._src.lax.lax"], "dot_general", jax.jit(mine)),
        (sys.modules["flax.linen.linear"], "Dense", nn.DenseGeneral),
        (sys.modules["jax._src.core"], "eval_jaxpr", mine),
    ],
)  # fmt: skip
def test_a_patched_library_is_another_fingerprint(f, monkeypatch, holder, name, value):
    """Whether the function uses the patched part is not known, so it always counts."""
    before = digest(f)
    monkeypatch.setattr(holder, name, value)
    path = (
        f"{holder.__module__}.{holder.__qualname__}"
        if isinstance(holder, type)
        else holder.__name__
    )
    assert f"{path}.{name}" in [where for where, _ in patches.find_patches()[0]]
    assert fingerprint_function(f).digest != before
    monkeypatch.undo()
    assert digest(f) == before


def test_a_patch_made_before_the_first_look_is_seen(f, monkeypatch):
    before = digest(f)
    monkeypatch.setattr(jax.nn, "relu", jax.nn.gelu)
    invalidate_library_cache()
    assert fingerprint_function(f).digest != before
    monkeypatch.undo()
    invalidate_library_cache()


def test_the_users_patch_is_walked(f, load, monkeypatch):
    digests = set()
    for factor in (2, 3):
        monkeypatch.setattr(jax.nn, "relu", load(f"def g(x): return x * {factor}").g)
        digests.add(digest(f))
    assert len(digests) == 2


def test_a_process_without_patches_has_few_of_them_and_always_the_same():
    """The libraries patch themselves in a handful of places; more would make digests depend on what
    else happens to be loaded."""
    invalidate_library_cache()
    found, unchecked = patches.find_patches()
    assert len(found) < 20, [path for path, _ in found]
    assert unchecked == []


def test_a_library_module_without_a_compiled_file_is_undecidable(f, monkeypatch):
    invalidate_library_cache()
    monkeypatch.setattr(bindings, "compiled_code", lambda module: None)
    assert "Python keeps no compiled file" in fingerprint_function(f).undecidable[0]
    monkeypatch.undo()
    invalidate_library_cache()


def read(text: str) -> bindings.Bindings:
    return bindings.Bindings(compile(text, "m.py", "exec"), "package.sub")


def test_bindings_tell_imports_definitions_constants_and_aliases_apart():
    found = read(
        "from a.b import c as d\nfrom . import e\nfrom ..g import h\nK = 3\n"
        "def f(): pass\n@deco\ndef w(): pass\nclass C: pass\ng = f\nm = d.x.y\nr = f()\n"
        "if K:\n    two = 1\nelse:\n    two = 2\n"
    )
    assert found.of("d") == [bindings.Import("a.b", "c")]
    assert found.of("e") == [bindings.Import("package.sub", "e")]
    assert found.of("h") == [bindings.Import("package.g", "h")]
    assert found.of("K") == [bindings.Constant(3)]
    assert found.of("g") == [bindings.Alias(("f",))]
    assert found.of("m") == [bindings.Alias(("d", "x", "y"))]
    assert found.of("r") == [bindings.Unknown()]
    assert found.of("two") == [bindings.Constant(1), bindings.Constant(2)]
    for name, is_class in (("f", False), ("w", False), ("C", True)):
        (definition,) = found.of(name)
        assert isinstance(definition, bindings.Definition)
        assert definition.is_class is is_class and definition.codes[0].co_name == name


def test_bindings_survive_modules_with_many_names():
    """Names beyond the 256th need instructions with wide arguments."""
    text = "".join(f"k{i} = {i}\n" for i in range(700)) + "from x import last\n"
    assert read(text).of("k699") == [bindings.Constant(699)]
    assert read(text).of("last") == [bindings.Import("x", "last")]


def test_global_assignments_inside_functions_are_found():
    code = compile(
        "K = None\ndef f():\n    def g():\n        global K\n        K = 1\n", "m", "exec"
    )
    assert bindings.stores_global(code, "K")
    assert not bindings.stores_global(code, "f")
    assert isinstance(code, types.CodeType)

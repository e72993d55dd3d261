"""The table of what is covered, and the holes that it admits."""

from __future__ import annotations

import pathlib
import random
import re

import jax
import jax.numpy as jnp
import optax

from orbax_aot.fingerprint import fingerprint_call

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "fingerprint.md"


def test_every_row_of_the_table_names_tests_that_exist():
    tests = set(
        re.findall(r"^def (test_\w+)", "".join(p.read_text() for p in HERE.glob("test_*.py")), re.M)
    )
    sections = DOCS.read_text().split("\n## ")
    rows = [
        line
        for section in sections
        if section.startswith(("What is covered", "What is undecidable", "Known holes"))
        for line in section.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| what", "| hole"))
    ]
    assert len(rows) >= 30
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named and set(named) <= tests, row


def digest(f, *args) -> str:
    found = fingerprint_call(f, args, {})
    assert found.undecidable == ()
    return found.digest


def test_hole_defaults_of_a_library_function_used_by_the_library(load, monkeypatch):
    f = load("def f(x): return jax.nn.silu(x)").f
    before = digest(f)
    monkeypatch.setattr(
        optax.adam, "__kwdefaults__", {**optax.adam.__kwdefaults__, "nesterov": True}
    )
    assert digest(f) == before


def test_hole_a_library_object_that_is_no_function(load, monkeypatch):
    import flax.linen.linear as linear

    f = load("import flax.linen as nn\ndef f(x): return nn.Embed(3, 4)").f
    before = digest(f)
    monkeypatch.setattr(linear, "default_embed_init", jax.nn.initializers.normal(5.0))
    assert digest(f) == before


def test_hole_patches_in_unwatched_modules(load, monkeypatch):
    import numpy.ma

    f = load("def f(x): return x").f
    before = digest(f)
    monkeypatch.setattr(numpy.ma, "sum", lambda x: x)
    assert digest(f) == before


def test_hole_the_order_of_a_set_of_strings(load):
    names = ["a", "b", "c", "d"]
    digests = set()
    for _ in range(3):
        random.shuffle(names)
        digests.add(digest(load(f"K = {{{str(names)[1:-1]}}}\ndef f(x): return list(K)").f))
    assert len(digests) == 1


def test_hole_a_value_changed_and_changed_back(load):
    module = load("K = 2.0\n@jax.jit\ndef inner(x): return x * K\ndef f(x): return inner(x)")
    before = digest(module.f, jnp.ones(3))
    module.K = 3.0
    jax.jit(lambda x: module.f(x)).lower(jnp.ones(3))
    module.K = 2.0
    assert digest(module.f, jnp.ones(3)) == before

"""The walk itself: streams, numbers and names."""

from __future__ import annotations

import pytest

from orbax_aot._jax import hooks
from orbax_aot.fingerprint import fingerprint_function, values
from orbax_aot.fingerprint.walk import Walk


def stream(*objects: object) -> str:
    walk = Walk(values.write_value)
    for value in objects:
        walk.visit(value)
    walk.run(frozenset)
    assert walk.reasons() == ()
    return walk.digest()


@pytest.mark.parametrize(
    "one, two",
    [
        (("ab", "c"), ("a", "bc")),
        ((1, "1"), ("1", 1)),
        (([],), ([[]],)),
        (([1], [1]), ([1, 1],)),
        (((),), ((), ())),
        (({1: 2},), ({1: {2: 0}},)),
        ((b"a",), ("a",)),
        ((1.0,), ("0x1.0000000000000p+0",)),
    ],
)
def test_no_two_different_values_read_the_same(one, two):
    assert stream(*one) != stream(*two)


def test_equal_values_read_the_same_whatever_their_addresses():
    assert stream([1, {"a": (2, [3])}]) == stream([1, {"a": (2, [3])}])


def test_one_object_met_twice_is_not_two_equal_objects():
    shared = [1]
    assert stream([shared, shared]) != stream([[1], [1]])


def test_attributes_wait_until_their_name_comes_up():
    class Thing:
        later = 1

    def digest(*names: str) -> str:
        walk = Walk(values.write_value)
        walk.visit(Thing())
        walk.mentions.add(names)
        walk.run(frozenset)
        return walk.digest()

    first = digest("later"), digest()
    Thing.later = 2
    second = digest("later"), digest()
    assert first[0] != second[0]
    assert first[1] == second[1]


def test_library_names_are_asked_for_only_where_attributes_wait():
    asked = []
    walk = Walk(values.write_value)
    walk.visit([1, 2])
    walk.run(lambda: asked.append(1) or frozenset())
    assert asked == []


def test_too_many_objects_are_undecidable(load):
    found = fingerprint_function(load("K = [[i] for i in range(600_000)]\ndef f(x): return K").f)
    assert "reaches too many objects" in found.undecidable[0]


def test_a_missing_private_hook_is_undecidable(load, monkeypatch):
    def missing(*args):
        raise hooks.HookMissingError("jax has no Python pytree registry")

    f = load("class C: pass\ndef f(x): return C()").f
    monkeypatch.setattr(hooks, "pytree_functions", missing)
    assert "HookMissingError" in fingerprint_function(f).undecidable[0]
    monkeypatch.undo()
    monkeypatch.setattr(hooks, "flax_state", missing)
    assert "jax has no Python pytree registry" in " ".join(fingerprint_function(f).undecidable)


def test_it_never_raises(load, monkeypatch):
    def broken(walk):
        raise KeyError("surprise")

    from orbax_aot.fingerprint import environment

    monkeypatch.setattr(environment, "write_environment", broken)
    found = fingerprint_function(load("def f(x): return x").f)
    assert found.undecidable == ("KeyError: 'surprise'",)

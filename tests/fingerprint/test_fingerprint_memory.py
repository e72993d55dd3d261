"""What caches may hold of an earlier state: jit keeps what it traced, and so must we."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from orbax_aot._jax import hooks
from orbax_aot.fingerprint import fingerprint_call, memory

X = jnp.ones(3)

_USES = {
    "jit": "@jax.jit\ndef inner(x): return x * K\ndef f(x): return inner(x)",
    "scan": "def inner(c, _): return c * K, None\n"
    "def f(x): return jax.lax.scan(inner, x, None, length=2)[0]",
    "checkpoint": "def inner(x): return x * K\ng = jax.checkpoint(inner)\ndef f(x): return g(x)",
    "cond": "def inner(x): return x * K\n"
    "def f(x): return jax.lax.cond(x[0] > 0, inner, jnp.sin, x)",
    "bound method": "class C:\n def m(self, x): return x * K\ninner = jax.jit(C().m)\n"
    "def f(x): return inner(x)",
}


def undecidable(f) -> tuple[str, ...]:
    return fingerprint_call(f, (X,), {}).undecidable


def lower(f) -> str:
    return jax.jit(f).lower(X).as_text()


@pytest.mark.parametrize("use", _USES)
def test_a_function_seen_before_it_was_traced_stays_decidable(load, use):
    module = load("K = 2.0\n" + _USES[use])
    before = fingerprint_call(module.f, (X,), {})
    lower(module.f)
    assert before.undecidable == ()
    assert fingerprint_call(module.f, (X,), {}) == before


@pytest.mark.parametrize("use", _USES)
def test_a_function_changed_after_it_was_traced_is_undecidable(load, use):
    module = load("K = 2.0\n" + _USES[use])
    assert undecidable(module.f) == ()
    first = lower(module.f)
    module.K = 3.0
    assert undecidable(module.f) != ()
    assert lower(lambda x: module.f(x)) == first.replace("jit_f", "jit__lambda"), "it is not stale"


@pytest.mark.parametrize("use", _USES)
def test_a_function_traced_before_it_was_ever_seen_is_undecidable(load, use):
    module = load("K = 2.0\n" + _USES[use])
    lower(module.f)
    assert "was traced before it was seen" in " ".join(undecidable(module.f))


def test_a_helper_that_two_functions_share_is_decidable_in_the_second(load):
    module = load(
        """
        K = 2.0
        @jax.jit
        def inner(x): return x * K
        def train(x): return inner(x) + 1
        def evaluate(x): return inner(x) - 1
        """
    )
    assert undecidable(module.train) == ()
    lower(module.train)
    assert undecidable(module.train) == ()  # after tracing, as a caller does
    assert undecidable(module.evaluate) == ()
    module.K = 3.0
    assert "inner was traced before it was seen" in " ".join(undecidable(module.evaluate))


def test_clearing_the_caches_of_jax_makes_all_decidable_again(load):
    """Of what was scanned over; JAX 0.10 keeps a mark on what was jitted."""
    module = load("K = 2.0\n" + _USES["scan"])
    lower(lambda x: module.f(x))
    assert undecidable(module.f) != ()
    jax.clear_caches()
    assert undecidable(module.f) == ()


def test_a_functools_cache_is_undecidable_once_it_is_filled_by_somebody_else(load):
    text = "K = 2.0\n@functools.lru_cache\ndef k(): return K\ndef f(x): return x * k()"
    module = load(text)
    assert undecidable(module.f) == ()
    lower(module.f)
    assert undecidable(module.f) == ()
    module = load(text)
    module.k()
    assert "k has cached results from before it was seen" in undecidable(module.f)[0]


def test_jitting_without_tracing_is_not_tracing(load):
    f = load("def f(x): return x").f
    jitted = jax.jit(f)
    assert not hooks.was_traced(f)
    jitted.lower(X)
    assert hooks.was_traced(f)


def test_a_function_that_dies_is_forgotten(load):
    module = load("def make():\n def f(x): return x\n return f")
    f = module.make()
    undecidable(f)
    key = id(f)
    assert key in memory._seen
    del f
    assert key not in memory._seen


def test_without_the_hook_it_is_undecidable(load, monkeypatch):
    def missing(function):
        raise hooks.HookMissingError("no such hook")

    monkeypatch.setattr(hooks, "was_traced", missing)
    assert "HookMissingError" in " ".join(undecidable(load("def f(x): return x").f))

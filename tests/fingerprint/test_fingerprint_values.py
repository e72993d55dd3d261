"""Functions, classes, values and arguments: what is part of a fingerprint, and what is not."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_aot.fingerprint import Fingerprint, fingerprint_call, fingerprint_function


def decided(fun, *args, options=None, **kwargs) -> str:
    found = fingerprint_call(fun, args, kwargs, options)
    assert found.undecidable == ()
    return found.digest


def reasons(fun, *args) -> str:
    return " ".join(fingerprint_call(fun, args, {}).undecidable)


def same(load, first: str, second: str, name: str = "f") -> bool:
    """Whether the function `f` of two modules has the same fingerprint; both must be decidable."""
    return decided(getattr(load(first), name)) == decided(getattr(load(second), name))


def test_it_is_a_digest_and_says_nothing_more_when_all_was_seen(load):
    found = fingerprint_function(load("def f(x): return x").f)
    assert isinstance(found, Fingerprint)
    assert len(found.digest) == 64 and int(found.digest, 16) >= 0
    assert found.undecidable == ()


def test_a_function_is_the_same_in_a_module_of_another_name(load):
    text = "K = 2\nclass C: v = 1.0\ndef f(x): return x * K * C.v"
    assert decided(load(text, "one").f) == decided(load(text, "two").f)


@pytest.mark.parametrize(
    "before, after",
    [
        ("K = 1", "K = 2"),
        ("K = 1", "K = 1.0"),
        ("K = 1", "K = True"),
        ("K = 0.0", "K = -0.0"),
        ("K = (1, 2)", "K = (2, 1)"),
        ("K = (1, (2,))", "K = (1, 2)"),
        ("K = [1]", "K = (1,)"),
        ("K = {'a': 1}", "K = {'a': 2}"),
        ("K = {'a': 1, 'b': 2}", "K = {'b': 2, 'a': 1}"),
        ("K = {1, 2}", "K = {1, 3}"),
        ("K = 'a'", "K = b'a'"),
        ("K = slice(1, 2)", "K = slice(1, 3)"),
        ("K = range(2)", "K = range(3)"),
        ("K = ...", "K = None"),
        ("K = np.float32(1)", "K = np.float64(1)"),
        ("K = np.dtype('f4')", "K = np.dtype('f8')"),
        ("K = np.zeros(2)", "K = np.zeros(3)"),
        ("K = np.zeros(2)", "K = np.ones(2)"),
        ("K = np.zeros(2)", "K = np.zeros(2, 'i4')"),
        ("K = jnp.zeros(2)", "K = jnp.ones(2)"),
        ("K = jnp.zeros(2)", "K = np.zeros(2, 'f4')"),
        ("K = jnp.float32", "K = jnp.bfloat16"),
        ("K = np.add", "K = np.multiply"),
        ("K = jnp.add", "K = jnp.multiply"),
        ("K = jax.nn.relu", "K = jax.nn.gelu"),
        ("K = functools.partial(jnp.sum, axis=0)", "K = functools.partial(jnp.sum, axis=1)"),
        ("K = jax.ShapeDtypeStruct((2,), 'f4')", "K = jax.ShapeDtypeStruct((3,), 'f4')"),
        ("K = jax.sharding.PartitionSpec('x')", "K = jax.sharding.PartitionSpec('y')"),
        ("K = jax.tree.structure((1, 2))", "K = jax.tree.structure((1, (2,)))"),
        ("K = lambda x: x", "K = lambda x: -x"),
        ("class C: pass\nK = C()\nK.v = 1", "class C: pass\nK = C()\nK.v = 2"),
    ],
)
def test_a_value_that_code_uses_counts(load, before, after):
    use = "\ndef f(x): return (K, getattr(K, 'v', None))"
    assert not same(load, before + use, after + use)


def test_values_nobody_names_do_not_count(load):
    use = "\ndef f(x): return x * C.used"
    assert same(
        load, "class C:\n used = 1\n unused = 1" + use, "class C:\n used = 1\n unused = 2" + use
    )


def test_computed_names_make_every_attribute_count(load):
    use = "\ndef f(x, name): return getattr(C, name)"
    assert not same(load, "class C:\n unused = 1" + use, "class C:\n unused = 2" + use)


def test_two_names_of_one_list_are_not_two_lists(load):
    use = "\ndef f(x): return A, B"
    assert not same(load, "A = [1]\nB = [1]" + use, "A = [1]\nB = A" + use)


def test_a_value_may_contain_itself(load):
    assert same(
        load, "K = []\nK.append(K)\ndef f(x): return K", "K = []\nK.append(K)\ndef f(x): return K"
    )


def test_a_set_of_strings_is_the_same_in_any_order(load):
    assert same(load, "K = {'a', 'b', 'c'}\ndef f(x): return 'a' in K",
                "K = {'c', 'b', 'a'}\ndef f(x): return 'a' in K")  # fmt: skip


def test_an_array_changed_in_place_is_another_value(load):
    module = load("K = np.zeros(3)\ndef f(x): return x + K")
    before = decided(module.f)
    module.K[1] = 1
    assert decided(module.f) != before


@pytest.mark.parametrize(
    "body, reason",
    [
        ("import os\ndef f(x): return x * len(os.environ)", "reads os.environ [program.f]"),
        ("import time\ndef f(x): return x * time.time()", "uses time.time [program.f]"),
        ("import random\ndef f(x): return x * random.random()", "uses random.random [program.f]"),
        ("def f(x): return x + np.random.normal()", "uses numpy.random [program.f]"),
        ("from numpy.random import normal\ndef f(x): return x + normal()", "RandomState"),
        ("def f(x): return np.load('x')", "uses numpy.load [program.f]"),
        ("def f(x): return eval('x')", "uses builtins.eval [program.f]"),
        ("def f(x): return open('x')", "open [program.f]"),
        ("def f(x): return hash('a')", "uses builtins.hash [program.f]"),
        ("def f(x): return x * jax.process_index()", "uses jax.process_index [program.f]"),
        ("def f(x): return x * len(jax.devices())", "uses jax.devices [program.f]"),
        ("def f(x): return f.__doc__", "looks up __doc__ [program.f]"),
        ("def f(x): return f.__code__.co_firstlineno", "looks up __code__ [program.f]"),
        ("G = (i for i in [1])\ndef f(x): return next(G)", "extension class builtins.generator"),
        ("import itertools\nG = itertools.count()\ndef f(x): return next(G)", "itertools.count"),
        (
            "import contextvars\nV = contextvars.ContextVar('v')\ndef f(x): return V.get()",
            "ContextVar",
        ),
        ("D = jax.devices()[0]\ndef f(x): return jax.device_put(x, D)", "a device [program.f]"),
        ("def f(x):\n import nowhere\n return x", "imports nowhere, which is not loaded yet"),
        ("def f(x):\n import numpy as n\n return x * n.random.normal()", "uses numpy.random"),
        ("def f(x): return x * len(globals())", "uses builtins.globals"),
    ],
)
def test_what_cannot_be_seen_is_undecidable(load, body, reason):
    assert reason in reasons(load(body).f)


def test_an_object_that_raises_when_looked_at_is_undecidable(load):
    module = load(
        """
        class M(type):
            def __getattribute__(cls, name):
                raise RuntimeError("no")
        class C(metaclass=M): pass
        c = C()
        def f(x): return c
        """
    )
    assert "RuntimeError" in reasons(module.f)


def test_a_traced_value_is_undecidable(load):
    found = []

    def traced(x):
        found.append(fingerprint_function(load("def f(x): return K").f))
        module = load("def f(x): return K")
        module.K = x
        found.append(fingerprint_function(module.f))
        return x

    jax.jit(traced).lower(1.0)
    assert found[0].undecidable == ()
    assert "a value of a trace that is under way" in found[1].undecidable[0]


def test_a_constructor_does_not_count_for_an_object_that_exists(load):
    text = """
    class Trainer:
        def __init__(self): self.journal_of_mine = open({!r}); self.rate = 2.0
        def step(self, x): return x * self.rate
    """
    module = load(text.format("/dev/null"))
    assert decided(module.Trainer().step) == decided(load(text.format("/dev/zero")).Trainer().step)


def test_a_constructor_counts_where_code_calls_it(load):
    text = "class C:\n def __init__(self): self.v = {}\ndef f(x): return C().v * x"
    assert not same(load, text.format(1), text.format(2))


def test_a_constructor_counts_where_code_takes_the_class_of_an_object(load):
    text = (
        "class C:\n def __init__(self): self.v = {}\nc = C()\nc.v = 0\ndef f(x): return type(c)().v"
    )
    assert not same(load, text.format(1), text.format(2))


def test_names_that_library_code_looks_up_count_without_being_named(load):
    """A library calls an optimizer of the user's: `update` occurs in no code of the user's."""
    text = """
    from flax.training import train_state
    class Optimizer:
        def init(self, params): return ()
        def update(self, grads, state, params): return jax.tree.map(lambda g: g * {}, grads), state
    TX = Optimizer()
    def f(state, grads): return state.apply_gradients(grads=grads)
    def state():
        return train_state.TrainState.create(apply_fn=None, params={{"w": jnp.ones(2)}}, tx=TX)
    """
    digests = []
    for factor in (2, 3):
        module = load(text.format(factor))
        digests.append(decided(module.f, module.state(), {"w": jnp.ones(2)}))
    assert digests[0] != digests[1]


def test_pytree_registrations_of_the_users_count(load):
    text = """
    class P: pass
    jax.tree_util.register_pytree_node(P, lambda p: ((p.a,), {}), lambda aux, c: P())
    def f(x): return jax.tree.leaves(P())
    """
    assert not same(load, text.format("None"), text.format("1"))


# -- arguments ------------------------------------------------------------------------------------


def plain(load):
    return load("def f(x, n=1): return x * n").f


def test_arrays_and_scalars_contribute_nothing_but_their_place(load):
    f = plain(load)
    digests = {
        decided(f, jnp.ones(2)), decided(f, np.zeros((3, 4), "i4")), decided(f, 3), decided(f, 2.5),
        decided(f, jax.ShapeDtypeStruct((2,), "f4")), decided(f, np.float32(1)),
    }  # fmt: skip
    assert len(digests) == 1


def test_the_structure_of_arguments_counts(load):
    f = plain(load)
    trees = ((1.0, 2.0), [1.0, 2.0], {"a": 1.0}, {"b": 1.0}, None, (1.0, (2.0,)))
    assert len({decided(f, tree) for tree in trees}) == len(trees)
    assert decided(f, 1.0, 2) != decided(f, 1.0, n=2)


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnums": (-1,)}, {"static_argnames": "n"}]
)
def test_static_arguments_count_by_value(load, options):
    f = plain(load)
    assert decided(f, 1.0, 2, options=options) != decided(f, 1.0, 3, options=options)
    assert decided(f, 1.0, 2) == decided(f, 1.0, 3)


def test_static_arguments_given_by_name_count_whichever_way_they_are_declared(load):
    f = plain(load)
    for options in ({"static_argnums": 1}, {"static_argnames": ("n",)}):
        assert decided(f, 1.0, n=2, options=options) != decided(f, 1.0, n=3, options=options)


def test_jit_options_count(load):
    f = plain(load)
    options = [None, {"donate_argnums": 0}, {"donate_argnums": 1}, {"keep_unused": True}]
    assert len({fingerprint_function(f, o).digest for o in options}) == len(options)
    assert decided(jax.jit(f, donate_argnums=0)) != decided(jax.jit(f))


def test_what_is_no_array_in_a_dynamic_argument_counts(load):
    f = plain(load)
    assert decided(f, "a") != decided(f, "b")


def test_it_runs_on_any_thread_with_the_same_result(load):
    f = plain(load)
    digests = []
    threads = [threading.Thread(target=lambda: digests.append(decided(f, 1.0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == [decided(f, 1.0)] * 8


def test_a_function_wrapped_by_this_package_is_the_function(load, monkeypatch):
    import sys
    import types

    wrapper = types.ModuleType("orbax_aot.functions_probe")
    source = "class Wrapper:\n def __init__(self, f): self.__wrapped__ = f"
    exec(source, vars(wrapper))
    monkeypatch.setitem(sys.modules, wrapper.__name__, wrapper)
    digests = {}
    for factor in (2, 2.0, 3):
        module = load(f"def g(x): return x * {factor!r}\ndef f(x): return G(x)")
        module.G = wrapper.Wrapper(module.g)
        digests[repr(factor)] = decided(module.f)
    assert len(set(digests.values())) == 3

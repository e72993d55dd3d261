"""Flax users' training loops, linen and nnx: interrupted, and resumed in a process that has compiled nothing."""

from __future__ import annotations

import flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from processes import Child

import orbax_aot as oaot


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("flax")


@pytest.fixture(scope="module")
def saved(path):
    with Child() as child:
        return {name: child.run(cases.train_and_save, path, name) for name in cases.CASES}


@pytest.fixture(scope="module")
def resumed(path, saved):
    with Child() as child:
        return {name: child.run(cases.resume, path, name) for name in cases.CASES}


@pytest.mark.parametrize("name", cases.CASES)
def test_a_resumed_loop_computes_what_the_uninterrupted_one_does(saved, resumed, name):
    found = {k: resumed[name][k] for k in ("saved", "losses", "last")}
    assert found == saved[name]
    assert resumed[name]["same type"]


@pytest.mark.parametrize("name", cases.CASES)
def test_a_resumed_loop_runs_the_saved_executable_without_tracing(saved, resumed, name):
    found = resumed[name]
    assert (found["verdict"], found["reasons"], found["traced"]) == ("LOADED", [], [])
    assert found["checked_by"] == "code"
    assert found["tracebacks"] == []


# -- nnx.jit ----------------------------------------------------------------------------------------------------------

PATTERN = """What nnx.jit returns writes into the modules it is given, which a stored executable cannot. \
Jit a function of their state instead:

    graph, state = nnx.split((model, optimizer))

    @oaot.jit
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss = train(model, optimizer, batch)  # the function given to nnx.jit
        return nnx.state((model, optimizer)), loss

    state, loss = step(state, batch)
    nnx.update((model, optimizer), state)  # where the modules themselves are needed"""


def train(model, optimizer, batch):
    return cases.nnx_update(model, optimizer, batch)


@pytest.mark.parametrize(
    "wrapped",
    [
        nnx.jit(train),
        nnx.jit(train, graph=False),
        nnx.jit(train, graph_updates=False),
        nnx.jit(donate_argnums=0)(train),
    ],
)
@pytest.mark.parametrize(
    "use", [oaot.jit, oaot.compile, lambda f: oaot.AotRestore(fns={"step": f})]
)
def test_what_nnx_jit_returns_is_refused_with_the_pattern_to_use(use, wrapped):
    with pytest.raises(oaot.UnsupportedFunctionError) as error:
        use(wrapped)
    kind = type(wrapped)
    assert str(error.value) == f"Unsupported type: {kind.__module__}.{kind.__qualname__}. {PATTERN}"


def test_the_pattern_for_nnx_jit_trains_as_nnx_jit_does():
    def make():
        model = cases.NnxNet(nnx.Rngs(0, dropout=1))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    batch = cases.make_batch(0)
    expected, expected_optimizer = make()
    jitted = nnx.jit(train)
    for _ in range(3):
        expected_loss = jitted(expected, expected_optimizer, batch)

    model, optimizer = make()
    # From here on as the message has it, but for the loop.
    graph, state = nnx.split((model, optimizer))

    @oaot.jit
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss = train(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    for _ in range(3):
        state, loss = step(state, batch)
    nnx.update((model, optimizer), state)

    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for a, b in zip(
        jax.tree.leaves(nnx.state(model, nnx.Param, nnx.BatchStat)),
        jax.tree.leaves(nnx.state(expected, nnx.Param, nnx.BatchStat)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert len(step.executables) == 1


def test_nnx_jit_inside_a_jitted_function_stays_as_jax_has_it():
    inner = nnx.jit(lambda model, x: model(x))
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    outer = oaot.jit(lambda state, x: inner(nnx.merge(graph, state), x))
    np.testing.assert_allclose(outer(state, jnp.ones((1, 4))), model(jnp.ones((1, 4))), rtol=1e-6)

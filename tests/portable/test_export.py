"""Exporting a trace: what is stored, how often functions are traced and lowered, refusals."""

from __future__ import annotations

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax._src import pjit
from portable_programs import DEVICES, MESH, array, assert_equal, call, exported, on, program

from orbax_aot._jax import export as export_door
from orbax_aot.portable import PortableError, PortableProgram, export_program

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def refusal(fun, *args, platforms=None) -> str:
    with pytest.raises(PortableError) as caught:
        exported(fun, *args, platforms=platforms)
    return str(caught.value)


@pytest.fixture
def lowerings(monkeypatch):
    """Counts how often anything is lowered."""
    count = []
    original = pjit._resolve_and_lower

    def counted(*args, **kwargs):
        count.append(kwargs.get("lowering_platforms"))
        return original(*args, **kwargs)

    monkeypatch.setattr(pjit, "_resolve_and_lower", counted)
    return count


def test_a_function_is_never_traced_again_and_lowered_only_where_it_must_be(lowerings):
    calls = []

    def fun(x):
        calls.append(x)
        return jnp.tanh(x)

    traced = jax.jit(fun).trace(X)
    lowered = traced.lower()
    del lowerings[:]
    export_program(traced, lowered=lowered)
    export_program(traced, lowered=lowered, platforms=("cpu",))
    assert lowerings == []
    export_program(traced)
    assert lowerings == [("cpu",)]
    export_program(traced, lowered=lowered, platforms=("cpu", "tpu", "cuda"))
    assert lowerings == [("cpu",), ("cpu", "tpu", "cuda")]
    assert len(calls) == 1


def test_exporting_leaves_the_lowered_function_as_it_was():
    traced = jax.jit(jnp.tanh).trace(X)
    lowered = traced.lower()
    text = lowered.as_text(debug_info=True)
    export_program(traced, lowered=lowered)
    assert lowered.as_text(debug_info=True) == text


def test_another_thread_can_export():
    traced = jax.jit(lambda x: x @ x.T).trace(array((8, 4), "data"))
    results = []
    thread = threading.Thread(target=lambda: results.append(export_program(traced)))
    thread.start()
    thread.join()
    assert PortableProgram.parse(results[0]).mesh_axes == {"data": 2, "model": 4}


def test_what_is_stored_is_what_jax_reads():
    restored = jax.export.deserialize(bytearray(exported(jnp.sin, X, platforms=("cpu", "tpu"))))
    assert restored.platforms == ("cpu", "tpu")
    (got,) = restored.call(np.ones((8, 4), "f"))
    np.testing.assert_allclose(got, np.sin(np.ones((8, 4))), rtol=1e-6)


def test_a_train_state_is_stored_as_a_flat_tuple():
    model = nn.Dense(4)

    def step(state, x):
        grads = jax.grad(lambda p: (state.apply_fn({"params": p}, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads)

    x = np.ones((8, 4), "f")
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), x)["params"],
        tx=optax.adam(0.1),
    )
    parsed = program(step, state, x)
    leaves = jax.tree.leaves(state)
    assert len(parsed.in_avals) == len(leaves) + 1
    assert [a.shape for a in parsed.out_avals] == [np.shape(leaf) for leaf in leaves]
    got = call(parsed.compile(None, DEVICES[:1]), [*leaves, x])
    assert_equal(got, jax.tree.leaves(jax.jit(step)(state, x)))


def test_weak_types_survive():
    parsed = program(lambda x, s: (x * s, s + 1), X, 2.0)
    assert [a.weak_type for a in parsed.in_avals] == [False, True]
    assert [a.weak_type for a in parsed.out_avals] == [False, True]
    outs = parsed.compile(None, DEVICES[:1])(np.ones((8, 4), "f"), 2.0)
    assert [o.weak_type for o in outs] == [False, True]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_arguments_and_results(impl):
    def fun(key):
        return jax.random.split(key)[0], jax.random.normal(key, (4,))

    key = jax.random.key(3, impl=impl)
    parsed = program(fun, key)
    assert_equal(parsed.compile(MESH)(key), jax.jit(fun)(key))


def test_arguments_that_are_not_used_stay_arguments():
    parsed = program(lambda x, unused, y: x - y, X, X, X)
    one, two, three = (np.full((8, 4), v, "f") for v in (1, 2, 3))
    (got,) = parsed.compile(None, DEVICES[:1])(one, two, three)
    np.testing.assert_array_equal(got, one - three)


def test_large_constants_are_stored():
    big = np.random.default_rng(0).normal(size=(1000, 500)).astype("f")
    parsed = program(lambda x: x @ big, jax.ShapeDtypeStruct((2, 1000), jnp.float32))
    x = np.ones((2, 1000), "f")
    np.testing.assert_allclose(parsed.compile(None, DEVICES[:1])(x)[0], x @ big, rtol=1e-3)


def test_one_program_serves_several_platforms_and_no_other():
    parsed = program(lambda x: jnp.sort(x, 0), X, platforms=("cpu", "tpu"))
    assert parsed.find_obstacle(None, "cpu") is None
    assert parsed.find_obstacle(None, "tpu") is None
    assert str(parsed.find_obstacle(None, "cuda")) == (
        "PLATFORM: The StableHLO is for cpu, tpu, not for cuda. "
        "Save with portable=('cpu', 'tpu', 'cuda')."
    )


def test_a_gpu_is_served_by_a_program_for_its_vendor():
    parsed = program(jnp.sin, X, platforms=("cpu", "cuda"))
    assert parsed.find_obstacle(None, "gpu") is None
    assert program(jnp.sin, X).find_obstacle(None, "gpu").code == "PLATFORM"


def test_custom_calls_are_listed_and_do_not_count_as_calls_into_the_host():
    parsed = program(lambda x: jnp.linalg.svd(x, compute_uv=False), X)
    assert parsed.custom_calls == ("lapack_sgesdd_ffi",)
    assert parsed.host_calls == ()
    assert parsed.unknown_calls == ()


def test_calls_into_the_host_are_refused_where_they_would_run():
    # Exporting refuses them; a file can hold them all the same.
    def fun(x):
        for target in ("xla_ffi_python_cpu_callback", "somebody_elses_kernel"):
            x = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return x

    unchecked = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
    with_calls = jax.export.export(jax.jit(fun), disabled_checks=unchecked)(X)
    parsed = PortableProgram.parse(export_door.serialize(export_door.flatten(with_calls)))
    assert parsed.host_calls == ("xla_ffi_python_cpu_callback",)
    assert parsed.unknown_calls == ("somebody_elses_kernel", "xla_ffi_python_cpu_callback")
    assert str(parsed.find_obstacle(None, "cpu")) == (
        "NEEDS_SOURCE: The StableHLO calls into the host (xla_ffi_python_cpu_callback), where "
        "there is nothing to call. Pass the live function."
    )


def debugging(x):
    jax.debug.print("{}", x.sum())
    return x


def ordered(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


def calling_back(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("fun", [debugging, ordered, calling_back])
def test_a_function_that_calls_back_into_python_is_refused(fun, reuse):
    traced = jax.jit(fun).trace(X)
    with pytest.raises(PortableError) as caught:
        export_program(traced, lowered=traced.lower() if reuse else None)
    assert caught.value.obstacle.code == "NOT_SERIALIZABLE"
    assert "Remove callbacks and debug prints to store it." in caught.value.obstacle.detail


def test_a_function_that_a_platform_does_not_have_is_refused():
    message = refusal(lambda x: jnp.linalg.eig(x)[0], jnp.ones((3, 3)), platforms=("cpu", "tpu"))
    assert message.startswith(
        "PLATFORM: No StableHLO was stored: something in the function does not exist on one of "
        "the platforms cpu, tpu. Ask for fewer platforms. "
    )


def test_mutable_arrays_are_refused():
    reference = jax.new_ref(jnp.ones(3))
    assert refusal(lambda x: reference[...] * x, jnp.ones(3)) == (
        "NOT_SERIALIZABLE: No StableHLO was stored: the function closes over a mutable array."
    )
    assert refusal(lambda r: r[...] * 2, reference).startswith(
        "NOT_SERIALIZABLE: No StableHLO was stored: an argument or output is no array"
    )


def test_shapes_that_are_not_constant_are_refused():
    shape = jax.export.symbolic_shape("b, 3")
    assert refusal(lambda x: x * 2, jax.ShapeDtypeStruct(shape, jnp.float32)) == (
        "NOT_SERIALIZABLE: No StableHLO was stored: the shape of float32[b,3] is not constant."
    )


def test_wide_types_need_the_same_configuration():
    with jax.enable_x64(True):
        parsed = program(lambda x: x + 1, jax.ShapeDtypeStruct((3,), jnp.float64))
        assert parsed.find_obstacle(None, "cpu") is None
    assert str(parsed.find_obstacle(None, "cpu")) == (
        "JAX_CONFIG: Input 0 is float64[3], and jax_enable_x64 is off here. Switch it on."
    )


def test_donated_inputs_are_reused():
    parsed = program(lambda x: x + 1, array((8, 4), "data"))
    for donated, expected in (((0,), True), ((), False)):
        compiled = parsed.compile(MESH, donated=donated)
        x = jax.device_put(np.ones((8, 4), "f"), on("data"))
        compiled(x)
        assert x.is_deleted() == expected


def test_compiler_options_reach_the_compiler():
    parsed = program(jnp.sin, X)
    parsed.compile(None, DEVICES[:1], compiler_options={"xla_cpu_enable_fast_math": True})
    with pytest.raises(PortableError, match="NEEDS_SOURCE: Compiling the stored StableHLO failed"):
        parsed.compile(None, DEVICES[:1], compiler_options={"no_such_option": True})

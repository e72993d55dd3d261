"""The program digest: what must not count, what must, and over processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_aot.program import program_digest

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(2, 4), ("data", "model"))
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def on(*spec: str | None, mesh: Mesh = MESH) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec))


def digest(fun, *args, **jit_options) -> str:
    return program_digest(jax.jit(fun, **jit_options).lower(*args))


def base(x):
    return jnp.tanh(x) * 2.0 + np.arange(4, dtype=np.float32)


def with_helper(scale):
    @jax.jit
    def helper(x):
        return jnp.sin(x) * scale

    return lambda x: helper(x) + helper(x * 2)


def with_other_helper(scale):
    @jax.jit
    def renamed(x):
        return jnp.sin(x) * scale

    return lambda x: renamed(x) + renamed(x * 2)


def test_names_and_lines_do_not_count():
    def other(values):
        # Another name, another line, another argument name.
        return jnp.tanh(values) * 2.0 + np.arange(4, dtype=np.float32)

    assert digest(base, X) == digest(other, X)
    assert digest(with_helper(3.0), X) == digest(with_other_helper(3.0), X)


def test_names_of_results_do_not_count():
    assert digest(lambda x: {"a": x + 1}, X) == digest(lambda x: [x + 1], X)


@pytest.mark.parametrize("device", [0, 3])
@pytest.mark.parametrize("options", [{}, {"donate_argnums": (0, 1)}])
def test_commitment_does_not_count_on_one_device(device, options):
    def fun(x, step):
        return base(x), step + 1

    plain = jnp.ones((8, 4)), jnp.ones((), jnp.int32)
    committed = jax.device_put(plain, DEVICES[device])
    assert digest(fun, *plain, **options) == digest(fun, *committed, **options)


@pytest.mark.parametrize("returned", [False, True])
def test_commitment_of_random_keys_does_not_count_on_one_device(returned):
    def fun(key):
        numbers = jax.random.normal(key, (3,)), jax.random.uniform(jax.random.fold_in(key, 1))
        return (key, numbers) if returned else numbers

    key = jax.random.key(0)
    committed = jax.device_put(key, DEVICES[1])
    assert digest(fun, key) == digest(fun, committed)
    assert digest(fun, key) != digest(lambda key: jax.random.normal(key, (3,)), key)


def test_commitment_of_scalars_does_not_count_on_a_mesh():
    x = jax.device_put(jnp.ones((8, 4)), on("data", "model"))
    loose = jnp.ones((), jnp.int32)
    committed = jax.device_put(loose, on())

    def fun(x, step):
        return x * step, step + 1

    assert digest(fun, x, loose) == digest(fun, x, committed)


def test_an_uncommitted_array_on_a_mesh_counts_because_the_compiler_places_it():
    x = jax.device_put(jnp.ones((8, 4)), on("data"))
    loose = jnp.ones((8, 4))
    committed = jax.device_put(loose, on())
    assert digest(jnp.add, x, loose) != digest(jnp.add, x, committed)


def sharded(*spec: str | None, mesh: Mesh = MESH):
    return jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=on(*spec, mesh=mesh))


def constrained(spec):
    return lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x), on(*spec)) * 2


OTHER_MESH = Mesh(DEVICES.reshape(4, 2), ("data", "model"))
RENAMED_MESH = Mesh(DEVICES.reshape(2, 4), ("data", "tensor"))
BIG = np.arange(100_000, dtype=np.float32)
BIG_CHANGED = np.where(BIG == 54_321, np.float32(-1), BIG)
COLUMNS_FIRST = layout.Format(layout.Layout((1, 0)), jax.sharding.SingleDeviceSharding(DEVICES[0]))

DIFFERENT = {
    "constant": ((lambda x: x * 2.0, X), (lambda x: x * 2.5, X)),
    "array constant": (
        (base, X),
        (lambda x: jnp.tanh(x) * 2.0 + np.arange(1.0, 5.0, dtype="f"), X),
    ),
    "large constant": ((lambda x: x.sum() + BIG, X), (lambda x: x.sum() + BIG_CHANGED, X)),
    "operator": ((jnp.sin, X), (jnp.cos, X)),
    "constant in a helper": ((with_helper(3.0), X), (with_helper(4.0), X)),
    "order of outputs": ((lambda x: (x + 1, x * 2), X), (lambda x: (x * 2, x + 1), X)),
    "which argument is used": ((lambda x, y: x + 1, X, X), (lambda x, y: y + 1, X, X)),
    "number of arguments": ((lambda x: x + 1, X), (lambda x, y: x + 1, X, X)),
    "weak type of an output": (
        (lambda x: x, 1.0),
        (lambda x: jax.lax.convert_element_type(x, jnp.float32), 1.0),
    ),
    "shape": ((jnp.sin, X), (jnp.sin, jax.ShapeDtypeStruct((4, 8), jnp.float32))),
    "dtype": ((jnp.sin, X), (jnp.sin, jax.ShapeDtypeStruct((8, 4), jnp.bfloat16))),
    "sharding": ((jnp.sin, sharded("data")), (jnp.sin, sharded(None, "model"))),
    "constraint": (
        (constrained(("data",)), sharded()),
        (constrained((None, "model")), sharded()),
    ),
    "mesh shape": ((jnp.sin, sharded("data")), (jnp.sin, sharded("data", mesh=OTHER_MESH))),
    "mesh axis names": (
        (jnp.sin, sharded(None, "model")),
        (jnp.sin, sharded(None, "tensor", mesh=RENAMED_MESH)),
    ),
    "one device or a mesh": ((jnp.sin, X), (jnp.sin, sharded())),
    "precision": (
        (lambda x: x @ x.T, X),
        (lambda x: jnp.matmul(x, x.T, precision="highest"), X),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_programs_have_different_digests(name):
    (one, *one_args), (two, *two_args) = DIFFERENT[name]
    assert digest(one, *one_args) == digest(one, *one_args)
    assert digest(one, *one_args) != digest(two, *two_args)


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 0},
        {"out_shardings": COLUMNS_FIRST},
        {"in_shardings": COLUMNS_FIRST},
        {"compiler_options": {"xla_cpu_enable_fast_math": True}},
        {"keep_unused": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_jit_that_change_the_program_count(options):
    def fun(x, unused):
        return jnp.sin(x)

    assert digest(fun, X, X, **options) == digest(fun, X, X, **options)
    assert digest(fun, X, X) != digest(fun, X, X, **options)


def test_an_output_sharding_counts():
    x = sharded("data")
    assert digest(jnp.sin, x, out_shardings=on()) != digest(jnp.sin, x, out_shardings=on("data"))


def test_a_module_has_a_digest_in_every_form():
    module = jax.jit(base).lower(X).compiler_ir("stablehlo")
    other = jax.jit(jnp.sin).lower(X).compiler_ir("stablehlo")
    assert program_digest(module) == program_digest(str(module))
    assert program_digest(module) != program_digest(other)


def test_the_lowered_function_still_compiles_and_keeps_its_text():
    lowered = jax.jit(base).lower(jax.device_put(jnp.ones((8, 4)), DEVICES[1]))
    text = lowered.as_text(debug_info=True)
    program_digest(lowered)
    assert lowered.as_text(debug_info=True) == text
    x = jax.device_put(jnp.ones((8, 4)), DEVICES[1])
    np.testing.assert_allclose(lowered.compile()(x), base(np.ones((8, 4), "f")), rtol=1e-6)


def run_python(source: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from orbax_aot.program import program_digest
    {padding}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    def fun(state, x):
        y = jnp.where(x > 0, jax.nn.gelu(x @ state["w"]), 0)
        return {{"w": state["w"] - y.mean(), "b": state["b"]}}, jnp.linalg.norm(y)
    at = lambda *p: jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P(*p)))
    jitted = jax.jit(fun, donate_argnums=0)
    print(program_digest(jitted.lower({{"w": at(None, "model"), "b": at()}}, at("data"))))
"""


def test_the_digest_is_equal_over_processes_and_hash_seeds():
    digests = set()
    for seed, padding in (("1", ""), ("2", "unused = 1\n" * 3)):
        source = textwrap.dedent(SCRIPT).format(padding=padding)
        digests.add(run_python(source, PYTHONHASHSEED=seed).strip())
    assert len(digests) == 1
    assert digests.pop().startswith("sha256:")


HOISTED = """
import jax, jax.numpy as jnp, numpy as np
from orbax_aot.program import program_digest
for changed in (0, 0, 1):
    constant = jnp.arange(100_000.0).at[54_321].add(changed)
    lowered = jax.jit(lambda x: x.sum() + constant).lower(jnp.ones(3))
    print(len(lowered._lowering.const_args), program_digest(lowered))
"""


def test_constants_that_are_arguments_of_the_module_count_by_value():
    # JAX decides at import whether constants become arguments, so this needs its own process.
    lines = run_python(HOISTED, JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS="1").split("\n")
    first, same, changed = lines[:3]
    assert first.startswith("1 sha256:")
    assert same == first
    assert changed.startswith("1 sha256:")
    assert changed != first

"""Programs on other meshes than they were saved on: the right result, or the reason why not."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from portable_programs import (
    DEVICES,
    MESH,
    array,
    assert_equal,
    call,
    exported,
    mesh_of,
    on,
    program,
    values_for,
)

from orbax_aot._jax import mlir
from orbax_aot.portable import PortableError, PortableProgram


def layers(w, x, scale, key):
    """A function with constraints, randomness, a loop, a weak scalar and donated inputs."""
    y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), on("data", "model"))
    y, _ = jax.lax.scan(lambda c, _: (jnp.where(c > 0, c * scale, c), None), y, None, length=3)
    return {"y": y, "w": w + y.mean()}, (y**2).sum(0) + jax.random.normal(key, (32,)), scale + 1


INPUTS = (array((16, 32), None, "model"), array((8, 16), "data"), 2.0)


@pytest.fixture(scope="module")
def saved():
    key = jax.random.key(1)
    outputs = ({"y": on("data", "model"), "w": on(None, "model")}, on("model"), None)
    data = exported(layers, *INPUTS, key, out_shardings=outputs)
    values = [*values_for(INPUTS[:2]), 2.0, key]
    want = jax.tree.leaves(jax.jit(layers)(*values))
    return PortableProgram.parse(data), values, want


OTHER_MESHES = {
    "same": MESH,
    "sizes exchanged": mesh_of(4, 2),
    "fewer devices": mesh_of(2, 2, first=3),
    "one axis of size 1": mesh_of(1, 2, first=5),
    "one device": mesh_of(1, 1, first=7),
    "devices in another order": Mesh(DEVICES[::-1].reshape(2, 4), ("data", "model")),
    "axes in another order": mesh_of(4, 2, names=("model", "data")),
    "an axis missing": mesh_of(4, names=("data",)),
    "an axis more": mesh_of(2, 2, 2, names=("data", "extra", "model")),
}


@pytest.mark.parametrize("name", OTHER_MESHES)
def test_the_result_and_its_shardings_are_right_on(name, saved):
    parsed, values, want = saved
    mesh = OTHER_MESHES[name]
    got = call(parsed.compile(mesh, donated=[0]), values)
    assert_equal(got, want)
    w, y, summed, scale = got
    keep = lambda *spec: PartitionSpec(*[a if a in mesh.shape else None for a in spec])
    assert w.sharding.is_equivalent_to(on(*keep(None, "model"), mesh=mesh), 2)
    assert y.sharding.is_equivalent_to(on(*keep("data", "model"), mesh=mesh), 2)
    assert summed.sharding.is_equivalent_to(on(*keep("model"), mesh=mesh), 1)
    assert scale.weak_type
    assert all(out.sharding.device_set == set(mesh.devices.flat) for out in got)


def test_the_work_is_split_over_the_new_mesh_not_repeated(saved):
    parsed, _, _ = saved
    compiled = parsed.compile(mesh_of(4, 2))
    w, x = compiled.input_shardings[0][:2]
    assert w.shard_shape((16, 32)) == (16, 16)
    assert x.shard_shape((8, 16)) == (2, 16)
    # The product of the local shapes: (8/4, 16) x (16, 32/2), not more.
    assert "f32[2,16]" in compiled.as_text()
    assert "f32[8,32]" not in compiled.as_text()


def test_one_device_needs_no_mesh(saved):
    parsed, values, want = saved
    got = call(parsed.compile(None, [DEVICES[6]]), values)
    assert_equal(got, want)
    assert all(out.devices() == {DEVICES[6]} for out in got)


def test_as_many_devices_as_saved_need_no_mesh(saved):
    parsed, values, want = saved
    got = call(parsed.compile(None, list(DEVICES[::-1])), values)
    assert_equal(got, want)
    assert [d.id for d in got[1].sharding.mesh.devices.flat] == list(range(8))[::-1]


def test_a_program_for_one_device_runs_on_a_mesh():
    parsed = program(lambda x: jnp.tanh(x) * 2, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert parsed.mesh_axes is None
    (value,) = values_for(parsed.in_avals)
    for mesh in (MESH, mesh_of(1, 1)):
        (got,) = call(parsed.compile(mesh), [value])
        assert_equal([got], [np.tanh(value) * 2])
        assert got.sharding.device_set == set(mesh.devices.flat)


def test_neither_mesh_nor_device_is_an_error(saved):
    with pytest.raises(PortableError, match=r"^DEVICE_COUNT: There is neither a mesh nor a device"):
        saved[0].compile(None)


@pytest.mark.parametrize("around", [MESH, mesh_of(2, names=("other",))])
def test_the_callers_mesh_does_not_matter(saved, around):
    parsed, values, want = saved
    with jax.set_mesh(around):
        for mesh in (None, mesh_of(1, 2)):
            assert_equal(call(parsed.compile(mesh, [DEVICES[5]]), values), want)
    with jax.set_mesh(MESH):
        pass  # leaving compile must not have left another mesh behind
    assert jax.sharding.get_abstract_mesh().empty


def test_another_thread_can_compile(saved):
    parsed, values, want = saved
    results = []
    thread = threading.Thread(target=lambda: results.append(parsed.compile(mesh_of(2, 2))))
    thread.start()
    thread.join()
    assert_equal(call(results[0], values), want)


def test_what_is_unspecified_stays_so():
    def fun(x):
        return jax.lax.with_sharding_constraint(jnp.tanh(x), on("data", "model"))

    parsed = program(fun, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert parsed.mesh_axes == {"data": 2, "model": 4}
    (value,) = values_for(parsed.in_avals)
    (got,) = parsed.compile(mesh_of(4, 2))(value)
    assert_equal([got], [np.tanh(value)])
    # The compiler chose, from the constraint inside.
    assert got.sharding.is_equivalent_to(on("data", "model", mesh=mesh_of(4, 2)), 2)


def test_a_program_without_arguments():
    def fun():
        return jax.lax.with_sharding_constraint(jnp.arange(32.0).reshape(8, 4), on("data"))

    parsed = program(fun)
    for mesh in (MESH, mesh_of(2, 2), None):
        (got,) = parsed.compile(mesh, [DEVICES[2]])()
        assert_equal([got], [np.arange(32, dtype="f").reshape(8, 4)])


def test_constraints_that_do_not_divide_inside_do_not_matter():
    def fun(x):
        odd = jax.lax.with_sharding_constraint(x[:7, :3] * 2, on("data", "model"))
        return odd @ jax.lax.with_sharding_constraint(x[:3], on("model"))

    parsed = program(fun, array((8, 5), "data"))
    values = values_for(parsed.in_avals)
    want = [values[0][:7, :3] * 2 @ values[0][:3]]
    for mesh in (mesh_of(4, 2), mesh_of(1, 3), None):
        assert_equal(call(parsed.compile(mesh, [DEVICES[0]]), values), want)


EXPLICIT = (AxisType.Explicit, AxisType.Explicit)


@pytest.mark.parametrize("types", [EXPLICIT, None], ids=["explicit", "automatic"])
def test_axes_of_explicit_type(types):
    mesh = mesh_of(2, 4, axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        parsed = program(
            lambda w, x: jax.sharding.reshard(jnp.tanh(x @ w), PartitionSpec("model", "data")),
            array((16, 32), None, "model", mesh=mesh),
            array((8, 16), "data", mesh=mesh),
        )
    w, x = values_for(parsed.in_avals)
    for sizes in ((4, 2), (1, 2), (1, 1)):
        other = mesh_of(*sizes, axis_types=types)
        (got,) = call(parsed.compile(other), [w, x])
        assert_equal([got], [np.tanh(x @ w)])
        assert got.sharding == on("model", "data", mesh=other)
    assert_equal(call(parsed.compile(None, DEVICES[:1]), [w, x]), [np.tanh(x @ w)])


def test_linear_algebra():
    parsed = program(lambda x: jnp.linalg.svd(x, compute_uv=False), array((8, 4), "data"))
    values = values_for(parsed.in_avals)
    want = [np.linalg.svd(values[0], compute_uv=False)]
    for mesh in (mesh_of(4, 2), None):
        assert_equal(call(parsed.compile(mesh, [DEVICES[1]]), values), want)


# --- obstacles -----------------------------------------------------------------------------------


def refusals(parsed: PortableProgram, *meshes: Mesh | None) -> set[str]:
    """Returns what `find_obstacle` says, having checked that `compile` says it too."""
    said = set()
    for mesh in meshes:
        obstacle = parsed.find_obstacle(None if mesh is None else mesh.shape, "cpu")
        with pytest.raises(PortableError) as caught:
            parsed.compile(mesh, [DEVICES[0]])
        assert caught.value.obstacle == obstacle
        said.add(str(obstacle))
    return said


NEEDS_SOURCE = (
    "NEEDS_SOURCE: The StableHLO cannot be moved to another mesh: {}. Pass the live function, or "
    "restore on a mesh of the saved shape."
)


def test_manual_computations_run_on_the_saved_shape_only():
    manual = jax.shard_map(
        lambda x: jax.lax.psum(x, "model") * jax.lax.axis_index("data"),
        mesh=MESH,
        in_specs=PartitionSpec("data", "model"),
        out_specs=PartitionSpec("data", None),
    )
    parsed = program(manual, array((8, 4), "data", "model"))
    values = values_for(parsed.in_avals)
    reversed_mesh = OTHER_MESHES["devices in another order"]
    assert parsed.find_obstacle(reversed_mesh.shape, "cpu") is None
    placed = [jax.device_put(values[0], on("data", "model"))]
    assert_equal(call(parsed.compile(reversed_mesh), values), [jax.jit(manual)(*placed)])
    said = refusals(
        parsed, mesh_of(4, 2), mesh_of(1, 1), None, OTHER_MESHES["axes in another order"]
    )
    (text,) = said
    assert text.startswith(NEEDS_SOURCE.split("{}")[0] + "it computes device by device (sdy.manual")
    assert "as shard_map does" in text


def test_sizes_that_do_not_divide():
    parsed = program(lambda x: x * 2, array((2, 4), "data"))
    assert refusals(parsed, mesh_of(4, 2)) == {
        "MESH_SHAPE: Dimension 0 of input 0, float32[2,4], is split over data, and 2 does not "
        "divide into 4 parts. Choose other sizes for the mesh."
    }
    assert parsed.find_obstacle({"data": 1, "model": 8}, "cpu") is None
    two = program(lambda x: x[:2], array((8, 4)), out_shardings=on("data"))
    assert refusals(two, mesh_of(8, 1)) == {
        "MESH_SHAPE: Dimension 0 of output 0, float32[2,4], is split over data, and 2 does not "
        "divide into 8 parts. Choose other sizes for the mesh."
    }


@pytest.mark.parametrize(
    ("sizes", "safe"),
    [
        ((2, 3), False),
        ((3, 4), False),
        ((2, 2, 3), False),
        ((2, 2, 6), False),
        ((6,), True),
        ((1, 6), True),
        ((2, 6), True),
        ((3, 3), True),
        ((2, 4, 16), True),
    ],
)
def test_sizes_that_the_partitioner_can_crash_on(sizes, safe):
    parsed = program(lambda x: x * 2, array((48, 48), "data"))
    mesh_shape = dict(zip(("data", "model", "extra"), sizes, strict=False))
    obstacle = parsed.find_obstacle(mesh_shape, "cpu")
    if safe:
        assert obstacle is None
    else:
        described = ", ".join(f"{name}={size}" for name, size in mesh_shape.items())
        assert str(obstacle) == (
            f"MESH_SHAPE: The sizes of the axes {described} do not divide one another, and XLA "
            "can crash moving a program to such a mesh. Use powers of two."
        )


def test_sizes_that_the_partitioner_can_crash_on_stay_possible_where_they_were_saved():
    saved = mesh_of(2, 3)
    parsed = program(lambda x: x * 2, array((12, 12), "data", "model", mesh=saved))
    assert parsed.find_obstacle(saved.shape, "cpu") is None
    assert parsed.find_obstacle({"data": 3, "model": 2}, "cpu").code == "MESH_SHAPE"


def test_renamed_axes():
    parsed = program(lambda x: x * 2, array((8, 4), "data", "model"))
    assert refusals(parsed, mesh_of(2, 4, names=("a", "b"))) == {
        "MESH_SHAPE: The program's mesh has axes data, model, this one a, b: "
        "data, model missing, a, b new. Name the axes alike."
    }
    assert refusals(parsed, mesh_of(2, 4, names=("data", "tensor"))) == {
        "MESH_SHAPE: The program's mesh has axes data, model, this one data, tensor: "
        "model missing, tensor new. Name the axes alike."
    }


def test_several_meshes():
    line = Mesh(DEVICES, ("x",))

    def fun(x):
        x = jax.lax.with_sharding_constraint(x * 2, on("x", mesh=line))
        return jax.lax.with_sharding_constraint(x, on("data", "model")) + 1

    parsed = program(fun, array((8, 4), "data"))
    values = values_for(parsed.in_avals)
    assert_equal(call(parsed.compile(MESH), values), [values[0] * 2 + 1])
    assert refusals(parsed, mesh_of(4, 2), None) == {NEEDS_SOURCE.format("it uses several meshes")}


# --- the module itself ---------------------------------------------------------------------------

BODY = """
module @m attributes {{mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32}} {{
  sdy.mesh @mesh = <["data"=2, "model"=4]{ids}>
  sdy.mesh @empty_mesh = <[]>
  func.func public @main(%arg0: tensor<8x4xf32> {{sdy.sharding = {sharding}}}) -> tensor<8x4xf32> {{
    {body}
    return %0 : tensor<8x4xf32>
  }}
}}
"""
PLAIN = '#sdy.sharding<@mesh, [{"data"}, {}]>'
CONSTRAINT = "%0 = sdy.sharding_constraint %arg0 {} : tensor<8x4xf32>"


PLAIN_BODY = CONSTRAINT.format('<@mesh, [{"model"}, {}]>')


def module_text(*, ids="", sharding=PLAIN, body=PLAIN_BODY):
    return BODY.format(ids=ids, sharding=sharding, body=body)


def facts(**parts) -> mlir.ModuleFacts:
    with mlir.parsed(module_text(**parts)) as module:
        return mlir.describe_module(module)


def test_what_a_module_says_is_found_wherever_it_occurs():
    plain = facts()
    assert plain.meshes == ((("data", 2), ("model", 4)),)
    assert not (plain.reordered or plain.split_axes or plain.partial_sums or plain.old_shardings)
    assert facts(ids=", device_ids=[7, 6, 5, 4, 3, 2, 1, 0]").reordered
    sub_axis = '#sdy.sharding<@mesh, [{"model":(1)2}, {}]>'
    assert facts(sharding=sub_axis).split_axes
    assert facts(body=CONSTRAINT.format('<@mesh, [{}, {"model":(2)2}]>')).split_axes
    assert facts(sharding='#sdy.sharding<@mesh, [{}, {}], unreduced={"data"}>').partial_sums
    inlined = CONSTRAINT.format('<mesh<["x"=8]>, [{"x"}, {}]>')
    assert facts(body=inlined).meshes == ((("data", 2), ("model", 4)), (("x", 8),))
    old = '%0 = stablehlo.add %arg0, %arg0 {mhlo.sharding = "{replicated}"} : tensor<8x4xf32>'
    assert facts(body=old).old_shardings
    callback = (
        "%0 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%arg0) "
        "{has_side_effect = true} : (tensor<8x4xf32>) -> tensor<8x4xf32>"
    )
    assert facts(body=callback).custom_calls == ("xla_ffi_python_cpu_callback",)


def test_meshes_are_resized_wherever_they_occur():
    inlined = CONSTRAINT.format('<mesh<["data"=2, "model"=4, "z"=1]>, [{"data"}, {"z"}]>')
    with mlir.parsed(module_text(body=inlined)) as module:
        mlir.resize_meshes(module, [("data", 3), ("extra", 2)])
        text = str(module)
    assert '["data"=3, "extra"=2, "model"=1]>' in text
    assert '["data"=3, "extra"=2, "model"=1, "z"=1]>' in text
    assert "sdy.mesh @empty_mesh = <[]>" in text
    assert "mhlo.num_partitions = 6 : i32" in text
    assert '"model"=4' not in text


def test_the_second_note_of_the_sizes_is_kept_in_step():
    def texts(mesh):
        lowered = jax.jit(jnp.sin).lower(array((8, 4), "data", mesh=mesh))
        with mlir.parsed(mlir.to_bytecode(lowered.compiler_ir("stablehlo"))) as module:
            yield str(module)
            mlir.resize_meshes(module, [("data", 4), ("model", 2)])
            yield str(module)

    _, resized = texts(MESH)
    lowered_there, unchanged = texts(mesh_of(4, 2))
    assert resized == unchanged == lowered_there

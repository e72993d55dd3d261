"""Meshes, shardings, collectives, layouts and memory kinds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support_case import Program, Section, Unavailable, array, call, put

import orbax_aot as oaot

section = Section("Shardings")


def mesh_of(devices, sizes, names, types=None) -> Mesh:
    grid = np.array(devices).reshape(sizes)
    return Mesh(grid, names, axis_types=types or (AxisType.Auto,) * len(names))


def _add_axes(sizes, spec) -> None:
    names = tuple("abcd"[: len(sizes)])

    @section.case(f"NamedSharding over {len(sizes)} axes", devices=int(np.prod(sizes)))
    def make(devices):
        mesh = mesh_of(devices, sizes, names)
        w = put(array(8, 8), NamedSharding(mesh, spec))
        x = put(array(8, 8, seed=1), NamedSharding(mesh, P(names[0])))
        return call(lambda w, x: (x @ w, jnp.sum(x), jnp.tanh(w)), w, x)


for _sizes, _spec in (
    ((4,), P("a")),
    ((2, 2), P("a", "b")),
    ((2, 2, 2), P(("a", "b"), "c")),
    ((2, 1, 2, 2), P(("a", "d"), ("b", "c"))),
):
    _add_axes(_sizes, _spec)


@section.case("axis types Explicit", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"), (AxisType.Explicit,) * 2)
    x = put(array(8, 8), NamedSharding(mesh, P("a", "b")))
    return call(lambda x: jnp.sin(x) * 2, x)


@section.case("axis types Explicit and Auto mixed", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"), (AxisType.Explicit, AxisType.Auto))
    x = put(array(8, 8), NamedSharding(mesh, P("a", None)))
    return call(lambda x: jnp.sin(x) * 2, x)


@section.case("explicit axes under jax.set_mesh, resharding inside", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"), (AxisType.Explicit,) * 2)
    x = put(array(8, 8), NamedSharding(mesh, P("a", "b")))

    def f(x):
        return jax.sharding.reshard(x, P(None, "b")) + 1

    return call(f, x, context=lambda: jax.set_mesh(mesh))


@section.case("auto axes under jax.set_mesh", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"))
    x = put(array(8, 8), NamedSharding(mesh, P("a")))
    f = lambda x: jax.lax.with_sharding_constraint(x * 2, P("b"))
    return call(f, x, context=lambda: jax.set_mesh(mesh))


@section.case("an abstract mesh in use_abstract_mesh", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"), (AxisType.Explicit,) * 2)
    x = put(array(8, 8), NamedSharding(mesh, P("a", "b")))

    def f(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return x + jax.sharding.reshard(x, P("a", "b"))

    return call(f, x)


@section.case("in_shardings with uncommitted arguments", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"))
    on = lambda *s: NamedSharding(mesh, P(*s))
    return call(
        lambda x, y: (x @ y).sum(0),
        array(8, 8),
        array(8, 8, seed=1),
        jit={"in_shardings": (on("a"), on(None, "b")), "out_shardings": on("b")},
    )


@section.case("out_shardings alone, no arguments on the mesh", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"))
    return call(
        lambda x: x * 2, array(8, 8), jit={"out_shardings": NamedSharding(mesh, P("a", "b"))}
    )


@section.case("a program that makes sharded state from nothing", devices=4)
def _(devices):
    mesh = mesh_of(devices, (4,), ("a",))
    return call(lambda: jnp.arange(8.0), jit={"out_shardings": NamedSharding(mesh, P("a"))})


@section.case("SingleDeviceSharding")
def _(devices):
    x = put(array(8), SingleDeviceSharding(devices[0]))
    return call(lambda x: x * 2, x)


@section.case("replicated and unspecified", devices=4)
def _(devices):
    mesh = mesh_of(devices, (4,), ("a",))
    x = put(array(8), NamedSharding(mesh, P()))
    return call(lambda x, y: x * y, x, 3.0)


@section.case("unconstrained dimensions", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"))
    x = put(array(8, 8), NamedSharding(mesh, P("a", "b")))
    spec = NamedSharding(mesh, P(P.UNCONSTRAINED, "b"))
    return call(lambda x: jax.lax.with_sharding_constraint(x * 2, spec), x)


@section.case("sharding constraints inside", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"))
    x = put(array(8, 8), NamedSharding(mesh, P("a", "b")))

    def f(x):
        y = jax.lax.with_sharding_constraint(x @ x, NamedSharding(mesh, P("b", None)))
        return jnp.tanh(y).sum(1)

    return call(f, x)


@section.case("more than one argument order: mixed shardings and a scalar", devices=4)
def _(devices):
    mesh = mesh_of(devices, (4,), ("a",))
    x = put(array(8), NamedSharding(mesh, P("a")))
    return call(lambda n, x, y: x * n + y, 2, x, np.float32(3))


@section.case("a mesh over part of the devices", devices=3)
def _(devices):
    mesh = mesh_of(devices, (3,), ("a",))
    return call(lambda x: jnp.cumsum(x), put(array(6), NamedSharding(mesh, P("a"))))


@section.case("a mesh in an order of its own", devices=4)
def _(devices):
    mesh = mesh_of([devices[i] for i in (2, 0, 3, 1)], (2, 2), ("a", "b"))
    x = put(array(8, 8), NamedSharding(mesh, P("a", "b")))
    return call(lambda x: x @ x, x, mesh=mesh)


@section.case("two meshes of other shapes over the same devices", devices=4)
def _(devices):
    flat, square = mesh_of(devices, (4,), ("a",)), mesh_of(devices, (2, 2), ("b", "c"))
    x = put(array(8, 8), NamedSharding(flat, P("a")))
    y = put(array(8, 8, seed=1), NamedSharding(square, P("c", "b")))
    return call(lambda x, y: x @ y, x, y)


@section.case("sizes that a mesh axis does not divide, made inside", devices=4)
def _(devices):
    mesh = mesh_of(devices, (4,), ("a",))
    x = put(array(8, 3), NamedSharding(mesh, P("a")))
    return call(lambda x: x.reshape(-1)[:7] * 2, x)


_COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "a"),
    "pmean": lambda x: jax.lax.pmean(x, "a"),
    "pmax": lambda x: jax.lax.pmax(x, "a"),
    "pmin": lambda x: jax.lax.pmin(x, "a"),
    "all_gather": lambda x: jax.lax.all_gather(x, "a", tiled=True),
    "psum_scatter": lambda x: jax.lax.psum_scatter(
        jnp.tile(x, (4, 1)), "a", scatter_dimension=0, tiled=True
    ),
    "all_to_all": lambda x: jax.lax.all_to_all(
        jnp.tile(x, (1, 2)), "a", split_axis=1, concat_axis=0, tiled=True
    ),
    "ppermute": lambda x: jax.lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)]),
    "pshuffle": lambda x: jax.lax.pshuffle(x, "a", [3, 2, 1, 0]),
    "axis_index": lambda x: x + jax.lax.axis_index("a"),
}


def _add_collective(name, body) -> None:
    @section.case(f"shard_map with {name}", devices=4)
    def make(devices):
        mesh = mesh_of(devices, (4,), ("a",))
        f = jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
        return call(f, put(array(8, 4), NamedSharding(mesh, P("a"))))


for _name, _body in _COLLECTIVES.items():
    _add_collective(_name, _body)


@section.case("shard_map over one of two axes", devices=4)
def _(devices):
    mesh = mesh_of(devices, (2, 2), ("a", "b"))
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, "a"),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(),
        axis_names={"a"},
    )
    return call(f, put(array(8, 4), NamedSharding(mesh, P("a", "b"))))


@section.case("shard_map in a scan, differentiated", devices=4)
def _(devices):
    mesh = mesh_of(devices, (4,), ("a",))
    body = jax.shard_map(
        lambda x: jnp.tanh(x) + jax.lax.pmean(x, "a"),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P("a"),
    )

    def f(x):
        return jax.grad(lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, None, 3)[0].sum())(
            x
        )

    return call(f, put(array(8), NamedSharding(mesh, P("a"))))


@section.case("jax.pmap inside", devices=1, remap=False)
def _(devices):
    if not hasattr(jax, "pmap"):
        raise Unavailable("no jax.pmap")
    return call(lambda x: jax.pmap(lambda y: y * 2)(x), array(1, 4))


def _custom_layout(devices):
    return Format(Layout(major_to_minor=(1, 0)), SingleDeviceSharding(devices[0]))


@section.case("a custom layout of an argument and of a result")
def _(devices):
    layout = _custom_layout(devices)
    x = put(array(4, 8), layout)
    return call(lambda x: x * 2, x, jit={"in_shardings": layout, "out_shardings": layout})


@section.case("a custom layout over a mesh", devices=4)
def _(devices):
    mesh = mesh_of(devices, (4,), ("a",))
    layout = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P("a")))
    x = put(array(8, 8), layout)
    return call(lambda x: x * 2, x, jit={"in_shardings": layout, "out_shardings": layout})


@section.case("a layout chosen by the compiler")
def _(devices):
    auto = Format(Layout.AUTO)

    def run(fns):
        return fns["f"](jax.device_put(array(4, 8)))

    return Program({"f": oaot.jit(lambda x: x.T @ x, out_shardings=auto)}, run)


@section.case("arguments and results in pinned host memory")
def _(devices):
    host = SingleDeviceSharding(devices[0], memory_kind="pinned_host")
    x = put(array(4, 8), host)
    f = lambda x: jax.device_put(x, jax.memory.Space.Device) * 2
    return call(f, x, jit={"out_shardings": host})


@section.case("pinned host memory over a mesh", devices=4)
def _(devices):
    mesh = mesh_of(devices, (4,), ("a",))
    host = NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    near = NamedSharding(mesh, P("a"), memory_kind="device")
    f = lambda x: jax.device_put(x, near) * 2
    return call(f, put(array(8, 8), host), jit={"out_shardings": host})


@section.case("offload to the host inside")
def _(devices):
    def f(x):
        y = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
        return jax.device_put(y, jax.memory.Space.Device) * 2

    return call(f, array(4, 8))


@section.case("offloading rematerialization policy")
def _(devices):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def f(x):
        def loss(x):
            y = checkpoint_name(jnp.sin(x), "y")
            return jnp.sum(jnp.sin(y))

        return jax.grad(jax.checkpoint(loss, policy=policy))(x)

    return call(f, array(4, 8))


@section.case("compute on the host inside")
def _(devices):
    from jax.experimental import compute_on

    compute = getattr(compute_on, "compute_on2", compute_on.compute_on)
    on_host = compute(compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)

    def f(x):
        return on_host(lambda v: v * 2)(x) + 1

    return call(f, array(8))


@section.case("unreduced results", devices=2)
def _(devices):
    mesh = mesh_of(devices, (2,), ("a",), (AxisType.Explicit,))
    x = put(array(4, 4), NamedSharding(mesh, P(None, "a")))
    y = put(array(4, 4, seed=1), NamedSharding(mesh, P("a", None)))

    def f(x, y):
        z = jnp.einsum("ab,bc->ac", x, y, out_sharding=P(unreduced={"a"}))
        return jax.sharding.reshard(z, P("a"))

    return call(f, x, y, context=lambda: jax.set_mesh(mesh))

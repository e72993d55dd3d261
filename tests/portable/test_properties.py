"""Random meshes, shardings and small programs: moved to another mesh, the result is the same."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from portable_programs import DEVICES, assert_equal, call, values_for

from orbax_aot.portable import PortableProgram, export_program

NAMES = ("a", "b", "c")
SIZES = (1, 2, 3, 4, 8)
DIMENSIONS = (4, 6, 8, 12)

# Steps keep values small, and keep a matrix a matrix.
STEPS: dict[str, Callable] = {
    "tanh": jnp.tanh,
    "scale": lambda x: x * np.float32(0.7) + np.float32(0.1),
    "transpose": lambda x: x.T,
    "gram": lambda x: jnp.tanh(x @ x.T / x.shape[1]),
    "product": lambda x: x @ jnp.cos(jnp.arange(x.shape[1] * 6.0)).reshape(x.shape[1], 6) / 6,
    "reduce": lambda x: x - x.mean(0) + x.max(1, keepdims=True),
    "cumsum": lambda x: jnp.cumsum(x, 0) / x.shape[0],
    "sort": lambda x: jnp.sort(x, 1),
    "reverse": lambda x: x[::-1],
    "roll": lambda x: jnp.roll(x, 3, 0),
    "concatenate": lambda x: jnp.concatenate([x, -x], 0),
    "odd slice": lambda x: x[1:, :-1] if min(x.shape) > 2 else x,
    "reshape": lambda x: x.reshape(2, -1) if x.size % 2 == 0 else x,
    "gather": lambda x: x[jnp.arange(x.shape[0]) * 5 % x.shape[0]],
    "scatter": lambda x: x.at[jnp.arange(0, x.shape[0], 2)].add(1.0),
    "noise": lambda x: x + jax.random.uniform(jax.random.key(7), x.shape),
    "scan": lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), x[0] * 0, x)[1] / 9,
    "branch": lambda x: jax.lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, x) / 2,
    "convolve": lambda x: jax.vmap(lambda r: jnp.convolve(r, jnp.ones(3) / 3, "same"))(x),
    "helper": jax.jit(lambda x: jnp.where(x > 0, x, x * np.float32(0.01))),
    "remember": jax.checkpoint(lambda x: jnp.sin(x)),
    "gradient": jax.grad(lambda x: (jnp.tanh(x) ** 2).sum() / 2),
}

SHAPES = [
    sizes
    for rank in (1, 2, 3)
    for sizes in itertools.product(SIZES, repeat=rank)
    if 1 < math.prod(sizes) <= len(DEVICES)
]
# Mostly several devices, sometimes one, in one axis or more.
meshes = st.sampled_from([*SHAPES, (1,), (1, 1)])


@st.composite
def specs(draw, names):
    """Draws how a matrix is split: each axis of the mesh over one dimension or none."""
    dimensions = [[], []]
    for name in draw(st.permutations(names)):
        place = draw(st.sampled_from((None, 0, 1)))
        if place is not None:
            dimensions[place].append(name)
    return PartitionSpec(*(tuple(axes) if axes else None for axes in dimensions))


def mixed(sizes) -> bool:
    """Whether these sizes, of at most eight devices, do not divide one another."""
    return 2 in sizes and 3 in sizes


@dataclasses.dataclass
class Case:
    """One program, its mesh, and the mesh to move it to."""

    sizes: tuple[int, ...]
    target: tuple[int, ...] | None
    target_names: tuple[str, ...]
    shape: tuple[int, int]
    steps: list[str | PartitionSpec]
    input: PartitionSpec | None
    output: PartitionSpec | None
    reuse: bool


@st.composite
def cases(draw):
    sizes = draw(meshes)
    names = NAMES[: len(sizes)]
    # The same axes in any order, with some of them gone, or with others added.
    target = draw(st.one_of(meshes, meshes, st.sampled_from([None, (1,), (1, 1)])))
    target_names = tuple(draw(st.permutations(NAMES))[: len(target or ())])
    missing, unknown = set(names) - set(target_names), set(target_names) - set(names)
    hypothesis.assume(target is None or not (missing and unknown))
    # XLA may crash compiling on these, wherever the program comes from, so never compile there.
    hypothesis.assume(not mixed(sizes))
    step = st.sampled_from(sorted(STEPS)) | specs(names)
    return Case(
        sizes,
        target,
        target_names,
        (draw(st.sampled_from(DIMENSIONS)), draw(st.sampled_from(DIMENSIONS))),
        draw(st.lists(step, min_size=1, max_size=5)),
        draw(st.none() | specs(names)),
        draw(st.none() | specs(names)),
        draw(st.booleans()),
    )


def mesh_over(sizes: tuple[int, ...], names: tuple[str, ...], reverse: bool = False) -> Mesh:
    devices = (DEVICES[::-1] if reverse else DEVICES)[: math.prod(sizes)]
    return Mesh(devices.reshape(sizes), names)


def run_steps(case: Case, mesh: Mesh | None, x):
    for step in case.steps:
        if not isinstance(step, PartitionSpec):
            x = STEPS[step](x)
        elif mesh is not None:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, step))
    return x, x.sum()


def splits(shape, spec, mesh) -> bool:
    """Whether each dimension divides into as many parts as its axes say."""
    for size, axes in zip(shape, spec or (), strict=False):
        axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
        if size % math.prod(mesh.get(a, 1) for a in axes):
            return False
    return True


OUTCOMES: collections.Counter = collections.Counter()


@hypothesis.given(cases())
@hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def check_case(case: Case):
    saved = mesh_over(case.sizes, NAMES[: len(case.sizes)])
    value = values_for([jax.ShapeDtypeStruct(case.shape, jnp.float32)])[0]
    want = jax.jit(lambda x: run_steps(case, None, x))(value)
    # Only what was legal where it was saved.
    hypothesis.assume(splits(case.shape, case.input, saved.shape))
    hypothesis.assume(splits(want[0].shape, case.output, saved.shape))

    place = lambda spec: None if spec is None else NamedSharding(saved, spec)
    argument = jax.ShapeDtypeStruct(case.shape, jnp.float32, sharding=place(case.input))
    options = {"out_shardings": (place(case.output), None)} if case.output is not None else {}
    traced = jax.jit(lambda x: run_steps(case, saved, x), **options).trace(argument)
    lowered = traced.lower() if case.reuse else None
    parsed = PortableProgram.parse(export_program(traced, lowered=lowered))

    mesh = None
    if case.target is not None:
        mesh = mesh_over(case.target, case.target_names, reverse=True)
    sizes = {} if mesh is None else dict(mesh.shape)
    obstacle = parsed.find_obstacle(None if mesh is None else sizes, "cpu")
    divides = splits(case.shape, case.input, sizes) and splits(want[0].shape, case.output, sizes)
    if obstacle is not None:
        assert obstacle.code == "MESH_SHAPE"
        assert mixed(case.target or ()) or not divides, (obstacle, case)
        OUTCOMES["refused"] += 1
        return
    assert divides, case
    assert not mixed(case.target or ()), case
    got = call(parsed.compile(mesh, [DEVICES[-1]]), [value])
    assert_equal(got, want)
    OUTCOMES["one device" if mesh is None or mesh.size == 1 else "moved"] += 1


@pytest.fixture(scope="module", autouse=True)
def _fresh_outcomes():
    OUTCOMES.clear()


def test_a_moved_program_computes_what_one_device_does():
    check_case()
    # The property would hold trivially if nothing were moved or everything refused.
    assert OUTCOMES["moved"] >= 10, OUTCOMES
    assert OUTCOMES["one device"] >= 3, OUTCOMES


@pytest.mark.parametrize("step", sorted(STEPS))
def test_every_step_moves(step):
    """Each kind of operation once, split over both axes before and after it."""
    splits_both = PartitionSpec("a", "b")
    for target, names in (((2, 4), ("a", "b")), ((2, 2, 2), ("b", "c", "a"))):
        case = Case(
            (4, 2), target, names, (8, 8), [splits_both, step, splits_both], None, None, True
        )
        saved = mesh_over(case.sizes, ("a", "b"))
        (value,) = values_for([jax.ShapeDtypeStruct(case.shape, jnp.float32)])
        argument = jax.ShapeDtypeStruct(
            case.shape, jnp.float32, sharding=NamedSharding(saved, splits_both)
        )
        traced = jax.jit(lambda x: run_steps(case, saved, x)).trace(argument)  # noqa: B023
        parsed = PortableProgram.parse(export_program(traced))
        got = call(parsed.compile(mesh_over(target, names, reverse=True)), [value])
        assert_equal(got, jax.jit(lambda x: run_steps(case, None, x))(value))  # noqa: B023

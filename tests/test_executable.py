"""The low-level functions, and their messages word for word."""

from __future__ import annotations

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import strategies as st

import orbax_aot as oaot
from orbax_aot._jax import devices as devices_lib

f = lambda state, x: ({"w": state["w"] * 2 + x}, (x.sum(), -x))


def arguments(ids=(0, 1, 2, 3)):
    mesh = programs.mesh_of(ids)
    place = lambda x: jax.device_put(x, programs.sharded(mesh, "data", "model"))
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    return {"w": place(x + 1)}, place(x)


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(f, donate_argnums=0).lower(*arguments())


@pytest.fixture(scope="module")
def compiled(lowered):
    return lowered.compile()


@pytest.fixture(scope="module")
def serialized(compiled):
    return oaot.partially_serialize(compiled, jax.devices()[:4])


def right(ids=(0, 1, 2, 3)):
    return programs.digest(f(*map(functools.partial(jax.tree.map, np.asarray), arguments(ids))))


@pytest.mark.parametrize("with_lowered", [True, False])
@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (4, 5, 6, 7), (7, 6, 5, 4), (2, 7, 0, 5)])
def test_loaded_on_any_devices_it_gives_the_same_results_there(
    lowered, compiled, serialized, ids, with_lowered
):
    devices = [jax.devices()[i] for i in ids]
    copy = oaot.PartiallySerialized.from_bytes(serialized.to_bytes())
    trees = {} if with_lowered else {"in_tree": compiled.in_tree, "out_tree": compiled.out_tree}
    loaded = oaot.load_compiled_from_serialized(
        lowered if with_lowered else None, copy, devices, **trees
    )
    state, x = arguments(ids)
    result = loaded(state, x)
    assert programs.digest(result) == right()
    assert result[0]["w"].sharding.is_equivalent_to(x.sharding, 2)
    assert state["w"].is_deleted(), "the donated buffer was not reused"


def test_what_is_serialized_tells_its_memory_kinds_and_options(serialized):
    assert serialized.in_memory_kinds == serialized.out_memory_kinds[:2]
    assert len(serialized.out_memory_kinds) == 3
    assert isinstance(serialized.no_kwargs, bool)
    options = serialized.compile_options
    assert devices_lib.assignment_shape(options) == (1, 4)
    assert serialized.payload and b"pickle" not in serialized.to_bytes()[:4000]


def test_bytes_that_are_damaged_anywhere_are_refused(serialized):
    data = serialized.to_bytes()
    for at in [0, 7, 8, 15, 20, 300, len(data) // 2, len(data) - 1]:
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(oaot.CorruptArtifactError):
            oaot.PartiallySerialized.from_bytes(damaged)
    for damaged in (b"", data[:10], data[:-1], data + b"x"):
        with pytest.raises(oaot.CorruptArtifactError):
            oaot.PartiallySerialized.from_bytes(damaged)


# -- messages ---------------------------------------------------------------------------------------------------------


class OtherClient:
    platform = "tpu"
    platform_version = "libtpu 1"

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


class Foreign:
    """A device of another client; no two clients can be made with the CPU alone."""

    client = OtherClient()


@pytest.fixture
def foreign(monkeypatch):
    is_device = devices_lib.is_device
    known = lambda value: isinstance(value, Foreign) or is_device(value)
    monkeypatch.setattr(devices_lib, "is_device", known)
    return Foreign()


CALLS = ["serialize", "load", "remap"]


def call(which, compiled, serialized, devices):
    if which == "serialize":
        return oaot.partially_serialize(compiled, devices)
    if which == "load":
        return oaot.load_compiled_from_serialized(
            None, serialized, devices, in_tree=compiled.in_tree, out_tree=compiled.out_tree
        )
    return oaot.remap_compile_options_device_assignment(serialized.compile_options, devices)


@pytest.mark.parametrize("which", CALLS)
def test_devices_of_two_clients(compiled, serialized, foreign, which):
    devices = [*jax.devices()[:3], foreign]
    client = jax.devices()[0].client
    with pytest.raises(oaot.ClientMismatchError) as error:
        call(which, compiled, serialized, devices)
    assert isinstance(error.value, ValueError) and isinstance(error.value, oaot.AotError)
    assert str(error.value) == (
        "Execution devices belong to a client other than `backend`. Got backend client: "
        f"{(client.platform, client.platform_version)} and execution devices client: "
        "('tpu', 'libtpu 1')"
    )


@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize("wrong", [["cpu:0"], "mixed", 3, None, []])
def test_something_else_than_devices(compiled, serialized, which, wrong):
    devices = [*jax.devices()[:3], "cpu:0"] if wrong == "mixed" else wrong
    with pytest.raises(oaot.DeviceTypeError) as error:
        call(which, compiled, serialized, devices)
    assert isinstance(error.value, ValueError) and isinstance(error.value, oaot.AotError)
    assert str(error.value) == f"execution_devices must be a list of xc.Device. Got: {devices!r}"


@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_wrong_count_of_devices(compiled, serialized, which, count):
    with pytest.raises(oaot.DeviceCountError) as error:
        call(which, compiled, serialized, jax.devices()[:count])
    assert isinstance(error.value, ValueError) and isinstance(error.value, oaot.AotError)
    assert str(error.value) == (
        "Cannot remap XLA compile options device assignment: assignment expects 4 devices "
        f"(replica_count=1 x computation_count=4), but got {count} execution devices."
    )


def test_a_compiled_object_that_cannot_be_serialized(compiled):
    class Opaque:
        _executable = object()

    with pytest.raises(oaot.NotSerializableError) as error:
        oaot.partially_serialize(Opaque(), jax.devices()[:4])
    assert isinstance(error.value, ValueError) and isinstance(error.value, oaot.AotError)
    assert str(error.value) == "Compilation does not support serialization."
    assert not oaot.is_serializable(Opaque())
    assert oaot.is_serializable(compiled)


def test_a_lowering_that_does_not_go_through_xla(serialized, lowered):
    class Lowered:
        _lowering = object()
        in_tree, out_tree = lowered.in_tree, lowered.out_tree

    with pytest.raises(oaot.NotSerializableError) as error:
        oaot.load_compiled_from_serialized(Lowered(), serialized, jax.devices()[:4])
    assert isinstance(error.value, ValueError)
    assert str(error.value) == "AOT is not implemented for non-XLA lowerings."


@pytest.mark.parametrize("make", [oaot.jit, lambda x: oaot.compile(x, 1.0)])
@pytest.mark.parametrize("kind", ["compiled", "lowered", "executable"])
def test_lowering_what_is_compiled_already(make, kind, compiled, lowered):
    what = {
        "compiled": compiled,
        "lowered": lowered,
        "executable": oaot.compile(lambda x: x, np.float32(1)),
    }[kind]
    with pytest.raises(oaot.UnsupportedFunctionError) as error:
        make(what)
    for base in (TypeError, ValueError, oaot.AotError):
        assert isinstance(error.value, base)
    assert str(error.value) == "Cannot lower a compiled jit function."


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (42, "builtins.int"),
        ("f", "builtins.str"),
        (None, "builtins.NoneType"),
        ([], "builtins.list"),
    ],
)
def test_an_unsupported_type(value, name):
    with pytest.raises(oaot.UnsupportedFunctionError) as error:
        oaot.compile(value, 1.0)
    for base in (TypeError, ValueError, oaot.AotError):
        assert isinstance(error.value, base)
    assert str(error.value).startswith(f"Unsupported type: {name}")


def test_neither_a_lowering_nor_trees_is_an_error_that_says_what_is_missing(serialized):
    with pytest.raises(TypeError, match="needs `lowered`, or both in_tree= and out_tree="):
        oaot.load_compiled_from_serialized(None, serialized, jax.devices()[:4])


def test_all_errors_derive_from_one():
    from orbax_aot import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert all(issubclass(c, errors.AotError) for c in classes)
    bases = {
        "ClientMismatchError": (ValueError,),
        "DeviceTypeError": (ValueError,),
        "DeviceCountError": (ValueError,),
        "NotSerializableError": (ValueError,),
        "UnsupportedFunctionError": (TypeError, ValueError),
        "CacheDirectoryError": (ValueError,),
        "SignatureError": (TypeError,),
        "IncompatibleExecutableError": (ValueError,),
        "CorruptArtifactError": (ValueError,),
        "UntrustedArtifactError": (ValueError,),
    }
    for name, expected in bases.items():
        assert issubclass(getattr(oaot, name), expected)
        assert all(issubclass(getattr(oaot, name), base) for base in expected)


# -- remapping --------------------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 2), (2, 4), (4, 2), (1, 8), (8, 1), (2, 3)]),
    st.permutations(range(8)),
)
def test_remapping_is_a_bijection_in_column_major_order(shape, order):
    replicas, computations = shape
    devices = [jax.devices()[i] for i in order[: replicas * computations]]
    start = np.arange(replicas * computations).reshape(shape)
    options = devices_lib.make_compile_options(replicas, computations, start)
    remapped = oaot.remap_compile_options_device_assignment(options, devices)
    assert devices_lib.assignment_shape(remapped) == shape
    expected = {
        (r, c): devices[c * replicas + r].id for r in range(replicas) for c in range(computations)
    }
    assert assignment_of(remapped, shape) == expected
    assert len(set(expected.values())) == len(devices)
    assert assignment_of(options, shape) == {
        (r, c): int(start[r, c]) for r in range(replicas) for c in range(computations)
    }, "the options given were changed"


def assignment_of(options, shape):
    """Reads (replica, computation) -> device id out of what native options print of themselves."""
    rows = re.findall(r"Computation\d+\{([\d ]*)\}", repr(options.device_assignment))
    found = {(r, c): int(i) for c, row in enumerate(rows) for r, i in enumerate(row.split())}
    assert len(found) == shape[0] * shape[1]
    return found


def test_a_plain_function_of_jnp_is_compiled():
    executable = oaot.compile(jnp.sin, np.float32(1))
    assert float(executable(np.float32(1))) == pytest.approx(np.sin(1))

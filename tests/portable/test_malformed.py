"""Bytes that are no program, or a damaged one, or one from the future: refused, never a crash."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.export import serialization
from portable_programs import array, exported, program

from orbax_aot._jax import export as export_door
from orbax_aot.portable import PortableError, PortableProgram

TRAILER_NBYTES = len(export_door._MAGIC) + hashlib.sha256().digest_size


@pytest.fixture(scope="module")
def good() -> bytes:
    return exported(lambda x: jnp.tanh(x) * 2, array((8, 4), "data", "model"))


@pytest.fixture
def native_reader(monkeypatch):
    """Fails the test where MLIR's reader is reached."""

    # Not an `Exception`, which `parse` would take for a malformed program.
    monkeypatch.setattr(export_door, "opened_module", lambda *args: pytest.fail("was reached"))


def refusal(data: bytes) -> str:
    with pytest.raises(PortableError) as caught:
        PortableProgram.parse(data)
    return str(caught.value)


def sealed(content: bytes) -> bytes:
    """Returns content with a checksum that fits."""
    return content + hashlib.sha256(content).digest() + export_door._MAGIC


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\0" * 64, b"\xff" * 64, b"not a program", export_door._MAGIC * 9]
)
def test_garbage_is_refused(data, native_reader):
    assert refusal(data).startswith("CORRUPT: The StableHLO cannot be read (")


def test_a_plain_export_has_no_checksum(native_reader):
    data = bytes(jax.export.export(jax.jit(jnp.sin))(jnp.ones(3)).serialize())
    assert refusal(data) == (
        "CORRUPT: The StableHLO cannot be read (it ends without a checksum). Save this step again."
    )


def test_every_truncation_is_refused(good, native_reader):
    for length in range(0, len(good), 7):
        assert refusal(good[:length]).startswith("CORRUPT: ")


def test_every_changed_byte_is_refused(good, native_reader):
    # In particular in the module, whose native reader can corrupt the heap on changed bytes.
    for position in range(0, len(good), 3):
        changed = bytearray(good)
        changed[position] ^= 0x55
        assert refusal(bytes(changed)).startswith(("CORRUPT: ", "JAX_VERSION: "))


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_random_bytes_with_a_checksum_that_fits_are_refused(content):
    assert refusal(sealed(content)).startswith("CORRUPT: ")


@given(position=st.integers(0, 2**20), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_table_with_a_checksum_that_fits_ends_quickly(good, position, value):
    content = bytearray(good[:-TRAILER_NBYTES])
    module = content.index(export_door._BYTECODE_MAGIC)
    # Not the module itself: nothing but the checksum stands between that and native code.
    content[position % module] = value
    started = time.monotonic()
    try:
        table = export_door.parse(sealed(bytes(content)))
    except (export_door.MalformedExportError, export_door.NewerExportError):
        pass
    else:
        assert len(table.in_avals) <= export_door.MAX_ARRAYS
    assert time.monotonic() - started < 5


def test_a_newer_calling_convention_is_named():
    restored = jax.export.deserialize(bytearray(exported(jnp.sin, jnp.ones(3))))
    newer = dataclasses.replace(restored, calling_convention_version=99)
    newest = jax.export.maximum_supported_calling_convention_version
    # A newer writer may not write our trailer as we know it: the version is what counts.
    for data in (bytes(newer.serialize()), export_door.serialize(newer)):
        assert refusal(data) == (
            f"JAX_VERSION: The StableHLO was stored by a newer JAX (calling convention 99, here "
            f"at most {newest}). Update jax and jaxlib."
        )


def test_a_newer_stablehlo_is_named(native_reader):
    restored = jax.export.deserialize(bytearray(exported(jnp.sin, jnp.ones(3))))
    code = restored.mlir_module_serialized
    head, _, rest = code.partition(b"StableHLO_v")
    _, _, rest = rest.partition(b"\0")
    newer = dataclasses.replace(
        restored, mlir_module_serialized=head + b"StableHLO_v99.1.2\0" + rest
    )
    assert refusal(export_door.serialize(newer)).startswith(
        "JAX_VERSION: The StableHLO was stored by a newer JAX (StableHLO 99.1.2, here "
    )


def nested(depth: int):
    tree = 0
    for _ in range(depth):
        tree = (tree, tree)
    return tree


@pytest.mark.parametrize("tree", [nested(3), {"a": 0}, [0], (0, (0,))], ids=str)
def test_trees_that_are_not_flat_are_refused(tree, native_reader):
    plain = jax.export.export(jax.jit(lambda t: t))(jax.tree.map(jnp.float32, tree))
    assert refusal(export_door.serialize(plain)).startswith(
        "CORRUPT: The StableHLO cannot be read ("
    )


def test_a_tree_that_shares_its_branches_does_not_take_exponential_time(native_reader, monkeypatch):
    # Forty levels, each of which holds the one below twice: small in bytes, 2 to the 40 leaves.
    builder_of = serialization._serialize_pytreedef
    generated = serialization.ser_flatbuf

    def doubling(builder, tree):
        node = builder_of(builder, jax.tree.structure(0))
        for _ in range(40):
            generated.PyTreeDefStartChildrenVector(builder, 2)
            builder.PrependUOffsetTRelative(node)
            builder.PrependUOffsetTRelative(node)
            children = builder.EndVector()
            generated.PyTreeDefStart(builder)
            generated.PyTreeDefAddKind(builder, generated.PyTreeDefKind.tuple)
            generated.PyTreeDefAddChildren(builder, children)
            node = generated.PyTreeDefEnd(builder)
        return node

    restored = jax.export.deserialize(bytearray(exported(jnp.sin, jnp.ones(3))))
    monkeypatch.setattr(serialization, "_serialize_pytreedef", doubling)
    data = export_door.serialize(restored)
    started = time.monotonic()
    assert refusal(data) == (
        "CORRUPT: The StableHLO cannot be read (2 leaves for 1 arrays). Save this step again."
    )
    assert time.monotonic() - started < 5


CRASHES = """
import sys
from orbax_aot.portable import PortableError, PortableProgram
for line in sys.stdin:
    try:
        PortableProgram.parse(bytes.fromhex(line))
        print("parsed")
    except PortableError as e:
        print(e.obstacle.code)
"""


def test_damaged_modules_do_not_end_the_process(good):
    rng = np.random.default_rng(0)
    start = good.index(export_door._BYTECODE_MAGIC)
    lines = []
    for _ in range(300):
        changed = bytearray(good)
        for position in rng.integers(start, len(good), rng.integers(1, 4)):
            changed[position] ^= int(rng.integers(1, 256))
        lines.append(changed.hex())
    done = subprocess.run(
        [sys.executable, "-c", CRASHES],
        input="\n".join(lines),
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"CORRUPT"}


def test_the_unchanged_bytes_are_read(good):
    assert (
        PortableProgram.parse(good).mesh_axes
        == program(lambda x: x, array((8, 4), "data", "model")).mesh_axes
    )

"""Large constants are stored once in a checkpoint, not once for each function that closes over them."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orbax_aot as oaot
from orbax_aot import manifest as m
from orbax_aot import store
from orbax_aot.errors import CorruptArtifactError


def folder_nbytes(path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def random_floats(nbytes: int) -> np.ndarray:
    """Returns numbers between 1 and 2 that hardly compress."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, nbytes // 4, dtype=np.uint32)
    return ((bits >> 9) | 0x3F800000).view(np.float32)


@pytest.mark.parametrize("nbytes, as_arguments", [(100_000_000, False), (10_000_000, True)])
def test_large_constants_are_stored_once_for_all_functions(tmp_path, nbytes, as_arguments):
    """In either of JAX's modes: constants inside the program, or as hidden arguments of it."""
    from jax._src import config

    values = random_floats(nbytes)
    table = jax.device_put(values)
    fns = {
        "outer": oaot.jit(lambda x: (table + x).sum()),
        "inner": oaot.jit(lambda x: jax.jit(lambda y: (table * y).max())(x)),
    }
    with config.use_simplified_jaxpr_constants(as_arguments):
        expected = {name: np.asarray(f(np.float32(3))) for name, f in fns.items()}
        oaot.AotHandler().save(tmp_path, oaot.AotSave(fns=fns))
    stored = folder_nbytes(tmp_path / "_aot" / "constants")
    assert 0.8 * values.nbytes < stored < 1.01 * values.nbytes
    assert folder_nbytes(tmp_path) - stored < 200_000
    restored = oaot.AotHandler().restore(tmp_path).fns
    restored.require_loaded()
    for name, value in expected.items():
        np.testing.assert_array_equal(restored[name](np.float32(3)), value)


def test_what_is_saved_again_keeps_its_constants(tmp_path):
    table = jax.device_put(random_floats(2_000_000))
    f = oaot.jit(lambda x: (table * x).max())
    f(np.float32(2))
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    oaot.AotHandler().save(folders[0], oaot.AotSave(fns={"f": f}))
    restored = oaot.AotHandler().restore(folders[0]).fns
    restored.f(np.float32(2))
    oaot.AotHandler().save(folders[1], oaot.AotSave(fns={"f": restored.f}))
    names = [sorted(p.name for p in folder.rglob("*.zst")) for folder in folders]
    assert names[0] == names[1] and len(names[0]) == 3
    again = oaot.AotHandler().restore(folders[1]).fns
    again.require_loaded()
    np.testing.assert_array_equal(again.f(np.float32(2)), f(np.float32(2)))


def test_a_damaged_shared_constant_is_corrupt(tmp_path):
    table = jax.device_put(random_floats(2_000_000))
    f = oaot.jit(lambda x: (table * x).sum())
    f(np.float32(2))
    oaot.AotHandler().save(tmp_path, oaot.AotSave(fns={"f": f}, portable=False))
    (file,) = (tmp_path / "_aot" / "constants").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    report = oaot.AotHandler().restore(tmp_path).fns.report["f"]
    assert report.verdict is oaot.Verdict.REFUSED
    assert [r.code for r in report.reasons] == [oaot.ReasonCode.CORRUPT]


def file_of(raw: bytes) -> tuple[bytes, m.File]:
    stored, fields = store.pack(raw)
    return stored, m.File(file="f", **fields)


@given(st.binary(max_size=64), st.lists(st.binary(min_size=1, max_size=16), max_size=4))
def test_what_is_cut_out_and_put_back_is_the_same(rest, known):
    raw = rest[:20] + b"".join(known) + rest[20:]
    left, parts = store.cut(raw, [memoryview(k) for k in known])
    assert len(left) + sum(len(part) for _, part in parts) == len(raw)
    stored, file = file_of(left)
    digest = hashlib.sha256(raw).hexdigest()
    file = m.File(
        **{f: getattr(file, f) for f in ("file", "sha256", "nbytes", "codec")},
        raw_sha256=digest,
        raw_nbytes=len(raw),
    )
    assert store.unpack(stored, file, "f", parts) == raw


@pytest.mark.parametrize("at", [-1, 7, 1 << 40])
def test_a_cut_outside_its_file_is_refused(at):
    stored, file = file_of(b"abcdef")
    whole = m.File(
        file="f",
        sha256=file.sha256,
        nbytes=file.nbytes,
        codec=file.codec,
        raw_sha256=file.raw_sha256,
        raw_nbytes=8,
    )
    with pytest.raises(CorruptArtifactError) as caught:
        store.unpack(stored, whole, "f", [(at, b"xy")])
    assert str(caught.value) == f"f: a cut at {at} is out of range."

"""Which StableHLO a save stores beside the executables, seen in the manifest and in the files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from stored import read_portable, signatures_of

import orbax_aot as oaot

X = np.arange(4, dtype=np.float32)
PORTABLE = "portable.stablehlo.zst"


def double(x):
    return 2 * x


def save(path, **fns_and_options):
    options = {k: fns_and_options.pop(k) for k in ("portable",) if k in fns_and_options}
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave({"x": X}, fns=fns_and_options, **options))
        mngr.wait_until_finished()
    return {name: signatures_of(path, name) for name in fns_and_options}


def called(function):
    function(X)
    return function


def stored_files(path):
    return sorted(p.name for p in (path / "1" / "default" / "_aot").rglob("*.stablehlo.zst"))


def test_by_default_it_is_stored_for_the_platform_at_hand(tmp_path):
    (signature,) = save(tmp_path, f=called(oaot.jit(double)))["f"]
    assert signature.portable.platforms == ("cpu",)
    assert signature.portable_absent is None
    assert stored_files(tmp_path) == [PORTABLE]


def test_without_portable_nothing_is_stored_and_no_reason_given(tmp_path):
    (signature,) = save(tmp_path, f=called(oaot.jit(double)), portable=False)["f"]
    assert (signature.portable, signature.portable_absent) == (None, None)
    assert len(signature.variants) == 1
    assert stored_files(tmp_path) == []


def test_the_platforms_asked_for_are_stored(tmp_path):
    (signature,) = save(tmp_path, f=called(oaot.jit(double)), portable=("cpu", "tpu"))["f"]
    assert signature.portable.platforms == ("cpu", "tpu")


@pytest.mark.parametrize("portable", [True, False, ("tpu",)], ids=str)
def test_platforms_of_jit_are_stored_whatever_the_save_says(tmp_path, portable):
    function = called(oaot.jit(double, platforms=("cpu", "tpu", "cuda")))
    (signature,) = save(tmp_path, f=function, portable=portable)["f"]
    assert signature.portable.platforms == ("cpu", "tpu", "cuda")


def test_functions_of_one_save_each_have_their_own_platforms(tmp_path):
    one = called(oaot.jit(double, platforms=("cpu", "rocm")))
    other = called(oaot.jit(lambda x: x + 1))
    found = save(tmp_path, one=one, other=other, portable=("cpu", "tpu"))
    assert found["one"][0].portable.platforms == ("cpu", "rocm")
    assert found["other"][0].portable.platforms == ("cpu", "tpu")
    assert stored_files(tmp_path) == [PORTABLE, PORTABLE]


def test_each_signature_has_its_own(tmp_path):
    function = oaot.jit(double)
    function(X), function(X[:2])
    signatures = save(tmp_path, f=function)["f"]
    assert [s.portable.platforms for s in signatures] == [("cpu",), ("cpu",)]
    assert signatures[0].portable.raw_sha256 != signatures[1].portable.raw_sha256


def test_what_is_stored_is_what_jax_export_reads(tmp_path):
    save(tmp_path, f=called(oaot.jit(double)), portable=("cpu", "tpu"))
    exported = jax.export.deserialize(bytearray(read_portable(tmp_path, "f")))
    assert exported.platforms == ("cpu", "tpu")
    np.testing.assert_array_equal(exported.call(X)[0], 2 * X)


def test_a_function_that_cannot_be_exported_is_saved_with_the_reason(tmp_path):
    def calls_back(x):
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    (signature,) = save(tmp_path, f=called(oaot.jit(calls_back)))["f"]
    assert len(signature.variants) == 1
    assert signature.portable is None
    assert signature.portable_absent.code == "NOT_SERIALIZABLE"
    assert signature.portable_absent.detail == (
        "No StableHLO was stored: the function has effects outside the program (host callbacks). "
        "Remove callbacks and debug prints to store it."
    )


def test_a_platform_that_cannot_have_it_is_named(tmp_path):
    def only_on_cpu(x):
        return jnp.linalg.svd(x.reshape(2, 2))[1]

    function = called(oaot.jit(only_on_cpu))
    (signature,) = save(tmp_path, f=function, portable=("cpu", "nonesuch"))["f"]
    assert len(signature.variants) == 1
    assert (signature.portable, signature.portable_absent.code) == (None, "PLATFORM")
    assert "Ask for fewer platforms." in signature.portable_absent.detail


def test_a_bare_compiled_is_saved_without_and_says_so(tmp_path):
    compiled = jax.jit(double).lower(X).compile()
    (signature,) = save(tmp_path, f=compiled)["f"]
    assert len(signature.variants) == 1
    assert signature.portable_absent.code == "NOT_SERIALIZABLE"
    assert signature.portable_absent.detail == (
        "a jax.stages.Compiled holds no StableHLO; save an AotFunction or an Executable"
    )


@pytest.mark.parametrize("wrong", ["cpu", ("cpu", 1), [None]], ids=str)
def test_platforms_of_another_kind_are_refused_at_construction(wrong):
    with pytest.raises(TypeError) as caught:
        oaot.AotSave({"x": X}, fns={}, portable=wrong)
    assert str(caught.value) == (
        "AotSave(portable=...) is True, False or a sequence of platforms such as ('cpu', 'tpu'); "
        f"got {wrong!r}."
    )

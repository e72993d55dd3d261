"""The behaviours that JAX tests for its own serialization, persistent cache and export, through `AotHandler`.

`docs/peers.md` names each of JAX's tests and ours beside it.
"""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import logging
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support_run import HERE, ROOT

import orbax_aot as oaot
from orbax_aot import executable as executable_lib
from orbax_aot import store, topology
from orbax_aot.errors import (
    ClientMismatchError,
    DeviceCountError,
    NotSerializableError,
    SignatureError,
    UnsupportedFunctionError,
)

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "item"
    path.mkdir()
    return path


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(logging, "exception", lambda text, *args: said.append(text % args))
    return said


@pytest.fixture
def infos(monkeypatch):
    said = []
    original = logging.log

    def log(level, text, *args):
        if level in (logging.INFO, logging.WARNING) and text.startswith("%s: %s in"):
            said.append(text % args)
        original(level, text, *args)

    monkeypatch.setattr(logging, "log", log)
    return said


@pytest.fixture
def events():
    found = []

    def listen(event, **details):
        if event.startswith("/jax/orbax_aot"):
            found.append((event, details))

    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_listener(listen)


def save(folder, **fns):
    oaot.AotHandler().save(folder, oaot.AotSave(fns=fns))


def restore(folder, fns=None, **kwargs):
    return oaot.AotHandler().restore(folder, oaot.AotRestore(fns=fns, **kwargs)).fns


def manifest(folder):
    return store.Store(folder).read_manifest().functions


def codes(fns, name="f"):
    return [reason.code.name for reason in fns.report[name].reasons]


# -- aot_test ---------------------------------------------------------------------------------------------------------


def test_a_lowered_function_and_its_text_are_had_as_from_jit():
    f = oaot.jit(lambda x: jnp.sin(x))
    lowered = f.lower(X)
    assert "stablehlo.sine" in lowered.as_text()
    assert "loc(" in lowered.as_text(debug_info=True) and "loc(" not in lowered.as_text()
    np.testing.assert_array_equal(lowered.compile()(X), f(X))


def test_a_compiled_function_is_saved_as_it_is(folder):
    save(folder, f=jax.jit(lambda x: x + 1).lower(X).compile())
    np.testing.assert_array_equal(restore(folder).f(X), X + 1)
    assert manifest(folder)["f"].signatures[0].code is None


def test_constants_under_x64(folder):
    with jax.enable_x64(True):
        table = jax.device_put(np.arange(8, dtype=np.float64))
        f = oaot.jit(lambda x: x + table)
        expected = f(X.astype(np.float64))
        save(folder, f=f)
        found = restore(folder).f(X.astype(np.float64))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, expected)


def test_refs_as_constants_are_refused_with_the_way_out(folder):
    ref = jax.new_ref(jax.device_put(X))

    def f(x):
        ref[...] += x
        return x

    fn = oaot.jit(f)
    fn(X)
    save(folder, f=fn)
    absent = manifest(folder)["f"].absent
    assert (absent.code, absent.detail) == (
        "NOT_SERIALIZABLE",
        "NotSerializableError: The program closes over a mutable ref; pass it as an argument.",
    )


@pytest.fixture(scope="module")
def other_client():
    from jaxlib import xla_client

    return xla_client.make_cpu_client()


def test_devices_of_another_client_are_refused(other_client):
    compiled = jax.jit(lambda x: x + 1).lower(X).compile()
    with pytest.raises(ClientMismatchError, match=r"^Execution devices belong to a client other"):
        oaot.partially_serialize(compiled, other_client.devices()[:1])


def test_a_lowering_that_does_not_go_through_xla_is_refused():
    serialized = oaot.partially_serialize(
        jax.jit(lambda x: x + 1).lower(X).compile(), jax.devices()[:1]
    )
    lowered = jax.jit(lambda x: x + 1).lower(X)
    lowered._lowering = object()
    with pytest.raises(
        NotSerializableError, match=r"^AOT is not implemented for non-XLA lowerings\.$"
    ):
        oaot.load_compiled_from_serialized(lowered, serialized, jax.devices()[:1])


def test_compiled_functions_cannot_be_jitted_again():
    compiled = jax.jit(lambda x: x + 1).lower(X).compile()
    with pytest.raises(UnsupportedFunctionError, match=r"^Cannot lower a compiled jit function\.$"):
        oaot.jit(compiled)


# -- compilation_cache_test -------------------------------------------------------------------------------------------


def test_what_was_not_saved_is_a_reason(folder):
    f = oaot.jit(lambda x: x + 1)
    f(X)
    save(folder, f=f)
    fns = restore(folder, ["f", "g"])
    assert fns.report["g"].verdict is oaot.Verdict.REFUSED
    assert codes(fns, "g") == ["NOT_SAVED"]


def test_what_was_never_called_is_a_reason(folder, warnings):
    save(folder, f=oaot.jit(lambda x: x + 1))
    assert manifest(folder)["f"].absent.code == "NEVER_CALLED"
    assert warnings == ["f: never called or compiled, so there is nothing to save."]


def test_different_programs_are_stored_apart(folder):
    fns = {"add": oaot.jit(lambda x: x + 1), "multiply": oaot.jit(lambda x: x * 3)}
    for f in fns.values():
        f(X)
    save(folder, **fns)
    restored = restore(folder)
    np.testing.assert_array_equal(restored.add(X), X + 1)
    np.testing.assert_array_equal(restored.multiply(X), X * 3)
    signatures = [f.signatures[0] for f in manifest(folder).values()]
    assert (
        len({s.program for s in signatures}) == len({s.variants[0].sha256 for s in signatures}) == 2
    )


def test_the_off_switch_leaves_functions_to_jit(folder, monkeypatch):
    f = oaot.jit(lambda x: x + 1)
    f(X)
    save(folder, f=f)
    monkeypatch.setenv("ORBAX_AOT", "off")
    live = oaot.jit(lambda x: x + 1)
    fns = restore(folder, {"f": live})
    np.testing.assert_array_equal(live(X), X + 1)
    assert codes(fns) == ["DISABLED"]


def test_executables_of_the_persistent_cache_are_saved_so_that_they_run(folder, tmp_path):
    cache = tmp_path / "jax_cache"
    old = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    from jax.experimental.compilation_cache import compilation_cache

    try:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        make = lambda: oaot.jit(lambda x: jnp.tanh(x) @ jnp.outer(x, x) + 1)
        make()(X)
        assert any(cache.iterdir())
        jax.clear_caches()
        hit = make()
        expected = np.asarray(hit(X))
        assert hit.executables[0]._from_persistent_cache
        save(folder, f=hit)
    finally:
        jax.config.update("jax_compilation_cache_dir", old[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", old[1])
        compilation_cache.reset_cache()
    np.testing.assert_array_equal(restore(folder).f(X), expected)


def test_a_write_failure_is_a_warning_and_the_weights_are_saved(tmp_path, warnings, monkeypatch):
    write = store.Store.write

    def fail(self, name, *args, **kwargs):
        if name.endswith(".zst"):
            raise OSError("no space left on device")
        return write(self, name, *args, **kwargs)

    monkeypatch.setattr(store.Store, "write", fail)
    f = oaot.jit(lambda x: x + 1)
    f(X)
    state = {"w": jax.device_put(X)}
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as manager:
        assert manager.save(0, args=oaot.AotSave(state, fns={"f": f}))
        manager.wait_until_finished()
        found, fns = manager.restore(0, args=oaot.AotRestore(fns={"f": f}))
    np.testing.assert_array_equal(found["w"], X)
    assert [w for w in warnings if w.startswith("f: not saved (")] == [
        "f: not saved (NOT_SAVED: OSError: no space left on device)"
    ]
    assert fns.report["f"].reasons[0].code.name == "NOT_SAVED"


def test_a_failing_manifest_is_a_warning_and_the_weights_are_saved(tmp_path, warnings, monkeypatch):
    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(store.Store, "write_manifest", fail)
    f = oaot.jit(lambda x: x + 1)
    f(X)
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as manager:
        assert manager.save(0, args=oaot.AotSave({"w": jax.device_put(X)}, fns={"f": f}))
        manager.wait_until_finished()
        found, fns = manager.restore(0, args=oaot.AotRestore(fns={"f": f}))
    np.testing.assert_array_equal(found["w"], X)
    assert any("no executables in this save; the state is saved." in w for w in warnings)
    np.testing.assert_array_equal(fns.f(X), X + 1)


def test_a_read_failure_is_a_warning_and_recompiles(folder, infos, monkeypatch):
    f = oaot.jit(lambda x: x + 1)
    f(X)
    save(folder, f=f)

    def fail(*args):
        raise OSError("stale file handle")

    monkeypatch.setattr(store.Store, "read", fail)
    live = oaot.jit(lambda x: x + 1)
    fns = restore(folder, {"f": live})
    np.testing.assert_array_equal(live(X), X + 1)
    assert codes(fns) == ["LOAD_FAILED"]
    assert re.fullmatch(
        r"f: recompiled in [\d.]+ s \(LOAD_FAILED: OSError: stale file handle\)", infos[-1]
    )


def test_only_the_primary_process_writes(folder, monkeypatch):
    f = oaot.jit(lambda x: x + 1)
    f(X)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    save(folder, f=f)
    assert not store.Store(folder).exists()


def test_what_became_of_a_function_is_an_event_and_a_line(folder, events, infos):
    f = oaot.jit(lambda x: x + 1)
    f(X)
    save(folder, f=f)
    restore(folder, {"f": oaot.jit(lambda x: x + 1)}).f(X)
    assert ("/jax/orbax_aot/restore/loaded", {"function": "f", "reason": ""}) in events
    restore(folder, {"f": oaot.jit(lambda x: x + 2)}).f(X)
    recompiled = [d for e, d in events if e == "/jax/orbax_aot/restore/recompiled"]
    assert recompiled == [{"function": "f", "reason": "CODE_CHANGED"}]
    assert re.fullmatch(r"f: loaded in [\d.]+ s", infos[0])
    assert re.fullmatch(
        r"f: recompiled in [\d.]+ s \(CODE_CHANGED: saved code \w+, here code \w+; "
        r"PROGRAM_CHANGED: saved program \w+, here program \w+\)",
        infos[-1],
    )


def test_bytes_go_through_the_backend_and_back():
    compiled = jax.jit(lambda x, y: x + y).lower(X, X).compile()
    serialized = oaot.partially_serialize(compiled, jax.devices()[:1])
    again = oaot.PartiallySerialized.from_bytes(serialized.to_bytes())
    loaded = oaot.load_compiled_from_serialized(
        None, again, jax.devices()[:1], in_tree=compiled.in_tree, out_tree=compiled.out_tree
    )
    np.testing.assert_array_equal(loaded(X, X), X + X)


def test_saving_what_was_saved_before_serializes_nothing(folder, tmp_path):
    f = oaot.jit(lambda x: x + 1)
    f(X)
    save(folder, f=f)
    before = executable_lib.counters["serializations"]
    later = tmp_path / "later"
    later.mkdir()
    save(later, f=f)
    assert executable_lib.counters["serializations"] == before
    assert manifest(later)["f"].signatures == manifest(folder)["f"].signatures


# -- cache_key_test: what must and must not change a program's identity ----------------------------------------------


def add_one(x):
    return x + 1


def make_kernel(name):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    kernel.__name__ = name
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    return lambda x: pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


def named(fun, name):
    fun.__name__ = name
    return fun


TABLE = np.ones(8, np.float32)

_SAME = {
    "the function's name": (named(lambda x: x * 2, "a"), named(lambda x: x * 2, "b"), {}),
    "where it stands in the source": (
        lambda x: jnp.sin(x) + 1,
        lambda x: (
            jnp.sin(x) + 1  # some lines below
        ),
        {},
    ),
    "the names of variables and arguments": (lambda x: x * 2, lambda y: y * 2, {}),
    "how it was written": (lambda x: x + x + x, lambda x: sum([x, x], start=x), {}),
    "the name of a Pallas kernel": (make_kernel("one"), make_kernel("two"), {}),
    "values of arguments": (lambda x: x * 2, lambda x: x * 2, {}),
}
_OTHER = {
    "an operation": (lambda x: x + 1, lambda x: x - 1, {}),
    "a number": (lambda x: x + 1, lambda x: x + 2, {}),
    "the value of a constant": (lambda x: x + TABLE, lambda x: x + 2 * TABLE, {}),
    "the order of results": (lambda x: (x, -x), lambda x: (-x, x), {}),
    "which operand is which": (lambda x: x[:4] - x[4:], lambda x: x[4:] - x[:4], {}),
    "the precision of a product": (
        lambda x: jnp.dot(x, x),
        lambda x: jnp.dot(x, x, precision="highest"),
        {},
    ),
    "donation": (lambda x: x * 2, lambda x: x * 2, {"donate_argnums": 0}),
    "keep_unused": (lambda x: 1, lambda x: 1, {"keep_unused": True}),
}


def verdict_of_change(folder, before, after, jit_options):
    f = oaot.jit(before)
    f(jax.device_put(X))
    save(folder, f=f)
    fns = restore(folder, {"f": oaot.jit(after, **jit_options)}, verify="program")
    expected = jax.jit(after)(X)
    found = fns.f(jax.device_put(X))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    return fns.report["f"].verdict.name


@pytest.mark.parametrize("change", _SAME)
def test_it_is_the_same_program_after_a_change_of(change, folder):
    assert verdict_of_change(folder, *_SAME[change]) == "LOADED"


@pytest.mark.parametrize("change", _OTHER)
def test_it_is_another_program_after_a_change_of(change, folder):
    assert verdict_of_change(folder, *_OTHER[change]) == "RECOMPILED"


def test_other_compiler_options_are_a_reason(folder):
    options = {"xla_cpu_enable_fast_math": True}
    f = oaot.jit(add_one, compiler_options=options)
    f(X)
    save(folder, f=f)
    same = restore(folder, {"f": oaot.jit(add_one, compiler_options=options)})
    same.f(X)
    assert same.report["f"].verdict is oaot.Verdict.LOADED
    other = restore(folder, {"f": oaot.jit(add_one)})
    other.f(X)
    assert "COMPILE_OPTIONS" in codes(other)
    assert other.report["f"].verdict is oaot.Verdict.RECOMPILED


def test_profiles_are_part_of_the_identity_and_not_of_the_manifest(folder):
    profile = bytes(range(256)) * 40
    f = oaot.jit(add_one, compiler_options={"fdo_profile": profile})
    f(X)
    save(folder, f=f)
    options = manifest(folder)["f"].signatures[0].variants[0].environment.options
    assert options["fdo_profile"].startswith("10240 bytes, sha256 ")
    other = oaot.jit(add_one, compiler_options={"fdo_profile": profile[:-1]})
    fns = restore(folder, {"f": other})
    other(X)
    assert "COMPILE_OPTIONS" in codes(fns)


def test_device_assignment_does_not_count_and_the_number_of_devices_does(folder):
    def program(devices):
        sharding = NamedSharding(Mesh(np.array(devices), ("a",)), P("a"))
        return oaot.jit(lambda x: jnp.cumsum(x)), jax.device_put(X, sharding)

    f, x = program(jax.devices()[:4])
    expected = f(x)
    save(folder, f=f)
    for devices, verdict, reasons in (
        (jax.devices()[4:8], "REMAPPED", []),
        (jax.devices()[3::-1], "REMAPPED", []),
        (jax.devices()[:2], "RECOMPILED", ["DEVICE_COUNT"]),
    ):
        live, x = program(devices)
        fns = restore(folder, {"f": live}, devices=devices)
        np.testing.assert_array_equal(live(x), expected)
        assert (fns.report["f"].verdict.name, codes(fns)) == (verdict, reasons)


@pytest.mark.parametrize(
    "flags, found",
    [
        ("--xla_gpu_autotune_level=0", {"xla_gpu_autotune_level": "0"}),
        ("--xla_gpu_autotune_level=1", {"xla_gpu_autotune_level": "1"}),
        ("--xla_force_host_platform_device_count=8", {}),
        ("--xla_dump_to=/tmp/x --xla_dump_hlo_as_text", {}),
        ("--xla_a=1 --xla_a=2 --xla_b", {"xla_a": "2", "xla_b": ""}),
        ("--xla_a='with spaces'", {"xla_a": "with spaces"}),
    ],
)
@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_that_change_programs_count_and_others_do_not(variable, flags, found):
    assert topology.xla_flags({variable: flags}) == found


@pytest.mark.parametrize(
    "context, reason",
    [
        (lambda: jax.default_matmul_precision("highest"), "jax_default_matmul_precision"),
        (lambda: jax.numpy_dtype_promotion("strict"), "jax_numpy_dtype_promotion"),
        (lambda: jax.enable_x64(True), "jax_enable_x64"),
        (contextlib.nullcontext, None),
    ],
    ids=["precision", "promotion", "x64", "none"],
)
def test_settings_of_the_calling_thread_are_compared_at_the_call(folder, context, reason):
    f = oaot.jit(lambda x: jnp.dot(x, x))
    f(X)
    save(folder, f=f)
    live = oaot.jit(lambda x: jnp.dot(x, x))
    fns = restore(folder, {"f": live})
    with context():
        live(X)
    reasons = fns.report["f"].reasons
    if reason is None:
        assert reasons == ()
        assert [e.origin.how for e in live.executables] == ["loaded"]
    else:
        assert [r.code.name for r in reasons] == ["JAX_CONFIG"]
        assert reason in reasons[0].current
        assert live.executables[-1].origin.how == "compiled"


# -- export_test: devices and trees that do not fit -------------------------------------------------------------------


def test_a_call_with_another_tree_says_which_leaves_differ(folder):
    f = oaot.jit(lambda t: t["a"] + t["b"])
    f({"a": X, "b": X})
    save(folder, f=f)
    with pytest.raises(SignatureError) as caught:
        restore(folder).f({"a": X, "c": X})
    assert str(caught.value) == (
        "f: the arguments match none of 1 saved signatures:\n"
        "  The arguments do not have the leaves of the saved signature. missing: 0/b; extra: 0/c"
    )


def test_a_call_with_other_types_says_which_leaves_differ(folder):
    f = oaot.jit(lambda t: t["a"] + t["b"])
    f({"a": X, "b": X})
    save(folder, f=f)
    with pytest.raises(SignatureError) as caught:
        restore(folder).f({"a": X[:4], "b": X.astype(np.int32)})
    assert str(caught.value) == (
        "f: the arguments match none of 1 saved signatures:\n"
        "  0/a: saved as float32[8], now float32[4]; 0/b: saved as float32[8], now int32[8]"
    )


def test_a_call_on_other_devices_than_the_restored_ones_says_where(folder):
    def on(devices):
        return jax.device_put(X, NamedSharding(Mesh(np.array(devices), ("a",)), P("a")))

    f = oaot.jit(lambda x: x + 1)
    f(on(jax.devices()[:4]))
    save(folder, f=f)
    fns = restore(folder)
    with pytest.raises(SignatureError, match=r"0: expected on .*, got on "):
        fns.f(on(jax.devices()[4:8]))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_another_number_of_devices_raises_before_native_code(count):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("a",)), P("a"))
    compiled = jax.jit(lambda x: x + 1).lower(jax.device_put(X, sharding)).compile()
    serialized = oaot.partially_serialize(compiled, jax.devices()[:4])
    with pytest.raises(DeviceCountError) as caught:
        oaot.load_compiled_from_serialized(
            None,
            serialized,
            jax.devices()[:count],
            in_tree=compiled.in_tree,
            out_tree=compiled.out_tree,
        )
    assert str(caught.value) == (
        "Cannot remap XLA compile options device assignment: assignment expects 4 devices "
        f"(replica_count=1 x computation_count=4), but got {count} execution devices."
    )


def test_a_saved_function_cannot_be_traced_and_says_what_to_do(folder):
    f = oaot.jit(lambda x: x + 1)
    f(X)
    save(folder, f=f)
    saved = restore(folder).f
    message = (
        "f: a compiled function cannot be transformed or called inside another jit; "
        "pass the live function to AotRestore(fns={...})."
    )
    for transform in (jax.jit(saved), jax.grad(lambda x: saved(x).sum()), jax.vmap(saved)):
        with pytest.raises(TypeError) as caught:
            transform(X)
        assert str(caught.value) == message


def test_a_live_function_is_transformed_as_jit_is(folder):
    f = oaot.jit(lambda x: (x**2).sum())
    f(X)
    save(folder, f=f)
    live = oaot.jit(lambda x: (x**2).sum())
    restore(folder, {"f": live})
    np.testing.assert_array_equal(jax.grad(live)(X), 2 * X)
    np.testing.assert_array_equal(jax.vmap(live)(X.reshape(2, 4)), (X.reshape(2, 4) ** 2).sum(1))
    np.testing.assert_array_equal(jax.jit(lambda x: live(x) + 1)(X), (X**2).sum() + 1)


# -- the table --------------------------------------------------------------------------------------------------------


def test_docs_peers_md_names_tests_that_exist():
    page = (ROOT / "docs" / "peers.md").read_text()
    sources = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    sources += "".join(path.read_text() for path in (ROOT / "tests" / "portable").glob("test_*.py"))
    cases = {
        case for line in page.splitlines() for case in re.findall(r"\[([^\]]+: [^\]]+)\]", line)
    }
    from support_cases import CASES

    assert cases and cases <= {case.id for case in CASES}
    named_tests = set(re.findall(r"`(test_\w+)` *\|$", page, re.MULTILINE))
    assert len(named_tests) > 20
    assert sorted(t for t in named_tests if f"def {t}(" not in sources) == []

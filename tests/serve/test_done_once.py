"""Functions are traced once and exported in the commit, on no thread of the training."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from stored import read_portable, signatures_of

import orbax_aot as oaot
from orbax_aot import portable

TRACE = "/jax/core/compile/jaxpr_trace_duration"
LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
X = np.arange(8, dtype=np.float32)

_events: list[tuple[str, str, int]] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, secs, **about: _events.append(
        (name, str(about.get("fun_name", "")), threading.get_ident())
    )
)


@pytest.fixture
def exports(monkeypatch):
    """The threads on which something was exported, and for which platforms."""
    calls = []
    real = portable.export_program

    def spy(traced, **options):
        calls.append((threading.get_ident(), options.get("platforms")))
        return real(traced, **options)

    monkeypatch.setattr(portable, "export_program", spy)
    return calls


def counted(fun, **options):
    """Returns a function and the threads on which its Python ran."""
    ran = []

    def counted_program(x):
        ran.append(threading.get_ident())
        return fun(x)

    return oaot.jit(counted_program, **options), ran


def events(kind):
    return [
        (fun, ident) for name, fun, ident in _events if name == kind and "counted_program" in fun
    ]


def save(path, fns, steps=(1,), **options):
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        for step in steps:
            mngr.save(step, args=oaot.AotSave({"x": X}, fns=fns, **options))
        mngr.wait_until_finished()


@pytest.fixture(autouse=True)
def forget_events():
    _events.clear()


@pytest.mark.parametrize(
    ("options", "lowerings"),
    [(True, 1), (("cpu",), 1), (("cpu", "tpu"), 2), (False, 1)],
    ids=["own platform", "own platform by name", "two platforms", "none"],
)
def test_saving_traces_nothing_and_lowers_again_only_for_other_platforms(
    tmp_path, exports, options, lowerings
):
    function, ran = counted(jnp.sin)
    function(X)
    save(tmp_path, {"f": function}, portable=options)
    here = threading.get_ident()
    assert ran == [here]
    assert [ident for _, ident in events(TRACE)] == [here]
    assert len(events(LOWER)) == lowerings
    assert [ident for _, ident in events(LOWER)][:1] == [here]
    assert here not in [ident for _, ident in events(LOWER)][1:]
    assert len(exports) == (options is not False)
    assert here not in [ident for ident, _ in exports]


def test_later_saves_export_nothing(tmp_path, exports):
    function, ran = counted(jnp.sin)
    function(X)
    save(tmp_path, {"f": function}, steps=(1, 2, 3))
    assert (len(ran), len(exports)) == (1, 1)
    saved = [signatures_of(tmp_path, "f", step)[0].portable for step in (1, 2, 3)]
    assert saved[0] is not None
    assert saved[0] == saved[1] == saved[2]


def test_platforms_of_jit_are_exported_when_it_compiles_and_not_in_the_save(tmp_path, exports):
    function, ran = counted(jnp.sin, platforms=("cpu", "tpu"))
    function(X)
    here = threading.get_ident()
    assert exports == [(here, ("cpu", "tpu"))]
    save(tmp_path, {"f": function})
    assert (len(ran), len(exports)) == (1, 1)
    assert len(events(TRACE)) == 1


def test_the_export_has_the_mesh_and_the_settings_of_the_thread_that_traced(tmp_path):
    """What a traced function asks of its surroundings, it asks again when it is lowered for other platforms."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def spread(x):
        return jax.lax.with_sharding_constraint(jnp.dot(x, x.T), P("data", "model"))

    function, ran = counted(spread)
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("data")))
    set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
    with set_mesh(mesh), jax.default_matmul_precision("highest"):
        function(x)
    save(tmp_path, {"f": function}, portable=("cpu", "tpu"))
    (signature,) = signatures_of(tmp_path, "f")
    assert signature.portable_absent is None
    assert signature.portable.platforms == ("cpu", "tpu")
    assert len(ran) == 1
    text = jax.export.deserialize(bytearray(read_portable(tmp_path, "f"))).mlir_module()
    assert "precision HIGHEST" in text or "precision = [HIGHEST, HIGHEST]" in text
    assert '"data"=2, "model"=4' in text


def test_restoring_without_source_and_saving_again_exports_nothing(tmp_path, exports):
    function, ran = counted(jnp.sin)
    function(X)
    save(tmp_path / "one", {"f": function})
    exports.clear(), ran.clear()
    with ocp.CheckpointManager(tmp_path / "one", item_handlers=oaot.AotHandler()) as mngr:
        _, fns = mngr.restore(1, args=oaot.AotRestore())
        np.testing.assert_array_equal(fns.f(X), jnp.sin(X))
    save(tmp_path / "two", {"f": fns.f})
    assert (ran, exports) == ([], [])
    saved = [signatures_of(tmp_path / n, "f")[0].portable for n in ("one", "two")]
    assert saved[0] == saved[1] is not None


def test_a_save_does_not_wait_for_the_export(tmp_path, monkeypatch):
    """The training thread goes on while a slow export runs."""
    may_go_on, real = threading.Event(), portable.export_program

    def slow(traced, **options):
        assert may_go_on.wait(30)
        return real(traced, **options)

    monkeypatch.setattr(portable, "export_program", slow)
    function, _ = counted(jnp.sin)
    function(X)
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave({"x": X}, fns={"f": function}))
        function(X)
        may_go_on.set()
        mngr.wait_until_finished()
    assert signatures_of(tmp_path, "f")[0].portable is not None

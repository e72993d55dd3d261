"""`AotFunction` and what else holds executables, as Python objects: many signatures, threads, copies, memory."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

import orbax_aot as oaot
from orbax_aot import functions as functions_lib
from orbax_aot import store


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "item"
    path.mkdir()
    return path


@pytest.fixture
def compiles():
    """Counts the compilations from here on."""
    counted = []

    def count(event, secs, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            counted.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield counted
    jax.monitoring.unregister_event_duration_listener(count)


def save(folder, **fns):
    oaot.AotHandler().save(folder, oaot.AotSave(fns=fns))


def restore(folder, fns):
    return oaot.AotHandler().restore(folder, oaot.AotRestore(fns=fns)).fns


def saved_signatures(folder, name="f"):
    return store.Store(folder).read_manifest().functions[name].signatures


def double(x):
    return x * 2


def test_an_unseen_signature_compiles_as_jit_would_and_is_saved_next_time(
    tmp_path, folder, compiles
):
    f = oaot.jit(double)
    f(np.ones(2, np.float32))
    save(folder, f=f)
    again = oaot.jit(double)
    fns = restore(folder, {"f": again})
    del compiles[:]
    again(np.ones(2, np.float32))
    assert len(compiles) == 0
    again(np.ones(3, np.float32))
    assert len(compiles) == 1
    reasons = fns.report["f"].reasons
    assert [r.code for r in reasons] == [oaot.ReasonCode.SIGNATURE_CHANGED]
    later = tmp_path / "later"
    later.mkdir()
    save(later, f=again)
    assert [s.inputs[0].shape for s in saved_signatures(later)] == [(2,), (3,)]


def test_many_signatures_are_warned_of_once_and_bounded(monkeypatch, folder):
    monkeypatch.setattr(functions_lib, "_MANY_SIGNATURES", 3)
    monkeypatch.setattr(functions_lib, "_MAX_SIGNATURES", 4)
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: said.append(text % args))
    f = oaot.jit(double)
    for n in range(1, 8):
        assert f(np.ones(n, np.float32)).shape == (n,)
    assert said == [
        "double: 3 signatures so far, all kept and saved. If a shape changes with each call, pad it.",
        "double: more than 4 signatures; the oldest are forgotten and no longer saved. If a shape changes "
        "with each call, pad it.",
    ]
    save(folder, f=f)
    assert [s.inputs[0].shape for s in saved_signatures(folder)] == [(4,), (5,), (6,), (7,)]
    np.testing.assert_array_equal(f(np.ones(1, np.float32)), [2])  # forgotten, not broken


def test_threads_that_call_one_function_compile_each_signature_once(compiles):
    f = oaot.jit(lambda x: jnp.sin(x) + 1)
    sizes = list(range(1, 5))
    expected = {n: np.sin(np.arange(n, dtype=np.float32)) + 1 for n in sizes}
    barrier, wrong = threading.Barrier(8), []

    def work(seed):
        barrier.wait()
        for i in range(40):
            n = sizes[(seed + i) % len(sizes)]
            if not np.allclose(f(np.arange(n, dtype=np.float32)), expected[n], rtol=1e-6):
                wrong.append(n)

    del compiles[:]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(compiles) == len(f.executables) == len(sizes)


def test_threads_may_call_a_function_while_its_load_is_under_way(folder):
    f = oaot.jit(double)
    f(np.ones(4, np.float32))
    save(folder, f=f)
    for fns in ({"f": oaot.jit(double)}, ["f"]):
        restored = restore(folder, fns)
        with ThreadPoolExecutor(8) as pool:
            x = np.ones(4, np.float32)
            results = list(pool.map(restored.f, [x] * 8))
        assert all((result == 2).all() for result in results)
        assert restored.report["f"].verdict is oaot.Verdict.LOADED


def test_a_function_and_its_executables_are_collected(folder):
    def use():
        f = oaot.jit(lambda x: x * 3)
        f(np.ones(3, np.float32))
        f(np.ones(3, np.float32))
        save(folder, f=f)
        live = oaot.jit(lambda x: x * 3)
        bound = restore(folder, {"f": live})
        bound.f(np.ones(3, np.float32))
        saved = restore(folder, ["f"])
        saved.f(np.ones(3, np.float32))
        held = (f, live, saved.f, bound, *live.executables, f.executables[0].compiled._executable)
        return [weakref.ref(x) for x in held]

    references = use()
    gc.collect()
    assert [r() for r in references] == [None] * len(references)


def test_cleared_functions_forget_their_executables():
    f = oaot.jit(lambda x: x * 5)
    f(np.ones(3, np.float32))
    executable = weakref.ref(f.executables[0].compiled._executable)
    f.clear()
    gc.collect()
    assert executable() is None
    assert f.executables == ()
    assert f(np.ones(3, np.float32))[0] == 5


def test_pickling_says_what_to_do_instead(folder):
    f = oaot.jit(double)
    f(np.ones(2, np.float32))
    save(folder, f=f)
    saved = restore(folder, ["f"]).f
    messages = {
        f: "The AotFunction 'double' cannot be pickled; pickle the function it wraps, or save it with "
        "AotSave(fns={...}).",
        saved: "The SavedFunction 'f' cannot be pickled; restore it from its checkpoint instead.",
        f.executables[
            0
        ]: "An Executable cannot be pickled or copied; save it with AotSave(fns={...}) instead.",
    }
    for value, message in messages.items():
        with pytest.raises(TypeError) as caught:
            pickle.dumps(value)
        assert str(caught.value) == message


def test_copies_of_a_function_are_the_function_itself(folder):
    f = oaot.jit(double)
    f(np.ones(2, np.float32))
    save(folder, f=f)
    saved = restore(folder, ["f"]).f
    for function in (f, saved):
        assert copy.copy(function) is function
        assert copy.deepcopy({"state": [function]})["state"][0] is function
    with pytest.raises(TypeError, match=r"^An Executable cannot be pickled or copied"):
        copy.deepcopy(f.executables[0])


def test_restored_functions_can_be_copied(folder):
    f = oaot.jit(double)
    f(np.ones(2, np.float32))
    save(folder, f=f)
    fns = restore(folder, ["f"])
    assert copy.copy(fns).f is fns.f
    with pytest.raises(AttributeError, match="no restored function 'g'; there are: f"):
        _ = fns.g


@pytest.mark.parametrize("where", ["save", "restore"])
def test_names_that_are_no_unicode_are_refused_before_anything_is_written(where):
    f = oaot.jit(double)
    with pytest.raises(ValueError) as caught:
        oaot.AotSave(fns={"a\ud800": f}) if where == "save" else oaot.AotRestore(fns=["a\ud800"])
    class_name = "AotSave" if where == "save" else "AotRestore"
    assert str(caught.value) == (
        f"{class_name}(fns=...): the function name 'a\\ud800' is no valid Unicode."
    )


def test_every_name_has_a_folder_of_its_own(folder):
    names = [
        "step",
        "Step",
        "STEP",
        "a/b",
        "a_b",
        "a\\b",
        "..",
        ".",
        "-",
        "constants",
        "con",
        "\u00e9",
        "e\u0301",
    ]
    names += ["x" * 300, "x" * 301]
    fns = {}
    for i, name in enumerate(names):
        fns[name] = oaot.jit(lambda x, i=i: x + i)
        fns[name](np.zeros(1, np.float32))
    save(folder, **fns)
    written = [f.folder for f in store.Store(folder).read_manifest().functions.values()]
    assert len({name.lower() for name in written}) == len(names)
    restored = restore(folder, None)
    assert [float(restored[name](np.zeros(1, np.float32))[0]) for name in names] == list(
        range(len(names))
    )

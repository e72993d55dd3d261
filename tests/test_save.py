"""What can be saved, what is refused when the arguments are made, and what is saved as a reason."""

from __future__ import annotations

import altering
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import programs
import pytest
import small_checkpoint as made
from watching import watching

import orbax_aot as oaot


def save(path, fns, **args):
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(made.STATE, fns=fns, **args))
    return altering.read_body(path / "1")


@pytest.mark.parametrize("fns", [42, "step", ["step"], lambda x: x, {"f": 42}, {"f": lambda x: x},
                                 {"f": jax.jit(lambda x: x)}, {"f": None}, {1: oaot.jit(abs)},
                                 {"": oaot.jit(abs)}])  # fmt: skip
def test_functions_that_cannot_be_saved_are_refused_when_the_arguments_are_made(fns):
    with pytest.raises(TypeError):
        oaot.AotSave(made.STATE, fns=fns)


def test_the_refusal_says_what_is_accepted():
    with pytest.raises(TypeError) as error:
        oaot.AotSave(made.STATE, fns=42)
    assert str(error.value) == (
        "AotSave(fns=...) takes a mapping from names to AotFunction (oaot.jit), Executable or "
        "jax.stages.Compiled; got int."
    )
    with pytest.raises(TypeError) as error:
        oaot.AotSave(made.STATE, fns={"f": 42})
    for accepted in ("AotFunction", "oaot.jit", "Executable", "jax.stages.Compiled", "got int"):
        assert accepted in str(error.value)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"fns": 42}, TypeError),
        ({"fns": "step"}, TypeError),
        ({"fns": {"f": 42}}, TypeError),
        ({"fns": [1]}, TypeError),
        ({"verify": "hope"}, ValueError),
        ({"on_mismatch": "cry"}, ValueError),
        ({"mesh": 4}, TypeError),
        ({"devices": 4}, oaot.DeviceTypeError),
        ({"devices": ["cpu:0"]}, oaot.DeviceTypeError),
        ({"devices": [jax.devices()[0]] * 2}, ValueError),
        ({"mesh": programs.mesh_of([0], (1,)), "devices": jax.devices()[:1]}, TypeError),
    ],
)
def test_restore_arguments_are_checked_when_they_are_made(args, error):
    with pytest.raises(error):
        oaot.AotRestore(**args)


def test_functions_executables_and_plain_compiled_are_saved(tmp_path):
    function = oaot.jit(made.double)
    function(made.STATE["a"])
    executable = oaot.compile(made.double, made.STATE["a"])
    compiled = jax.jit(made.double).lower(made.STATE["a"]).compile()
    body = save(tmp_path, {"function": function, "executable": executable, "compiled": compiled})
    signatures = {n: f["signatures"][0] for n, f in body["functions"].items()}
    for name in ("function", "executable"):
        assert signatures[name]["program"].startswith("sha256:")
        assert signatures[name]["code"]["undecidable"] == []
        assert signatures[name]["portable"]["platforms"] == ["cpu"]
    assert signatures["compiled"]["program"] is None and signatures["compiled"]["code"] is None
    assert signatures["compiled"]["portable"] is None
    assert signatures["compiled"]["portable_absent"]["code"] in oaot.ReasonCode.__members__
    state, fns = made.restore(tmp_path)
    for name in signatures:
        assert float(fns[name](state["a"])[0]) == 2
        assert fns.report[name].verdict is oaot.Verdict.LOADED


@pytest.mark.parametrize("verify", ["code", "program", "signature"])
def test_a_plain_compiled_cannot_be_compared_with_a_live_function(tmp_path, verify):
    save(tmp_path, {"f": jax.jit(made.double).lower(made.STATE["a"]).compile()})
    state, fns = made.restore(tmp_path, fns={"f": oaot.jit(made.double)}, verify=verify)
    assert float(fns.f(state["a"])[0]) == 2
    report = fns.report["f"]
    if verify == "signature":
        assert (report.verdict, report.reasons) == (oaot.Verdict.LOADED, ())
    else:
        assert report.verdict is oaot.Verdict.RECOMPILED
        assert [r.code for r in report.reasons] == [oaot.ReasonCode.NOT_COMPARABLE]


def test_a_function_never_called_is_saved_as_a_reason_with_a_warning(tmp_path):
    with watching() as watched:
        body = save(tmp_path, {"f": oaot.jit(made.double)})
    assert body["functions"]["f"]["absent"]["code"] == "NEVER_CALLED"
    (line,) = [line for line in watched.lines() if "never called" in line]
    assert line.startswith("WARNING f: ")
    state, fns = made.restore(tmp_path, fns={"f": oaot.jit(made.double)})
    assert float(fns.f(state["a"])[0]) == 2
    assert [r.code for r in fns.report["f"].reasons] == [oaot.ReasonCode.NEVER_CALLED]


def test_what_cannot_be_stored_is_a_reason_and_the_others_are_saved(tmp_path):
    ref = jax.new_ref(jnp.zeros(3))

    def closes_over_a_ref(x):
        ref[...] += x
        return ref[...]

    bad, good = oaot.jit(closes_over_a_ref), oaot.jit(made.double)
    bad(made.STATE["a"])
    good(made.STATE["a"])
    with watching() as watched:
        body = save(tmp_path, {"bad": bad, "good": good})
    assert body["functions"]["bad"]["absent"]["code"] == "NOT_SERIALIZABLE"
    assert [
        line
        for line in watched.lines()
        if line.startswith("WARNING bad: not saved (NOT_SERIALIZABLE")
    ]
    assert watched.named("/jax/orbax_aot/save/absent") == [
        ("/jax/orbax_aot/save/absent", {"function": "bad", "reason": "NOT_SERIALIZABLE"})
    ]
    _, fns = made.restore(tmp_path)
    assert fns.report["good"].verdict is oaot.Verdict.LOADED
    assert fns.report["bad"].verdict is oaot.Verdict.REFUSED


def test_all_signatures_of_a_function_are_saved_and_loaded(tmp_path):
    f = oaot.jit(made.double)
    sizes = (1, 2, 5)
    for size in sizes:
        f(np.ones(size, np.float32))
    save(tmp_path, {"f": f})
    _, fns = made.restore(tmp_path, fns={"f": oaot.jit(made.double)})
    with watching() as watched:
        for size in sizes:
            assert fns.f(np.ones(size, np.float32)).shape == (size,)
    assert watched.work("double") == []
    assert fns.report["f"].signatures == (oaot.Verdict.LOADED,) * 3


def test_static_arguments_choose_the_saved_signature(tmp_path):
    """Dynamic arguments are the same in all calls: only static ones tell the programs apart."""
    power = lambda x, n, mode="up": x**n if mode == "up" else -(x**n)
    f = oaot.jit(power, static_argnums=1, static_argnames="mode")
    cases = ((2, "up", 4), (3, "up", 8), (3, "down", -8))
    for n, mode, _ in cases:
        f(np.float32(2), n, mode=mode)
    save(tmp_path, {"f": f})
    _, fns = made.restore(tmp_path)
    for _ in range(3):
        for n, mode, right in cases:
            assert float(fns.f(np.float32(2), n, mode=mode)) == right
    for n in (4, 2.0, True):
        with pytest.raises(oaot.SignatureError):
            fns.f(np.float32(2), n, mode="up")
    with pytest.raises(oaot.SignatureError, match="which of them is meant"):
        fns.f(np.float32(2))


def test_positional_static_numbers_are_not_mixed_up_by_the_fast_path(tmp_path):
    f = oaot.jit(lambda x, n: x * n, static_argnums=1)
    for n in (2, 3):
        f(np.float32(1), n)
    save(tmp_path, {"f": f})
    _, fns = made.restore(tmp_path)
    for _ in range(3):
        assert [float(fns.f(np.float32(1), n)) for n in (2, 3)] == [2, 3]


def test_one_signature_with_static_arguments_may_be_called_without_them(tmp_path):
    f = oaot.jit(lambda x, n: x * n, static_argnames="n")
    f(np.float32(1), n=5)
    save(tmp_path, {"f": f})
    _, fns = made.restore(tmp_path)
    assert float(fns.f(np.float32(1))) == float(fns.f(np.float32(1), n=5)) == 5


@pytest.mark.parametrize(
    "name", ["../../up", "con", "a/b", "Größe", "A", "a", "x" * 300, " ", ".", "_aot", "constants"]
)
def test_any_name_is_saved_inside_the_folder(tmp_path, name):
    f = oaot.jit(made.double)
    f(made.STATE["a"])
    save(tmp_path, {name: f, "a b": f})
    state, fns = made.restore(tmp_path)
    assert sorted(fns) == sorted([name, "a b"])
    assert float(fns[name](state["a"])[0]) == 2
    assert {p.name for p in tmp_path.iterdir()} == {"1"}


def test_constants_too_large_for_the_program_are_stored_once(tmp_path):
    table = np.arange(40_000, dtype=np.float32)
    with jax.enable_x64(False):
        f, g = oaot.jit(lambda x: x + table), oaot.jit(lambda x: x - table)
        f(np.float32(1)), g(np.float32(1))
    save(tmp_path, {"f": f, "g": g})
    _, fns = made.restore(tmp_path)
    assert programs.digest(fns.f(np.float32(1))) == programs.digest(table + 1)
    assert programs.digest(fns.g(np.float32(1))) == programs.digest(1 - table)

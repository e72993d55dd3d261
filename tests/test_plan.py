"""The decision, as a table: what is saved x what is here x what is asked for -> verdict and reasons. Imports no jax."""

from __future__ import annotations

import msgspec
import pytest

from orbax_aot import manifest as m
from orbax_aot import plan
from orbax_aot.report import Reason, ReasonCode, Verdict

ENVIRONMENT = m.Environment(
    jax="0.12.0",
    jaxlib="0.12.0",
    cpu_features="avx2,sse4",
    xla_flags={},
    config={},
    options={},
)
DIGESTS = {"sha256": "", "raw_sha256": "", "nbytes": 1, "raw_nbytes": 1, "codec": "zstd"}
CODE = m.Code(fingerprint="a" * 64, call="b" * 64, undecidable=())


def topology(ids, *, coords=None, processes=None, **changes):
    fields = dict(
        platform="cpu",
        platform_version="1",
        device_kind="cpu",
        count=len(ids),
        replicas=1,
        partitions=len(ids),
        coords=coords,
        ids=tuple(ids),
        processes=tuple(processes or [0] * len(ids)),
    )
    return m.Topology(**{**fields, **changes})


def variant(ids=(0, 1, 2, 3), environment=ENVIRONMENT, sharding=0, saved=None, **changes):
    fields = dict(
        file="0.pjrt.zst",
        topology=saved or topology(ids),
        environment=environment,
        name="f",
        kept=(0,),
        in_shardings=(sharding,),
        out_shardings=(sharding,),
        in_types=(None,),
        out_types=(None,),
        layouts=m.Layouts(inputs=(None,), dispatch=(None,), outputs=(None,)),
        custom_calls=(),
        rank=None,
        hlo_fingerprint=None,
        cost={},
        memory={},
        **DIGESTS,
    )
    return m.Variant(**{**fields, **changes})


def signature(*variants, portable=None, **changes):
    leaf = m.Leaf(path="0", shape=(4,), dtype="float32", weak_type=False, sharding=0, donated=False)
    fields = dict(
        folder="0",
        inputs=(leaf,),
        outputs=(leaf,),
        output_tree="*",
        code=CODE,
        program="sha256:1",
        portable=portable,
        variants=variants or (variant(),),
    )
    return m.Signature(**{**fields, **changes})


def manifest(*signatures, version=(1, 0), **functions):
    body = m.Body(
        meshes=(
            m.Mesh(
                axes=(("data", 2), ("model", 2)), types=("Auto", "Auto"), positions=(0, 1, 2, 3)
            ),
        ),
        shardings=(m.Sharding(mesh=0, spec=("data", None)), m.Sharding(device=0)),
        functions={
            "f": m.Function(folder="f", signatures=signatures or (signature(),)),
            **functions,
        },
    )
    return m.Manifest(version=version, body=body)


def machine(n=8, environment=ENVIRONMENT, process=0, **changes):
    here = topology(range(n), **changes)
    return plan.Machine(
        topology=here, kinds=(here.device_kind,) * n, environment=environment, process=process
    )


PORTABLE = m.Portable(file="p", platforms=("cpu",), **DIGESTS)
MESH = (("data", 2), ("model", 2))
LIVE = plan.Wanted(live=True, code=CODE)


def decide(saved=None, here=None, want=None, problem=None, **request):
    functions = None if want is None else {"f": want}
    asked = plan.Request(functions=functions, **request)
    return plan.decide(saved or manifest(), here or machine(), asked, problem)["f"]


def only(decided):
    (decision,) = decided.decisions
    return decision


def causes(decision):
    """The reasons why a program was not loaded; that nothing can be done about it is one more where it is refused."""
    needs_source = [r for r in decision.reasons if r.code is ReasonCode.NEEDS_SOURCE]
    assert len(needs_source) == (decision.verdict is Verdict.REFUSED)
    return tuple(r for r in decision.reasons if r not in needs_source)


# -- where it runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "verdict", "assignment"),
    [
        ({}, "LOADED", (0, 1, 2, 3)),
        ({"mesh": MESH, "positions": (0, 1, 2, 3)}, "LOADED", (0, 1, 2, 3)),
        ({"mesh": MESH, "positions": (4, 5, 6, 7)}, "REMAPPED", (4, 5, 6, 7)),
        ({"mesh": MESH, "positions": (3, 2, 1, 0)}, "REMAPPED", (3, 2, 1, 0)),
        ({"devices": (0, 1, 2, 3)}, "LOADED", (0, 1, 2, 3)),
        ({"devices": (6, 1, 0, 7)}, "REMAPPED", (6, 1, 0, 7)),
    ],
)
def test_where_a_program_goes(request_, verdict, assignment):
    decision = only(decide(**request_))
    assert (decision.verdict.name, decision.assignment) == (verdict, assignment)
    assert decision.reasons == ()


def test_a_mesh_laid_over_the_devices_in_another_order_is_followed_position_by_position():
    saved = manifest()
    mesh = msgspec.structs.replace(saved.body.meshes[0], positions=(2, 0, 3, 1))
    saved = m.Manifest(version=(1, 0), body=msgspec.structs.replace(saved.body, meshes=(mesh,)))
    decision = only(decide(saved, mesh=MESH, positions=(4, 5, 6, 7)))
    assert decision.assignment == (
        5,
        7,
        4,
        6,
    )  # position 0 of the mesh is device 2 of the assignment


@pytest.mark.parametrize(
    ("here", "request_", "reason"),
    [
        (8, {"mesh": (("data", 2), ("model", 4)), "positions": tuple(range(8))}, "DEVICE_COUNT"),
        (8, {"devices": (0, 1)}, "DEVICE_COUNT"),
        (2, {}, "DEVICE_COUNT"),
        (8, {"mesh": (("data", 4), ("model", 1)), "positions": (0, 1, 2, 3)}, "MESH_SHAPE"),
        (8, {"mesh": (("model", 2), ("data", 2)), "positions": (0, 1, 2, 3)}, "MESH_SHAPE"),
        (8, {"mesh": (("x", 4),), "positions": (0, 1, 2, 3)}, "MESH_SHAPE"),
    ],
)
def test_what_does_not_fit_has_one_reason(here, request_, reason):
    decided = decide(here=machine(here), **request_)
    assert decided.verdict is Verdict.REFUSED
    assert [r.code.name for r in causes(only(decided))] == [reason]
    live = decide(here=machine(here), want=LIVE, **request_)
    assert (live.verdict, only(live).reasons) == (Verdict.RECOMPILED, causes(only(decided)))


def test_a_program_for_one_device_goes_where_its_arguments_are():
    saved = manifest(signature(variant((0,), sharding=1)))
    decision = only(decide(saved, single=5))
    assert (decision.verdict, decision.assignment, decision.movable) == (
        Verdict.REMAPPED,
        (5,),
        True,
    )


# -- what must agree --------------------------------------------------------------------------------------------------


def environment(**changes):
    return msgspec.structs.replace(ENVIRONMENT, **changes)


@pytest.mark.parametrize(
    ("here", "code", "text"),
    [
        (
            machine(environment=environment(jaxlib="0.12.1")),
            "JAX_VERSION",
            "JAX_VERSION: saved jax 0.12.0, jaxlib 0.12.0, here jax 0.12.0, jaxlib 0.12.1",
        ),
        (
            machine(environment=environment(jax="0.13.0")),
            "JAX_VERSION",
            "JAX_VERSION: saved jax 0.12.0, jaxlib 0.12.0, here jax 0.13.0, jaxlib 0.12.0",
        ),
        (
            machine(environment=environment(cpu_features="avx2,amx")),
            "CPU_FEATURES",
            "CPU_FEATURES: saved only there: sse4, here only here: amx",
        ),
        (
            machine(environment=environment(xla_flags={"xla_a": "1"})),
            "XLA_FLAGS",
            "XLA_FLAGS: saved xla_a=unset, here xla_a=1",
        ),
        (
            machine(environment=environment(config={"jax_enable_x64": True})),
            "JAX_CONFIG",
            "JAX_CONFIG: saved jax_enable_x64=unset, here jax_enable_x64=True",
        ),
        (machine(platform_version="2"), "PLATFORM_VERSION", "PLATFORM_VERSION: saved 1, here 2"),
        (machine(device_kind="cpu9"), "DEVICE_KIND", "DEVICE_KIND: saved cpu, here cpu9"),
    ],
)
@pytest.mark.parametrize("want", [None, LIVE, plan.Wanted()])
def test_each_difference_is_one_reason_that_tells_both_sides(here, code, text, want):
    decided = decide(here=here, want=want)
    assert [str(r) for r in causes(only(decided))] == [text]
    assert causes(only(decided))[0].code.name == code
    live = want is not None and want.live
    assert decided.verdict is (Verdict.RECOMPILED if live else Verdict.REFUSED)
    rebuilt = decide(manifest(signature(portable=PORTABLE)), here, want)
    assert rebuilt.verdict is (Verdict.RECOMPILED if live else Verdict.REBUILT)


def test_another_platform_is_one_reason_among_those_that_follow():
    decided = decide(here=machine(platform="tpu", device_kind="TPU v5", platform_version="9"))
    assert only(decided).reasons[0] == Reason(ReasonCode.PLATFORM, "cpu", "tpu")


def test_other_compile_options_of_the_live_function_are_a_reason():
    want = plan.Wanted(live=True, code=CODE, options={"xla_a": "1"})
    assert [r.code for r in only(decide(want=want)).reasons] == [ReasonCode.COMPILE_OPTIONS]
    assert decide(want=None).verdict is Verdict.LOADED


@pytest.mark.parametrize(
    ("saved", "here", "fits"),
    [
        ([(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 0), (1, 0), (0, 1), (1, 1)], True),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], [(2, 4), (3, 4), (2, 5), (3, 5)], True),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 0), (0, 1), (1, 0), (1, 1)], False),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], None, False),
    ],
)
def test_devices_with_coordinates_must_lie_alike(saved, here, fits):
    coords = tuple(saved)
    found = decide(
        manifest(signature(variant(saved=topology(range(4), coords=coords)))),
        machine(4, coords=None if here is None else tuple(here)),
    )
    codes = [r.code.name for r in causes(only(found))]
    assert codes == ([] if fits else ["DEVICE_LAYOUT"])


# -- may it run -------------------------------------------------------------------------------------------------------


def code(**changes):
    return msgspec.structs.replace(CODE, **changes)


@pytest.mark.parametrize(
    ("verify", "saved", "here", "verdict", "reason"),
    [
        ("code", CODE, CODE, "LOADED", None),
        ("code", CODE, code(fingerprint="c" * 64), "PENDING", "CODE_CHANGED"),
        ("code", CODE, code(undecidable=("reads a file",)), "PENDING", "CODE_UNDECIDABLE"),
        ("code", code(undecidable=("reads a file",)), CODE, "PENDING", "CODE_UNDECIDABLE"),
        ("code", None, CODE, "PENDING", "CODE_UNDECIDABLE"),
        ("program", CODE, CODE, "PENDING", None),
        ("signature", CODE, code(fingerprint="c" * 64), "LOADED", None),
        ("signature", None, CODE, "LOADED", None),
    ],
)
def test_a_live_function_is_compared_as_asked(verify, saved, here, verdict, reason):
    decision = only(
        decide(
            manifest(signature(code=saved)), want=plan.Wanted(live=True, code=here), verify=verify
        )
    )
    assert decision.verdict.name == verdict
    assert [r.code.name for r in decision.reasons] == ([] if reason is None else [reason])
    if verdict == "PENDING":
        assert decision.if_same is Verdict.LOADED and decision.variant == 0


def test_without_a_live_function_there_is_nothing_to_compare():
    assert decide(manifest(signature(code=None, program=None))).verdict is Verdict.LOADED


@pytest.mark.parametrize("verify", ["code", "program"])
def test_a_bare_compiled_is_not_comparable_with_a_live_function(verify):
    decided = decide(manifest(signature(code=None, program=None)), want=LIVE, verify=verify)
    assert decided.verdict is Verdict.RECOMPILED
    assert [r.code for r in only(decided).reasons] == [ReasonCode.NOT_COMPARABLE]


def test_a_program_with_callbacks_needs_its_source():
    saved = manifest(signature(variant(callbacks=1)))
    decided = decide(saved)
    assert decided.verdict is Verdict.REFUSED
    assert [r.code for r in only(decided).reasons] == [ReasonCode.NEEDS_SOURCE]
    assert decide(saved, want=LIVE).verdict is Verdict.PENDING


# -- functions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "request_", "problem", "code"),
    [
        (manifest(version=(2, 0)), {}, None, "FORMAT_VERSION"),
        (manifest(), {"disabled": True}, None, "DISABLED"),
        (manifest(), {}, Reason(ReasonCode.CORRUPT, "damaged"), "CORRUPT"),
        (manifest(f=m.Function(absent=m.Absent(code="NEVER_CALLED", detail="x"))), {}, None, "NEVER_CALLED"),
        (manifest(f=m.Function(absent=m.Absent(code="of a later version", detail="x"))), {}, None, "NOT_SAVED"),
        (m.Manifest(version=(1, 0), body=m.Body()), {}, None, "NOT_SAVED"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_a_reason(saved, request_, problem, code):
    for want, verdict in ((LIVE, Verdict.RECOMPILED), (plan.Wanted(), Verdict.REFUSED)):
        decided = decide(saved, None, want, problem, **request_)
        assert decided.verdict is verdict
        assert [r.code.name for r in decided.reasons] == [code]


def test_no_manifest_is_routine_and_every_live_function_is_not_saved():
    asked = plan.Request(functions={"f": LIVE})
    decided = plan.decide(None, machine(), asked)["f"]
    assert (decided.verdict, [r.code for r in decided.reasons]) == (
        Verdict.RECOMPILED,
        [ReasonCode.NOT_SAVED],
    )
    assert plan.decide(None, machine(), plan.Request()) == {}


def test_all_that_is_saved_is_restored_unless_named():
    saved = manifest(g=m.Function(folder="g", signatures=(signature(),)))
    assert sorted(plan.decide(saved, machine(), plan.Request())) == ["f", "g"]
    asked = plan.Request(functions={"g": plan.Wanted()})
    assert sorted(plan.decide(saved, machine(), asked)) == ["g"]


def test_the_best_variant_is_taken_and_a_function_is_as_good_as_its_worst_signature():
    bad = variant(environment=environment(jaxlib="0"))
    decided = decide(manifest(signature(bad, variant()), signature(bad)))
    assert [d.verdict for d in decided.decisions] == [Verdict.LOADED, Verdict.REFUSED]
    assert decided.decisions[0].variant == 1
    assert decided.verdict is Verdict.REFUSED


@pytest.mark.parametrize(
    "changes", [{"count": 8}, {"count": 2}, {"ids": (0, 1)}, {"partitions": 8}, {"replicas": 3}]
)
def test_counts_that_do_not_add_up_never_reach_the_loader(changes):
    saved = topology(range(4), **changes) if "ids" not in changes else topology(range(4))
    saved = msgspec.structs.replace(saved, **changes)
    decided = decide(manifest(signature(variant(saved=saved))))
    assert [r.code for r in causes(only(decided))] == [ReasonCode.DEVICE_COUNT]

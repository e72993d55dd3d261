"""The public names, their parameters, and the handler names that lie in checkpoints.

A change here is a change for users: say it in the changelog, and follow the policy in CONTRIBUTING.md.
"""

from __future__ import annotations

import inspect

import orbax.checkpoint as ocp
import pytest

import orbax_aot as oaot
import orbax_aot.v1 as oaot_v1

PUBLIC = {
    "AotError": None,
    "AotFunction": None,
    "AotHandler": "state_handler, *, trust, timeout_secs, probe",
    "AotRestore": "item, *, fns, mesh, devices, verify, on_mismatch",
    "AotSave": "item, *, fns, save_args, custom_metadata, portable",
    "CacheDirectoryError": None,
    "ClientMismatchError": None,
    "CorruptArtifactError": None,
    "DeviceCountError": None,
    "DeviceTypeError": None,
    "Difference": None,
    "Executable": None,
    "FunctionReport": "verdict, reasons, seconds, nbytes, signatures, checked_by",
    "IncompatibleExecutableError": None,
    "Manifest": None,
    "NoExecutablesError": None,
    "NotSerializableError": None,
    "PartiallySerialized": None,
    "Precompiled": None,
    "Pruned": None,
    "Reason": "code, saved, current",
    "ReasonCode": None,
    "RestoreReport": None,
    "Restored": "state, fns",
    "RestoredFunctions": None,
    "SavedFunction": None,
    "SignatureError": None,
    "StepChangedError": None,
    "Trust": None,
    "UnknownTopologyError": None,
    "UnsupportedFunctionError": None,
    "UntrustedArtifactError": None,
    "Verdict": None,
    "attach": "path, fns, *, portable",
    "check": "path, mesh, devices, platform",
    "compile": "fun, /, *args, **kwargs",
    "diff": "a, b",
    "inspect": "path",
    "is_serializable": "compiled",
    "jit": "fun, /, *, platforms, **jit_kwargs",
    "load_compiled_from_serialized": None,
    "partially_serialize": None,
    "precompile": "path, topology, *, functions, mesh, progress",
    "prune": "path, *, functions, variants, platforms, portable, unused, dry_run",
    "remap_compile_options_device_assignment": None,
    "sign": "path, *, private_key, password, signing_certificate, certificates",
    "verify": "path, *, trust",
}
PUBLIC_V1 = {
    "AotFunctionsHandler": "",
    "AotHandler": "",
    "AotRestore": "item, *, fns, mesh, devices, verify, on_mismatch",
    "AotSave": "item, *, fns, portable, timeout_secs",
    "Restored": "state, fns",
    "add_handlers": "registry",
}


def parameters(value):
    """Names of the parameters as they stand in a `def`, without types and defaults."""
    signature = inspect.signature(value)
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
    if bare and bare[0].name == "self":
        bare = bare[1:]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))[1:-1]


def test_the_public_names_are_these():
    assert sorted(oaot.__all__) == sorted(PUBLIC)
    assert sorted(oaot_v1.__all__) == sorted(PUBLIC_V1)
    for name in PUBLIC:
        assert name in dir(oaot) and getattr(oaot, name) is not None


@pytest.mark.parametrize("name", [n for n, pinned in PUBLIC.items() if pinned is not None])
def test_the_parameters_are_these(name):
    assert parameters(getattr(oaot, name)) == PUBLIC[name]


@pytest.mark.parametrize("name", [n for n in PUBLIC_V1 if "Handler" not in n])
def test_the_parameters_for_v1_are_these(name):
    assert parameters(getattr(oaot_v1, name)) == PUBLIC_V1[name]


@pytest.mark.parametrize("name", [n for n in PUBLIC_V1 if n.endswith("Handler")])
def test_handlers_for_v1_are_made_without_arguments_as_its_registries_do(name):
    getattr(oaot_v1, name)()


def test_all_errors_are_aot_errors():
    errors = [getattr(oaot, n) for n in PUBLIC if n.endswith("Error")]
    assert all(issubclass(e, oaot.AotError) for e in errors)


def test_the_names_of_handlers_that_lie_in_checkpoints_are_these():
    assert oaot.AotHandler.typestr() == "orbax_aot.handler.AotHandler"
    assert oaot.AotHandler().typestr() == ocp.StandardCheckpointHandler.typestr()
    assert f"{oaot_v1.AotHandler.__module__}.{oaot_v1.AotHandler.__qualname__}" == (
        ocp.StandardCheckpointHandler.typestr()
    )
    json_handler = oaot_v1.AotFunctionsHandler
    assert f"{json_handler.__module__}.{json_handler.__qualname__}" == (
        ocp.JsonCheckpointHandler.typestr()
    )


def test_verdicts_and_reasons_are_these():
    assert [v.name for v in oaot.Verdict] == (
        ["LOADED", "REMAPPED", "REBUILT", "RECOMPILED", "PENDING", "REFUSED"]
    )
    assert sorted(c.name for c in oaot.ReasonCode) == sorted(
        [
            "DEVICE_COUNT",
            "MESH_SHAPE",
            "DEVICE_KIND",
            "DEVICE_LAYOUT",
            "PLATFORM",
            "PLATFORM_VERSION",
            "JAX_VERSION",
            "CPU_FEATURES",
            "XLA_FLAGS",
            "COMPILE_OPTIONS",
            "JAX_CONFIG",
            "CODE_CHANGED",
            "CODE_UNDECIDABLE",
            "PROGRAM_CHANGED",
            "SIGNATURE_CHANGED",
            "NOT_COMPARABLE",
            "CORRUPT",
            "UNTRUSTED",
            "FORMAT_VERSION",
            "NEEDS_SOURCE",
            "NOT_SERIALIZABLE",
            "NOT_SAVED",
            "NEVER_CALLED",
            "LOAD_FAILED",
            "TIMEOUT",
            "OTHER_PROCESS",
            "DISABLED",
        ]
    )

"""Compiled XLA executables saved beside the weights of an Orbax checkpoint.

    import orbax_aot as oaot

Names are imported when they are first used, so that reading a manifest imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orbax_aot.attaching import attach
    from orbax_aot.checking import check
    from orbax_aot.comparing import Difference, diff
    from orbax_aot.editing import Pruned, prune
    from orbax_aot.errors import (
        AotError,
        CacheDirectoryError,
        ClientMismatchError,
        CorruptArtifactError,
        DeviceCountError,
        DeviceTypeError,
        IncompatibleExecutableError,
        NoExecutablesError,
        NotSerializableError,
        SignatureError,
        StepChangedError,
        UnsupportedFunctionError,
        UntrustedArtifactError,
    )
    from orbax_aot.executable import (
        PartiallySerialized,
        is_serializable,
        load_compiled_from_serialized,
        partially_serialize,
        remap_compile_options_device_assignment,
    )
    from orbax_aot.functions import AotFunction, Executable, compile, jit
    from orbax_aot.handler import AotHandler, AotRestore, AotSave, Restored
    from orbax_aot.inspection import inspect
    from orbax_aot.manifest import Manifest
    from orbax_aot.precompiling import Precompiled, UnknownTopologyError, precompile
    from orbax_aot.report import FunctionReport, Reason, ReasonCode, RestoreReport, Verdict
    from orbax_aot.restored import RestoredFunctions, SavedFunction
    from orbax_aot.signing import sign, verify
    from orbax_aot.trust import Trust
    from orbax_aot.version import __version__

_HOMES = {
    "attaching": "attach",
    "checking": "check",
    "comparing": "Difference diff",
    "editing": "Pruned prune",
    "errors": (
        "AotError CacheDirectoryError ClientMismatchError CorruptArtifactError DeviceCountError DeviceTypeError "
        "IncompatibleExecutableError NoExecutablesError NotSerializableError SignatureError StepChangedError "
        "UnsupportedFunctionError UntrustedArtifactError"
    ),
    "executable": (
        "PartiallySerialized is_serializable load_compiled_from_serialized partially_serialize "
        "remap_compile_options_device_assignment"
    ),
    "functions": "AotFunction Executable compile jit",
    "handler": "AotHandler AotRestore AotSave Restored",
    "inspection": "inspect",
    "manifest": "Manifest",
    "precompiling": "Precompiled UnknownTopologyError precompile",
    "report": "FunctionReport Reason ReasonCode RestoreReport Verdict",
    "restored": "RestoredFunctions SavedFunction",
    "signing": "sign verify",
    "trust": "Trust",
    "version": "__version__",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    *sorted(n for n in _HOME_OF if not n.startswith("_")),
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'orbax_aot' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"orbax_aot.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})

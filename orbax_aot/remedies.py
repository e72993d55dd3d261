"""What someone can do about each reason: one sentence, as `orbax-aot check` prints it. Imports no jax."""

from __future__ import annotations

from orbax_aot.report import ReasonCode

REMEDIES = {
    ReasonCode.DEVICE_COUNT: "Restore on as many devices, precompile for this number, or let it be compiled again.",
    ReasonCode.MESH_SHAPE: "Pass a mesh with the saved axes, or precompile for this one.",
    ReasonCode.DEVICE_KIND: "Code for one kind of device does not run on another: precompile for this kind.",
    ReasonCode.DEVICE_LAYOUT: "Ask for the same shape of slice, or precompile for this one.",
    ReasonCode.PLATFORM: "Precompile for this platform; the StableHLO must be saved for it, by portable=(…).",
    ReasonCode.PLATFORM_VERSION: "Use the driver, runtime or plugin of the save, or let it be compiled again.",
    ReasonCode.JAX_VERSION: "Use the versions of the save, or let it be compiled again and save it.",
    ReasonCode.CPU_FEATURES: "Save and restore on one type of CPU, or set XLA_FLAGS=--xla_cpu_max_isa=… on all.",
    ReasonCode.XLA_FLAGS: "Set the same XLA_FLAGS and LIBTPU_INIT_ARGS.",
    ReasonCode.COMPILE_OPTIONS: "Nothing: the function asks for other compiler options.",
    ReasonCode.JAX_CONFIG: "Set the same JAX configuration.",
    ReasonCode.CODE_CHANGED: "Nothing, if you changed it.",
    ReasonCode.CODE_UNDECIDABLE: "The programs are compared at the first call; see docs/fingerprint.md.",
    ReasonCode.PROGRAM_CHANGED: "Nothing: the new program is compiled.",
    ReasonCode.SIGNATURE_CHANGED: "Nothing: the new signature is saved with the next step.",
    ReasonCode.NOT_COMPARABLE: "Save an oaot.jit function instead of a jax.stages.Compiled.",
    ReasonCode.CORRUPT: "Save this step again, and find out what damaged it.",
    ReasonCode.UNTRUSTED: "Check the owner and the permissions of the files, or their signature.",
    ReasonCode.FORMAT_VERSION: "Update orbax-aot.",
    ReasonCode.NEEDS_SOURCE: "Pass the live function to the restore.",
    ReasonCode.NOT_SERIALIZABLE: "The function must change to be saved; the detail says what it holds.",
    ReasonCode.NOT_SAVED: "Check the name, or add the function by attach.",
    ReasonCode.NEVER_CALLED: "Call or compile the function before it is saved.",
    ReasonCode.LOAD_FAILED: "Look into the log; the runtime refused the executable.",
    ReasonCode.TIMEOUT: "Raise timeout_secs, or save fewer functions.",
    ReasonCode.OTHER_PROCESS: "Look into the log of the other process.",
    ReasonCode.DISABLED: "Unset ORBAX_AOT.",
}

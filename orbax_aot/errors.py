"""The exceptions of this package; all derive from `AotError`."""

from __future__ import annotations


class AotError(Exception):
    """Base of every error this package raises."""


class ClientMismatchError(AotError, ValueError):
    """Execution devices belong to another PJRT client than the backend, or to several."""


class DeviceTypeError(AotError, ValueError):
    """Something in a list of execution devices is not a device."""


class DeviceCountError(AotError, ValueError):
    """The number of execution devices is not the number the executable was compiled for."""


class NotSerializableError(AotError, ValueError):
    """The compiled object holds what plain data cannot describe."""


class UnsupportedFunctionError(AotError, TypeError, ValueError):
    """A function of a kind that cannot be lowered, saved or restored."""


class CacheDirectoryError(AotError, ValueError):
    """A call that needs a cache directory was given none."""


class SignatureError(AotError, TypeError):
    """The arguments do not match any saved signature."""


class IncompatibleExecutableError(AotError, ValueError):
    """A saved executable cannot run here, and recompiling was not allowed or not possible."""


class CorruptArtifactError(AotError, ValueError):
    """A file under `_aot` is damaged, or not what its manifest says."""


class UntrustedArtifactError(AotError, ValueError):
    """A saved executable may not be loaded under the handler's trust policy."""


class NoExecutablesError(AotError, FileNotFoundError):
    """A path leads to no item with executables, or to several."""

    def __init__(self, message: str, several: bool = False):
        super().__init__(message)
        self.several = several


class StepChangedError(AotError):
    """A committed step was changed by another writer while a change to it was prepared."""

"""Libraries: whose code is named and pinned by its installed build instead of being walked.

Three kinds of modules are told apart. *Trusted* libraries and the *pure* part of the standard
library depend on nothing but arguments, builds and settings that are compared elsewhere: their
objects are written by name. The rest of the standard library, and a few functions of trusted
libraries, read the outer world: reaching them cannot be decided. Everything else, installed or
not, is walked.
"""

from __future__ import annotations

import base64
import csv
import enum
import functools
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
import types
from collections.abc import Mapping


def words(text: str) -> frozenset[str]:
    """The words of a text, for long lists of names."""
    return frozenset(text.split())


TRUSTED_DISTRIBUTIONS: Mapping[str, str] = {
    "absl": "absl-py",
    "chex": "chex",
    "einops": "einops",
    "flax": "flax",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "jaxtyping": "jaxtyping",
    "ml_dtypes": "ml_dtypes",
    "numpy": "numpy",
    "opt_einsum": "opt_einsum",
    "optax": "optax",
    "scipy": "scipy",
    "toolz": "toolz",
    "typing_extensions": "typing_extensions",
}
# This package compiles functions and is no part of them.
OWN_PACKAGE = "orbax_aot"

_PURE_STANDARD_LIBRARY = words(
    "__future__ _abc _bisect _collections _collections_abc _functools _heapq _operator _struct"
    " _thread _typing _weakrefset abc base64 binascii bisect builtins cmath collections contextlib"
    " copy copyreg dataclasses decimal enum fractions functools hashlib heapq inspect itertools"
    " json keyword logging math numbers operator re reprlib statistics string struct textwrap"
    " traceback types typing unicodedata warnings"
)
_PURE_NAMES = words(
    "sys:byteorder sys:float_info sys:maxsize sys:version_info sys:hexversion sys:implementation"
    " sys:exc_info os:PathLike threading:local"
)
# What trusted libraries and pure modules offer that depends on the machine, files or the process.
_IMPURE_NAMES = words(
    "builtins:open builtins:input builtins:eval builtins:exec builtins:compile"
    " builtins:__import__ builtins:globals builtins:locals builtins:id builtins:hash"
    " builtins:breakpoint builtins:help"
    " numpy:load numpy:loadtxt numpy:genfromtxt numpy:fromfile numpy:memmap numpy:fromregex"
    " numpy:random jax.numpy:load jax.numpy:fromfile"
    " jax:devices jax:local_devices jax:device_count jax:local_device_count jax:process_index"
    " jax:process_count jax:process_indices jax:default_backend jax:live_arrays"
    " typing:get_type_hints inspect:currentframe inspect:stack inspect:getsource"
    " inspect:getsourcelines inspect:getsourcefile inspect:getfile inspect:getdoc"
    " inspect:getmodule inspect:get_annotations traceback:extract_stack contextlib:chdir"
    " absl.logging:get_verbosity absl.logging:vlog_is_on absl.logging:level_debug"
    " absl.logging:level_info"
)
_IMPURE_MODULES = (
    "numpy.random", "numpy.lib.npyio", "numpy.lib._npyio_impl", "numpy.lib.format",
    "numpy.ctypeslib", "numpy.f2py", "jax._src.xla_bridge", "jax._src.distributed",
    "jax.experimental.multihost_utils", "jax.distributed", "flax.io", "flax.training.checkpoints",
    "absl.flags", "absl.app", "scipy.io", "scipy.stats", "jax._src.debugger",
)  # fmt: skip
# Reaching one of these makes every attribute count, not only those that code names.
COMPUTED_ACCESS = words(
    "builtins:getattr builtins:hasattr builtins:vars builtins:dir operator:attrgetter"
    " _operator:attrgetter operator:methodcaller _operator:methodcaller inspect:getmembers"
    " inspect:getmembers_static inspect:getattr_static"
)
# Reaching one of these makes constructors count of objects that code only uses.
CLASS_ACCESS = frozenset({"builtins:type"})


class Kind(enum.Enum):
    """How the objects of a module are looked at."""

    NAMED = "named"
    IMPURE = "impure"
    OWN = "own"
    USER = "user"


_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


@functools.cache
def _standard_library_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    paths.add(os.path.dirname(os.__file__))  # where a virtual environment really takes it from
    return tuple(sorted(os.path.realpath(path) + os.sep for path in paths))


def _top(module_name: str) -> str:
    return module_name.partition(".")[0]


_kinds: dict[str, Kind] = {}


def kind_of_module(module_name: str) -> Kind:
    """How the module of this (absolute) name is looked at."""
    kind = _kinds.get(module_name)
    if kind is None:
        kind = _find_kind(module_name)
        if module_name in sys.modules:
            _kinds[module_name] = kind
    return kind


def _hides_standard_library(top: str) -> bool:
    """Whether a file of the user's stands in for a module of the standard library."""
    path = getattr(sys.modules.get(top), "__file__", None)
    return isinstance(path, str) and not _in_standard_library(path)


def _in_standard_library(path: str) -> bool:
    real = os.path.realpath(path)
    return any(
        real.startswith(folder) and not real[len(folder) :].startswith(_PACKAGE_FOLDERS)
        for folder in _standard_library_folders()
    )


def _find_kind(module_name: str) -> Kind:
    top = _top(module_name)
    if top == OWN_PACKAGE:
        return Kind.OWN
    if top in TRUSTED_DISTRIBUTIONS:
        inside = any(
            module_name == prefix or module_name.startswith(prefix + ".")
            for prefix in _IMPURE_MODULES
        )
        return Kind.IMPURE if inside else Kind.NAMED
    if top in sys.stdlib_module_names and _hides_standard_library(top):
        return Kind.USER
    if top in _PURE_STANDARD_LIBRARY:
        return Kind.NAMED
    if top in sys.stdlib_module_names:
        return Kind.IMPURE
    return Kind.USER


def is_impure(module_name: str, name: str) -> bool:
    """Whether the object `name` of a library module depends on more than its arguments."""
    path = f"{module_name}:{name.partition('.')[0]}"
    if path in _PURE_NAMES:
        return False
    return path in _IMPURE_NAMES or kind_of_module(module_name) is Kind.IMPURE


def impure_names_in(module_name: str) -> list[str]:
    """The attributes of a library module that cannot be decided when reached through it."""
    prefix = module_name + ":"
    names = [path[len(prefix) :] for path in _IMPURE_NAMES if path.startswith(prefix)]
    below = module_name + "."
    names += [path[len(below) :].partition(".")[0] for path in _IMPURE_MODULES
              if path.startswith(below)]  # fmt: skip
    return sorted(set(names))


_roots: dict[str, str] = {}  # of trusted packages (ending in a separator) and single modules


def _root(top: str) -> str | None:
    root = _roots.get(top)
    if root is None:
        module = sys.modules.get(top)
        origin = getattr(module, "__file__", None)
        if not origin:
            return None
        root = os.path.realpath(origin)
        if hasattr(module, "__path__"):
            root = os.path.dirname(root) + os.sep
        _roots[top] = root
    return root


def _trusted_file(real: str) -> tuple[str, Kind] | None:
    for top in (*TRUSTED_DISTRIBUTIONS, OWN_PACKAGE):
        root = _root(top)
        if root is not None and (real == root or real.startswith(root)):
            inside = real[len(root) :] if real != root else ""
            return f"{top}/{inside}", kind_of_module(top)
    return None


def _standard_library_file(real: str) -> tuple[str, Kind] | None:
    if not _in_standard_library(real):
        return None
    folder = next(f for f in _standard_library_folders() if real.startswith(f))
    inside = real[len(folder) :]
    top = inside.partition(os.sep)[0].removesuffix(".py")
    return inside, Kind.NAMED if top in _PURE_STANDARD_LIBRARY else Kind.IMPURE


_UNKNOWN = object()
_files: dict[str, tuple[str, Kind] | None] = {}


def library_file(path: str) -> tuple[str, Kind] | None:
    """The name inside its library of a source file, or None where the file is the user's."""
    known = _files.get(path, _UNKNOWN)
    if known is not _UNKNOWN:
        return known  # type: ignore[return-value]
    found = None
    if path.startswith("<frozen "):
        found = (path, Kind.NAMED)
    else:
        real = os.path.realpath(path)
        found = _trusted_file(real) or _standard_library_file(real)
    _files[path] = found
    return found


def name_in_library(value: object) -> tuple[str, str] | None:
    """(module, qualified name) where a library offers exactly this object, else None."""
    module_name = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if module_name is None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, types.ModuleType):
            module_name = owner.__name__
    if not isinstance(module_name, str) or not isinstance(name, str):
        return None
    if kind_of_module(module_name) is Kind.USER:
        return None
    found: object = sys.modules.get(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module_name, name) if found is value and found is not None else None


# -- builds ---------------------------------------------------------------------------------------


def _read_record(record: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The digest of what a RECORD file says of code, and each such file's size and hash."""
    lines = []
    files = {}
    for row in csv.reader(record.splitlines()):
        if len(row) == 3 and row[1] and (row[0].endswith(".py") or ".so" in row[0]):
            lines.append(",".join(row))
            files[row[0]] = (int(row[2]) if row[2].isdigit() else -1, row[1])
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest(), files


def _record_path(record: str) -> str | None:
    for line in record.splitlines():
        name = line.partition(",")[0]
        if name.endswith(".dist-info/RECORD"):
            return name
    return None


class Build:
    """One installed distribution: version, digest of its files' record, files edited since."""

    def __init__(self, package: str, distribution: str) -> None:
        self.package = package
        self.distribution = distribution
        self.version = "absent"
        self.digest = ""
        self.root = ""
        self.files: dict[str, tuple[int, str]] = {}
        self.recorded_at = 0.0
        self.problem: str | None = None
        try:
            self._read()
        except importlib.metadata.PackageNotFoundError:
            if package in sys.modules:
                self.problem = f"{package} is loaded but is no installed distribution"
        except Exception as error:  # a broken installation must not break a restore
            self.problem = f"{type(error).__name__} while reading the installed files of {package}"

    def _read(self) -> None:
        found = importlib.metadata.distribution(self.distribution)
        self.version = found.version
        record = found.read_text("RECORD") or ""
        self.digest, self.files = _read_record(record)
        path = _record_path(record)
        self.root = str(found.locate_file(""))
        if not self.files or path is None:
            self.problem = f"{self.package} has no record of its installed files"
            return
        self.recorded_at = os.stat(os.path.join(self.root, path)).st_mtime

    def edited_files(self, module_files: list[str]) -> list[tuple[str, str]]:
        """Loaded files that are not as installed, each with the hash of what it holds now."""
        edited = []
        for path in module_files:
            name = os.path.relpath(path, self.root).replace(os.sep, "/")
            if name.startswith("../"):
                self.problem = f"{self.package} is loaded from outside its installed distribution"
                continue
            size, recorded = self.files.get(name, (-1, ""))
            stat = os.stat(path)
            if stat.st_size == size and stat.st_mtime <= self.recorded_at:
                continue
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).digest()
            text = "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            if text != recorded:
                edited.append((name, text))
        return sorted(edited)


class _Builds:
    """The builds of all trusted libraries, read once; files of modules loaded later are added."""

    def __init__(self) -> None:
        self._builds = {top: Build(top, name) for top, name in TRUSTED_DISTRIBUTIONS.items()}
        self._seen: set[str] = set()
        self._edited: dict[str, list[tuple[str, str]]] = {}

    def describe(self) -> tuple[list[str], list[str]]:
        """(lines for the digest, problems that make it undecidable)."""
        new: dict[str, list[str]] = {}
        for name, module in list(sys.modules.items()):
            top = _top(name)
            if top in self._builds and name not in self._seen:
                self._seen.add(name)
                path = getattr(module, "__file__", None)
                if isinstance(path, str):
                    new.setdefault(top, []).append(path)
        for top, paths in new.items():
            try:
                self._edited.setdefault(top, []).extend(self._builds[top].edited_files(paths))
            except OSError as error:
                self._builds[top].problem = f"{type(error).__name__} on the files of {top}"
        lines = [f"{b.package} {b.version} {b.digest}" for b in self._builds.values()]
        for top, edited in sorted(self._edited.items()):
            lines += [f"edited {top} {name} {digest}" for name, digest in sorted(edited)]
        return lines, [b.problem for b in self._builds.values() if b.problem]


_builds: _Builds | None = None


def describe_builds() -> tuple[list[str], list[str]]:
    """(lines that say which builds of the trusted libraries are installed, what is unclear)."""
    global _builds
    if _builds is None:
        _builds = _Builds()
    return _builds.describe()


def forget() -> None:
    """Forgets what was read of installed libraries; for tests."""
    global _builds
    _builds = None
    _files.clear()
    _kinds.clear()
    _roots.clear()

"""The format: strict typed structs of everything `_aot/manifest.json` says, and their JSON.

Imports no jax, so that a manifest can be read and judged without it. `docs/format.md` is the specification; the
structs here are its implementation, field by field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orbax_aot import strict_json
from orbax_aot.errors import CorruptArtifactError

FORMAT = "orbax-aot"
# History of the format (major, minor):
#   [1, 0] 2026-12-01  first version
FORMAT_VERSION = (1, 0)

MAX_MANIFEST_NBYTES = 64 << 20  # 500 arrays take 200 kB
MAX_PAYLOAD_NBYTES = 16 << 30
MAX_RANK = 64
MAX_DEVICES = 1 << 20
MAX_NAME = 4096  # characters of a function's name or of a path of keys


class _Struct(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


class Mesh(_Struct, frozen=True, kw_only=True):
    """Named axes over device positions; `positions` index the variant's device list, row-major over the axes."""

    axes: tuple[tuple[str, int], ...]
    types: tuple[str, ...]
    positions: tuple[int, ...] | None = None  # None: an abstract mesh
    device: tuple[str, int | None, str] | None = None  # abstract device: kind, cores, platform

    @property
    def size(self) -> int:
        size = 1
        for _, n in self.axes:
            size *= n
        return size


class Unconstrained(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dimension whose sharding is left to the compiler (`PartitionSpec.UNCONSTRAINED`)."""

    unconstrained: bool


class Sharding(_Struct, frozen=True, kw_only=True):
    """One of three: named (`mesh`, `spec`), one device (`device`), or an HLO sharding (`hlo`, `positions`)."""

    mesh: int | None = None
    spec: tuple[str | tuple[str, ...] | Unconstrained | None, ...] = ()
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    unreduced_kind: str | None = None
    device: int | None = None
    hlo: str | None = None  # base64 of an xla.OpSharding
    positions: tuple[int, ...] | None = None
    memory: str | None = None


class Layout(_Struct, frozen=True, kw_only=True):
    """A device-local layout: dimensions from major to minor, and tiles."""

    order: tuple[int, ...]
    tiling: tuple[tuple[int, ...], ...] | None = None
    bits: int = 0


class Leaf(_Struct, frozen=True, kw_only=True):
    """One array (or token, or ref) that goes in or comes out."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    sharding: int | None  # as it was when compiled; null: not committed to devices
    donated: bool
    kind: str = "array"  # "array", "ref" or "token"
    type: int | None = None  # the sharding inside the aval (explicit axes), over an abstract mesh
    space: str | None = None  # memory space of the aval, where not device memory
    layout: int | None = None  # layout of the aval, where it has one


class Topology(_Struct, frozen=True, kw_only=True):
    """Devices, in the order of the device assignment (a variant) or of the client (a machine)."""

    platform: str
    platform_version: str
    device_kind: str
    count: int
    replicas: int
    partitions: int
    coords: tuple[tuple[int, ...], ...] | None
    ids: tuple[int, ...]
    processes: tuple[int, ...]


class Environment(_Struct, frozen=True, kw_only=True):
    """The software and settings an executable depends on."""

    jax: str
    jaxlib: str
    cpu_features: str
    xla_flags: dict[str, str]
    config: dict[str, Any]
    options: dict[str, Any]


class File(_Struct, frozen=True, kw_only=True):
    """A compressed file and the digests of its stored and of its raw bytes."""

    file: str
    sha256: str
    raw_sha256: str
    nbytes: int
    raw_nbytes: int
    codec: str


class Cut(File, frozen=True, kw_only=True):
    """Bytes that were cut out of a file, at offset `at` of its raw bytes, since other files hold them too."""

    at: int


class CutFile(File, frozen=True, kw_only=True):
    """A file whose raw bytes are its own with those of `cuts` put back in.

    `raw_sha256` and `raw_nbytes` are of the whole; `sha256` and `nbytes` of the stored rest.
    """

    cuts: tuple[Cut, ...] = ()


class Constant(File, frozen=True, kw_only=True):
    """A constant that the program takes as a hidden leading argument."""

    shape: tuple[int, ...]
    dtype: str
    raw_shape: tuple[int, ...]
    raw_dtype: str
    weak_type: bool = False


class Layouts(_Struct, frozen=True, kw_only=True):
    """Indices into the layout table, one for each kept input or each output; null: the default."""

    inputs: tuple[int | None, ...] = ()
    dispatch: tuple[int | None, ...] = ()
    outputs: tuple[int | None, ...] = ()


class Variant(CutFile, frozen=True, kw_only=True):
    """One executable of a signature: for one topology and environment."""

    topology: Topology
    environment: Environment
    name: str
    kept: tuple[int, ...]  # over constants and inputs; the others are unused
    in_shardings: tuple[int | None, ...]
    out_shardings: tuple[int | None, ...]
    in_types: tuple[int | None, ...]
    out_types: tuple[int | None, ...]
    layouts: Layouts
    committed: bool = True
    no_kwargs: bool = False
    arg_names: tuple[str, ...] | None = None
    constants: tuple[Constant, ...] = ()
    custom_calls: tuple[str, ...]
    callbacks: int = 0
    effects: bool = False  # needs runtime tokens, as prints and callbacks do
    out_refs: tuple[int | None, ...] | None = None  # which input ref an output is written to
    rank: int | None
    hlo_fingerprint: str | None
    cost: dict[str, float]
    memory: dict[str, int]

    @property
    def shared(self) -> tuple[File, ...]:
        """The files beside all functions that it needs."""
        return (*self.constants, *self.cuts)


class Code(_Struct, frozen=True, kw_only=True):
    """Fingerprints of the Python code: of the function alone, and of a call with its arguments' static parts."""

    fingerprint: str
    call: str
    undecidable: tuple[str, ...]


class Portable(CutFile, frozen=True, kw_only=True):
    """The StableHLO of a signature, as `jax.export` serializes it, with flat arguments and results."""

    platforms: tuple[str, ...]


class Absent(_Struct, frozen=True, kw_only=True):
    """Why something was not saved: a reason code and a sentence."""

    code: str
    detail: str


class Signature(_Struct, frozen=True, kw_only=True):
    """One way of calling a function: its arguments and results by key path, and what was compiled for them."""

    folder: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    output_tree: Any
    static: tuple[tuple[str, Any], ...] = ()
    context: dict[str, Any] | None = None  # null: not known
    code: Code | None
    program: str | None
    portable: Portable | None
    portable_absent: Absent | None = None
    variants: tuple[Variant, ...] = ()
    absent: Absent | None = None


class Function(_Struct, frozen=True, kw_only=True):
    """A saved function, or the reason why it was not saved."""

    folder: str = ""
    signatures: tuple[Signature, ...] = ()
    absent: Absent | None = None


class StateLeaf(_Struct, frozen=True, kw_only=True):
    """What Orbax does not keep of an array of the state."""

    sharding: int | None
    weak_type: bool


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest proper."""

    created_by: dict[str, str] = {}
    kind: str = "state"  # or "functions": an item that holds no state
    state: dict[str, StateLeaf] = {}
    meshes: tuple[Mesh, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    layouts: tuple[Layout, ...] = ()
    functions: dict[str, Function] = {}


class _Document(msgspec.Struct):
    format: str
    version: tuple[int, int]
    sha256: str
    body: msgspec.Raw


class Manifest(msgspec.Struct, frozen=True):
    """A read manifest: its version and, where this package knows the major version, its body."""

    version: tuple[int, int]
    body: Body
    path: str = ""

    @property
    def functions(self) -> Mapping[str, Function]:
        return self.body.functions

    @property
    def is_readable(self) -> bool:
        return self.version[0] == FORMAT_VERSION[0]


# Made here, since this evaluates annotations: in a restore no code is compiled.
_DOCUMENT = msgspec.json.Decoder(_Document)
_BODY = msgspec.json.Decoder(Body)


class Tables:
    """The meshes, shardings and layouts of a manifest while it is written, each stored once."""

    def __init__(self) -> None:
        self.meshes: dict[Mesh, int] = {}
        self.shardings: dict[Sharding, int] = {}
        self.layouts: dict[Layout, int] = {}

    @staticmethod
    def _index(table: dict[Any, int], value: Any) -> int:
        return table.setdefault(value, len(table))

    def add_mesh(self, mesh: Mesh) -> int:
        return self._index(self.meshes, mesh)

    def add_sharding(self, sharding: Sharding) -> int:
        return self._index(self.shardings, sharding)

    def add_layout(self, layout: Layout) -> int:
        return self._index(self.layouts, layout)

    def body(self) -> Body:
        """Returns a body that holds these tables and nothing else."""
        return Body(
            meshes=tuple(self.meshes),
            shardings=tuple(self.shardings),
            layouts=tuple(self.layouts),
        )

    def adopt_sharding(self, index: int | None, body: Body) -> int | None:
        """Returns the index in these tables of a sharding of another manifest `body`."""
        if index is None:
            return None
        value = body.shardings[index]
        if value.mesh is not None:
            value = msgspec.structs.replace(value, mesh=self.add_mesh(body.meshes[value.mesh]))
        return self.add_sharding(value)

    def adopt_function(self, function: Function, body: Body) -> Function:
        """Returns `function` of another manifest `body` with its table indices moved into these tables."""
        signatures = tuple(self.adopt_signature(s, body) for s in function.signatures)
        return msgspec.structs.replace(function, signatures=signatures)

    def adopt_signature(self, signature: Signature, body: Body) -> Signature:
        """Returns `signature` of another manifest `body` with its table indices moved into these tables."""
        sharding = lambda index: self.adopt_sharding(index, body)

        def layout(index: int | None) -> int | None:
            return None if index is None else self.add_layout(body.layouts[index])

        def leaf(value: Leaf) -> Leaf:
            return msgspec.structs.replace(
                value,
                sharding=sharding(value.sharding),
                type=sharding(value.type),
                layout=layout(value.layout),
            )

        def variant(value: Variant) -> Variant:
            return msgspec.structs.replace(
                value,
                in_shardings=tuple(map(sharding, value.in_shardings)),
                out_shardings=tuple(map(sharding, value.out_shardings)),
                in_types=tuple(map(sharding, value.in_types)),
                out_types=tuple(map(sharding, value.out_types)),
                layouts=Layouts(
                    inputs=tuple(map(layout, value.layouts.inputs)),
                    dispatch=tuple(map(layout, value.layouts.dispatch)),
                    outputs=tuple(map(layout, value.layouts.outputs)),
                ),
            )

        return msgspec.structs.replace(
            signature,
            inputs=tuple(map(leaf, signature.inputs)),
            outputs=tuple(map(leaf, signature.outputs)),
            variants=tuple(map(variant, signature.variants)),
        )


def files_of(body: Body) -> dict[str, File]:
    """Returns the files that a manifest names, each once, by their path below the folder it lies in."""
    files: dict[str, File] = {}
    for function in body.functions.values():
        for signature in function.signatures:
            folder = f"{function.folder}/{signature.folder}"
            for variant in signature.variants:
                files[f"{folder}/{variant.file}"] = variant
                files.update({file.file: file for file in variant.shared})
            if signature.portable is not None:
                files[f"{folder}/{signature.portable.file}"] = signature.portable
                files.update({file.file: file for file in signature.portable.cuts})
    return files


def rebuilt(body: Body, functions: Mapping[str, Function], tables: Tables) -> Body:
    """Returns `body` with other functions, over tables that hold what they and the state need and nothing else.

    The functions' indices are those of `tables` already; the state's are moved there.
    """
    state = {
        path: msgspec.structs.replace(leaf, sharding=tables.adopt_sharding(leaf.sharding, body))
        for path, leaf in body.state.items()
    }
    return msgspec.structs.replace(
        tables.body(),
        created_by=body.created_by,
        kind=body.kind,
        state=state,
        functions=dict(functions),
    )


def encode(body: Body) -> bytes:
    """Returns the bytes of `manifest.json` for `body`.

    Raises:
      ValueError: they could not be read again.
    """
    text = msgspec.json.encode(body)
    digest = hashlib.sha256(text).hexdigest()
    document = _Document(
        format=FORMAT, version=FORMAT_VERSION, sha256=digest, body=msgspec.Raw(text)
    )
    data = msgspec.json.encode(document)
    if len(data) > MAX_MANIFEST_NBYTES:
        raise ValueError(f"a manifest of {len(data)} bytes; at most {MAX_MANIFEST_NBYTES} are read")
    decode(data)  # what could not be read, for its depth or for a number, is better not written
    return data


def decode(data: bytes, path: str = "manifest.json") -> Manifest:
    """Reads and checks the bytes of a `manifest.json`.

    A manifest of a newer major version comes back with an empty body, since only a reader of that version knows
    what its fields mean.

    Raises:
      CorruptArtifactError: what was found does not have the form of a manifest or does not match its digest; the
        message has the path and the JSON path.
    """
    document = _decode_document(data, path)
    if document.version[0] != FORMAT_VERSION[0]:
        return Manifest(version=document.version, body=Body(), path=path)
    try:
        strict_json.require(data)
        body = _BODY.decode(document.body)
    except (msgspec.DecodeError, RecursionError, strict_json.StrictJsonError) as e:
        why = str(e)
        if isinstance(e, msgspec.DecodeError):  # its paths begin in the body
            why = why.replace("`$", "`$.body")
        raise CorruptArtifactError(f"{path}: {why}. Save this step again.") from e
    _check_references(body, path)
    return Manifest(version=document.version, body=body, path=path)


def _decode_document(data: bytes, path: str) -> _Document:
    """Reads the outermost level and compares the digest; looks no further into the body."""
    try:
        document = _DOCUMENT.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CorruptArtifactError(f"{path}: not a manifest: {e}. Save this step again.") from e
    if document.format != FORMAT:
        raise CorruptArtifactError(
            f"{path}: expected format {FORMAT!r}, found {document.format[:40]!r}."
        )
    digest = hashlib.sha256(document.body).hexdigest()
    if digest != document.sha256:
        raise CorruptArtifactError(
            f"{path}: the digest of the body is {digest[:12]}…, expected {document.sha256[:12]}…. "
            "The file was damaged or edited; save this step again."
        )
    return document


def _check_references(body: Body, path: str) -> None:
    """Raises `CorruptArtifactError` where a table index or a size cannot be meant."""

    def require(index: int | None, table: Sequence[Any], where: str) -> None:
        if index is not None and not 0 <= index < len(table):
            raise CorruptArtifactError(
                f"{path}: {where}: index {index} of a table of {len(table)} entries."
            )

    for i, mesh in enumerate(body.meshes):
        where = f"$.body.meshes[{i}]"
        if any(n < 1 or n > 1 << 20 for _, n in mesh.axes) or len(mesh.axes) > MAX_RANK:
            raise CorruptArtifactError(f"{path}: {where}: axis sizes {mesh.axes} are out of range.")
        if len(mesh.types) != len(mesh.axes) or (
            mesh.positions is not None and len(mesh.positions) != mesh.size
        ):
            raise CorruptArtifactError(f"{path}: {where}: axes, types and positions disagree.")
    for i, sharding in enumerate(body.shardings):
        require(sharding.mesh, body.meshes, f"$.body.shardings[{i}].mesh")
    for path_, leaf in body.state.items():
        require(leaf.sharding, body.shardings, f"$.body.state[{path_!r}].sharding")
    for name, function in body.functions.items():
        if len(name) > MAX_NAME:
            raise CorruptArtifactError(
                f"{path}: $.body.functions: a name of {len(name)} characters."
            )
        for i, signature in enumerate(function.signatures):
            where = f"$.body.functions[{name!r}].signatures[{i}]"
            for leaf in (*signature.inputs, *signature.outputs):
                require(leaf.sharding, body.shardings, f"{where}…{leaf.path}.sharding")
                require(leaf.type, body.shardings, f"{where}…{leaf.path}.type")
                require(leaf.layout, body.layouts, f"{where}…{leaf.path}.layout")
                if len(leaf.shape) > MAX_RANK or any(n < 0 or n >= 1 << 62 for n in leaf.shape):
                    raise CorruptArtifactError(
                        f"{path}: {where}…{leaf.path}.shape: {leaf.shape} is out of range."
                    )
            if signature.portable is not None:
                _check_sizes(signature.portable, f"{where}.portable", path)
            for j, variant in enumerate(signature.variants):
                _check_variant(variant, signature, body, f"{where}.variants[{j}]", path, require)


def _check_variant(
    variant: Variant, signature: Signature, body: Body, where: str, path: str, require: Any
) -> None:
    """Raises `CorruptArtifactError` where the parts of a variant do not fit together."""
    for name in ("in_shardings", "out_shardings", "in_types", "out_types"):
        for index in getattr(variant, name):
            require(index, body.shardings, f"{where}.{name}")
    for name in ("inputs", "dispatch", "outputs"):
        for index in getattr(variant.layouts, name):
            require(index, body.layouts, f"{where}.layouts.{name}")
    n_all = len(variant.constants) + len(signature.inputs)
    if len(set(variant.kept)) != len(variant.kept) or any(not 0 <= k < n_all for k in variant.kept):
        raise CorruptArtifactError(f"{path}: {where}.kept: not indices of {n_all} inputs.")
    n_out = len(signature.outputs if variant.out_refs is None else variant.out_refs)
    lengths = {
        "in_shardings": (len(variant.in_shardings), len(variant.kept)),
        "in_types": (len(variant.in_types), len(variant.kept)),
        "layouts.inputs": (len(variant.layouts.inputs), len(variant.kept)),
        "layouts.dispatch": (len(variant.layouts.dispatch), len(variant.kept)),
        "out_shardings": (len(variant.out_shardings), n_out),
        "out_types": (len(variant.out_types), n_out),
        "layouts.outputs": (len(variant.layouts.outputs), n_out),
    }
    for name, (found, expected) in lengths.items():
        if found != expected:
            raise CorruptArtifactError(
                f"{path}: {where}.{name}: {found} entries, expected {expected}."
            )
    files: list[File] = [variant, *variant.shared]
    if signature.portable is not None:
        files += [signature.portable, *signature.portable.cuts]
    for file in files:
        _check_sizes(file, where, path)
    _check_topology(variant.topology, f"{where}.topology", path)


def _check_topology(topology: Topology, where: str, path: str) -> None:
    """Raises `CorruptArtifactError` where the numbers of devices disagree: a wrong one aborts in native code."""
    count = topology.count
    fits = (
        0 < count <= MAX_DEVICES
        and topology.replicas > 0
        and topology.partitions > 0
        and topology.replicas * topology.partitions == count
        and len(topology.ids) == len(topology.processes) == count
        and (topology.coords is None or len(topology.coords) == count)
    )
    if not fits:
        raise CorruptArtifactError(
            f"{path}: {where}: {count} devices, {topology.replicas}x{topology.partitions} replicas x partitions, "
            f"{len(topology.ids)} ids and {len(topology.processes)} processes disagree."
        )


def _check_sizes(file: File, where: str, path: str) -> None:
    """Raises `CorruptArtifactError` for sizes that no file of this package has."""
    if not all(0 <= n <= MAX_PAYLOAD_NBYTES for n in (file.nbytes, file.raw_nbytes)):
        raise CorruptArtifactError(
            f"{path}: {where}: sizes {file.nbytes} and {file.raw_nbytes} are out of range."
        )

"""Executables for machines that are not here, from the StableHLO of a committed step, without the source."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from absl import logging
from etils import epath

from orbax_aot import artifact as artifact_lib
from orbax_aot import executable as executable_lib
from orbax_aot import locations
from orbax_aot import manifest as m
from orbax_aot import portable as portable_lib
from orbax_aot import topology as topology_lib
from orbax_aot._jax import topologies
from orbax_aot.editing import Edit
from orbax_aot.errors import AotError, CorruptArtifactError
from orbax_aot.report import Reason, ReasonCode

_CPU = re.compile(r"cpu:(\d+)")
_MAX_CPUS = 4096
_CUDA = re.compile(r"cuda:(.+):(\d+)")
_MAX_GPUS = 64
# Generations that libtpu may know, by the number of dimensions of their slices; the sizes are tried.
_TPU_GENERATIONS = (
    *((name, 2) for name in ("v2", "v3", "v5e", "v6e")),
    *((name, 3) for name in ("v4", "v5p", "tpu7x")),
)
_TPU_SHAPES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"),
}


class UnknownTopologyError(AotError, ValueError):
    """A topology that cannot be compiled for, or that does not fit the mesh that is asked for."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where to compile for: a topology's name and its devices, in its own order."""

    name: str
    devices: tuple[Any, ...]

    @property
    def platform(self) -> str:
        return str(self.devices[0].client.platform)

    @property
    def processes(self) -> int:
        return len({d.process_index for d in self.devices})


def find_topology(name: str) -> Target:
    """Returns the topology of a name.

    That is `cpu:8`; a TPU slice such as `v5e:2x4`, where libtpu is installed; or `cuda:h100.txtpb:8`, where JAX's
    CUDA plugin is: a file that describes the kind of GPU, as XLA's `GpuTargetConfigProto` in text, and the number of
    them in one host.

    Raises:
      UnknownTopologyError: there is none; the message says why.
    """
    if match := _CPU.fullmatch(name):
        number = int(match[1])
        if not 1 <= number <= _MAX_CPUS:
            raise UnknownTopologyError(f"{name}: between 1 and {_MAX_CPUS} CPU devices.")
        return Target(name, topologies.make_cpu_devices(number))
    if match := _CUDA.fullmatch(name):
        return _find_gpus(name, match[1], int(match[2]))
    if not topologies.has_libtpu():
        raise UnknownTopologyError(
            f"{name}: not cpu:N, and TPU topologies need libtpu: pip install 'orbax-aot[tpu-compile]'."
        )
    try:
        return Target(name, topologies.make_tpu_devices(name))
    except ValueError as e:
        raise UnknownTopologyError(
            f"{name}: {e} `orbax-aot precompile --list` shows what there is."
        ) from e


def _find_gpus(name: str, path: str, number: int) -> Target:
    if not 1 <= number <= _MAX_GPUS:
        raise UnknownTopologyError(f"{name}: between 1 and {_MAX_GPUS} GPUs.")
    try:
        return Target(name, topologies.make_cuda_devices(epath.Path(path).read_text(), number))
    except OSError as e:
        raise UnknownTopologyError(f"{name}: a file that describes the GPU: {e}.") from e
    except ValueError as e:
        raise UnknownTopologyError(
            f"{name}: {str(e).rstrip('.')}. GPUs need JAX's CUDA plugin: pip install 'jax[cuda13]'."
        ) from e


def list_topologies() -> Iterator[Target]:
    """Yields TPU topologies that the installed libtpu knows, of the usual sizes; none without libtpu."""
    if not topologies.has_libtpu():
        return
    for generation, dimensions in _TPU_GENERATIONS:
        for shape in _TPU_SHAPES[dimensions]:
            name = f"{generation}:{shape}"
            try:
                yield Target(name, topologies.make_tpu_devices(name))
            except ValueError:
                continue


@dataclasses.dataclass(frozen=True)
class Precompiled:
    """What became of one signature: `where` is "function/signature"; `reason` is None where it was compiled."""

    where: str
    reason: Reason | None = None
    secs: float = 0.0
    nbytes: int = 0


def precompile(
    path: epath.PathLike,
    topology: str | Sequence[Any],
    *,
    functions: Sequence[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    progress: Callable[[str], None] = lambda where: None,
) -> tuple[Precompiled, ...]:
    """Adds executables for other machines to a committed step, from its StableHLO. Needs no source and no such machine.

    A restore there then finds them as if they had been saved there. One for the same place is superseded. What was
    compiled is committed at the end, at once: a concurrent reader sees the step as it was or as it is afterwards.

    Args:
      path: a checkpoint root (its latest step is taken), a step or an item.
      topology: a name, as `list_topologies` and `find_topology` have them, or devices in order.
      functions: which; by default all that are saved.
      mesh: the sizes of the axes by name, for as many devices as the topology has. By default as the program was
        saved, where it fits, or all devices along its only axis.
      progress: called with "function/signature" before each compilation.

    Returns:
      What became of each signature, with the reason where it could not be compiled.

    Raises:
      UnknownTopologyError: the topology is not known, or `mesh` has another size.
      KeyError: a function that is not there.
      NoExecutablesError, CorruptArtifactError: as `inspect`.
      StepChangedError: another writer was faster; nothing has changed.
    """
    target = find_topology(topology) if isinstance(topology, str) else _target_of(topology)
    if mesh is not None and math.prod(mesh.values()) != len(target.devices):
        raise UnknownTopologyError(
            f"{target.name} has {len(target.devices)} devices, the mesh {math.prod(mesh.values())}."
        )
    edit = Edit(locations.find_item(path))
    for name in functions or ():
        if name not in edit.functions:
            raise KeyError(f"no function {name!r} there, only {sorted(edit.functions)}")
    results = []
    for name, function in sorted(edit.body.functions.items()):
        if functions is not None and name not in functions:
            continue
        if function.absent is not None:
            results.append(Precompiled(name, _as_reason(function.absent)))
        for number, signature in enumerate(function.signatures):
            where = f"{name}/{number}"
            progress(where)
            saved = artifact_lib.SavedSignature(edit.store, edit.body, function, signature)
            results.append(_add_variant(edit, name, number, saved, target, mesh))
    if any(r.reason is None for r in results):
        edit.commit()
    return tuple(results)


def _target_of(devices: Sequence[Any]) -> Target:
    devices = tuple(devices)
    if not devices:
        raise UnknownTopologyError("no devices to compile for.")
    return Target(f"{devices[0].client.platform}:{len(devices)}", devices)


def _as_reason(absent: m.Absent) -> Reason:
    return Reason(ReasonCode.__members__.get(absent.code, ReasonCode.NOT_SAVED), absent.detail)


def _add_variant(
    edit: Edit,
    name: str,
    number: int,
    saved: artifact_lib.SavedSignature,
    target: Target,
    mesh: Mapping[str, int] | None,
) -> Precompiled:
    """Compiles one signature, writes its file, and puts the variant into the new manifest."""
    where = f"{name}/{number}"
    start = time.perf_counter()
    try:
        artifact = _compile(saved, target, mesh)
    except portable_lib.PortableError as e:
        code = ReasonCode.__members__.get(e.obstacle.code, ReasonCode.NEEDS_SOURCE)
        return Precompiled(where, Reason(code, e.obstacle.detail))
    except CorruptArtifactError as e:
        return Precompiled(where, Reason(ReasonCode.CORRUPT, str(e)))
    function = edit.functions[name]
    signature = function.signatures[number]
    (variant,) = edit.add_files(artifact, f"{function.folder}/{signature.folder}").variants
    others = tuple(
        v for v in signature.variants if artifact_lib.place_of(v) != artifact_lib.place_of(variant)
    )
    signatures = list(function.signatures)
    signatures[number] = msgspec.structs.replace(signature, variants=(*others, variant))
    edit.functions[name] = msgspec.structs.replace(function, signatures=tuple(signatures))
    secs = time.perf_counter() - start
    logging.info("%s: compiled for %s in %.2f s.", where, target.name, secs)
    return Precompiled(where, None, secs, variant.nbytes)


def _compile(
    saved: artifact_lib.SavedSignature, target: Target, mesh: Mapping[str, int] | None
) -> artifact_lib.Artifact:
    """Returns an artifact with the one new variant.

    Raises:
      PortableError: the program cannot be compiled for the target.
      CorruptArtifactError: the StableHLO is damaged.
    """
    signature = saved.signature
    if signature.portable is None:
        absent = signature.portable_absent or m.Absent(code="NOT_SAVED", detail="no StableHLO")
        detail = f"there is no StableHLO to compile ({absent.code}: {absent.detail})"
        raise portable_lib.PortableError(portable_lib.Obstacle("NOT_SAVED", detail))
    program = portable_lib.PortableProgram.parse(saved.read_portable())
    axes = _choose_axes(program, target, mesh)
    over = None if axes is None else topology_lib.make_mesh(axes, target.devices)
    donated = [i for i, leaf in enumerate(signature.inputs) if leaf.donated]
    compiled = program.compile(over, target.devices[:1], donated=donated)
    serialized = executable_lib.serialize(compiled)
    return artifact_lib.pack(serialized).as_variant_of(signature, saved.body)


def _choose_axes(
    program: portable_lib.PortableProgram, target: Target, mesh: Mapping[str, int] | None
) -> dict[str, int] | None:
    """Returns the axes of the mesh to compile for; None for a program of one device.

    Raises:
      PortableError: only the caller can say how to use so many devices.
    """
    own = program.mesh_axes
    if own is None:
        return None
    if mesh is not None:
        return dict(mesh)
    number = len(target.devices)
    if math.prod(own.values()) == number:
        return dict(own)
    wide = [name for name, size in own.items() if size > 1]
    if number == 1 or len(own) == 1 or len(wide) == 1:
        only = wide[0] if len(wide) == 1 else next(iter(own))
        return {name: number if name == only else 1 for name in own}
    saved = ",".join(f"{name}={size}" for name, size in own.items())
    detail = (
        f"the program was saved over {saved}; pass a mesh of these axes for the {number} devices of "
        f"{target.name}"
    )
    raise portable_lib.PortableError(portable_lib.Obstacle("MESH_SHAPE", detail))

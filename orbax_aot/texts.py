"""The programs of a checkpoint as text: StableHLO as it was saved, and optimized HLO of what loads here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from absl import logging
from etils import epath

from orbax_aot import artifact as artifact_lib
from orbax_aot import checking, locations
from orbax_aot import manifest as m
from orbax_aot import plan as plan_lib
from orbax_aot import store as store_lib
from orbax_aot._jax import compiled as compiled_lib
from orbax_aot.executable import LoadedProgram
from orbax_aot.portable import PortableProgram
from orbax_aot.topology import devices_here


def write_stablehlo(
    path: epath.PathLike, folder: epath.PathLike, functions: Sequence[str] = ()
) -> Iterator[str]:
    """Writes the StableHLO of each signature that has one below `folder`; yields what was written.

    Raises:
      NoExecutablesError, CorruptArtifactError: as `inspect`; also where a StableHLO is damaged.
    """
    for name, saved in _signatures(path, functions):
        if saved.signature.portable is None:
            logging.warning("%s: no StableHLO was saved.", name)
            continue
        text = PortableProgram.parse(saved.read_portable()).as_text()
        yield _write(folder, f"{name}.stablehlo.txt", text)


def write_hlo(
    path: epath.PathLike, folder: epath.PathLike, functions: Sequence[str] = ()
) -> Iterator[str]:
    """Writes the optimized HLO of each signature that loads here below `folder`; yields what was written.

    Loads the executables, which runs native code: load only what you trust.

    Raises:
      NoExecutablesError, CorruptArtifactError: as `inspect`; also where an executable is damaged.
    """
    for name, saved in _signatures(path, functions):
        manifest = m.Manifest(m.FORMAT_VERSION, saved.body)
        machine = checking.describe_place(manifest, None, None, None).machine
        decision = plan_lib.decide_signature(
            saved.signature, saved.body, machine, plan_lib.Request(), plan_lib.Wanted()
        )
        if decision.variant is None or decision.assignment is None:
            why = "; ".join(map(str, decision.reasons))
            logging.warning("%s: cannot be loaded here: %s", name, why)
            continue
        here = devices_here()
        serialized = saved.read_variant(decision.variant).unpack(name)
        program = LoadedProgram.load(serialized, [here[i] for i in decision.assignment])
        yield _write(folder, f"{name}.hlo.txt", compiled_lib.program_text(program.executable))


def _signatures(
    path: epath.PathLike, functions: Sequence[str]
) -> Iterator[tuple[str, artifact_lib.SavedSignature]]:
    store = store_lib.Store(locations.find_item(path))
    body = store.read_manifest().body
    for name, function in sorted(body.functions.items()):
        if not functions or name in functions:
            for signature in function.signatures:
                saved = artifact_lib.SavedSignature(store, body, function, signature)
                yield f"{store_lib.folder_name(name)}.{signature.folder}", saved


def _write(folder: epath.PathLike, name: str, text: str) -> str:
    path = epath.Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)

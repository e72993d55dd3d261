"""Restoring the functions of a checkpoint: read and decide, load, bind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableSet, Sequence
from typing import TYPE_CHECKING, Any

import jax
from absl import logging
from etils import epath

from orbax_aot import agreement, deadline, multihost, topology
from orbax_aot import artifact as artifact_lib
from orbax_aot import functions as functions_lib
from orbax_aot import manifest as m
from orbax_aot import plan as plan_lib
from orbax_aot import probe as probe_lib
from orbax_aot import restored as restored_lib
from orbax_aot import signatures as signatures_lib
from orbax_aot import state as state_lib
from orbax_aot import store as store_lib
from orbax_aot import trust as trust_lib
from orbax_aot._jax.config import device_settings
from orbax_aot.errors import CorruptArtifactError, IncompatibleExecutableError
from orbax_aot.overrides import is_off
from orbax_aot.report import Reason, ReasonCode, Verdict
from orbax_aot.timeline import Timeline

if TYPE_CHECKING:
    from orbax_aot.handler import AotRestore


def begin(
    directory: epath.Path,
    args: AotRestore,
    timeout_secs: float = 600.0,
    *,
    trust: trust_lib.Trust | None = None,
    probe: bool = False,
) -> Restoring | NothingRestored:
    """Starts to restore the functions of an item. Never raises: whatever fails, the state must come back."""
    try:
        restoring = Restoring(directory, args, timeout_secs, trust=trust, probe=probe)
        restoring.start()
        return restoring
    except Exception as e:
        return NothingRestored(directory, args, e)


def has_state(directory: epath.PathLike) -> bool:
    """Whether an item holds a state, and not executables only."""
    directory = epath.Path(directory)
    try:
        return not (directory / "metadata").exists() or (directory / "_METADATA").exists()
    except OSError:
        return True


class NothingRestored:
    """Stands for a restore of functions that failed as a whole: live functions are what they were before."""

    def __init__(self, directory: epath.Path, args: AotRestore, error: Exception):
        self._note = f"{directory}: functions are not restored: {type(error).__name__}: {error}"
        logging.error("%s", self._note, exc_info=error)
        self._error = error
        self._live = dict(args.fns) if isinstance(args.fns, Mapping) else {}

    def require_fit(self) -> None:
        raise IncompatibleExecutableError(f"{self._note}. The state was not touched.") from (
            self._error
        )

    def make_target(self, read_metadata: Callable[[], Any]) -> None:
        return None

    def take_state(self, state: Any, start: float) -> Any:
        return state

    def finish(
        self, keep: MutableSet[restored_lib.RestoredFunction] | None = None
    ) -> restored_lib.RestoredFunctions:
        live = {name: fn for name, fn in self._live.items() if fn is not None}
        return restored_lib.RestoredFunctions(live, {}, self._note)


class Restoring:
    """One restore's functions: read and decide, load, bind. Raises only where our own code is at fault: see `begin`."""

    def __init__(
        self,
        directory: epath.Path,
        args: AotRestore,
        timeout_secs: float = 600.0,
        *,
        trust: trust_lib.Trust | None = None,
        probe: bool = False,
    ):
        """`timeout_secs` is how long the manifest, and the other processes' views, are waited for."""
        self._directory = directory
        self._args = args
        self._trust = (trust or trust_lib.Trust.owner()).effective()
        self._standing = trust_lib.Standing()
        self._store = store_lib.Store(directory)
        self._group: multihost.Group | None = None
        self._timeout_secs = timeout_secs
        self._manifest: m.Manifest | None = None
        self._note = ""
        self._live: dict[str, functions_lib.AotFunction] = {}
        self._restored: dict[str, restored_lib.RestoredFunction] = {}
        self.timeline = Timeline()
        self._machine: plan_lib.Machine | None = None
        self._devices: tuple[Any, ...] = ()
        self._mesh: jax.sharding.Mesh | None = None
        self._prober: probe_lib.Prober | None = None
        if probe and jax.process_count() == 1:
            self._prober = probe_lib.Prober(directory, device_settings())

    def start(self) -> None:
        """Reads the manifest, decides with the other processes, and starts to load."""
        with self.timeline.span("manifest", "decide"):
            plans = self._agree("plan", self._make_plans())
        try:
            self._restored = {name: self._prepare(name, plan) for name, plan in plans.items()}
        except Exception as e:  # what every process hits alike, as all have the same plans
            self._restored = {
                name: self._prepare(name, plan)
                for name, plan in self._failing_plans(e, tuple(plans)).items()
            }
        for function in self._restored.values():
            function.start()
        if self._prober is not None:
            threading.Thread(target=self._end_probing, name="orbax_aot_probe", daemon=True).start()

    def _end_probing(self) -> None:
        assert self._prober is not None
        for function in self._restored.values():
            function.wait()
        self._prober.close()

    def _make_plans(self) -> dict[str, plan_lib.FunctionPlan]:
        try:
            self._live = {
                name: functions_lib.as_aot_function(fn) for name, fn in self._args.live.items()
            }
            problem = None if is_off() else self._read_manifest()
            return self._decide(problem)
        except Exception as e:
            return self._failing_plans(e, self._args.names or tuple(self._saved_names()))

    def _failing_plans(
        self, error: Exception, names: Sequence[str]
    ) -> dict[str, plan_lib.FunctionPlan]:
        logging.error(
            "%s: functions are not restored; the state is.", self._store.folder, exc_info=error
        )
        reason = Reason(ReasonCode.LOAD_FAILED, f"{type(error).__name__}: {error}"[:300])
        return {
            name: plan_lib.FunctionPlan((), (reason,), name in self._args.live) for name in names
        }

    def _agree(
        self, topic: str, plans: dict[str, plan_lib.FunctionPlan]
    ) -> dict[str, plan_lib.FunctionPlan]:
        """Returns the plans that all processes of the job take alike; blocks until all have told theirs."""
        try:
            self._group = self._group or multihost.Group(self._timeout_secs)
            if self._group.is_alone:
                return plans
            views = self._group.exchange(topic, agreement.make_view(plans))
            return agreement.agree(plans, views, self._group.index)
        except Exception as e:
            return agreement.without_the_others(plans, str(e))

    def _saved_names(self) -> Sequence[str]:
        return sorted(self._manifest.functions) if self._manifest is not None else ()

    def _read_manifest(self) -> Reason | None:
        """Reads the manifest; returns why that failed, None where it did not or where there is none."""
        try:
            found = deadline.within(self._timeout_secs, self._open_manifest, "manifest")
            if found is None:
                self._note = f"{self._directory}: no executables (no {store_lib.FOLDER} folder)"
                return None
            self._manifest, self._standing = found
            return None
        except Exception as e:
            self._note = f"{self._store.manifest_path}: {e}"
            logging.warning("%s", self._note)
            return signatures_lib.reason_of(e)

    def _open_manifest(self) -> tuple[m.Manifest, trust_lib.Standing] | None:
        """Returns the manifest and what stands against it; None where nothing was saved."""
        try:
            manifest, content = self._store.open_manifest()
        except FileNotFoundError as e:
            if not self._store.folder.exists():
                return None
            path = self._store.manifest_path
            raise CorruptArtifactError(f"{path}: missing. Save this step again.") from e
        return manifest, self._trust.judge(self._store, manifest, content)

    def _decide(self, problem: Reason | None) -> dict[str, plan_lib.FunctionPlan]:
        args = self._args
        mesh = args.mesh if args.mesh is not None else topology.mesh_of_tree(args.item)
        self._mesh = mesh
        anchor = args.devices or (None if mesh is None else tuple(mesh.devices.flat))
        client = anchor[0].client if anchor else None
        self._machine = topology.describe_machine(client)
        self._devices = tuple((client or jax.devices()[0].client).devices())
        index = {d: i for i, d in enumerate(self._devices)}
        functions = None
        if args.fns is not None:
            functions = {name: self._wanted(name) for name in args.names}
        request = plan_lib.Request(
            mesh=None
            if mesh is None
            else tuple(
                (str(n), int(s)) for n, s in zip(mesh.axis_names, mesh.devices.shape, strict=True)
            ),
            positions=() if mesh is None else tuple(index[d] for d in mesh.devices.flat),
            devices=None if args.devices is None else tuple(index[d] for d in args.devices),
            single=index.get(state_lib.single_device_of(args.item)),
            functions=functions,
            verify=args.effective_verify,
            disabled=is_off(),
            untrusted=self._standing.native,
            portable_untrusted=self._standing.portable,
        )
        return plan_lib.decide(self._manifest, self._machine, request, problem)

    def _wanted(self, name: str) -> plan_lib.Wanted:
        function = self._live.get(name)
        if function is None:
            return plan_lib.Wanted()
        code = function.function_code() if self._args.effective_verify == "code" else None
        return plan_lib.Wanted(live=True, code=code, options=function.compiler_options)

    def _prepare(self, name: str, plan: plan_lib.FunctionPlan) -> restored_lib.RestoredFunction:
        restored = restored_lib.RestoredFunction(
            name,
            plan,
            verify=self._args.effective_verify,
            on_mismatch=self._args.on_mismatch,
            group=self._group,
            timeline=self.timeline,
        )
        if not plan.decisions:
            return restored
        assert self._manifest is not None
        body, function = self._manifest.body, self._manifest.functions[name]
        for i, (signature, decision) in enumerate(
            zip(function.signatures, plan.decisions, strict=True)
        ):
            devices = tuple(self._devices[j] for j in decision.assignment or ())
            probe = self._probe_of(name, i, decision)
            saved = artifact_lib.SavedSignature(
                self._store, body, function, signature, self._standing, self._timeout_secs
            )
            place = self._rebuild_place(signature)
            restored.signatures.append(
                signatures_lib.RestoredSignature(
                    restored, i, saved, decision, devices, place, probe
                )
            )
        return restored

    def _probe_of(
        self, name: str, index: int, decision: plan_lib.Decision
    ) -> Callable[[], str] | None:
        prober, variant = self._prober, decision.variant
        if prober is None or variant is None:
            return None
        return lambda: prober.find_problem(name, index, variant, decision.assignment or ())

    def _rebuild_place(self, signature: m.Signature) -> signatures_lib.RebuildPlace:
        """Returns where a program that fits nowhere as it is would be rebuilt.

        On the mesh that is asked for; else on a mesh as it was saved, where there are enough devices; else on one.
        """
        assert self._manifest is not None and self._machine is not None
        mesh = self._mesh
        if mesh is not None:
            return signatures_lib.RebuildPlace(mesh, tuple(mesh.devices.flat))
        given = self._args.devices
        local = [
            d
            for d, process in zip(self._devices, self._machine.topology.processes, strict=True)
            if process == self._machine.process
        ]
        devices = tuple(given or local)
        saved = plan_lib.find_main_mesh(signature, self._manifest.body)
        if saved is not None and (
            len(given) == saved.size if given else len(devices) >= saved.size
        ):
            return signatures_lib.RebuildPlace(state_lib.make_mesh(saved, devices), devices)
        if given and len(given) > 1 and saved is not None:
            reason = Reason(
                ReasonCode.DEVICE_COUNT,
                f"for {saved.size} devices",
                f"{len(given)} devices; pass mesh= to say how to use them",
            )
            return signatures_lib.RebuildPlace(reason=reason)
        return signatures_lib.RebuildPlace(None, devices[:1])

    def require_fit(self) -> None:
        """Raises unless each function was loaded or remapped, or is pending; waits for loads."""
        bad = []
        for name, restored in sorted(self._restored.items()):
            report = restored.report()
            if report.verdict not in (Verdict.LOADED, Verdict.REMAPPED, Verdict.PENDING):
                bad.append(f"{name}: {report}")
        if bad:
            listed = "\n  ".join(bad)
            raise IncompatibleExecutableError(
                f"{self._directory}: saved executables cannot be used here:\n  {listed}\n"
                "The state was not touched. Pass on_mismatch='recompile' to compile them anew."
            )

    def make_target(self, read_metadata: Callable[[], Any]) -> Any:
        """Returns a target sharded as the executables expect; None to leave that to the state's handler.

        `read_metadata` returns Orbax's metadata of the state, and may raise.
        """
        if self._manifest is None:
            return None
        try:
            return state_lib.make_target(read_metadata(), self._manifest.body, self._placements())
        except Exception:
            logging.exception("%s: the state comes back as Orbax places it.", self._directory)
            return None

    def _placements(self) -> state_lib.Placements:
        args = self._args
        programs = tuple(
            program
            for restored in self._restored.values()
            for signature in restored.signatures
            if (program := self._program(signature)) is not None
        )
        return state_lib.Placements(
            mesh=args.mesh,
            devices=None if args.devices is None else tuple(args.devices),
            programs=programs,
            fallback=self._devices,
        )

    def _program(self, restored: signatures_lib.RestoredSignature) -> state_lib.Program | None:
        """Returns how a signature will run here, as far as it is decided; None where nothing saved runs."""
        variant, signature = restored.variant, restored.signature
        if variant is not None and restored.devices:
            return state_lib.Program(signature, variant, devices=restored.devices)
        if restored.verdict is not Verdict.REBUILT or restored.place.mesh is None:
            return None
        assert self._manifest is not None
        main = plan_lib.find_main_variant(signature, self._manifest.body)
        if main is None:
            return None
        return state_lib.Program(signature, main, mesh=restored.place.mesh)

    def take_state(self, state: Any, start: float) -> Any:
        """Returns the restored state with the weak types it was saved with, where it comes back strong.

        `start` is when its restoring began, as `time.perf_counter` tells it.
        """
        try:
            self.timeline.add("state", "weights", start)
            if self._manifest is None:
                return state
            return state_lib.give_weak_types(state, self._manifest.body.state)
        except Exception:
            logging.exception("%s: weak types are not restored.", self._directory)
            return state

    def finish(
        self, keep: MutableSet[restored_lib.RestoredFunction] | None = None
    ) -> restored_lib.RestoredFunctions:
        """Binds live functions and returns all; with other processes, once all know what each could load.

        `keep` takes what was restored, for a later save to find.
        """
        try:
            functions = self._bind()
            if keep is not None:
                for restored in self._restored.values():
                    keep.add(restored)
            return functions
        except Exception as e:
            return NothingRestored(self._directory, self._args, e).finish()

    def _bind(self) -> restored_lib.RestoredFunctions:
        if self._group is not None and not self._group.is_alone:
            found = {name: function.as_plan() for name, function in self._restored.items()}
            for name, plan in self._agree("loaded", found).items():
                self._restored[name].follow(plan)
        functions: dict[str, Any] = {}
        for name, restored in self._restored.items():
            live = self._live.get(name)
            if live is not None:
                live.bind(restored)
                functions[name] = live
            elif (given := self._args.live.get(name)) is not None:  # it could not be wrapped
                functions[name] = given
            else:
                functions[name] = restored_lib.SavedFunction(restored)
                if restored.plan.verdict is Verdict.REFUSED:
                    reasons = restored.plan.reasons or tuple(
                        r for d in restored.plan.decisions for r in d.reasons
                    )
                    restored.announce(Verdict.REFUSED, reasons, 0.0)
        return restored_lib.RestoredFunctions(functions, self._restored, self._note, self.timeline)

"""Trying executables in a child process first: what kills it is not loaded here.

The child is started once for a restore and asked about one executable after the other; when it dies, the next question
starts another. It opens the same devices, so this is for platforms that two processes can share, and for jobs of one
process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import logging
from etils import epath

_START_SECS = 120.0
_LOAD_SECS = 120.0
_RUN_SECS = 30.0
_MAX_RUN_NBYTES = 1 << 28  # arguments larger than this are not made up for a trial


class Prober:
    """Asks a child process to try executables of one item. Safe to use from several threads."""

    def __init__(self, item: epath.Path, config: dict[str, Any]):
        """`config` holds the JAX settings that say which devices there are."""
        self._about = {"item": os.fspath(item), "config": config}
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self._useless = False

    def find_problem(
        self, function: str, signature: int, variant: int, devices: Sequence[int]
    ) -> str:
        """Returns how the child died of an executable; "" where it did not, or could not be asked. Never raises.

        `devices` are positions in the client's list of devices, in the order of the device assignment.
        """
        asked = {"function": function, "signature": signature, "variant": variant}
        with self._lock:
            try:
                return self._ask({**asked, "devices": list(devices)})
            except Exception as e:
                logging.warning("%s: not probed: %s", function, e)
                return ""

    def _ask(self, question: dict[str, Any]) -> str:
        if self._useless:
            return ""
        if self._child is None:
            self._child = _Child()
            if self._child.ask(self._about, _START_SECS) != "ready":
                self._useless = True
                self._stop()
                logging.warning("The probe process does not start; executables load unprobed.")
                return ""
        for stage, doing, secs in (
            ("loaded", "loading", _LOAD_SECS),
            ("ran", "running", _RUN_SECS),
        ):
            answer = self._child.ask(question if stage == "loaded" else {}, secs)
            if answer == stage:
                continue
            if answer == "failed":  # it raised, which it can do here as well
                return ""
            how = self._child.how_it_ended()
            self._stop()
            if (
                answer == "late" and stage == "ran"
            ):  # made-up arguments can keep a program busy for ever
                return ""
            return f"a probe process {how or f'took more than {secs:g} s'} while {doing} it"
        return ""

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            self._stop()


class _Child:
    """A process that answers lines with words."""

    def __init__(self) -> None:
        home = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH", ""))))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "ORBAX_AOT_PROBE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "orbax_aot.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._words: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, name="orbax_aot_probe", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._words.put(line.strip())
        self._words.put("dead")

    def ask(self, question: dict[str, Any], secs: float) -> str:
        """Returns the answer, "dead" or "late"."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._words.get(timeout=secs)
        except BrokenPipeError:
            return "dead"
        except queue.Empty:
            return "late"

    def how_it_ended(self) -> str:
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return ""
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


# -- the child -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answers questions on standard input, one a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # native code may print
    about = json.loads(sys.stdin.readline())
    import jax

    for name, value in about["config"].items():
        jax.config.update(name, value)
    jax.devices()
    answers.write("ready\n")
    for line in sys.stdin:
        question = json.loads(line)
        try:
            run = _load(about["item"], **question)
            answers.write("loaded\n")
            sys.stdin.readline()
            run()
            answers.write("ran\n")
        except Exception:
            answers.write("failed\n")


def _load(item: str, function: str, signature: int, variant: int, devices: list[int]) -> Any:
    """Loads one executable; returns what runs it once."""
    import jax

    from orbax_aot import artifact, executable, store

    place = store.Store(item)
    manifest = place.read_manifest()
    saved_function = manifest.functions[function]
    saved = artifact.SavedSignature(
        place, manifest.body, saved_function, saved_function.signatures[signature]
    )
    serialized = saved.read_variant(variant).unpack(function)
    known = jax.devices()[0].client.devices()
    program = executable.LoadedProgram.load(serialized, [known[i] for i in devices])
    return lambda: _run(program.flat(), serialized.signature.inputs)


def _run(compiled: Any, inputs: Sequence[Any]) -> None:
    """Runs a program on zeros, where its arguments are plain arrays of no great size."""
    import jax
    import numpy as np

    from orbax_aot._jax import compiled as compiled_lib
    from orbax_aot._jax import dispatch, values

    if any(leaf.kind != "array" or leaf.dtype.startswith("key<") for leaf in inputs):
        return
    shapes = [(leaf.shape, np.dtype(values.make_dtype(leaf.dtype))) for leaf in inputs]
    if sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes) > _MAX_RUN_NBYTES:
        return
    arguments = [
        jax.device_put(np.zeros(shape, dtype), sharding)
        for (shape, dtype), sharding in zip(
            shapes, compiled_lib.argument_shardings(compiled), strict=True
        )
    ]
    jax.block_until_ready(dispatch.call_flat(compiled, arguments))


if __name__ == "__main__":
    main()

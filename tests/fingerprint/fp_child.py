"""Runs programs handed over as JSON lines: fingerprints each one and lowers it.

One child serves many programs, each in a folder of its own, so that a corpus of hundreds of pairs
takes two interpreter starts. Run as a script; speaks JSON lines on its standard streams.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import pathlib
import re
import sys
import tempfile
import time
import traceback
import warnings

import jax
import optax  # noqa: F401 (programs use them; loading them is not part of any program)

from orbax_aot import fingerprint


def lowered_digest(fun, args, kwargs, options) -> str:
    """The digest of the program's StableHLO without locations and without the function's name."""
    text = jax.jit(fun, **options).lower(*args, **kwargs).as_text()
    text = re.sub(r"module @[\w.<>]+", "module @program", text)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def program_folder(files: dict[str, str]):
    """A temporary folder with the program's files, importable while the context is open."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        before = set(sys.modules)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            for name in set(sys.modules) - before:
                path = getattr(sys.modules[name], "__file__", None) or ""
                if path.startswith(folder):
                    del sys.modules[name]


def run(job: dict) -> dict:
    with program_folder(job["files"]):
        main = importlib.import_module("main")
        try:
            return judge(main, job.get("mode", "plain"))
        finally:
            getattr(main, "undo", lambda: None)()


def judge(main, mode: str) -> dict:
    """Fingerprints the program, as a caller does before and after tracing it, and lowers it.

    In mode "change" the program's `change()` runs first; in mode "trace, change" it is also
    lowered before that, by the same function objects.
    """
    fun, args, kwargs, options = unpack(main.program())
    if mode == "trace, change":
        lowered_digest(fun, args, kwargs, options)
    if mode in ("change", "trace, change"):
        main.change()
        fun, args, kwargs, options = unpack(main.program())
    start = time.perf_counter()
    found = fingerprint.fingerprint_call(fun, args, kwargs, options)
    seconds = time.perf_counter() - start
    program = lowered_digest(fun, args, kwargs, options)
    after = fingerprint.fingerprint_call(fun, args, kwargs, options)
    undecidable = list(found.undecidable) + list(after.undecidable)
    if found.digest != after.digest:
        undecidable.append("changed by tracing")
    return {
        "digest": found.digest,
        "undecidable": undecidable,
        "program": program,
        "seconds": seconds,
    }


def unpack(program: dict):
    return program["fun"], program["args"], program.get("kwargs", {}), program.get("options", {})


def main() -> None:
    warnings.simplefilter("ignore")
    replies = sys.stdout
    sys.stdout = sys.stderr  # programs may print
    for line in sys.stdin:
        job = json.loads(line)
        try:
            reply = run(job)
        except BaseException as error:
            reply = {"error": "".join(traceback.format_exception(error))[-2000:]}
        print(json.dumps({"name": job["name"], **reply}), file=replies, flush=True)


if __name__ == "__main__":
    main()

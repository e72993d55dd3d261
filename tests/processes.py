"""Runs functions in child processes that are reused, and outlives their death.

    with Child(devices=4) as child:
        losses = child.run(resume_training, path, steps=20)

`resume_training` is a function at the top of a module that the child can import (a test module, or a module of cases
beside it). Arguments and the result travel as JSON; `str(path)` is done for paths. What the function raises comes back
as `CaseFailed`. If the process ends instead, `ChildDied` says how, with the end of what it printed, and the next `run`
starts another; `child.pid` tells whether it is still the same one. A test that claims something about a restart uses a
`Child` of its own; tests that only need shelter from an abort can share one.

Imports nothing but the standard library, so that a child can be asked what *it* has imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
_SHOWN = 6000  # characters of a dead child's output that its error quotes


class CaseFailed(Exception):
    """The function raised; the message is its traceback."""


class ChildDied(Exception):
    """The process ended while it ran a function. `returncode` is negative for a signal."""

    def __init__(self, message: str, returncode: int | None):
        super().__init__(message)
        self.returncode = returncode


class Child:
    """A Python process with `devices` CPU devices; started at its first `run`, started again after its death."""

    def __init__(
        self,
        devices: int = 8,
        env: Mapping[str, str | None] | None = None,
        timeout_secs: float = 240.0,
    ):
        """`env` is laid over this process's environment; None removes a variable."""
        self._env = _environment(devices, env or {})
        self._timeout_secs = timeout_secs
        self._process: subprocess.Popen[bytes] | None = None
        self._replies = -1
        self._output: Any = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id; None where none runs."""
        return None if self._process is None else self._process.pid

    def output(self) -> str:
        """Returns all that the present process has printed, on both streams."""
        if self._output is None:
            return ""
        return Path(self._output.name).read_text(errors="replace")

    def run(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Calls a function in the child and returns its result.

        `function` is the function, or `"module:name"`.

        Raises:
          CaseFailed: it raised.
          ChildDied: the process ended, or did not answer within `timeout_secs` and was ended.
        """
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        request = {"function": function, "args": args, "kwargs": kwargs}
        try:
            self._process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died(function) from None
        reply = json.loads(self._read_reply(function))
        if "error" in reply:
            raise CaseFailed(f"{function}\n{reply['error']}")
        return reply["result"]

    def kill(self) -> None:
        """Ends the process at once, as a machine that goes down does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._forget()

    def close(self) -> None:
        """Lets the process end, once it is idle."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._forget()

    def _start(self) -> None:
        self._replies, write_end = os.pipe()
        self._output = tempfile.NamedTemporaryFile(prefix="child-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(write_end)],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            env=self._env,
        )
        os.close(write_end)

    def _read_reply(self, function: str) -> bytes:
        data = bytearray()
        deadline = time.monotonic() + self._timeout_secs
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._replies], [], [], max(left, 0))
            if not ready:
                assert self._process is not None
                self._process.kill()
                raise self._died(function, f" (no answer in {self._timeout_secs:g} s)")
            part = os.read(self._replies, 1 << 20)
            if not part:
                raise self._died(function)
            data += part
        return bytes(data)

    def _died(self, function: str, why: str = "") -> ChildDied:
        assert self._process is not None
        returncode = self._process.wait()
        shown = self.output()[-_SHOWN:]
        self._forget()
        return ChildDied(f"{function}: exit status {returncode}{why}\n{shown}", returncode)

    def _forget(self) -> None:
        assert self._process is not None
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        os.close(self._replies)
        self._output.close()
        self._process, self._output = None, None


def _environment(devices: int, changes: Mapping[str, str | None]) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "ORBAX_AOT"))}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    env["JAX_PLATFORMS"] = "cpu"
    path = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def _serve(write_end: int) -> None:
    """Answers requests on standard input until it is closed."""
    with os.fdopen(write_end, "wb") as replies:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            try:
                module, _, name = request["function"].partition(":")
                function = getattr(importlib.import_module(module), name)
                reply = {"result": function(*request["args"], **request["kwargs"])}
                text = json.dumps(reply)
            except BaseException:
                text = json.dumps({"error": traceback.format_exc()})
            sys.stdout.flush()
            replies.write(text.encode() + b"\n")
            replies.flush()


if __name__ == "__main__":
    sys.modules["processes"] = sys.modules["__main__"]
    _serve(int(sys.argv[1]))

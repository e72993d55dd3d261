"""Restores an item in a process that a native call may end. Prints verdict, reasons and result as JSON.

python crash_child.py ITEM load|run|fine
"""

from __future__ import annotations

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, os.path.dirname(__file__))

import trust_support as support

from orbax_aot import signatures
from orbax_aot._jax import dispatch

item, where = sys.argv[1], sys.argv[2]
if where == "load":  # as a driver does that does not like the bytes
    signatures.LoadedProgram.load = classmethod(lambda *a, **k: os.abort())  # type: ignore[assignment]
if where == "run":
    dispatch.call_flat = lambda *a, **k: os.abort()

outcome = support.restore(support.Path(item), fn=None, probe="probe" in sys.argv[3:])
found = {"verdict": outcome.verdict, "text": outcome.text, "weights": outcome.weights}
if outcome.verdict in ("LOADED", "REBUILT"):
    found["result"] = outcome.call().tolist()
print(json.dumps(found))

"""Restores an item under an audit hook; prints what was unpickled, compiled and executed outside the import system.

python audit_child.py ITEM [unpickle|exec|compile]     the last to see the hook at work
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, os.path.dirname(__file__))

import trust_support as support

found: list[str] = []
_watched = False


def _is_import() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event == "pickle.find_class" or (event in ("exec", "compile") and not _is_import()):
        found.append(f"{event}: {args!r}"[:300])


sys.addaudithook(_hook)
_watched = True
mode = sys.argv[2] if len(sys.argv) > 2 else "restore"
if mode == "unpickle":
    import pickle

    pickle.loads(b"cbuiltins\nlist\n.")
elif mode == "exec":
    exec("1")
elif mode == "compile":
    compile("1", "x", "eval")
else:
    item = support.Path(sys.argv[1])
    outcomes = [support.restore(item), support.restore(item, fn=support.live())]
    results = [outcome.call().tolist() for outcome in outcomes]
    assert results == [support.EXPECTED.tolist()] * 2
    verdicts = [o.fns.report["step"].verdict.name for o in outcomes]
    assert verdicts == ["LOADED", "LOADED"], verdicts
    portable = support.restore(item, support.oaot.Trust.portable_only())
    assert portable.call().tolist() == support.EXPECTED.tolist()
_watched = False
print(json.dumps(found))

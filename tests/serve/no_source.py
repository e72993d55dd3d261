"""Makes models' code impossible to import in this process; imported first by whatever serves.

Neither the modules that define and train the models, nor flax, nor optax can be imported from then on.
"""

from __future__ import annotations

import importlib.machinery
import sys

BLOCKED = ("flax", "optax", "serve_models", "serve_training")


class _Refuser:
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} cannot be imported where its functions are served")
        return None


already = [name for name in sys.modules if name.partition(".")[0] in BLOCKED]
if already:
    raise RuntimeError(f"imported already: {already}")
sys.meta_path.insert(0, _Refuser())

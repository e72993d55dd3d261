"""What the tests of the fingerprint share."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator

import pytest

_HEADER = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
"""

Load = Callable[..., types.ModuleType]


@pytest.fixture
def load(tmp_path) -> Iterator[Load]:
    """Makes a module of a source text: `load(text, name=...)`. JAX and numpy are imported in it."""
    counter = itertools.count()
    loaded: list[str] = []

    def load(text: str, name: str = "program") -> types.ModuleType:
        folder = tmp_path / str(next(counter))
        folder.mkdir()
        path = folder / f"{name}.py"
        path.write_text(_HEADER + textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def no_stale_traces() -> Iterator[None]:
    """Lets no test see traces of another."""
    import jax

    jax.clear_caches()
    yield
    jax.clear_caches()

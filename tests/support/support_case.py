"""What a row of the support matrix is: a small program, and what a checkpoint makes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import orbax_aot as oaot

CARRIED = "carried"
WITH_LIVE = "with live function"
UNAVAILABLE = "unavailable"


def not_carried(code: str) -> str:
    return f"not carried: {code}"


class Unavailable(Exception):
    """This JAX has not got what a case is about."""


@dataclasses.dataclass
class Program:
    """Functions to save, and what to do with them or with those that come back.

    `run` returns a tree of arrays and plain values to compare; it must compile nothing but through the functions.
    `context` is entered around saving's first call and around the calls after the restore. On other devices the
    restore is told the list of devices, or `mesh` where that is given.
    """

    functions: dict[str, Any]
    run: Callable[[Mapping[str, Any]], Any]
    context: Callable[[], Any] = contextlib.nullcontext
    mesh: jax.sharding.Mesh | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: `make(devices)` builds the program on so many devices; the other fields say what is expected.

    `expected` is an outcome, `unless` replaces it on the JAX versions that begin so. `remap` also restores on other
    devices. `by_program` says that the live function has to be lowered to see that it is the same program;
    `may_compile` that the calls compile more than the saved functions.
    """

    section: str
    title: str
    make: Callable[[Sequence[Any]], Program]
    devices: int
    expected: str
    unless: Mapping[str, str]
    remap: bool
    by_program: bool
    may_compile: bool

    @property
    def id(self) -> str:
        return f"{self.section}: {self.title}"

    def expected_here(self) -> str:
        for version, outcome in self.unless.items():
            if jax.__version__.startswith(version):
                return outcome
        return self.expected


class Section:
    """Collects the cases of one topic; a decorator for functions that make programs."""

    def __init__(self, title: str):
        self.title = title
        self.cases: list[Case] = []

    def case(
        self,
        title: str,
        *,
        devices: int = 1,
        expected: str = CARRIED,
        unless: Mapping[str, str] | None = None,
        remap: bool = True,
        by_program: bool = False,
        may_compile: bool = False,
    ) -> Callable[[Callable[[Sequence[Any]], Program]], Callable[[Sequence[Any]], Program]]:
        def add(make: Callable[[Sequence[Any]], Program]) -> Callable[[Sequence[Any]], Program]:
            self.cases.append(
                Case(
                    self.title,
                    title,
                    make,
                    devices,
                    expected,
                    unless or {},
                    remap,
                    by_program or may_compile or expected == WITH_LIVE,
                    may_compile,
                )
            )
            return make

        return add


def call(
    fun: Callable[..., Any],
    *args: Any,
    jit: Mapping[str, Any] | None = None,
    context: Callable[[], Any] = contextlib.nullcontext,
    mesh: jax.sharding.Mesh | None = None,
    **kwargs: Any,
) -> Program:
    """Returns the program that calls one function once."""
    return Program(
        {"f": oaot.jit(fun, **(jit or {}))}, lambda fns: fns["f"](*args, **kwargs), context, mesh
    )


def array(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Returns the same small numbers everywhere, made without compiling."""
    values = np.random.default_rng(seed).integers(-4, 5, size=shape)
    return (values / 2 if np.dtype(dtype).kind in "fcV" else values).astype(dtype)


def put(value: Any, sharding: Any) -> jax.Array:
    return jax.device_put(value, sharding)


def encode(tree: Any) -> list[Any]:
    """Returns a tree as JSON data in which each bit counts: paths, types, placement and digests of the bytes."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        [jax.tree_util.keystr(path, simple=True, separator="/"), *_encode_leaf(leaf)]
        for path, leaf in flat
    ]


def _encode_leaf(leaf: Any) -> list[Any]:
    if isinstance(leaf, jax.Array):
        about = [str(leaf.dtype), bool(leaf.aval.weak_type), list(leaf.shape), _placement(leaf)]
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return [*about, _digest(np.asarray(leaf))]
    if isinstance(leaf, np.ndarray | np.generic):
        return [str(leaf.dtype), list(leaf.shape), _digest(np.asarray(leaf))]
    return [type(leaf).__name__, repr(leaf)]


def _placement(leaf: jax.Array) -> str:
    sharding = leaf.sharding
    spec = getattr(sharding, "spec", "")
    where = "committed" if leaf._committed else "uncommitted"
    return f"{type(sharding).__name__} {spec} {sharding.memory_kind} {where}"


def _digest(value: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]

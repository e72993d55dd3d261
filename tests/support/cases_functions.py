"""Several functions in one checkpoint, and their names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from support_case import Program, Section, array

import orbax_aot as oaot

section = Section("Functions")


@section.case("several functions that share state")
def _(devices):
    params = {"w": array(4, 4), "b": array(4)}
    fns = {
        "predict": oaot.jit(lambda p, x: x @ p["w"] + p["b"]),
        "train": oaot.jit(
            lambda p, x: jax.tree.map(
                lambda v, g: v - g, p, jax.grad(lambda q: ((x @ q["w"] + q["b"]) ** 2).mean())(p)
            )
        ),
    }

    def run(fns):
        new = fns["train"](params, array(8, 4))
        return new, fns["predict"](new, array(8, 4))

    return Program(fns, run)


@section.case("100 functions")
def _(devices):
    def make(i):
        return oaot.jit(lambda x: x * i + 1)

    fns = {f"f{i}": make(i) for i in range(100)}
    return Program(fns, lambda fns: [fns[f"f{i}"](array(4)) for i in range(100)])


@section.case("a function that calls another saved function")
def _(devices):
    inner = oaot.jit(lambda x: x * 2 + 1)
    outer = oaot.jit(lambda x: jnp.sum(inner(x)) + inner(x))
    return Program(
        {"inner": inner, "outer": outer},
        lambda fns: [fns["inner"](array(4)), fns["outer"](array(4))],
    )


@section.case("a function saved under two names", remap=False)
def _(devices):
    f = oaot.jit(lambda x: x * 2 + 1)
    return Program({"a": f, "b": f}, lambda fns: [fns["a"](array(4)), fns["b"](array(4))])


_NAMES = {
    "slashes": "model/train/step",
    "unicode": "schritt/größe/歩",
    "very long": "step_" * 200,
    "dots and dashes": "-../..",
    "names that differ in case only": "Step",
    "a name the format uses itself": "constants",
    "control characters": "a\nb\tc",
}


def _add_name(what: str, name: str) -> None:
    @section.case(f"names: {what}")
    def make(devices):
        fns = {name: oaot.jit(lambda x: x * 2), "step": oaot.jit(lambda x: x * 3)}
        return Program(fns, lambda fns: [fns[name](array(4)), fns["step"](array(4))])


for _what, _name in _NAMES.items():
    _add_name(_what, _name)

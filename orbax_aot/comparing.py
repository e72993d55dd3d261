"""Why two steps differ: code, programs, topologies, settings. Read from two manifests; imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from orbax_aot import manifest as m
from orbax_aot import plan as plan_lib
from orbax_aot.inspection import inspect


@dataclasses.dataclass(frozen=True)
class Difference:
    """One way in which two checkpoints differ.

    `where` is a function, or "function/signature", or "function/signature/variant" by the numbers of the first.
    `what` is one of "function", "signature", "inputs", "outputs", "static", "context", "code", "program", "portable",
    "variant", "topology", "versions", "flags", "config", "options", "cpu", "executable". `a` and `b` are empty where
    there is nothing.
    """

    where: str
    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.a or '-'} | {self.b or '-'}"


def diff(a: epath.PathLike, b: epath.PathLike) -> tuple[Difference, ...]:
    """Returns how the functions of two checkpoints differ; empty where they do not.

    Compares what the manifests say, and so executables by what they were made from and for: their bytes are not
    deterministic.

    Args:
      a: a checkpoint root (its latest step is taken), a step or an item.
      b: likewise.

    Raises:
      NoExecutablesError: nothing was saved there, or several items were.
      CorruptArtifactError: a manifest is damaged.
    """
    return tuple(compare(inspect(a).body, inspect(b).body))


def compare(a: m.Body, b: m.Body) -> Iterable[Difference]:
    """Yields how the functions of two manifests differ, by name."""
    for name in sorted({*a.functions, *b.functions}):
        one, other = a.functions.get(name), b.functions.get(name)
        if one is None or other is None:
            yield Difference(name, "function", _function(one), _function(other))
        elif one.absent is not None or other.absent is not None:
            if one.absent != other.absent:
                yield Difference(name, "function", _function(one), _function(other))
        else:
            yield from _compare_signatures(name, one, a, other, b)


def _function(function: m.Function | None) -> str:
    if function is None:
        return ""
    if function.absent is not None:
        return f"not saved ({function.absent.code}: {function.absent.detail})"
    number = len(function.signatures)
    return f"{number} signature{'' if number == 1 else 's'}"


def _compare_signatures(
    name: str, one: m.Function, a: m.Body, other: m.Function, b: m.Body
) -> Iterable[Difference]:
    left = list(enumerate(other.signatures))
    for number, signature in enumerate(one.signatures):
        where = f"{name}/{number}"
        partner = _find_partner(signature, a, [s for _, s in left], b)
        if partner is None:
            yield Difference(where, "signature", _call(signature), "")
        else:
            yield from _compare_signature(where, signature, a, left.pop(partner)[1], b)
    for number, signature in left:
        yield Difference(f"{name}/{number}", "signature", "", _call(signature))


def _find_partner(
    signature: m.Signature, a: m.Body, others: Sequence[m.Signature], b: m.Body
) -> int | None:
    """Finds the same call among the others; failing that, where each side has one left, that one."""
    keys = [_key(s, b) for s in others]
    for key in (_key(signature, a), _key(signature, a)[:2]):
        for i, found in enumerate(keys):
            if found[: len(key)] == key:
                return i
    return 0 if len(others) == 1 else None


def _key(signature: m.Signature, body: m.Body) -> tuple[Any, ...]:
    types = tuple((leaf.path, leaf.shape, leaf.dtype) for leaf in signature.inputs)
    return types, signature.static, tuple(_leaf(leaf, body) for leaf in signature.inputs)


def _call(signature: m.Signature) -> str:
    types = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in signature.inputs[:4]]
    return ", ".join(types) + (", …" if len(signature.inputs) > 4 else "") or "no arguments"


def _compare_signature(
    where: str, one: m.Signature, a: m.Body, other: m.Signature, b: m.Body
) -> Iterable[Difference]:
    for what in ("inputs", "outputs"):
        yield from _compare_leaves(where, what, getattr(one, what), a, getattr(other, what), b)
    if one.static != other.static:
        yield Difference(where, "static", _pairs(dict(one.static)), _pairs(dict(other.static)))
    yield from _differing(where, "context", one.context or {}, other.context or {})
    if one.code != other.code:
        yield Difference(where, "code", _code(one.code), _code(other.code))
    if one.program != other.program:
        yield Difference(where, "program", _short(one.program), _short(other.program))
    yield from _compare_variants(where, one.variants, other.variants)
    portable = lambda s: "" if s.portable is None else ", ".join(s.portable.platforms)
    if portable(one) != portable(other):
        yield Difference(where, "portable", portable(one), portable(other))


def _compare_leaves(
    where: str,
    what: str,
    one: Sequence[m.Leaf],
    a: m.Body,
    other: Sequence[m.Leaf],
    b: m.Body,
) -> Iterable[Difference]:
    ones = {leaf.path: _leaf(leaf, a) for leaf in one}
    others = {leaf.path: _leaf(leaf, b) for leaf in other}
    for path in dict.fromkeys((*ones, *others)):
        if ones.get(path) != others.get(path):
            told = lambda leaves, p=path: f"{p}: {leaves[p]}" if p in leaves else ""
            yield Difference(where, what, told(ones), told(others))


def _leaf(leaf: m.Leaf, body: m.Body) -> str:
    parts = [f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"]
    if leaf.sharding is not None:
        sharding = body.shardings[leaf.sharding]
        if sharding.mesh is not None:
            mesh = body.meshes[sharding.mesh]
            axes = ", ".join(f"{n}={s}" for n, s in mesh.axes)
            spec = ", ".join(str(x) if x is not None else "-" for x in sharding.spec)
            parts.append(f"P({spec}) over {axes}")
        if sharding.memory not in (None, "device"):
            parts.append(f"in {sharding.memory}")
    parts += [w for w, is_so in (("weak", leaf.weak_type), ("donated", leaf.donated)) if is_so]
    return " ".join(parts)


def _compare_variants(
    where: str, one: Sequence[m.Variant], other: Sequence[m.Variant]
) -> Iterable[Difference]:
    """Pairs variants for the same devices, then the same platform, then the last one left on each side."""
    left = list(other)
    for number, variant in enumerate(one):
        partner = _find_variant(variant, left)
        if partner is None:
            yield Difference(f"{where}/{number}", "variant", _place(variant), "")
            continue
        left.remove(partner)
        yield from _compare_variant(f"{where}/{number}", variant, partner)
    for variant in left:
        yield Difference(f"{where}/{other.index(variant)}", "variant", "", _place(variant))


def _find_variant(variant: m.Variant, others: Sequence[m.Variant]) -> m.Variant | None:
    keys = (
        lambda v: (v.topology, v.environment),
        lambda v: v.topology,
        lambda v: (v.topology.platform, v.topology.device_kind, v.topology.count),
    )
    for key in keys:
        for found in others:
            if key(found) == key(variant):
                return found
    same = [v for v in others if v.topology.platform == variant.topology.platform]
    return same[0] if len(same) == 1 else None


def _compare_variant(where: str, one: m.Variant, other: m.Variant) -> Iterable[Difference]:
    if one.topology != other.topology:
        yield from _compare_topology(where, one.topology, other.topology)
    x, y = one.environment, other.environment
    versions = lambda e: f"jax {e.jax}, jaxlib {e.jaxlib}"
    if versions(x) != versions(y):
        yield Difference(where, "versions", versions(x), versions(y))
    yield from _differing(where, "flags", x.xla_flags, y.xla_flags)
    yield from _differing(where, "config", x.config, y.config)
    yield from _differing(where, "options", x.options, y.options)
    if x.cpu_features != y.cpu_features:
        yield Difference(where, "cpu", *plan_lib.set_difference(x.cpu_features, y.cpu_features))
    if one.hlo_fingerprint != other.hlo_fingerprint:
        name = lambda v: _short(
            None if v.hlo_fingerprint is None else v.hlo_fingerprint.encode().hex()
        )
        yield Difference(where, "executable", f"HLO {name(one)}", f"HLO {name(other)}")


def _compare_topology(where: str, one: m.Topology, other: m.Topology) -> Iterable[Difference]:
    for name in (
        "platform",
        "device_kind",
        "count",
        "platform_version",
        "coords",
        "ids",
        "processes",
    ):
        x, y = getattr(one, name), getattr(other, name)
        if x != y:
            label = name.replace("_", " ")
            yield Difference(where, "topology", f"{label} {x}", f"{label} {y}")
            if name in ("platform", "count"):
                return  # the rest follows


def _differing(
    where: str, what: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterable[Difference]:
    if one != other:
        yield Difference(where, what, *plan_lib.dict_difference(one, other))


def _place(variant: m.Variant) -> str:
    topology = variant.topology
    return f"{topology.platform} x {topology.count} ({topology.device_kind})"


def _code(code: m.Code | None) -> str:
    if code is None:
        return ""
    unseen = f", unseen: {'; '.join(code.undecidable)}" if code.undecidable else ""
    return f"{_short(code.fingerprint)}, called with {_short(code.call)}{unseen}"


def _short(digest: str | None) -> str:
    return "" if digest is None else digest.rpartition(":")[2][:12]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())

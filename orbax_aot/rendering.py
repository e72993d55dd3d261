"""A manifest as people read it: trees, tables and small drawings of meshes. Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from orbax_aot import manifest as m
from orbax_aot.comparing import Difference
from orbax_aot.editing import Pruned
from orbax_aot.remedies import REMEDIES
from orbax_aot.report import FunctionReport, Reason, ReasonCode, Verdict

if TYPE_CHECKING:
    from orbax_aot.precompiling import Precompiled, Target

# A subtree with more leaves than this is folded into one line, unless it branches little near the root.
FOLD = 24
_FEW_BRANCHES = 8
_NEAR = 3
_MAX_GRID = 64  # devices that a mesh is drawn with
_DIGITS = 12  # of a digest
_BYTES_OF = {"bfloat16": 2, "bool": 1, "int4": 0.5, "uint4": 0.5, "int2": 0.25, "uint2": 0.25}


def plain(value: Any) -> str:
    """Returns text that cannot steer a terminal: a manifest may come from anyone."""
    text = str(value).replace("\n", " ")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def size(nbytes: float) -> str:
    """Returns a number of bytes as people read it, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def show_manifest(
    manifest: m.Manifest, functions: Sequence[str] = (), fold: int | None = FOLD
) -> RenderableType:
    """Returns all that is shown of a manifest; `fold` is None to show each leaf."""
    body = manifest.body
    parts: list[RenderableType] = [_header(manifest)]
    shown = {n: f for n, f in sorted(body.functions.items()) if not functions or n in functions}
    if len(shown) > 1:
        parts.append(_overview(shown))
    meshes: dict[int, None] = {}
    for name, function in shown.items():
        parts += [Text(), _function(name, function, body, fold)]
        meshes.update(dict.fromkeys(_meshes_of(function, body)))
    for index in sorted(meshes):
        parts += [Text(), _mesh(index, body.meshes[index])]
    return Group(*parts)


# -- header ----------------------------------------------------------------------------------------------------------


def _header(manifest: m.Manifest) -> RenderableType:
    body = manifest.body
    version = ".".join(map(str, manifest.version))
    lines = [Text(plain(manifest.path), style="bold")]
    if not manifest.is_readable:
        newest = ".".join(map(str, m.FORMAT_VERSION))
        lines.append(Text(f"format {version}, which this version (format {newest}) cannot read."))
        return Group(*lines)
    by = [f"{k} {v}" for k, v in body.created_by.items() if k != "host"]
    host = f" on {body.created_by['host']}" if body.created_by.get("host") else ""
    lines.append(Text(plain(f"format {version}, saved by {', '.join(by) or 'unknown'}{host}")))
    what = (
        "executables only, no state"
        if body.kind == "functions"
        else f"beside a state of {count(len(body.state), 'array')}"
    )
    stored = size(sum(file.nbytes for file in m.files_of(body).values()))
    lines.append(Text(f"{count(len(body.functions), 'function')}, {stored}, {what}"))
    return Group(*lines)


def _overview(functions: dict[str, m.Function]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("function", overflow="fold")
    for heading in ("signatures", "variants", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("for", overflow="fold")
    for name, function in functions.items():
        variants = [v for s in function.signatures for v in s.variants]
        portable = [s.portable for s in function.signatures if s.portable is not None]
        places = dict.fromkeys(place(v.topology) for v in variants)
        if portable:
            names = dict.fromkeys(p for part in portable for p in part.platforms)
            places[f"StableHLO ({', '.join(names)})"] = None
        if function.absent is not None:
            places = {f"not saved: {function.absent.code}": None}
        table.add_row(
            Text(plain(name)),
            str(len(function.signatures)),
            str(len(variants)),
            size(sum(f.nbytes for f in (*variants, *portable))),
            Text(plain(", ".join(places))),
        )
    return table


# -- functions -------------------------------------------------------------------------------------------------------


def _function(name: str, function: m.Function, body: m.Body, fold: int | None) -> RenderableType:
    tree = Tree(Text(plain(name), style="bold cyan"), guide_style="dim")
    if function.absent is not None:
        tree.add(_absent(function.absent))
    for index, signature in enumerate(function.signatures):
        branch = tree.add(_signature_line(index, signature))
        if signature.absent is not None:
            branch.add(_absent(signature.absent))
        _leaves(branch, "inputs", signature.inputs, body, fold)
        _leaves(branch, "outputs", signature.outputs, body, fold)
        for number, variant in enumerate(signature.variants):
            _variant(branch, number, variant, in_full=fold is None)
        if signature.portable is not None:
            part = signature.portable
            branch.add(
                Text(
                    plain(
                        f"StableHLO for {', '.join(part.platforms)}: {size(part.nbytes)}, "
                        f"{size(part.raw_nbytes)} raw"
                    )
                )
            )
        elif signature.portable_absent is not None:
            branch.add(Text("no StableHLO: ").append_text(_absent(signature.portable_absent)))
    return tree


def _absent(absent: m.Absent) -> Text:
    return Text.assemble((plain(absent.code), "yellow"), plain(f" {absent.detail}"))


def _signature_line(index: int, signature: m.Signature) -> Text:
    text = Text(f"signature {index}", style="bold")
    facts = []
    if signature.static:
        facts.append("static " + ", ".join(f"{k}={v}" for k, v in signature.static))
    if signature.program:
        facts.append(f"program {short(signature.program)}")
    if signature.code is not None:
        unseen = signature.code.undecidable
        seen = f", {count(len(unseen), 'thing')} unseen" if unseen else ""
        facts.append(f"code {short(signature.code.fingerprint)}{seen}")
    return text.append(plain(("  " + ", ".join(facts)) if facts else ""), style="not bold")


def short(digest: str) -> str:
    return digest.rpartition(":")[2][:_DIGITS]


def _leaves(
    branch: Tree, title: str, leaves: Sequence[m.Leaf], body: m.Body, fold: int | None
) -> None:
    total = size(sum(map(_leaf_nbytes, leaves)))
    node = branch.add(f"{title}: {count(len(leaves), 'array')}, {total}")
    nested: dict[str, Any] = {}
    for leaf in leaves:
        *parents, last = leaf.path.split("/")
        place = nested
        for part in parents:
            inner = place.setdefault(part, {})
            place = inner if isinstance(inner, dict) else place
        place[last] = leaf
    _subtree(node, nested, body, fold)


def _subtree(
    node: Tree, nested: dict[str, Any], body: m.Body, fold: int | None, depth: int = 0
) -> None:
    for name, child in nested.items():
        if isinstance(child, m.Leaf):
            node.add(_leaf(name, child, body))
            continue
        leaves = list(_flat(child))
        is_slim = len(child) <= _FEW_BRANCHES and depth < _NEAR
        if fold is not None and len(leaves) > fold and not is_slim:
            total = size(sum(map(_leaf_nbytes, leaves)))
            node.add(Text(plain(f"{name}/…  {count(len(leaves), 'array')}, {total}")))
        else:
            _subtree(node.add(Text(plain(name))), child, body, fold, depth + 1)


def _flat(nested: dict[str, Any]) -> Iterable[m.Leaf]:
    for child in nested.values():
        if isinstance(child, m.Leaf):
            yield child
        else:
            yield from _flat(child)


def _leaf(name: str, leaf: m.Leaf, body: m.Body) -> Text:
    text = Text(plain(f"{name} " if name else ""))
    text.append(plain(aval(leaf)), style="green")
    if leaf.sharding is not None and (placed := sharding(body.shardings[leaf.sharding])):
        text.append(plain(f" {placed}"), style="magenta")
    for flag, is_set in (("weak", leaf.weak_type), ("donated", leaf.donated)):
        if is_set:
            text.append(f" {flag}", style="dim")
    if leaf.kind != "array":
        text.append(plain(f" {leaf.kind}"), style="dim")
    return text


def aval(leaf: m.Leaf) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def sharding(value: m.Sharding) -> str:
    """Returns a sharding as `P(…)`, with the mesh it is over; empty for one device."""
    memory = f" in {value.memory}" if value.memory not in (None, "device") else ""
    if value.mesh is None:
        return ("HLO sharding" if value.hlo is not None else "") + memory

    def part(entry: Any) -> str:
        if isinstance(entry, m.Unconstrained):
            return "?"
        if entry is None:
            return "-"
        return entry if isinstance(entry, str) else "+".join(entry)

    return f"P({', '.join(map(part, value.spec))}) on mesh {value.mesh}{memory}"


def _leaf_nbytes(leaf: m.Leaf) -> float:
    digits = "".join(c for c in leaf.dtype.partition("e")[0] if c.isdigit())
    each = _BYTES_OF.get(leaf.dtype)
    if each is None:
        each = int(digits) / 8 if digits else 0
    return math.prod(leaf.shape) * each


def place(topology: m.Topology) -> str:
    """Returns what a variant is for, in a few words."""
    kind = "" if topology.device_kind == topology.platform else f" ({topology.device_kind})"
    return f"{topology.platform} x {topology.count}{kind}"


def _variant(branch: Tree, number: int, variant: m.Variant, in_full: bool) -> None:
    topology, environment = variant.topology, variant.environment
    node = branch.add(
        Text(f"variant {number}: ").append(
            plain(
                f"{place(topology)}, {size(variant.nbytes)}, {size(variant.raw_nbytes)} raw, "
                f"jax {environment.jax}, jaxlib {environment.jaxlib}"
            )
        )
    )
    if topology.platform_version != topology.platform:
        node.add(Text(plain(f"runtime {' '.join(topology.platform_version.split())}")))
    node.add(Text(plain(f"devices {_ids(topology)}")))
    if variant.cost:
        cost = variant.cost
        facts = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in cost.items()]
        node.add(Text(plain(f"cost: {', '.join(facts)}")))
    if variant.memory:
        facts = [f"{name} {size(value)}" for name, value in variant.memory.items() if value]
        node.add(Text(plain(f"memory per device: {', '.join(facts) or 'none'}")))
    for title, settings in (
        ("XLA flags", environment.xla_flags),
        ("compiler options", environment.options),
        ("JAX configuration", environment.config if in_full else {}),
    ):
        if settings:
            listed = ", ".join(f"{k}={v}" for k, v in settings.items())
            node.add(Text(plain(f"{title}: {listed}")))
    if variant.constants:
        total = size(sum(c.nbytes for c in variant.constants))
        node.add(f"{count(len(variant.constants), 'constant')}, {total}")
    if variant.custom_calls:
        node.add(Text(plain(f"custom calls: {', '.join(variant.custom_calls)}")))
    if variant.callbacks or variant.effects:
        node.add(
            Text(f"{count(variant.callbacks, 'host callback')}: needs the live function", "yellow")
        )


def _ids(topology: m.Topology) -> str:
    ids = topology.ids
    if len(ids) > 1 and list(ids) == list(range(ids[0], ids[0] + len(ids))):
        shown = f"{ids[0]} to {ids[-1]}"
    else:
        shown = ", ".join(map(str, ids[:16])) + (" …" if len(ids) > 16 else "")
    processes = len(set(topology.processes))
    return shown + (f" of {processes} processes" if processes > 1 else "")


# -- meshes ----------------------------------------------------------------------------------------------------------


def _meshes_of(function: m.Function, body: m.Body) -> Iterable[int]:
    for signature in function.signatures:
        leaves = (*signature.inputs, *signature.outputs)
        indices = {leaf.sharding for leaf in leaves}
        for variant in signature.variants:
            indices |= {*variant.in_shardings, *variant.out_shardings}
        for index in indices:
            if index is not None and (mesh := body.shardings[index].mesh) is not None:
                yield mesh


def axes(mesh: m.Mesh) -> str:
    return ", ".join(f"{name}={n}" for name, n in mesh.axes) or "no axes"


def _mesh(index: int, mesh: m.Mesh) -> RenderableType:
    title = Text(f"mesh {index}", style="bold").append(plain(f"  {axes(mesh)}"), style="not bold")
    kinds = sorted(set(mesh.types) - {"Auto"})
    if kinds:
        title.append(plain(f"  {', '.join(kinds)}"), style="not bold")
    if mesh.positions is None or mesh.size > _MAX_GRID or mesh.size < 2:
        return title
    return Group(title, _grid(mesh))


def _grid(mesh: m.Mesh) -> Text:
    """Draws device positions: the last axis goes to the right, the others down."""
    assert mesh.positions is not None
    width = mesh.axes[-1][1]
    rows = [mesh.positions[i : i + width] for i in range(0, len(mesh.positions), width)]
    digits = len(str(max(mesh.positions)))
    rule = lambda left, middle, right: left + middle.join(["─" * (digits + 2)] * width) + right
    lines = [rule("┌", "┬", "┐")]
    for i, row in enumerate(rows):
        lines.append("│" + "│".join(f" {p:>{digits}} " for p in row) + "│")
        last = i == len(rows) - 1
        lines.append(rule("└", "┴", "┘") if last else rule("├", "┼", "┤"))
    right = plain(mesh.axes[-1][0])
    down = plain(" x ".join(name for name, _ in mesh.axes[:-1]))
    lines[0] += f"  {right} →" + (f"  {down} ↓" if down else "")
    return Text("\n".join(f"  {line}" for line in lines), no_wrap=True, overflow="crop")


# -- check -----------------------------------------------------------------------------------------------------------

_FOLLOWS_FROM_PLATFORM = (
    ReasonCode.DEVICE_KIND,
    ReasonCode.PLATFORM_VERSION,
    ReasonCode.CPU_FEATURES,
)
_STYLES = {
    Verdict.LOADED: "green",
    Verdict.REMAPPED: "green",
    Verdict.REFUSED: "red",
}


def show_check(reports: Mapping[str, FunctionReport], note: str = "") -> RenderableType:
    """Returns a verdict for each function, and below it each reason: saved, here, and what to do."""
    parts: list[RenderableType] = [Text(plain(note))] if note else []
    if not reports:
        parts.append(Text("no functions"))
    width = max((len(plain(name)) for name in reports), default=0)
    for name, report in reports.items():
        line = Text(plain(name).ljust(width), style="bold")
        line.append("  ")
        line.append(str(report.verdict), style=_STYLES.get(report.verdict, "yellow"))
        verdicts = dict.fromkeys(report.signatures)
        if len(verdicts) > 1:
            each = ", ".join(f"{list(report.signatures).count(v)} {v}" for v in verdicts)
            line.append(f"  ({each})", style="not bold")
        parts.append(line)
        parts += map(_reason, _telling(report.reasons))
    return Group(*parts)


def _telling(reasons: Sequence[Reason]) -> Iterable[Reason]:
    """Leaves out what only follows from another platform."""
    elsewhere = any(r.code is ReasonCode.PLATFORM for r in reasons)
    return [r for r in reasons if not (elsewhere and r.code in _FOLLOWS_FROM_PLATFORM)]


def _reason(reason: Reason) -> RenderableType:
    table = Table.grid(padding=(0, 1), pad_edge=False)
    table.add_column(width=5, no_wrap=True)
    table.add_column(overflow="fold")
    if reason.saved and reason.current:
        rows = [("saved", reason.saved), ("here", reason.current)]
    else:
        rows = [("why", reason.saved or reason.current)]
    for title, text in (*rows, ("do", REMEDIES[reason.code])):
        table.add_row(Text(title, style="dim"), Text(plain(text)))
    return Group(Text(f"  {reason.code}", style="yellow"), Padding(table, (0, 0, 0, 4)))


# -- diff, prune -----------------------------------------------------------------------------------------------------


def show_differences(differences: Sequence[Difference], a: str, b: str) -> RenderableType:
    """Returns the differences below the function, signature or variant that they are of."""
    if not differences:
        return Text("no difference")
    parts: list[RenderableType] = [Text(plain(f"a  {a}")), Text(plain(f"b  {b}"))]
    where = None
    for difference in differences:
        if difference.where != where:
            where = difference.where
            parts += [Text(), Text(plain(where), style="bold")]
        table = Table.grid(padding=(0, 1), pad_edge=False)
        table.add_column(width=12, no_wrap=True)
        table.add_column(width=1)
        table.add_column(overflow="fold")
        table.add_row(
            Text(plain(difference.what), style="yellow"), "a", Text(plain(difference.a or "-"))
        )
        table.add_row("", "b", Text(plain(difference.b or "-")))
        parts.append(Padding(table, (0, 0, 0, 2)))
    return Group(*parts)


def show_pruned(pruned: Pruned) -> RenderableType:
    """Returns what was dropped, or would be."""
    if not pruned.parts and not pruned.files:
        return Text("nothing to drop")
    lines = [Text(plain(f"  {part}")) for part in pruned.parts]
    verb = "would drop" if pruned.dry_run else "dropped"
    lines.insert(0, Text(f"{verb} {count(len(pruned.parts), 'part')}:" if lines else f"{verb}:"))
    lines.append(Text(f"  {count(len(pruned.files), 'file')}, {size(pruned.nbytes)}"))
    if pruned.dry_run:
        lines.append(Text("Nothing was changed; add --yes to do it."))
    return Group(*lines)


# -- precompile ------------------------------------------------------------------------------------------------------


def precompiled_as_dict(result: Precompiled) -> dict[str, Any]:
    told = {"where": result.where, "seconds": result.secs, "nbytes": result.nbytes}
    if (reason := result.reason) is not None:
        told["reason"] = {"code": reason.code.name, "detail": reason.saved}
    return told


def show_precompiled(topology: str, results: Sequence[Precompiled]) -> RenderableType:
    """Returns what became of each signature."""
    parts: list[RenderableType] = [Text(plain(topology), style="bold")]
    for result in results:
        if result.reason is None:
            told = f"  {result.where}: {size(result.nbytes)} in {result.secs:.2f} s"
            parts.append(Text(plain(told)))
        else:
            parts += [Text(plain(f"  {result.where}: not compiled")), _reason(result.reason)]
    return Group(*parts)


def target_as_dict(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "platform": target.platform,
        "device_kind": str(target.devices[0].device_kind),
        "devices": len(target.devices),
        "processes": target.processes,
    }


def show_topologies(targets: Sequence[Target]) -> RenderableType:
    """Returns the topologies that can be named, and how to get more."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("topology", no_wrap=True)
    table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("hosts", justify="right", no_wrap=True)
    table.add_column("kind")
    table.add_row("cpu:N", "N", "1", "cpu")
    table.add_row("cuda:FILE:N", "N", "1", "as FILE describes it")
    for target in targets:
        told = target_as_dict(target)
        row = ("name", "devices", "processes", "device_kind")
        table.add_row(*(str(told[name]) for name in row))
    if targets:
        note = "Other sizes of these generations may be named too."
    else:
        note = "For TPU topologies: pip install 'orbax-aot[tpu-compile]'."
    return Group(table, Text(note))

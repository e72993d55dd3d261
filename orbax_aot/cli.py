"""The command line `orbax-aot`. Each command imports what it needs when it runs, so that reading imports no jax."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from orbax_aot.errors import AotError
from orbax_aot.version import __version__

# Exit codes. Click itself ends with 2 where the command line is wrong.
EXIT_ERROR = 1
EXIT_RECOMPILES = 3
EXIT_REFUSED = 4

_path = click.argument("path", type=str)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_functions = click.option(
    "--function",
    "-f",
    "functions",
    multiple=True,
    metavar="NAME",
    help="Only this function; may be given several times.",
)


class _Group(click.Group):
    """Ends with one line and an exit code where a command raises what a user can act on."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AotError as e:
            message = "".join(c if c.isprintable() or c == "\n" else "�" for c in str(e))
            click.echo(f"orbax-aot: {message}", err=True)
            ctx.exit(EXIT_ERROR)
        except OSError as e:
            click.echo(f"orbax-aot: {e}", err=True)
            ctx.exit(EXIT_ERROR)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="orbax-aot")
def main() -> None:
    """Compiled executables in Orbax checkpoints: what is there, and would it load?

    PATH is a checkpoint root (its latest step is taken), a step, or an item of a step.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a "?"


@contextlib.contextmanager
def _console() -> Iterator[Any]:
    """Gives a console that follows `NO_COLOR` and `COLUMNS`; ends quietly where a pipe's reader has left."""
    from rich.console import Console

    try:
        yield Console(highlight=False, markup=False, emoji=False)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def _require_functions(asked: tuple[str, ...], saved: Any) -> None:
    for name in asked:
        if name not in saved:
            raise click.BadParameter(
                f"no function {name!r} there, only {', '.join(sorted(saved)) or 'none'}.",
                param_hint="--function",
            )


# -- inspect ---------------------------------------------------------------------------------------------------------


@main.command()
@_path
@_functions
@click.option("--all", "unfold", is_flag=True, help="Show each array of large trees.")
@click.option("--stablehlo", metavar="FOLDER", help="Write the StableHLO of each signature there.")
@click.option("--hlo", metavar="FOLDER", help="Write the optimized HLO of what loads here there.")
@_as_json
def inspect(
    path: str,
    functions: tuple[str, ...],
    unfold: bool,
    stablehlo: str | None,
    hlo: str | None,
    as_json: bool,
) -> None:
    """Show what is saved: functions, signatures, variants, meshes, sizes."""
    from orbax_aot.inspection import inspect as inspect_

    manifest = inspect_(path)
    _require_functions(functions, manifest.functions)
    if stablehlo is not None or hlo is not None:
        return _write_texts(path, functions, stablehlo, hlo)
    if as_json:
        body = msgspec.to_builtins(manifest.body)
        if functions:
            body["functions"] = {n: body["functions"][n] for n in functions}
        _print_json({"path": manifest.path, "version": manifest.version, "body": body})
        return None
    from orbax_aot import rendering

    with _console() as console:
        console.print(
            rendering.show_manifest(manifest, functions, None if unfold else rendering.FOLD)
        )


def _write_texts(
    path: str, functions: tuple[str, ...], stablehlo: str | None, hlo: str | None
) -> None:
    from orbax_aot import texts

    for folder, write in ((stablehlo, texts.write_stablehlo), (hlo, texts.write_hlo)):
        if folder is None:
            continue
        for written in write(path, folder, functions):
            click.echo(written)


# -- check -----------------------------------------------------------------------------------------------------------


def _parse_mesh(_: click.Context, __: click.Parameter, value: str | None) -> dict[str, int] | None:
    if value is None:
        return None
    axes: dict[str, int] = {}
    for part in value.split(","):
        name, equals, number = part.partition("=")
        if not (name and equals and number.isdecimal() and int(number) > 0) or name in axes:
            raise click.BadParameter(f"expected axes such as data=2,model=4, got {value!r}.")
        axes[name] = int(number)
    return axes


_mesh = click.option(
    "--mesh", metavar="AXES", callback=_parse_mesh, help="Axes and sizes, as in data=2,model=4."
)


@main.command()
@_path
@_functions
@click.option(
    "--platform", metavar="NAME", help="Ask about cpu, tpu or cuda; JAX's default if left out."
)
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="Ask about N devices.")
@click.option(
    "--topology", metavar="NAME", help="Ask about a topology, as precompile --list names it."
)
@_mesh
@_as_json
def check(
    path: str,
    functions: tuple[str, ...],
    platform: str | None,
    devices: int | None,
    topology: str | None,
    mesh: dict[str, int] | None,
    as_json: bool,
) -> None:
    """Say whether the functions would load, here or elsewhere, and why not.

    Compares machines, software and settings, not code: a restore that passes a live function compares that too.

    Exit code: 0 all load; 3 some are compiled again; 4 some cannot run.
    """
    _quiet_jax()
    from orbax_aot import checking
    from orbax_aot.report import Verdict

    where: Any = devices
    if topology is not None:
        from orbax_aot import precompiling

        if devices is not None:
            raise click.UsageError(
                "--topology says how many devices there are; leave out --devices."
            )
        described = precompiling.find_topology(topology)
        if platform not in (None, described.platform):
            raise click.UsageError(f"{topology} is a topology of {described.platform}.")
        where, platform = described.devices, None
    try:
        report = checking.check(path, mesh, where, platform)
    except ValueError as e:
        if isinstance(e, AotError):
            raise
        raise click.UsageError(str(e)) from e
    _require_functions(functions, report)
    chosen = {n: r for n, r in sorted(report.items()) if not functions or n in functions}
    if as_json:
        told = report.to_dict()
        _print_json({"note": report.note, "functions": {n: told[n] for n in chosen}})
    else:
        from orbax_aot import rendering

        with _console() as console:
            console.print(rendering.show_check(chosen, report.note))
    verdicts = {r.verdict for r in chosen.values()}
    if Verdict.REFUSED in verdicts:
        sys.exit(EXIT_REFUSED)
    if verdicts - {Verdict.LOADED, Verdict.REMAPPED}:
        sys.exit(EXIT_RECOMPILES)


# -- diff, prune -----------------------------------------------------------------------------------------------------


@main.command()
@click.argument("a", type=str)
@click.argument("b", type=str)
@_as_json
def diff(a: str, b: str, as_json: bool) -> None:
    """Say why the functions of two steps differ: code, program, topology, flags.

    Exit code: 0 no difference; 3 some.
    """
    from orbax_aot.comparing import diff as diff_

    differences = diff_(a, b)
    if as_json:
        import dataclasses

        _print_json([dataclasses.asdict(d) for d in differences])
    else:
        from orbax_aot import rendering

        with _console() as console:
            console.print(rendering.show_differences(differences, a, b))
    if differences:
        sys.exit(EXIT_RECOMPILES)


@main.command()
@_path
@_functions
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="F/S/V",
    help="Drop this variant, as train_step/0/1.",
)
@click.option(
    "--platform", "platforms", multiple=True, metavar="NAME", help="Drop all for this platform."
)
@click.option("--portable", is_flag=True, help="Drop the StableHLO.")
@click.option("--unused", is_flag=True, help="Drop unused files even if younger than an hour.")
@click.option("--yes", is_flag=True, help="Do it; without this, only say what would be dropped.")
@_as_json
def prune(
    path: str,
    functions: tuple[str, ...],
    variants: tuple[str, ...],
    platforms: tuple[str, ...],
    portable: bool,
    unused: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Drop variants, platforms or StableHLO, and files that nothing refers to.

    Changes nothing without --yes. The weights stay as they are.
    """
    from orbax_aot.editing import prune as prune_

    try:
        pruned = prune_(
            path,
            functions=functions or None,
            variants=variants,
            platforms=platforms,
            portable=portable,
            unused=unused,
            dry_run=not yes,
        )
    except KeyError as e:
        raise click.UsageError(e.args[0]) from e
    if as_json:
        told = {"parts": pruned.parts, "files": pruned.files, "nbytes": pruned.nbytes}
        return _print_json({**told, "dry_run": pruned.dry_run})
    from orbax_aot import rendering

    with _console() as console:
        console.print(rendering.show_pruned(pruned))
    return None


# -- precompile ------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("path", required=False)
@click.option(
    "--topology",
    "topologies",
    multiple=True,
    metavar="NAME",
    help="As cpu:8, v5e:2x4 or cuda:FILE:8; may be repeated.",
)
@_functions
@_mesh
@click.option("--list", "list_", is_flag=True, help="List the topologies that can be named.")
@_as_json
def precompile(
    path: str | None,
    topologies: tuple[str, ...],
    functions: tuple[str, ...],
    mesh: dict[str, int] | None,
    list_: bool,
    as_json: bool,
) -> None:
    """Add executables for machines that are not here, from the saved StableHLO.

    TPU topologies need libtpu (pip install 'orbax-aot[tpu-compile]'), GPUs JAX's CUDA plugin and a file that
    describes them (cuda:h100.txtpb:8). The StableHLO must be saved for them, as by
    AotSave(portable=("cpu", "tpu", "cuda")).

    Exit code: 0 all were compiled; 3 some could not be.
    """
    _quiet_jax()
    if list_:
        return _list_topologies(as_json)
    if path is None or not topologies:
        raise click.UsageError("PATH and --topology are needed, or --list.")
    from orbax_aot import precompiling, rendering

    told: dict[str, Any] = {}
    failed = False
    with _console() as console:
        for topology in topologies:
            tell = lambda where, t=topology: click.echo(f"{where}: compiling for {t}", err=True)
            try:
                results = precompiling.precompile(
                    path, topology, functions=functions or None, mesh=mesh, progress=tell
                )
            except KeyError as e:
                raise click.UsageError(e.args[0]) from e
            failed |= any(r.reason is not None for r in results)
            told[topology] = [rendering.precompiled_as_dict(r) for r in results]
            if not as_json:
                console.print(rendering.show_precompiled(topology, results))
    if as_json:
        _print_json(told)
    if failed:
        sys.exit(EXIT_RECOMPILES)
    return None


def _list_topologies(as_json: bool) -> None:
    from orbax_aot import precompiling, rendering

    targets = list(precompiling.list_topologies())
    if as_json:
        return _print_json([{"name": "cpu:N"}, *map(rendering.target_as_dict, targets)])
    with _console() as console:
        console.print(rendering.show_topologies(targets))
    return None


def _quiet_jax() -> None:
    """Keeps JAX's search for accelerators from writing between a command's own lines."""
    import logging

    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()

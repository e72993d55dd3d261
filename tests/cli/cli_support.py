"""A manifest made by hand, and the command line run in a process of its own or in this one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import msgspec
from click.testing import CliRunner, Result

from orbax_aot import cli
from orbax_aot import manifest as m
from orbax_aot import store as store_lib

SNAPSHOTS = pathlib.Path(__file__).parent / "snapshots"


def run(*args: str, env: dict[str, str | None] | None = None) -> Result:
    """Runs the command line in this process, 80 columns wide, as into a pipe."""
    return CliRunner().invoke(cli.main, list(args), env={"COLUMNS": "80", **(env or {})})


def run_process(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line as a shell would."""
    return run_python("-m", "orbax_aot.cli", *args, **env)


def run_python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where it finds this package and these modules."""
    environment = {**os.environ, "PYTHONPATH": python_path(), **env}
    return subprocess.run(
        [sys.executable, *args], env=environment, capture_output=True, text=True, timeout=300
    )


def assert_snapshot(name: str, text: str) -> None:
    """Compares with the stored output; rewrites that where UPDATE_SNAPSHOTS is set."""
    path = SNAPSHOTS / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text)
    assert text == path.read_text()


def write(item: pathlib.Path, body: m.Body) -> pathlib.Path:
    item.mkdir(parents=True, exist_ok=True)
    store_lib.Store(item).write_manifest(body)
    return item


def leaf(path: str, shape: tuple[int, ...], sharding: int | None = None, **fields) -> m.Leaf:
    fields = {"dtype": "float32", "weak_type": False, "donated": False, **fields}
    return m.Leaf(path=path, shape=shape, sharding=sharding, **fields)


def variant(count: int = 8, *, platform: str = "cpu", file: str = "0.pjrt.zst", **fields):
    described = {
        "topology": m.Topology(
            platform=platform,
            platform_version=platform,
            device_kind=platform,
            count=count,
            replicas=1,
            partitions=count,
            coords=None,
            ids=tuple(range(count)),
            processes=(0,) * count,
        ),
        "environment": m.Environment(
            jax="0.10.2",
            jaxlib="0.10.2",
            cpu_features="avx,avx2" if platform == "cpu" else "",
            xla_flags={},
            config={"jax_threefry_partitionable": True},
            options={},
        ),
        "name": "jit_f",
        "kept": (),
        "in_shardings": (),
        "out_shardings": (),
        "in_types": (),
        "out_types": (),
        "layouts": m.Layouts(),
        "custom_calls": (),
        "rank": None,
        "hlo_fingerprint": None,
        "cost": {"flops": 4096.0},
        "memory": {"argument": 1024, "temp": 0},
        "sha256": "ab" * 32,
        "raw_sha256": "cd" * 32,
        "nbytes": 6_400,
        "raw_nbytes": 31_200,
        "codec": "zstd",
        "file": file,
    }
    return m.Variant(**{**described, **fields})


def body() -> m.Body:
    """Three functions: sharded with two variants, on one device, and one that was not saved."""
    weights = tuple(leaf(f"0/params/layer_{i}/w", (64, 64), 0) for i in range(30))
    inputs = (*weights, leaf("0/step", (), 1, dtype="int32", weak_type=True, donated=True))
    wide = {
        "kept": tuple(range(len(inputs))),
        "in_shardings": (*(0,) * 30, 1),
        "in_types": (None,) * 31,
        "out_shardings": (2,),
        "out_types": (None,),
        "layouts": m.Layouts(inputs=(None,) * 31, dispatch=(None,) * 31, outputs=(None,)),
    }
    train_step = m.Signature(
        folder="0",
        inputs=inputs,
        outputs=(leaf("loss", (), 2),),
        output_tree={"leaf": 0},
        code=m.Code(fingerprint="0123456789abcdef", call="", undecidable=("reads a file",)),
        program="sha256:fedcba9876543210",
        portable=m.Portable(
            file="portable.stablehlo.zst",
            platforms=("cpu", "tpu"),
            sha256="",
            raw_sha256="",
            nbytes=2_870,
            raw_nbytes=6_120,
            codec="zstd",
        ),
        variants=(
            variant(**wide),
            msgspec.structs.replace(
                variant(file="1.pjrt.zst", platform="tpu", **wide),
                topology=msgspec.structs.replace(
                    variant().topology,
                    platform="tpu",
                    platform_version="libtpu 1.2\nbuilt today",
                    device_kind="TPU v5 lite",
                    coords=tuple((i % 4, i // 4, 0) for i in range(8)),
                    processes=(0, 0, 1, 1, 0, 0, 1, 1),
                ),
            ),
        ),
    )
    predict = m.Signature(
        folder="0",
        inputs=(leaf("0", (3,)),),
        outputs=(leaf("", (3,)),),
        output_tree={"leaf": 0},
        code=None,
        program=None,
        portable=None,
        portable_absent=m.Absent(code="NOT_SERIALIZABLE", detail="a jax.stages.Compiled"),
        variants=(
            variant(
                1,
                kept=(0,),
                in_shardings=(None,),
                out_shardings=(None,),
                in_types=(None,),
                out_types=(None,),
                layouts=m.Layouts(inputs=(None,), dispatch=(None,), outputs=(None,)),
                custom_calls=("lapack_sgeqrf",),
            ),
        ),
    )
    return m.Body(
        created_by={"orbax_aot": "0.1.0", "jax": "0.10.2", "host": "trainer"},
        state={"params/w": m.StateLeaf(sharding=0, weak_type=False)},
        meshes=(
            m.Mesh(
                axes=(("data", 2), ("model", 4)),
                types=("Auto", "Auto"),
                positions=tuple(range(8)),
            ),
        ),
        shardings=(
            m.Sharding(mesh=0, spec=(None, "model")),
            m.Sharding(mesh=0, spec=()),
            m.Sharding(mesh=0, spec=(("data", "model"),), memory="pinned_host"),
        ),
        functions={
            "train_step": m.Function(folder="train_step", signatures=(train_step,)),
            "predict": m.Function(folder="predict", signatures=(predict,)),
            "never": m.Function(absent=m.Absent(code="NEVER_CALLED", detail="never called")),
        },
    )


def python_path() -> str:
    """Returns a PYTHONPATH under which a child process imports this package and these modules."""
    here = pathlib.Path(__file__).parent
    return os.pathsep.join((str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")))

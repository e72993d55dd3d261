"""Whatever is wrong with what was saved, it has a reason, the function works, and the process lives."""

from __future__ import annotations

import shutil

import altered_cases as cases
import altering
import pytest
from processes import Child, ChildDied


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    with Child() as child:
        child.run(cases.save, path)
        return path, child.run(cases.right_results)


@pytest.fixture(scope="module")
def child():
    with Child() as child:
        yield child


@pytest.fixture
def path(saved, tmp_path):
    """A copy of the checkpoint, to be damaged."""
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def run(child, path, live=True):
    """Restores and calls in the shared process, which must outlive it."""
    child.run(len, [])
    pid = child.pid
    found = child.run(cases.restore, path, live)
    assert child.pid == pid
    return found


def with_count(topology, count):
    """A topology of another number of devices, all its parts in agreement."""
    return {
        **topology,
        "count": count,
        "partitions": count,
        "ids": list(range(count)),
        "processes": [0] * count,
    }


FACTS = {
    "the platform": (["topology", "platform"], "tpu", "PLATFORM"),
    "the kind": (["topology", "device_kind"], "TPU v5 lite", "DEVICE_KIND"),
    "the platform version": (["topology", "platform_version"], "libtpu 1.2", "PLATFORM_VERSION"),
    "a larger count": (["topology"], lambda old: with_count(old, 8), "DEVICE_COUNT"),
    "a smaller count": (["topology"], lambda old: with_count(old, 2), "DEVICE_COUNT"),
    "a count that disagrees with the ids": (["topology", "count"], 8, "CORRUPT"),
    "fewer ids": (["topology", "ids"], [0, 1], "CORRUPT"),
    "more partitions": (["topology", "partitions"], 8, "CORRUPT"),
    "more replicas": (["topology", "replicas"], 4, "CORRUPT"),
    "coordinates": (
        ["topology", "coords"],
        [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]],
        "DEVICE_LAYOUT",
    ),
    "the jaxlib": (["environment", "jaxlib"], "0.0.1", "JAX_VERSION"),
    "the jax": (["environment", "jax"], "0.0.1", "JAX_VERSION"),
    "the CPU features": (["environment", "cpu_features"], "avx10,sse2", "CPU_FEATURES"),
    "a flag": (["environment", "xla_flags"], {"xla_cpu_enable_fast_math": "true"}, "XLA_FLAGS"),
    "a setting": (["environment", "config"], {"jax_enable_x64": True}, "JAX_CONFIG"),
    "an option": (["environment", "options"], {"xla_foo": "1"}, "COMPILE_OPTIONS"),
    "the digest of the stored bytes": (["sha256"], "0" * 64, "CORRUPT"),
    "the digest of the raw bytes": (["raw_sha256"], "0" * 64, "CORRUPT"),
    "the stored size": (["nbytes"], 17, "CORRUPT"),
    "the raw size": (["raw_nbytes"], 17, "CORRUPT"),
    "an enormous raw size": (["raw_nbytes"], 1 << 33, "CORRUPT"),
    "the codec": (["codec"], "gzip", "CORRUPT"),
    "a file outside": (["file"], "../../../../../etc/passwd", "CORRUPT"),
    "an absolute file": (["file"], "/etc/passwd", "CORRUPT"),
}


@pytest.mark.parametrize("fact", FACTS)
def test_each_altered_fact_has_its_own_reason_and_the_function_works(saved, path, child, fact):
    keys, value, code = FACTS[fact]
    body = altering.read_body(path / "1")
    altering.write_body(path / "1", altering.alter_variants(body, keys, value))
    found = run(child, path)
    right = saved[1]
    assert found["report"] == {
        "predict": ["RECOMPILED", [code]],
        "train_step": ["RECOMPILED", [code]],
    }
    for name in ("state", "predict", "train_step"):
        assert found[name] == right[name]
    level = "WARNING" if code == "CORRUPT" else "INFO"
    lines = [line for line in found["lines"] if "recompiled" in line]
    assert len(lines) == 2 and all(line.startswith(f"{level} ") for line in lines), found["lines"]
    assert all(f"({code}: " in line for line in lines), lines
    assert found["tracebacks"] == []


@pytest.mark.parametrize("fact", ["the platform", "the jaxlib", "a larger count", "the raw size"])
def test_without_a_live_function_an_altered_fact_leads_to_the_portable_program(
    saved, path, child, fact
):
    keys, value, code = FACTS[fact]
    body = altering.read_body(path / "1")
    altering.write_body(path / "1", altering.alter_variants(body, keys, value))
    found = run(child, path, live=False)
    assert {name: verdict for name, (verdict, _) in found["report"].items()} == {
        "predict": "REBUILT",
        "train_step": "REBUILT",
    }
    assert all(codes == [code] for _, codes in found["report"].values())
    for name in ("state", "predict", "train_step"):
        assert found[name] == saved[1][name]


def damage(path, how):
    files = sorted((path / "1/default/_aot").rglob("*.pjrt.zst"))
    assert len(files) == 2
    for file in files:
        data = file.read_bytes()
        changed = {
            "missing": None,
            "empty": b"",
            "truncated": data[:-10],
            "one byte": data[:1],
            "longer": data + b"x",
            "flipped at the start": bytes([data[0] ^ 1]) + data[1:],
            "flipped in the middle": data[: len(data) // 2]
            + bytes([data[len(data) // 2] ^ 128])
            + data[len(data) // 2 + 1 :],
            "flipped at the end": data[:-1] + bytes([data[-1] ^ 1]),
            "zeros": bytes(len(data)),
        }[how]
        if changed is None:
            file.unlink()
        else:
            assert changed != data
            file.write_bytes(changed)


@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "empty",
        "truncated",
        "one byte",
        "longer",
        "flipped at the start",
        "flipped in the middle",
        "flipped at the end",
        "zeros",
    ],
)
def test_a_damaged_payload_is_corrupt_and_the_function_works(saved, path, child, how):
    damage(path, how)
    found = run(child, path)
    assert found["report"] == {
        "predict": ["RECOMPILED", ["CORRUPT"]],
        "train_step": ["RECOMPILED", ["CORRUPT"]],
    }
    for name in ("state", "predict", "train_step"):
        assert found[name] == saved[1][name]
    lines = [line for line in found["lines"] if "recompiled" in line]
    assert len(lines) == 2 and all(line.startswith("WARNING ") for line in lines), lines
    assert found["tracebacks"] == []


def test_swapped_payloads_are_corrupt(saved, path, child):
    first, second = sorted((path / "1/default/_aot").rglob("*.pjrt.zst"))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    found = run(child, path)
    assert [codes for _, codes in found["report"].values()] == [["CORRUPT"], ["CORRUPT"]]
    assert found["predict"] == saved[1]["predict"]


MANIFESTS = {
    "empty": (lambda data: b"", "CORRUPT"),
    "not JSON": (lambda data: b"\x00\xff\xfe" * 20, "CORRUPT"),
    "JSON of another kind": (lambda data: b"[1, 2, 3]", "CORRUPT"),
    "nested too deep": (lambda data: b"[" * 100_000, "CORRUPT"),
    "truncated": (lambda data: data[: len(data) // 2], "CORRUPT"),
    "one byte short": (lambda data: data[:-1], "CORRUPT"),
    "a digit flipped in the body": (
        lambda data: data.replace(b'"jaxlib":"0.', b'"jaxlib":"1.'),
        "CORRUPT",
    ),
    "another format": (lambda data: data.replace(b"orbax-aot", b"orbax-bot", 1), "CORRUPT"),
    "a newer major version": (
        lambda data: altering.manifest_bytes({"all": "new"}, (2, 0)),
        "FORMAT_VERSION",
    ),
    "a body of another shape": (lambda data: altering.manifest_bytes([1, 2]), "CORRUPT"),
    "functions of another shape": (
        lambda data: altering.manifest_bytes({"functions": {"predict": 1}}),
        "CORRUPT",
    ),
}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_cannot_be_read_is_a_reason_and_no_error(saved, path, child, name, live):
    change, code = MANIFESTS[name]
    file = altering.manifest_path(path / "1")
    data = file.read_bytes()
    assert change(data) != data
    file.write_bytes(change(data))
    found = run(child, path, live)
    verdict = "RECOMPILED" if live else "REFUSED"
    assert found["report"] == {"predict": [verdict, [code]], "train_step": [verdict, [code]]}
    assert found["state"] == saved[1]["state"]
    assert found["tracebacks"] == []
    for function in ("predict", "train_step"):
        if live:
            assert found[function] == saved[1][function]
        else:
            assert found[function].startswith(
                f"IncompatibleExecutableError: {function}: cannot be called here: {code}"
            )


def test_a_newer_minor_version_with_unknown_fields_is_loaded(saved, path, child):
    body = altering.read_body(path / "1")
    body["later"] = {"more": 1}
    for variant in altering.variants(body):
        variant["later"] = [1, 2]
        variant["topology"]["later"] = "x"
    altering.manifest_path(path / "1").write_bytes(altering.manifest_bytes(body, (1, 9)))
    found = run(child, path)
    assert found["report"] == {"predict": ["LOADED", []], "train_step": ["LOADED", []]}
    assert found["predict"] == saved[1]["predict"]


def test_an_unaltered_copy_is_loaded(saved, path, child):
    """What the other tests alter is all that keeps these executables from being loaded."""
    altering.write_body(path / "1", altering.read_body(path / "1"))
    found = run(child, path)
    assert found["report"] == {"predict": ["LOADED", []], "train_step": ["LOADED", []]}
    for name in ("state", "predict", "train_step"):
        assert found[name] == saved[1][name]


def test_a_mesh_in_another_order_than_the_program_is_corrupt(saved, path, child):
    """jax 0.10.2 ends the process where arguments lie on other devices than the program runs on."""
    body = altering.read_body(path / "1")
    body["meshes"][0]["positions"] = body["meshes"][0]["positions"][::-1]
    altering.write_body(path / "1", body)
    found = run(child, path)
    for name in ("predict", "train_step"):
        assert found["report"][name] == ["RECOMPILED", ["CORRUPT"]]
        assert found[name] == saved[1][name]


def test_no_part_of_a_manifest_altered_alone_ends_the_process_or_gives_a_wrong_result(tmp_path):
    """Every value in a manifest gets another value of its JSON type, under a right digest.

    Some are noticed by JAX only, at the call, which then raises. The order of results within their tree is what the
    manifest says it is.
    """
    saved, scratch = tmp_path / "saved", tmp_path / "scratch"
    deaths, wrong = [], []
    with Child(devices=2) as child:
        child.run(cases.save_small, saved)
        total = child.run(cases.small_parts, saved)
        assert total > 400
        left = list(range(0, total, 3))  # a value has about three alterations, next to each other
        while left:
            now, left = left[:20], left[20:]
            try:
                wrong += child.run(cases.run_altered, saved, scratch, now)
            except ChildDied as e:
                last = [line for line in str(e).splitlines() if line[:1].isdigit()][-1]
                deaths.append(f"{last}: exit status {e.returncode}")
                left = [n for n in now if n > int(last.partition(":")[0])] + left
    assert deaths == []
    assert [w for w in wrong if w.endswith("differs") and "output_tree" not in w] == []

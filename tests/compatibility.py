"""The table in `docs/compatibility.md`: each Orbax feature with the tests that show it, through v0 and v1.

    python tests/compatibility.py    # writes the page anew

A feature is listed by the names of tests; `test_compatibility.py` checks that these exist and that the page is current.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs/compatibility.md"


class Feature(NamedTuple):
    """`v0` and `v1` are `module::test`, the module without `test_` and `.py`; None where no test shows it."""

    name: str
    v0: str | None
    v1: str | None


_AROUND = "around_the_handler::test_"

FEATURES = (
    Feature(
        "State and executables in one item",
        "v1::test_each_api_restores_what_either_wrote_without_tracing",
        "v1::test_each_api_restores_what_either_wrote_without_tracing",
    ),
    Feature(
        "Executables as an item of their own",
        "v1::test_each_api_restores_what_either_wrote_without_tracing",
        "v1::test_each_api_restores_what_either_wrote_without_tracing",
    ),
    Feature(
        "Restoring without the source",
        "v1::test_each_api_restores_without_the_source_what_either_wrote",
        "v1::test_each_api_restores_without_the_source_what_either_wrote",
    ),
    Feature(
        "Read by an Orbax without this package",
        "v1::test_plain_orbax_reads_the_weights_without_a_warning",
        "v1::test_plain_orbax_reads_the_weights_without_a_warning",
    ),
    Feature(
        "Synchronous and asynchronous saves",
        _AROUND + "a_synchronous_manager_saves_executables",
        "v1::test_every_way_to_save_and_load_of_v1_carries_the_executables",
    ),
    Feature(
        "`CheckpointManager` / `training.Checkpointer`",
        _AROUND + "the_best_steps_by_metric_keep_their_executables",
        "v1::test_every_way_to_save_and_load_of_v1_carries_the_executables",
    ),
    Feature(
        "`Checkpointer`, `AsyncCheckpointer`",
        _AROUND + "a_checkpointer_without_manager_carries_executables",
        None,
    ),
    Feature(
        "`PyTreeCheckpointHandler`",
        _AROUND + "a_pytree_handler_takes_a_state_and_gives_it_back",
        None,
    ),
    Feature("Its save and restore args", _AROUND + "a_pytree_handler_gets_its_own_arguments", None),
    Feature(
        "Restoring as another dtype",
        _AROUND + "a_state_restored_as_another_dtype_compiles_another_signature",
        None,
    ),
    Feature(
        "Partial restore", _AROUND + "a_part_of_a_state_is_restored_beside_the_executables", None
    ),
    Feature("A state handler of one's own", _AROUND + "a_handler_of_ones_own_is_wrapped", None),
    Feature(
        "A registry of one's own", None, "v1::test_a_registry_of_ones_own_takes_the_handlers_once"
    ),
    Feature(
        "Random keys, numpy leaves, numbers",
        _AROUND + "random_keys_and_numpy_leaves_come_back_beside_executables",
        "v1::test_weak_types_and_leaves_that_are_no_arrays_come_back_through_v1",
    ),
    Feature(
        "zarr3, OCDBT off",
        _AROUND + "each_format_of_arrays_carries_executables",
        "v1::test_a_context_with_zarr3_and_without_ocdbt_carries_executables",
    ),
    Feature(
        "`best_fn`, `max_to_keep`",
        _AROUND + "the_best_steps_by_metric_keep_their_executables",
        None,
    ),
    Feature(
        "`save_interval_steps`", _AROUND + "steps_between_the_save_interval_are_skipped_whole", None
    ),
    Feature(
        "`read_only`, `reload`",
        _AROUND + "a_read_only_manager_restores_and_sees_new_steps_on_reload",
        None,
    ),
    Feature(
        "`delete`, `todelete_subdir`", _AROUND + "deleting_a_step_takes_its_executables_along", None
    ),
    Feature("Step name formats", _AROUND + "any_name_of_a_step_folder_will_do", None),
    Feature("`single_host_load_and_broadcast`", _AROUND + "one_host_may_load_and_broadcast", None),
    Feature("`AsyncOptions(timeout_secs=…)`", _AROUND + "orbax_own_timeout_is_the_state_s", None),
    Feature(
        "`checkpoint_utils`",
        _AROUND + "checkpoint_utils_iterate_over_steps_that_have_executables",
        None,
    ),
    Feature("Copying a step folder", _AROUND + "a_step_folder_copied_elsewhere_is_whole", None),
    Feature("Renaming the root", _AROUND + "a_renamed_root_is_whole", None),
    Feature(
        "Merging checkpoints",
        _AROUND + "state_of_one_root_and_functions_of_another_merge_into_a_third",
        None,
    ),
    Feature(
        "A running event loop, as in a notebook",
        None,
        "v1::test_v1_works_where_an_event_loop_runs_already_as_in_a_notebook",
    ),
    Feature(
        "Flax linen and nnx loops",
        "flax::test_a_resumed_loop_runs_the_saved_executable_without_tracing",
        None,
    ),
    Feature(
        "Saved on one JAX, restored on another",
        "upgrade::test_on_another_jax_a_live_function_is_compiled_anew_and_the_version_is_named",
        "upgrade::test_on_another_jax_a_live_function_is_compiled_anew_and_the_version_is_named",
    ),
)


def make_page() -> str:
    lines = [
        "# What works with what",
        "",
        "Each Orbax feature, and the test that shows it with executables in the checkpoint. A dash means that no test "
        "shows it, not that it fails.",
        "",
        "This page is written by `python tests/compatibility.py`; a test checks that it is current.",
        "",
        "| Orbax feature | v0 | v1 |",
        "|---|---|---|",
    ]
    lines += [f"| {f.name} | {_cell(f.v0)} | {_cell(f.v1)} |" for f in FEATURES]
    return "\n".join(lines) + "\n"


def _cell(test: str | None) -> str:
    if test is None:
        return "–"
    module, _, name = test.partition("::")
    return f"[`{name}`](../tests/test_{module}.py)"


def find_missing() -> list[str]:
    """Returns the tests that are listed and do not exist."""
    listed = {test for f in FEATURES for test in (f.v0, f.v1) if test is not None}
    return sorted(test for test in listed if not _exists(test))


def _exists(test: str) -> bool:
    module, _, name = test.partition("::")
    path = TESTS / f"test_{module}.py"
    return path.exists() and any(
        isinstance(node, ast.FunctionDef) and node.name == name
        for node in ast.parse(path.read_text()).body
    )


if __name__ == "__main__":
    PAGE.write_text(make_page())

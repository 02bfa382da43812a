"""Marks the lab's tests as `nightly`, but for one run of each command and what the service relies on."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
IN_MAKE_TEST = (
    "backtest/test_backtest.py::test_figures_equal_those_computed_by_hand",
    "backtest/test_backtest.py::test_json_report",
    "calibrate/test_calibrate.py::test_report_equals_a_replay_of_the_policy",
    "calibrate/test_calibrate.py::test_every_risk_of_a_shipped_policy_has_a_threshold",
    "replay/test_formats.py::test_replay_equals_the_monitor",
    "replay/test_formats.py::test_minimized_metrics_change_their_sign",
    "replay/test_folders.py::test_plan_stands_beside",
    "replay/test_formats.py::test_json_lines_of_several_runs",
    "replay/test_policies_page.py",
    "replay/test_roles.py::test_roles_are_those_of_the_service",
    "replay/test_roles.py::test_several_eval_sets",
    "rlhf/test_job.py::test_steps_between_the_last_eval",
    "rlhf/test_job.py::test_every_eval_is_reported_printed_and_saved",
    "simulator/test_stopping.py::test_reproduce_compares_eleven_figures",
    "stopbench/test_stopbench.py::test_custom_rule_equals_the_policy_that_it_copies",
    "test_cli.py::test_help_lists_all_subcommands",
    "worlds/test_worlds.py::test_run_of_a_seed_does_not_change",
)
"""Paths and tests that are not nightly; whatever starts like one of them."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files all of whose tests are deselected: it takes seconds in each process."""
    name = collection_path.relative_to(FOLDER).as_posix()
    if collection_path.suffix != ".py" or "not nightly" not in config.option.markexpr:
        return None
    return None if any(test.startswith(name) for test in IN_MAKE_TEST) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the lab's tests as `nightly`."""
    kept = tuple(f"tests/lab/{test}" for test in IN_MAKE_TEST)
    for item in items:
        if item.path.is_relative_to(FOLDER) and not item.nodeid.startswith(kept):
            item.add_marker(pytest.mark.nightly)

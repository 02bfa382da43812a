"""Policies in JSON or YAML files, and errors with line and column."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from evalstop_detectors import DETECTORS, POLICIES, policy_from_document, policy_to_document
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.policy_file import load_policy, policy_from_file
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.replay.conftest import build_rows, property_settings, write_jsonl

VALID_POLICY = """name: mine
members:
  - detector: k_decline
    params: {k: 4}
    stop_at: 5
  - detector: k_below_best
    id: below
at_least: all
"""


def test_yaml_and_json_are_equivalent(tmp_path: Path) -> None:
    """A policy in YAML equals the same policy in JSON."""
    (tmp_path / "p.yaml").write_text(VALID_POLICY)
    policy = policy_from_file(tmp_path / "p.yaml")
    (tmp_path / "p.json").write_text(json.dumps(policy_to_document(policy)))
    assert policy_from_file(tmp_path / "p.json") == policy
    assert policy == policy_from_document(
        {
            "name": "mine",
            "members": [
                {"detector": "k_decline", "params": {"k": 4}, "stop_at": 5},
                {"detector": "k_below_best", "id": "below"},
            ],
            "at_least": 2,
        }
    )


def test_policy_is_loaded_by_name() -> None:
    """The message about an unknown name lists the shipped policies."""
    assert load_policy("paper") is POLICIES["paper"]
    with pytest.raises(UnusableArguments, match=f"'papr'; give one of {', '.join(POLICIES)}"):
        load_policy("papr")


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("stop_at: 5", "stop_at: -5", ["line 5, column 5", "$.members[0].stop_at", "number > 0"]),
        ("stop_at: 5", "stopat: 5", ["line 5, column 5", "`stopat`", "stop_at (number > 0"]),
        ("k: 4", "k: four", ["line 4, column 14", "$.members[0].params.k", "from 1 to 1000000"]),
        ("k: 4", "q: 4", ["line 4, column 14", "`q`", "min_delta (number >= 0)"]),
        ("k_below_best", "k_below", ["line 6, column 5", "'k_below'", *DETECTORS]),
        ("at_least: all", "at_least: most", ["line 8, column 1", "$.at_least", '"all" or "any"']),
        ("at_least: all", "at_least: 3", ["line 8, column 1", "at most 2"]),
        ("at_least: all", "gate:\n  - below\n  - above", ["line 10, column 5", "'above'", "k_decline, below"]),
        ("name: mine", "nme: mine", ["line 1, column 1", "`nme`", "at_least (number > 0"]),
        ("name: mine\n", "", ["line 1, column 1", "`name`"]),
        ("name: mine", "name: mine\nname: yours", ["line 2, column 1", "'name' occurs twice"]),
        ("params: {k: 4}", "params: {k: 4", ["line 5, column 12"]),
        ("params: {k: 4}", "params: &p {k: *p}", ["line 4"]),
        ("at_least: all", "? [a]\n: 1", ["line 8", "a key must be a string"]),
        ("at_least: all", "min_evals: 2026-11-21", ["line 8, column 1", "$.min_evals", "whole number"]),
        ("at_least: all", "description: !!python/object:os.system {}", ["line 8", "tag"]),
        ("at_least: all", "stop: {risk: 1e-2}", ["line 8", "`stop`"]),
        ("stop_at: 5", "stop_at: {risk: 0.123}", ["line 5", "a risk of 0.123", "evalstop-lab calibrate k_decline"]),
        ("at_least: all", "at_least: \0", ["p.yaml"]),
        (VALID_POLICY, "", ["p.yaml", "object"]),
        (VALID_POLICY, "[" * 5000, ["p.yaml"]),
    ],
)
def test_error_has_its_position(tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    """The message has the file, the line, the column, the key and its valid values."""
    assert old in VALID_POLICY
    (tmp_path / "p.yaml").write_text(VALID_POLICY.replace(old, new))
    with pytest.raises(UnusableArguments) as refusal:
        policy_from_file(tmp_path / "p.yaml")
    for part in [str(tmp_path / "p.yaml"), *parts]:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"name": "p",\n "members": [}', ["line 2, column 14"]),
        ('{"name": "p", "name": "q", "members": []}', ["'name' occurs twice"]),
        ('{"name": "p", "members": []}', ["$.members", "length >= 1"]),
        ("[" * 100_000, ["p.json"]),
    ],
)
def test_json_errors(tmp_path: Path, text: str, parts: list[str]) -> None:
    """Invalid JSON is reported with its position, and an invalid policy with its key."""
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UnusableArguments) as refusal:
        policy_from_file(tmp_path / "p.json")
    for part in parts:
        assert part in str(refusal.value)


@property_settings
@given(
    start=st.integers(0, len(VALID_POLICY)),
    length=st.integers(0, 12),
    inserted=st.text(st.sampled_from(":-{}[]&*!|>'\"%@`# \n\tab01.é\0")) | st.text(max_size=5),
)
def test_any_changed_text_is_read_or_refused(tmp_path: Path, start: int, length: int, inserted: str) -> None:
    """A policy with random text inserted anywhere is read or refused, without another error."""
    file = tmp_path / "p.yaml"
    file.write_bytes(
        (VALID_POLICY[:start] + inserted + VALID_POLICY[start + length :]).encode("utf-8", "surrogatepass")
    )
    with contextlib.suppress(UnusableArguments):
        policy_from_file(file)


def test_invalid_policy_is_an_unusable_argument(tmp_path: Path, failing_replay: Callable[..., str]) -> None:
    """The exit code is 2."""
    (tmp_path / "p.yaml").write_text("name: p")
    log = write_jsonl(tmp_path / "a.jsonl", build_rows())
    assert "`members`" in failing_replay(2, log, "--policy", tmp_path / "p.yaml")
    assert "no file 'nowhere'" in failing_replay(2, log, "--policy", "nowhere")

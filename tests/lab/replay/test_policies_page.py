"""docs/policies.md agrees with the code: its tables have all keys, and its examples run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import DETECTORS, POLICIES, InvalidPolicy, policy_from_document
from evalstop_lab.replay.command import load_policy

from tests.lab.replay.conftest import Replay, build_rows, write_jsonl

PAGE = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```(json|yaml)\n(.*?)```", PAGE.split("## Three examples")[1].split("## ")[0], re.DOTALL)


def read_table_keys(heading: str) -> set[str]:
    """The first column of the table below the heading."""
    table = PAGE.split(heading)[1].strip().split("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


def list_allowed_keys(document: Any) -> set[str]:
    """The allowed keys in the message about an unknown key."""
    with pytest.raises(InvalidPolicy) as refusal:
        policy_from_document(document)
    return set(str(refusal.value).split("; allowed: ")[1].split(", "))


def test_tables_have_all_keys() -> None:
    """The tables have a row for each key of a policy or a member, and no others."""
    assert read_table_keys("Of the policy:") == list_allowed_keys({"unknown": 1})
    assert read_table_keys("Of a member:") == list_allowed_keys({"name": "p", "members": [{"unknown": 1}]})


def test_shipped_policies_are_listed() -> None:
    """The table of shipped policies has all of them."""
    assert read_table_keys("## Shipped") == set(POLICIES)


@pytest.mark.parametrize(("language", "text"), EXAMPLES)
def test_examples_run(tmp_path: Path, replay: Replay, language: str, text: str) -> None:
    """Each example is a policy that stops a run that turns, and does not stop one that rises."""
    file = tmp_path / f"example.{language}"
    file.write_text(text)
    policy = load_policy(str(file))
    assert {member.detector.name for member in policy.members} <= set(DETECTORS)
    turned = [min(i, 60 - i) / 30 + 0.01 * (-1) ** i for i in range(60)]
    log = write_jsonl(tmp_path / "runs.jsonl", [*build_rows("turned", turned), *build_rows("rising", range(60))])
    turned_run, rising = replay(log, "--policy", file)
    assert (turned_run["verdict"], rising["verdict"]) == ("stop", "continue")
    assert 300 < turned_run["stop_step"] < 590


def test_there_are_three_examples() -> None:
    """The page has three examples, in JSON and YAML."""
    assert [language for language, _ in EXAMPLES] == ["json", "yaml", "yaml"]


def test_example_of_an_error_is_current(tmp_path: Path) -> None:
    """The message on the page is the one that the code raises."""
    message = re.search(r"mine\.yaml: (.*)\.\n", PAGE)
    assert message
    with pytest.raises(InvalidPolicy) as refusal:
        policy_from_document({"name": "p", "members": [{"detector": "k_decline", "stop_at": -5}]})
    assert str(refusal.value) == message[1]


def test_example_of_the_output_has_its_keys(tmp_path: Path, replay: Replay) -> None:
    """An object of the output has the keys on the page, in the same order."""
    example = json.loads(re.findall(r"```json\n(.*?)```", PAGE.split("## Try it")[1], re.DOTALL)[0])
    assert list(replay(write_jsonl(tmp_path / "a.jsonl", build_rows()))[0]) == list(example)

"""How tables fit into a terminal."""

from __future__ import annotations

import re

import pytest
from evalstop_client.cli.command import print_table

ID = "0199aa0f-55aa-7c01-b1c2-0f1e2d3c4b5a"
WHY = "k_decline: 3 consecutive declines of eval, k = 3"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The terminal that rich sees: COLUMNS sets its width."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


def test_only_prose_is_broken_into_lines(terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids and names stay whole, and prose fills the rest of the terminal."""
    terminal.setenv("COLUMNS", "90")
    print_table(("id", "run", "why"), [(ID, "ppo-7b-seed3", WHY)], prose=("why",))
    output = capsys.readouterr().out
    assert ID in output
    assert "ppo-7b-seed3" in output
    assert WHY not in output
    assert all(len(re.sub(r"\x1b\[\d+m", "", line)) <= 90 for line in output.splitlines())


def test_table_too_wide_for_the_terminal_is_not_broken(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the names alone need more than the terminal's width, each row is one line."""
    terminal.setenv("COLUMNS", "60")
    print_table(("id", "run", "why"), [(ID, "ppo-7b-seed3", WHY)], prose=("why",))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if ID in line]
    assert "ppo-7b-seed3" in row
    assert WHY in row

"""The command line of the lab."""

from __future__ import annotations

import pytest
from evalstop_lab.cli import SUBCOMMANDS, main


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The module of a name has a subcommand of that name, with options of its own."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"evalstop-lab {name} " in capsys.readouterr().out


def test_help_lists_all_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` lists every subcommand, and `--version` prints the version."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert set(capsys.readouterr().out.split()) >= SUBCOMMANDS.keys()
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("evalstop-lab ")

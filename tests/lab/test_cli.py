"""The command line of the lab, which imports no more than the subcommand that is named."""

from __future__ import annotations

import pytest
from evalstop_lab.cli import SUBCOMMANDS, main


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_answers_to_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The module that is imported for a name offers a subcommand of that name, with options of its own."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"evalstop-lab {name} " in capsys.readouterr().out


def test_without_a_subcommand_all_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks what there is sees every one of them, and which version it is."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert set(capsys.readouterr().out.split()) >= SUBCOMMANDS.keys()
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("evalstop-lab ")

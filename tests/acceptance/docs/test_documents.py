"""The documents agree with the code: links, examples, commands, settings and states."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evalstop_client import cli as client_cli
from evalstop_client.receivers import cli as receiver_cli
from evalstop_lab import cli as lab_cli
from evalstop_service.cli import entry as service_cli
from evalstop_service.domain.decision_lifecycle import NEXT_STATES
from evalstop_service.settings import Settings

from tests.acceptance.docs.connect_pages import PAGES
from tests.acceptance.docs.documents import (
    ROOT,
    Block,
    list_blocks,
    list_documents,
    read_anchors,
    read_commands,
    read_links,
)

SHELL_BLOCKS = list_blocks("sh")
PYTHON_BLOCKS = list_blocks("python")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
OTHER_PROGRAMS = {"cd", "curl", "docker", "echo", "export", "helm", "kubectl", "pg_dump", "pip", "python", "source"}
"""Programs in examples that are not a part of EvalStop, and are not checked."""


def has_own_test(block: Block) -> bool:
    """Whether test_connect_pages.py or test_quickstart.py follows the whole page."""
    return str(block.file.relative_to(ROOT).with_suffix("")) in PAGES


@pytest.mark.parametrize("file", list_documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_relative_links_have_targets(file: Path) -> None:
    """Every relative link names a file of the repository, and its anchor a heading."""
    for target in read_links(file):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (file.parent / path).resolve() if path else file
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        assert not anchor or anchor in read_anchors(linked), target


def test_every_page_is_linked_from_the_index() -> None:
    """Links from docs/README.md lead to every page of docs/."""
    visited: set[Path] = set()
    to_visit = [ROOT / "docs/README.md"]
    while to_visit:
        file = to_visit.pop()
        if file not in visited and file.suffix == ".md":
            visited.add(file)
            to_visit += [
                (file.parent / link.partition("#")[0]).resolve() for link in read_links(file) if "://" not in link
            ]
    assert {file for file in list_documents() if file.is_relative_to(ROOT / "docs")} <= visited


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=str)
def test_python_examples_compile(block: Block) -> None:
    """Every Python block compiles."""
    compile(block.text + ("\n    ...\n" if block.text.rstrip().endswith('"""') else ""), str(block), "exec")


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.parametrize("block", [block for block in PYTHON_BLOCKS if block.runs and not has_own_test(block)], ids=str)
def test_python_examples_run(block: Block, service: dict[str, str], tmp_path: Path) -> None:
    """Every Python block marked to run succeeds against a running service, without a warning."""
    program = [sys.executable, "-W", "error", "-c", block.text]
    result = subprocess.run(program, env=service, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.parametrize("block", [block for block in SHELL_BLOCKS if block.runs and not has_own_test(block)], ids=str)
def test_shell_examples_run(block: Block, service: dict[str, str], tmp_path: Path) -> None:
    """Every shell block marked to run succeeds, and no request gets an error status."""
    if shutil.which("curl") is None:
        assert os.environ.get("CI") != "true", "the examples need curl"
        pytest.skip("the examples need curl")
    script = 'set -eu\ncurl() { command curl --fail-with-body "$@"; }\n' + block.text
    result = subprocess.run(
        ["bash", "-c", script], env=service, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=str)
def test_shell_examples_use_existing_commands(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Every evalstop command parses, and every make target exists."""
    for command in read_commands(block):
        words = list(itertools.dropwhile(ASSIGNMENT.fullmatch, shlex.split(command.rstrip("&"))))
        words = words[: next((index for index, word in enumerate(words) if word in (">", ">>", "|")), len(words))]
        match words[0]:
            case "evalstop":
                is_client = words[1] in client_cli.COMMANDS
                parser = client_cli.parser() if is_client else service_cli.parser(words[1:])
                parser.parse_args(words[1:])
            case "evalstop-receiver":
                receiver_words = words[1 : words.index("--")] if "--" in words else words[1:]
                assert_parses(receiver_cli.main, receiver_words, capsys)
                if "evalstop-lab" in words:
                    assert_parses(lab_cli.main, words[words.index("evalstop-lab") + 1 :], capsys)
            case "evalstop-lab":
                assert_parses(lab_cli.main, words[1:], capsys)
            case "make":
                targets = [word for word in words[1:] if "=" not in word]
                assert set(targets) <= list_make_targets(), command
            case program:
                assert program in OTHER_PROGRAMS, command


def assert_parses(main: object, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the command knows every option among the words, by its own --help."""
    assert callable(main)
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    help_text = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in help_text] == []


def list_make_targets() -> set[str]:
    """The targets that `make` lists."""
    return set(re.findall(r"^([a-z-]+):.*  ## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_lists_every_target() -> None:
    """`make` alone lists every phony target."""
    result = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^  make ([a-z-]+) +\S", result.stdout, re.MULTILINE)) == phony == list_make_targets()


def test_make_targets_in_documents_exist() -> None:
    """Every `make TARGET` in a document is a target; the changelog names also those that are gone."""
    for file in list_documents():
        if file.name == "CHANGELOG.md":
            continue
        mentioned = set(re.findall(r"`make ([a-z-]+)", file.read_text()))
        assert mentioned <= list_make_targets(), file


def test_variables_in_documents_are_read() -> None:
    """Every EVALSTOP_ variable in a document is a setting, read by the client, or given by --key-env; the changelog
    names also those that are gone."""
    settings = {f"EVALSTOP_{name.upper()}" for name in Settings.model_fields}
    sources = "".join(file.read_text() for file in (ROOT / "clients/evalstop_client").rglob("*.py"))
    read = settings | set(re.findall(r"EVALSTOP_[A-Z_]+[A-Z]", sources))
    for file in list_documents():
        if file.name == "CHANGELOG.md":
            continue
        text = file.read_text()
        key_variables = set(re.findall(r"--key-env (EVALSTOP_[A-Z_]+)", text))
        assert set(re.findall(r"EVALSTOP_[A-Z_]*[A-Z]", text)) <= read | key_variables, file


def test_documented_states_match_the_lifecycle() -> None:
    """The table of states in docs/decisions.md has the transitions of the code."""
    text = (ROOT / "docs/decisions.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    documented = {state: set(re.findall(r"`(\w+)`", following)) for state, following in rows}
    assert documented == {
        str(state): {str(next_state) for next_state in following} for state, following in NEXT_STATES.items()
    }


def test_introductory_pages_have_runnable_examples() -> None:
    """The pages for beginners keep their runnable Python and shell blocks."""
    assert {block.file.name for block in PYTHON_BLOCKS if block.runs} == {
        "README.md",
        "quickstart.md",
        "why.md",
        "http.md",
        "read-results.md",
    }
    assert {block.file.name for block in SHELL_BLOCKS if block.runs} == {
        "quickstart.md",
        "operations.md",
        "ways-in.md",
        "read-results.md",
    }

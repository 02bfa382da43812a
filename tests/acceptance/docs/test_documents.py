"""What the documents say is so: links lead somewhere, examples run, commands, settings and states exist."""

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
from evalstop_client.cli import entry as client_cli
from evalstop_client.receivers.cli import entry as receiver_cli
from evalstop_lab import cli as lab_cli
from evalstop_service.cli import entry as service_cli
from evalstop_service.rules.decision_lifecycle import NEXT_STATES
from evalstop_service.settings import Settings

from tests.acceptance.docs.connect_pages import PAGES
from tests.acceptance.docs.documents import ROOT, Block, anchors, blocks, commands, documents, links

SHELL = blocks("sh")
PYTHON = blocks("python")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
ELSEWHERE = {"cd", "curl", "docker", "echo", "export", "helm", "kubectl", "pg_dump", "pip", "python", "source"}
"""Programs that an example may call and that are not ours to check."""


def is_followed(block: Block) -> bool:
    """Whether the page is followed as a whole by a test of its own."""
    return str(block.file.relative_to(ROOT).with_suffix("")) in PAGES


@pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    """Every relative link names a file, and its anchor a heading."""
    for target in links(file):
        if target.startswith("https://"):
            continue
        place, _, anchor = target.partition("#")
        there = (file.parent / place).resolve() if place else file
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(there), target


def test_every_document_can_be_reached_from_the_index() -> None:
    """No page of docs/ is an island."""
    seen: set[Path] = set()
    waiting = [ROOT / "docs/README.md"]
    while waiting:
        file = waiting.pop()
        if file not in seen and file.suffix == ".md":
            seen.add(file)
            waiting += [(file.parent / link.partition("#")[0]).resolve() for link in links(file) if "://" not in link]
    assert {file for file in documents() if file.is_relative_to(ROOT / "docs")} <= seen


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_examples_are_python(block: Block) -> None:
    """Every Python block compiles."""
    compile(block.text + ("\n    ...\n" if block.text.rstrip().endswith('"""') else ""), str(block), "exec")


@pytest.mark.real
@pytest.mark.parametrize("block", [block for block in PYTHON if block.runs and not is_followed(block)], ids=str)
def test_python_examples_run(block: Block, service: dict[str, str], tmp_path: Path) -> None:
    """Every Python block that is marked to run does, against a service that is up, and raises and warns of nothing."""
    program = [sys.executable, "-W", "error", "-c", block.text]
    done = subprocess.run(program, env=service, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.real
@pytest.mark.parametrize("block", [block for block in SHELL if block.runs and not is_followed(block)], ids=str)
def test_shell_examples_run(block: Block, service: dict[str, str], tmp_path: Path) -> None:
    """Every shell block that is marked to run does, and the service answers none of it with an error."""
    if shutil.which("curl") is None:
        assert os.environ.get("CI") != "true", "there is no curl to run the examples with"
        pytest.skip("there is no curl to run the examples with")
    script = 'set -eu\ncurl() { command curl --fail-with-body "$@"; }\n' + block.text
    done = subprocess.run(["bash", "-c", script], env=service, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_examples_call_what_exists(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of ours is one that its own parser takes, every make target is there."""
    for command in commands(block):
        words = list(itertools.dropwhile(ASSIGNMENT.fullmatch, shlex.split(command.rstrip("&"))))
        words = words[: next((index for index, word in enumerate(words) if word in (">", ">>", "|")), len(words))]
        match words[0]:
            case "evalstop":
                line = client_cli if words[1] in client_cli.COMMANDS else service_cli
                line.parser(words[1:]).parse_args(words[1:])
            case "evalstop-receiver":
                ours = words[1 : words.index("--")] if "--" in words else words[1:]
                assert_parses(receiver_cli.main, ours, capsys)
                if "evalstop-lab" in words:
                    assert_parses(lab_cli.main, words[words.index("evalstop-lab") + 1 :], capsys)
            case "evalstop-lab":
                assert_parses(lab_cli.main, words[1:], capsys)
            case "make":
                targets = [word for word in words[1:] if "=" not in word]
                assert set(targets) <= make_targets(), command
            case program:
                assert program in ELSEWHERE, command


def assert_parses(main: object, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command line knows every option among the words: with `--help` behind them it only explains itself."""
    assert callable(main)
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    explained = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in explained] == []


def make_targets() -> set[str]:
    """The targets that `make` lists."""
    return set(re.findall(r"^([a-z-]+):.*  ## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_explains_itself() -> None:
    """`make` alone lists every target that is meant to be called."""
    listed = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^  make ([a-z-]+) +\S", listed.stdout, re.MULTILINE)) == phony == make_targets()


def test_make_targets_in_prose_exist() -> None:
    """A `make something` in any document is a target."""
    for file in documents():
        named = set(re.findall(r"`make ([a-z-]+)", file.read_text()))
        assert named <= make_targets(), file


def test_every_variable_that_is_named_is_read() -> None:
    """An EVALSTOP_ variable in a document is a setting, one that client or receiver read, or one given by name."""
    settings = {f"EVALSTOP_{name.upper()}" for name in Settings.model_fields}
    sources = "".join(file.read_text() for file in (ROOT / "clients/evalstop_client").rglob("*.py"))
    read = settings | set(re.findall(r"EVALSTOP_[A-Z_]+[A-Z]", sources))
    for file in documents():
        text = file.read_text()
        given = set(re.findall(r"--key-env (EVALSTOP_[A-Z_]+)", text))
        assert set(re.findall(r"EVALSTOP_[A-Z_]*[A-Z]", text)) <= read | given, file


def test_the_life_of_a_decision_is_drawn_as_it_is() -> None:
    """The table of states in docs/decisions.md is that of the machine."""
    text = (ROOT / "docs/decisions.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    told = {state: set(re.findall(r"`(\w+)`", following)) for state, following in rows}
    assert told == {str(state): {str(one) for one in following} for state, following in NEXT_STATES.items()}


def test_the_documents_one_begins_with_hold_examples_that_run() -> None:
    """The pages that one begins with hold Python that is run, and commands that are."""
    assert {block.file.name for block in PYTHON if block.runs} == {
        "README.md",
        "quickstart.md",
        "why.md",
        "http.md",
        "read-results.md",
    }
    assert {block.file.name for block in SHELL if block.runs} == {
        "quickstart.md",
        "operations.md",
        "ways-in.md",
        "roles.md",
        "read-results.md",
    }

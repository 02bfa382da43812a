"""Command templates: a label's value is one argument or is refused, and never reaches a shell."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest
from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.command import CommandJobControl, Template, parse_template
from evalstop_client.receivers.stop.job_control import Gone, Job, Present
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.receivers.conformance import make_stop_request

UNSAFE_VALUES = [
    "", " ", "-rf", "--all", "7; rm -rf /", "$(reboot)", "`id`", "a b", "7|8", "7&", "7\n8", "../../etc", "a..b",
    "@file",     "%s\0", "~root", "*", "{run_id}", "é", "x" * 257, "'", '"', "\\", "<in", ">out", "!1", "#", "=7",
]  # fmt: skip


@pytest.mark.parametrize("value", UNSAFE_VALUES)
def test_unsafe_label_is_refused(value: str) -> None:
    """A value that could mean more than itself to a shell or a scheduler is refused, naming the label."""
    with pytest.raises(RequestRefused, match="job_id"):
        parse_template("my-cancel {job_id}").filled({"job_id": value})


@given(st.text(max_size=30))
def test_any_accepted_label_is_one_argument(value: str) -> None:
    """Any text is refused, or is one unchanged argument at its position in the command."""
    command = parse_template("my-cancel --job={job_id} now")
    with contextlib.suppress(RequestRefused):
        assert command.filled({"job_id": value}) == ["my-cancel", f"--job={value}", "now"]


@pytest.mark.parametrize("value", ["7", "7_3", "ns/job-1", "a.b@c:8080", "1[3-4]"])
def test_scheduler_job_ids_are_accepted(value: str) -> None:
    """Job ids in the formats of known schedulers are accepted."""
    assert parse_template("c {job_id}").filled({"job_id": value}) == ["c", value]


def test_template_is_split_before_it_is_filled() -> None:
    """Quotes group words, doubled braces are literal, and a word may have several placeholders."""
    command = parse_template("c '{a} and {b}' {{literal}} -x")
    assert command.filled({"a": "1", "b": "2"}) == ["c", "1 and 2", "{literal}", "-x"]
    assert command.names == {"a", "b"}


@pytest.mark.parametrize("text", ["", "  ", "c 'open", "c {", "c {a b}", "c }", "{program} x", "c {}"])
def test_malformed_template_is_an_error(text: str) -> None:
    """A template that cannot be filled is a ConfigurationError when the receiver starts."""
    with pytest.raises(ConfigurationError, match="command"):
        parse_template(text)


def make_commands(check: str) -> dict[str, Template]:
    """Commands with this check."""
    return {"cancel": parse_template("true {job_id}"), "check": parse_template(check)}


def test_command_runs_without_a_shell(tmp_path: Path) -> None:
    """The command gets its arguments unexpanded, and only the environment that it is given."""
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'home': os.environ['HOME']}));sys.exit(3)"
    )
    check = f"{sys.executable} {script} $HOME '*' {{job_id}}"
    job_control = CommandJobControl(make_commands(check), {"HOME": "/nowhere"})
    job = job_control.find_job(make_stop_request({"job_id": "7"}))
    assert isinstance(job, Job)
    state = job_control.check_job(job)
    assert isinstance(state, Gone)
    assert json.loads(state.details["said"]) == {"argv": ["$HOME", "*", "7"], "home": "/nowhere"}


def test_check_exit_code_decides_the_state() -> None:
    """0 means present and 3 gone; any other code, a timeout or a missing program means unavailable."""
    job = Job("7", {"job_id": "7"})
    assert isinstance(
        CommandJobControl(make_commands("sh -c 'exit 0'"), {"PATH": "/bin:/usr/bin"}).check_job(job), Present
    )
    assert isinstance(
        CommandJobControl(make_commands("sh -c 'exit 3'"), {"PATH": "/bin:/usr/bin"}).check_job(job), Gone
    )
    for check in ("sh -c 'echo broken >&2; exit 1'", "sh -c 'kill -9 $$'", "/no/such/program"):
        with pytest.raises(SchedulerUnavailable):
            CommandJobControl(make_commands(check), {"PATH": "/bin:/usr/bin"}).check_job(job)
    with pytest.raises(SchedulerUnavailable, match=r"within 0\.1 s"):
        CommandJobControl(make_commands("sleep 5"), {"PATH": "/bin:/usr/bin"}, command_seconds=0.1).check_job(job)


def test_find_job_applies_labels_and_patterns() -> None:
    """A run without the receiver's labels is foreign; one that matches no pattern, or has no job id, is refused."""
    job_control = CommandJobControl(
        make_commands("true"), {}, own_labels={"scheduler": "lsf"}, patterns={"user": re.compile("ann|ben")}
    )
    assert job_control.find_job(make_stop_request({"job_id": "7", "user": "ann"})) is None
    with pytest.raises(RequestRefused, match="does not match its pattern"):
        job_control.find_job(make_stop_request({"scheduler": "lsf", "job_id": "7", "user": "eve"}))
    with pytest.raises(RequestRefused, match="no label job_id"):
        job_control.find_job(make_stop_request({"scheduler": "lsf", "user": "ben"}))
    job = job_control.find_job(make_stop_request({"scheduler": "lsf", "user": "ben", "job_id": "7"}))
    assert job == Job("7", {"job_id": "7"})

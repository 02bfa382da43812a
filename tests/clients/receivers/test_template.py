"""Commands with places for labels: whatever a label holds, it stays one argument or is refused."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest
from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers import ForeignJob, Gone, Job, Present
from evalstop_client.receivers.command.job_control import CommandJobControl, Commands
from evalstop_client.receivers.command.template import template
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.receivers.conformance import make_stop_request

HOSTILE = [
    "", " ", "-rf", "--all", "7; rm -rf /", "$(reboot)", "`id`", "a b", "7|8", "7&", "7\n8", "../../etc", "a..b",
    "@file",     "%s\0", "~root", "*", "{run_id}", "é", "x" * 257, "'", '"', "\\", "<in", ">out", "!1", "#", "=7",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_label_is_refused(value: str) -> None:
    """Whatever could be more than a value somewhere is turned away, with the label's name."""
    with pytest.raises(RequestRefused, match="job_id"):
        template("my-cancel {job_id}").filled({"job_id": value})


@given(st.text(max_size=30))
def test_any_label_stays_one_argument(value: str) -> None:
    """For every text there is: refused, or found again whole, in its place, in a vector of unchanged length."""
    command = template("my-cancel --job={job_id} now")
    with contextlib.suppress(RequestRefused):
        assert command.filled({"job_id": value}) == ["my-cancel", f"--job={value}", "now"]


@pytest.mark.parametrize("value", ["7", "7_3", "ns/job-1", "a.b@c:8080", "1[3-4]"])
def test_ids_as_schedulers_write_them_are_taken(value: str) -> None:
    """The ids of known schedulers pass."""
    assert template("c {job_id}").filled({"job_id": value}) == ["c", value]


def test_template_is_split_before_it_is_filled() -> None:
    """Quotes of the template group; braces that are written twice are braces; several places fill."""
    command = template("c '{a} and {b}' {{literal}} -x")
    assert command.filled({"a": "1", "b": "2"}) == ["c", "1 and 2", "{literal}", "-x"]
    assert command.names == {"a", "b"}


@pytest.mark.parametrize("text", ["", "  ", "c 'open", "c {", "c {a b}", "c }", "{program} x", "c {}"])
def test_unusable_template_is_explained_at_the_start(text: str) -> None:
    """What could never be filled is told when the receiver starts, not when a job has to be stopped."""
    with pytest.raises(ConfigurationError, match="command"):
        template(text)


def commands(check: str) -> Commands:
    return Commands(cancel=template("true {job_id}"), check=template(check))


def test_no_shell_ever_sees_a_value(tmp_path: Path) -> None:
    """The command gets exactly the arguments of the vector, through no shell and without our environment's secrets."""
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'home': os.environ['HOME']}));sys.exit(3)"
    )
    check = f"{sys.executable} {script} $HOME '*' {{job_id}}"
    job_control = CommandJobControl(commands(check), {"HOME": "/nowhere"})
    job = job_control.find_job(make_stop_request({"job_id": "7"}))
    assert isinstance(job, Job)
    assert job_control.check_job(job) == Gone("gone", {"argv": ["$HOME", "*", "7"], "home": "/nowhere"})


def test_exit_code_of_the_check_is_read_strictly(tmp_path: Path) -> None:
    """0 is there, 3 is gone; any other code, a command that hangs or that is not there means that nobody knows."""
    job = Job("7", {"job_id": "7"})
    assert isinstance(CommandJobControl(commands("sh -c 'exit 0'"), {"PATH": "/bin:/usr/bin"}).check_job(job), Present)
    assert isinstance(CommandJobControl(commands("sh -c 'exit 3'"), {"PATH": "/bin:/usr/bin"}).check_job(job), Gone)
    for check in ("sh -c 'echo broken >&2; exit 1'", "sh -c 'kill -9 $$'", "/no/such/program"):
        with pytest.raises(SchedulerUnavailable):
            CommandJobControl(commands(check), {"PATH": "/bin:/usr/bin"}).check_job(job)
    with pytest.raises(SchedulerUnavailable, match=r"within 0\.1 s"):
        CommandJobControl(commands("sleep 5"), {"PATH": "/bin:/usr/bin"}, command_seconds=0.1).check_job(job)


def test_only_what_is_mine_and_allowed_is_touched() -> None:
    """Another scheduler's run is not ours; ours outside the allow-list, or without the labels, is refused."""
    job_control = CommandJobControl(
        commands("true"), {}, mine={"scheduler": "lsf"}, allow={"user": frozenset({"ann", "ben"})}
    )
    assert isinstance(job_control.find_job(make_stop_request({"job_id": "7", "user": "ann"})), ForeignJob)
    with pytest.raises(RequestRefused, match="allow-list"):
        job_control.find_job(make_stop_request({"scheduler": "lsf", "job_id": "7", "user": "eve"}))
    with pytest.raises(RequestRefused, match="no label job_id"):
        job_control.find_job(make_stop_request({"scheduler": "lsf", "user": "ben"}))
    found = job_control.find_job(make_stop_request({"scheduler": "lsf", "user": "ben", "job_id": "7"}))
    assert found == Job("7", {"job_id": "7"})


def test_label_cannot_pass_for_the_run_itself() -> None:
    """{run_id} and {decision_id} are the service's, whatever labels are called so."""
    job_control = CommandJobControl(Commands(cancel=template("c {run_id}"), check=template("c {decision_id}")), {})
    job = job_control.find_job(make_stop_request({"run_id": "forged", "decision_id": "forged"}))
    assert isinstance(job, Job)
    assert json.loads(json.dumps(dict(job.facts))) == {"decision_id": "decision-1", "run_id": "run-1"}


@pytest.mark.parametrize("value", ["0", "07", "-7", "7 8", "all", "1-3", "7\n", "", None])
def test_label_that_means_more_than_one_job_is_refused(value: str | None) -> None:
    """A label has to match its pattern as a whole: `bkill 0` would end all jobs of a user."""
    pattern = {"job_id": re.compile("[1-9][0-9]*")}
    job_control = CommandJobControl(commands("true {job_id}"), {}, patterns=pattern)
    with pytest.raises(RequestRefused, match="job_id"):
        job_control.find_job(make_stop_request({} if value is None else {"job_id": value}))
    assert isinstance(job_control.find_job(make_stop_request({"job_id": "70"})), Job)

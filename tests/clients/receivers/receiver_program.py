"""`evalstop-receiver` as a program that a test can end and start again on the same journal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.clients.fake_service import KEY, FakeServer
from tests.clients.programs import running_program, wait_until
from tests.clients.webhooks import SECRET

RECEIVER = [sys.executable, "-m", "evalstop_client.receivers.cli"]

_RUN_EACH = """
import json, os, sys
from evalstop_client.receivers.cli import main

for number, arguments in enumerate(json.load(sys.stdin)):
    if os.fork() == 0:
        os.dup2(os.open(f"{number}.err", os.O_CREAT | os.O_WRONLY, 0o600), sys.stderr.fileno())
        sys.exit(main(arguments))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def run_receivers(
    arguments: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str]
) -> list[tuple[int, str]]:
    """Run a receiver with each list of arguments, in turn; returns their exit codes and what they wrote to stderr.

    They are forked from one process, which imports the receiver once.
    """
    completed = subprocess.run(
        [sys.executable, "-c", _RUN_EACH],
        input=json.dumps(arguments),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    codes = map(int, completed.stdout.split())
    return [(code, (folder / f"{number}.err").read_text()) for number, code in enumerate(codes)]


@dataclass
class ReceiverProgram:
    """A receiver that keeps its journal in `folder`/state and reports to `server`; `command` is its subcommand."""

    folder: Path
    server: FakeServer
    stack: ExitStack
    command: list[str]
    process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> str:
        """Start it and return the URL that it listens on, if it does."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [*RECEIVER, *self.command, "--state", str(self.folder / "state"), "--ready-file", str(ready)]
        command += ["--url", self.server.url, "--poll-seconds", "0.1", *options]
        if "--pull" not in options:
            command += ["--listen", "127.0.0.1:0"]
        environment = {"EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": KEY}
        self.process = process = self.stack.enter_context(running_program(command, **environment))
        wait_until(lambda: ready.exists() or process.poll() is not None)
        return str(json.loads(ready.read_text()).get("url"))

    def end(self, number: signal.Signals) -> int:
        """End it by this signal and return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

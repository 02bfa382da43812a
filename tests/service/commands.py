"""Commands of the service as processes of their own, forked from one that has imported it: that alone takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from evalstop_service import cli

TIMEOUT_SECONDS = 60

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload([__name__])


def run(environment: dict[str, str], *arguments: str) -> CompletedProcess[str]:
    """Run `evalstop` with these arguments to its end."""
    with TemporaryDirectory() as folder:
        printed = Path(folder, "stdout"), Path(folder, "stderr")
        process = forked.Process(target=_become, args=(environment, list(arguments), *printed))
        process.start()
        process.join(TIMEOUT_SECONDS)
        assert process.exitcode is not None, f"{arguments} does not end"
        return CompletedProcess(arguments, process.exitcode, *(file.read_text() for file in printed))


def _become(environment: dict[str, str], arguments: list[str], stdout: Path, stderr: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in ((sys.stdout, stdout), (sys.stderr, stderr)):
        with file.open("w") as printed:
            os.dup2(printed.fileno(), stream.fileno())
    sys.exit(cli.main(arguments))

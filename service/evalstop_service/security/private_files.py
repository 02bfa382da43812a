"""Files that only their owner can read: the embedded database, and the secrets generated at the first start."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evalstop_service.errors import Conflict

_log = logging.getLogger(__name__)

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def create_private_folder(folder: Path) -> None:
    """Create a folder that only its owner can access; an existing one keeps its permissions: it may hold other
    files."""
    if not folder.is_dir():
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def create_private_file(file: Path) -> None:
    """Create an empty file that only its owner can read; an existing one keeps its text and loses the permissions of
    others."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
    except FileExistsError:
        if file.stat().st_uid == os.geteuid():
            file.chmod(FILE_MODE)


def keep_secret(file: Path, make: Callable[[], str]) -> str:
    """The secret in a file, generated at the first call.

    The file appears with its text: a process that starts meanwhile, or after this one was killed, never reads an empty
    secret. Of several processes, the first to finish the file generates the secret of all.
    """
    if not file.exists():
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f"{file.name}.") as draft:
            draft.write(make())
            draft.flush()
            os.fsync(draft.fileno())
            with suppress(FileExistsError):
                file.hardlink_to(draft.name)  # unlike a rename, it keeps an existing file
    return file.read_text()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an existing folder until the block or the process ends; raises Conflict if another process holds it."""
    create_private_file(folder / "lock")
    with (folder / "lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another `evalstop up` uses {folder}; stop it, or choose another folder with --data-folder"
            ) from None
        except OSError as error:  # a network disk without locks
            _log.warning("%s cannot be locked (%s): make sure that no second `evalstop up` uses it", folder, error)
        yield

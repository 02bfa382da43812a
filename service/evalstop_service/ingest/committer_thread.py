"""A committer for callers without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from evalstop_service.ingest.committer import Committer


@contextmanager
def running_in_thread(committer: Committer) -> Iterator[Committer]:
    """Run a committer on its own event loop in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="committer", daemon=True)
    thread.start()
    running = committer.run()
    try:
        asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
        try:
            yield committer
        finally:
            asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

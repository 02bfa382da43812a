"""Clients that send a byte a second, never read, come by ten thousands or send bombs: cut off, the others served."""

from __future__ import annotations

import gzip
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.faults import raw_sockets
from tests.faults.conftest import Installation
from tests.faults.retrying_clients import DEADLINE_SECONDS, Trainer, batch, more, told, training, wait_until
from tests.faults.run_records import installed
from tests.faults.servers import serving

pytestmark = pytest.mark.real

HASTE = {"EVALSTOP_REQUEST_SECONDS": "1.5", "EVALSTOP_ANSWER_SECONDS": "1.5"}
LIMIT_BYTES = 8 * 2**20
MOST_MB = 600
"""Of memory, that harm may cost for a while."""


@contextmanager
def embedded(folder: Path, migrated_file: Path, *under: str, **environment: str) -> Iterator[Installation]:
    """A service on an embedded database."""
    file = folder / "evalstop.db"
    shutil.copyfile(migrated_file, file)
    with ExitStack() as stack:
        database = Database(f"sqlite:///{file}")
        stack.callback(database.close)
        project, key = installed(database)
        yield Installation(
            project, stack.enter_context(serving(folder, f"sqlite:///{file}", under, **environment)), key
        )


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Installation]:
    """A service that gives its clients a second and a half."""
    with embedded(tmp_path_factory.mktemp("hasty"), migrated_file, **HASTE) as installation:
        yield installation


@contextmanager
def others_are_served(installation: Installation, name: str) -> Iterator[None]:
    """While the block lasts, and after it, a trainer is served; no connection is left behind."""
    (program,) = installation.service.programs
    before, end = raw_sockets.open_sockets(program.pid), threading.Event()
    trainer = Trainer(installation.caller(), name, end, pause_seconds=0.03)  # or it would be what costs most here
    with training([trainer], end):
        more([trainer], 3)
        yield
        more([trainer], 3)
    assert trainer.caller.refusals == []
    wait_until(lambda: raw_sockets.open_sockets(program.pid) <= before + 3, "all connections are closed")


@pytest.mark.parametrize("part", ["head", "body"])
def test_one_byte_at_a_time(hasty: Installation, part: str) -> None:
    """Whoever never gets to the end of a request is answered 408 with what to do, however steadily it sends."""
    path = "/api/v1/runs/0198c0de-0000-7000-8000-000000000000/observations"
    whole = raw_sockets.head("POST", path, hasty.key, Content_Type="application/json", Content_Length="100000")
    begun = whole[:20] if part == "head" else whole + b'{"observations":['
    with others_are_served(hasty, f"beside-slow-{part}"), ExitStack() as stack:
        ends = [stack.enter_context(raw_sockets.connected(hasty.service.url)) for _ in range(20)]
        for end in ends:
            end.sendall(begun)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while raw_sockets.ended(ends) < len(ends):
            assert time.monotonic() < deadline
            for end in ends:
                if not raw_sockets.ended([end]):
                    with suppress(ConnectionError):
                        end.send(b"a" if part == "head" else b" ")
            time.sleep(0.1)
        for end in ends:
            status, problem = raw_sockets.answered(end)
            if status:  # a byte that comes after the end undoes the answer
                assert status == problem["status"] == 408
                assert "send the same again" in problem["detail"]


def test_nothing_at_all(hasty: Installation) -> None:
    """Whoever connects and says nothing is cut off."""
    with others_are_served(hasty, "beside-silence"), ExitStack() as stack:
        ends = [stack.enter_context(raw_sockets.connected(hasty.service.url)) for _ in range(100)]
        wait_until(lambda: raw_sockets.ended(ends) == len(ends), "all are cut off")
        assert [end.recv(1) for end in ends] == [b""] * len(ends)


def test_never_reads(hasty: Installation) -> None:
    """Whoever asks for much and reads nothing of it is cut off, and what was to be sent is given up."""
    with hasty.caller() as caller:
        run_id = caller.post("/runs", {"name": "long"})["id"]
        caller.post(
            f"/runs/{run_id}/observations", batch([PostedObservation("eval", step, 0.5) for step in range(10_000)])
        )
    ask = raw_sockets.head("GET", f"/api/v1/runs/{run_id}/observations?metric=eval&limit=10000", hasty.key)
    (program,) = hasty.service.programs
    with others_are_served(hasty, "beside-the-deaf"), ExitStack() as stack:
        before = raw_sockets.resident_mb(program.pid)
        ends = [stack.enter_context(raw_sockets.connected(hasty.service.url, 4096)) for _ in range(12)]
        for end in ends:
            end.sendall(ask * 5)
        wait_until(lambda: all(map(raw_sockets.is_closed, ends)), "all are cut off")
        assert raw_sockets.resident_mb(program.pid, peak=True) - before < MOST_MB


def test_endless_headers(tmp_path: Path, migrated_file: Path) -> None:
    """A head that does not end is refused long before it fills the memory, however much time it may take."""
    with ExitStack() as stack:
        patient = stack.enter_context(embedded(tmp_path, migrated_file, EVALSTOP_REQUEST_SECONDS="600"))
        (program,) = patient.service.programs
        stack.enter_context(others_are_served(patient, "beside-headers"))
        before = raw_sockets.resident_mb(program.pid)
        for number in range(4):
            end = stack.enter_context(raw_sockets.connected(patient.service.url))
            line = b"X-Long: " + b"x" * 60_000 + b"\r\n" if number % 2 else b"x" * 60_000
            end.sendall(raw_sockets.head("GET", "/livez", patient.key)[:-2] + b"X-Very-Long: ")
            with pytest.raises(ConnectionError):
                end.sendall(line * 5000)
            assert raw_sockets.answered(end)[0] in (0, 431)  # what comes after the end undoes the answer
        assert raw_sockets.resident_mb(program.pid, peak=True) - before < MOST_MB


def bombs() -> dict[str, bytes]:
    """Bodies as large as they may be that are small to send, or cheap to make, and dear to read."""
    size = LIMIT_BYTES - 1024
    points = b'{"observations":[%s]}'
    return {
        "lists in lists": b"[" * size,
        "empty lists": points % (b"[]," * (size // 3))[:-1],
        "empty objects": points % (b"{}," * (size // 3))[:-1],
        "objects in objects": b'{"a":' * (size // 5),
        "small numbers": points % (b"1.5," * (size // 4))[:-1],
        "as many numbers as may be": points % (b"1.5," * 1_090_000)[:-1],
        "a large number": points % (b"9" * size),
        "names": b'{"observations":[{%s}]}' % b",".join(b'"%d":0' % number for number in range(size // 12)),
        "escapes": b'{"observations":["%s"]}' % (b"\\u00e9" * (size // 6)),
        "points": points % (b'{"metric":"a","step":1,"value":1},' * (size // 34))[:-1],
    }


def test_bombs(hasty: Installation) -> None:
    """Bodies that unfold into many times their size are refused; the memory stays bounded and the service up."""
    (program,) = hasty.service.programs
    headers = {"Authorization": f"Bearer {hasty.key}", "Content-Type": "application/json"}
    with hasty.caller() as caller:
        url = f"{hasty.service.url}/api/v1/runs/{caller.post('/runs', {'name': 'bombed'})['id']}/observations"
    made = bombs()
    answers: dict[str, list[int]] = {}
    with others_are_served(hasty, "beside-bombs"):
        before = raw_sockets.resident_mb(program.pid)

        def throw(name: str, secret: bool) -> None:
            sent = headers if secret else headers | {"Authorization": "Bearer esk_nobody"}
            response = httpx.post(url, content=made[name], headers=sent, timeout=DEADLINE_SECONDS, trust_env=False)
            answers.setdefault(name, []).append(response.status_code)

        for secret in (True, False):
            threads = [threading.Thread(target=throw, args=(name, secret)) for name in made for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert all(status in (400, 401, 413, 422, 429, 503) for given in answers.values() for status in given)
        assert raw_sockets.resident_mb(program.pid, peak=True) - before < MOST_MB


@pytest.mark.parametrize("known", [True, False], ids=["known-key", "unknown-key"])
def test_many_large_bodies(hasty: Installation, known: bool) -> None:
    """Of many large bodies that arrive together, only so much is held as fits; the others are told to come again."""
    (program,) = hasty.service.programs
    headers = {"Content_Type": "application/json", "Content_Length": str(LIMIT_BYTES)}
    path = "/api/v1/runs/0198c0de-0000-7000-8000-000000000000/observations"
    most = b" " * (LIMIT_BYTES - 1)
    with others_are_served(hasty, f"beside-large-{known}"), ExitStack() as stack:
        before = raw_sockets.resident_mb(program.pid)
        ends = [stack.enter_context(raw_sockets.connected(hasty.service.url)) for _ in range(80)]

        def send(end: socket.socket) -> None:
            end.sendall(raw_sockets.head("POST", path, hasty.key if known else "esk_nobody", **headers))
            with suppress(ConnectionError):
                end.sendall(most)

        with ThreadPoolExecutor(len(ends)) as threads:
            list(threads.map(send, ends))
        wait_until(lambda: raw_sockets.ended(ends) > len(ends) // 4, "what does not fit is refused")
        if known:  # who has no key is held no large body at all
            assert raw_sockets.ended(ends) < len(ends)
        assert raw_sockets.resident_mb(program.pid) - before < MOST_MB


def test_compressed_bombs(hasty: Installation) -> None:
    """A compressed body is not unfolded on this route at all."""
    (program,) = hasty.service.programs
    bomb = gzip.compress(b'{"observations":[' + b" " * 64 * 2**20)
    with others_are_served(hasty, "beside-gzip"):
        before = raw_sockets.resident_mb(program.pid)
        url = f"{hasty.service.url}/api/v1/runs/0198c0de-0000-7000-8000-000000000000/observations"
        headers = {"Authorization": f"Bearer {hasty.key}", "Content-Type": "application/json"}
        response = httpx.post(url, content=bomb, headers=headers | {"Content-Encoding": "gzip"}, trust_env=False)
        assert response.status_code == 415
        assert "Content-Encoding" in response.json()["detail"]
        assert raw_sockets.resident_mb(program.pid, peak=True) - before < MOST_MB


@pytest.mark.timeout(240)
@pytest.mark.parametrize("connections", [2_000, pytest.param(10_000, marks=pytest.mark.chaos)])
def test_many_connections(tmp_path: Path, migrated_file: Path, connections: int) -> None:
    """With thousands of connections that stay open, and more coming than may, each new client is served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(connections, hard - 2000 if hard != resource.RLIM_INFINITY else connections)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 1500), hard))
    files = count + 300  # so many that it can never hold all that come
    with (
        embedded(
            tmp_path, migrated_file, "prlimit", f"--nofile={files}:{files}", EVALSTOP_REQUEST_SECONDS="600"
        ) as installation,
        ExitStack() as stack,
    ):
        (program,) = installation.service.programs
        before = raw_sockets.resident_mb(program.pid)
        ends: list[socket.socket] = []

        def served(name: str) -> None:
            with installation.caller() as caller:
                run_id = caller.post("/runs", {"name": name})["id"]
                assert caller.post(f"/runs/{run_id}/observations", batch(told(0)))["accepted"] == 3
                assert (caller.refusals, caller.cut) == ([], 0)

        while len(ends) < count + 500:
            ends += [stack.enter_context(raw_sockets.connected(installation.service.url)) for _ in range(500)]
            served(f"beside-{len(ends)}")
        assert raw_sockets.open_sockets(program.pid) > count * 0.9
        assert raw_sockets.resident_mb(program.pid, peak=True) - before < MOST_MB
        stack.close()
        wait_until(lambda: raw_sockets.open_sockets(program.pid) < 200, "all connections are closed")
        served("after all")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

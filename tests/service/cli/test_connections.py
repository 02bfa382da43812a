"""What a connection writes: an answer's head with its body, and nothing later than the turn of the loop it came in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
from evalstop_service.cli.connections import CoalescingTransport


class FakeTransport:
    """Notes what it is called to do; stands for a socket, which would not tell how its bytes were handed over."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.calls.append(b" + ".join(pieces))

    def close(self) -> None:
        self.calls.append("close")

    def pause_reading(self) -> None:
        self.calls.append("pause_reading")

    def get_write_buffer_size(self) -> int:
        return 100


def calls(act: Callable[[Any], None]) -> list[bytes | str]:
    """What came of acts on a transport, and what of the turn's end."""
    fake = FakeTransport()

    async def turn() -> None:
        act(CoalescingTransport(cast(asyncio.Transport, fake), asyncio.get_running_loop()))
        fake.calls.append("the turn ends")
        await asyncio.sleep(0)

    asyncio.run(turn())
    return fake.calls


def two(transport: Any) -> None:
    transport.write(b"head")
    transport.write(b"body")


def one(transport: Any) -> None:
    transport.write(b"head")
    transport.pause_reading()


def three(transport: Any) -> None:
    two(transport)
    transport.write(b"more")


def last(transport: Any) -> None:
    transport.write(b"head")
    transport.close()


def measured(transport: Any) -> None:
    transport.write(b"head")
    assert transport.get_write_buffer_size() == 104


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (two, [b"head + body", "the turn ends"]),
        (one, ["pause_reading", "the turn ends", b"head"]),
        (three, [b"head + body", "the turn ends", b"more"]),
        (last, [b"head", "close", "the turn ends"]),
        (measured, ["the turn ends", b"head"]),
    ],
)
def test_pieces_go_two_at_a_time(act: Callable[[Any], None], expected: list[bytes | str]) -> None:
    """Two pieces are one call; one alone waits for the end of the turn, or for the connection's."""
    assert calls(act) == expected

"""Prepares structs before threads use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import msgspec


def prepare_structs() -> None:
    """Let msgspec build what it needs to decode each struct that has been defined so far.

    Otherwise it does so when a struct is decoded first, and if two threads do that at the same time, the process ends
    with a segmentation fault (msgspec 0.22): one of them uses what the other has not finished. All structs take 20 ms.
    """
    for struct in iterate_structs():
        with suppress(TypeError):  # it has a field that cannot be decoded, so nobody decodes it
            msgspec.json.Decoder(struct)


def iterate_structs(base: type[msgspec.Struct] = msgspec.Struct) -> Iterator[type[msgspec.Struct]]:
    """All structs that have been defined so far."""
    for struct in base.__subclasses__():
        yield struct
        yield from iterate_structs(struct)

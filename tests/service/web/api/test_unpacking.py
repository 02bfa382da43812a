"""Bodies unpacked as they arrive: the same however they are cut, never much of them at once, and broken ones told."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from backports import zstd
from evalstop_service.web.api.reading.decompression import MOST_MEMBERS, PIECE_BYTES, Damaged, Unpacker, unpacker
from hypothesis import example, given
from hypothesis import strategies as st

MEBIBYTE = 2**20

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "gzip": gzip.compress,
    "zstd": zstd.compress,
}

contents = st.binary(max_size=300) | st.builds(
    bytes.__mul__, st.binary(max_size=3), st.integers(0, 2 * PIECE_BYTES // 3 + 100)
)


def made(encoding: str) -> Unpacker:
    found = unpacker(encoding)
    assert found is not None
    return found


def unpacked(encoding: str, parts: Iterable[bytes]) -> bytes:
    unpack, found = made(encoding), []
    for part in parts:
        for piece in unpack.pieces(part):
            assert 0 < len(piece) <= PIECE_BYTES
            found.append(piece)
    unpack.end()
    return b"".join(found)


def cut(body: bytes, places: Iterable[int]) -> list[bytes]:
    at = [0, *sorted({place % (len(body) + 1) for place in places}), len(body)]
    return [body[begin:end] for begin, end in pairwise(at)]


@pytest.mark.parametrize("encoding", PACKED)
@given(files=st.lists(contents, min_size=1, max_size=3), places=st.lists(st.integers(0, 10**6), max_size=6))
@example(files=[b"", b"a", b""], places=[])
@example(files=[b"x" * PIECE_BYTES], places=[3])
def test_any_cutting(encoding: str, files: list[bytes], places: list[int]) -> None:
    """However a body is cut on its way, the same comes out of it; files strung together are one."""
    body = b"".join(map(PACKED[encoding], files))
    assert unpacked(encoding, cut(body, places)) == b"".join(files)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@given(content=contents, lost=st.integers(1, 10**6))
def test_cut_off(encoding: str, content: bytes, lost: int) -> None:
    """A packed body of which the end is missing, or all of it, is damaged."""
    body = PACKED[encoding](content)
    with pytest.raises(Damaged):
        unpacked(encoding, [body[: -(1 + lost % len(body))]])


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@given(content=contents, tail=st.binary(min_size=1, max_size=50))
def test_something_else(encoding: str, content: bytes, tail: bytes) -> None:
    """What is not packed as it says is damaged, at its beginning and after a whole file."""
    for body in (b"\x00" + tail, PACKED[encoding](content) + b"\x00" + tail):
        with pytest.raises(Damaged):
            unpacked(encoding, [body])


def test_a_flipped_bit() -> None:
    """The checksum of gzip is checked."""
    body = bytearray(gzip.compress(b"observations" * 100))
    body[-6] ^= 1
    with pytest.raises(Damaged, match="incorrect data check"):
        unpacked("gzip", [bytes(body)])


def test_files_without_end() -> None:
    """Ten thousand files may be strung together, and not one more, though it is empty."""
    for encoding in ("gzip", "zstd"):
        empty = PACKED[encoding](b"")
        assert unpacked(encoding, [empty * MOST_MEMBERS]) == b""
        with pytest.raises(Damaged, match="10000 compressed files"):
            unpacked(encoding, [empty * (MOST_MEMBERS + 1)])


def test_a_large_window() -> None:
    """A window of 8 MiB is enough for every usual level; one that asks for more memory is refused unread."""
    content = b"observations" * MEBIBYTE
    usual = zstd.compress(content, options={zstd.CompressionParameter.window_log: 23})
    assert unpacked("zstd", [usual]) == content
    assert unpacked("zstd", [zstd.compress(content, level=19)]) == content
    huge = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27}).compress(content)
    with pytest.raises(Damaged, match="window is over 8 MiB"):
        unpacked("zstd", [huge])


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_bomb(encoding: str) -> None:
    """Of a body that unpacks to a thousand times its size, little is held."""
    packer = zlib.compressobj(9, wbits=31) if encoding == "gzip" else zstd.ZstdCompressor()
    zeros = bytes(MEBIBYTE)
    bomb = b"".join([*(packer.compress(zeros) for _ in range(100)), packer.flush()])
    assert len(bomb) < MEBIBYTE / 4
    unpack, size = made(encoding), 0
    tracemalloc.start()
    try:
        for piece in unpack.pieces(bomb):
            size += len(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    unpack.end()
    assert size == 100 * MEBIBYTE
    assert peak < MEBIBYTE


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "gzip, zstd", "*", "zstd;q=1"])
def test_unknown_encodings(encoding: str) -> None:
    """Nothing else is unpacked, and nothing twice."""
    assert unpacker(encoding) is None
    assert unpacker(encoding.split(",")[0].strip() + "x") is None


def test_names_of_encodings() -> None:
    """The names are those of HTTP, in any case."""
    for encoding in ("", "identity", "GZIP", " x-gzip", "Zstd"):
        assert unpacker(encoding) is not None

"""Decompression of request bodies: in small pieces, however they are cut, and with damaged files refused."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Iterable
from itertools import pairwise

import pytest
from evalstop_service.web.api.reading.decompression import (
    MOST_MEMBERS,
    PIECE_BYTES,
    DecompressionError,
    Decompressor,
    create_decompressor,
)
from hypothesis import example, given
from hypothesis import strategies as st

from tests.service.web.api.line_streams import COMPRESS, zstd

MEBIBYTE = 2**20


contents = st.binary(max_size=300) | st.builds(
    bytes.__mul__, st.binary(max_size=3), st.integers(0, 2 * PIECE_BYTES // 3 + 100)
)


def get_unpacker(encoding: str) -> Decompressor:
    unpack = create_decompressor(encoding)
    assert unpack is not None
    return unpack


def decompress(encoding: str, parts: Iterable[bytes]) -> bytes:
    unpack, pieces = get_unpacker(encoding), []
    for part in parts:
        for piece in unpack.feed(part):
            assert 0 < len(piece) <= PIECE_BYTES
            pieces.append(piece)
    unpack.end()
    return b"".join(pieces)


def cut_at(body: bytes, cut_offsets: Iterable[int]) -> list[bytes]:
    offsets = [0, *sorted({offset % (len(body) + 1) for offset in cut_offsets}), len(body)]
    return [body[begin:end] for begin, end in pairwise(offsets)]


@pytest.mark.parametrize("encoding", COMPRESS)
@given(files=st.lists(contents, min_size=1, max_size=3), cut_offsets=st.lists(st.integers(0, 10**6), max_size=6))
@example(files=[b"", b"a", b""], cut_offsets=[])
@example(files=[b"x" * PIECE_BYTES], cut_offsets=[3])
def test_content_does_not_depend_on_how_the_body_is_cut(
    encoding: str, files: list[bytes], cut_offsets: list[int]
) -> None:
    """Whatever the parts of a body, the same content comes out, and concatenated files are one."""
    body = b"".join(map(COMPRESS[encoding], files))
    assert decompress(encoding, cut_at(body, cut_offsets)) == b"".join(files)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@given(content=contents, lost=st.integers(1, 10**6))
def test_truncated_file_is_damaged(encoding: str, content: bytes, lost: int) -> None:
    """A compressed body whose end is missing, or all of it, is refused."""
    body = COMPRESS[encoding](content)
    with pytest.raises(DecompressionError):
        decompress(encoding, [body[: -(1 + lost % len(body))]])


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@given(content=contents, tail=st.binary(min_size=1, max_size=50))
def test_other_content_is_damaged(encoding: str, content: bytes, tail: bytes) -> None:
    """A body that is not compressed as declared is refused, at its beginning and after a whole file."""
    for body in (b"\x00" + tail, COMPRESS[encoding](content) + b"\x00" + tail):
        with pytest.raises(DecompressionError):
            decompress(encoding, [body])


def test_gzip_checksum_is_verified() -> None:
    """A body with a flipped bit is refused."""
    body = bytearray(gzip.compress(b"observations" * 100))
    body[-6] ^= 1
    with pytest.raises(DecompressionError, match="incorrect data check"):
        decompress("gzip", [bytes(body)])


def test_number_of_concatenated_files_is_limited() -> None:
    """10,000 concatenated files are read, and one more is refused even if it is empty."""
    for encoding in ("gzip", "zstd"):
        empty = COMPRESS[encoding](b"")
        assert decompress(encoding, [empty * MOST_MEMBERS]) == b""
        with pytest.raises(DecompressionError, match="10000 compressed files"):
            decompress(encoding, [empty * (MOST_MEMBERS + 1)])


def test_zstd_window_is_limited_to_8_mib() -> None:
    """A window of 8 MiB covers every usual level; a file that asks for a larger one is refused."""
    content = b"observations" * MEBIBYTE
    usual = zstd.compress(content, options={zstd.CompressionParameter.window_log: 23})
    assert decompress("zstd", [usual]) == content
    assert decompress("zstd", [zstd.compress(content, level=19)]) == content
    huge = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27}).compress(content)
    with pytest.raises(DecompressionError, match="window is over 8 MiB"):
        decompress("zstd", [huge])


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_decompression_bomb_takes_little_memory(encoding: str) -> None:
    """Less than 1 MiB is held of a small body that decompresses to 100 MiB."""
    packer = zlib.compressobj(9, wbits=31) if encoding == "gzip" else zstd.ZstdCompressor()
    zeros = bytes(MEBIBYTE)
    bomb = b"".join([*(packer.compress(zeros) for _ in range(100)), packer.flush()])
    assert len(bomb) < MEBIBYTE / 4
    unpack, size = get_unpacker(encoding), 0
    tracemalloc.start()
    try:
        for piece in unpack.feed(bomb):
            size += len(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    unpack.end()
    assert size == 100 * MEBIBYTE
    assert peak < MEBIBYTE


def test_encoding_names_ignore_case() -> None:
    """Names follow HTTP, with `x-gzip` as an alias."""
    for encoding in ("", "identity", "GZIP", " x-gzip", "Zstd"):
        assert create_decompressor(encoding) is not None

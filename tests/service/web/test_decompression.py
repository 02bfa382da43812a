"""Decompression of request bodies: within a limit, and with damaged files refused."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from evalstop_service.web.body import decompress
from evalstop_service.web.problems import Problem, ProblemKind
from hypothesis import given
from hypothesis import strategies as st

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MEBIBYTE = 2**20

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}

contents = st.binary(max_size=300) | st.builds(bytes.__mul__, st.binary(max_size=3), st.integers(0, 50_000))


@pytest.mark.parametrize("encoding", COMPRESS)
@given(content=contents)
def test_content_within_the_limit_is_whole(encoding: str, content: bytes) -> None:
    """The limit holds to the byte."""
    body = COMPRESS[encoding](content)
    assert decompress(body, encoding, len(content)) == content
    if content:
        with pytest.raises(Problem) as refused:
            decompress(body, encoding, len(content) - 1)
        assert refused.value.kind is ProblemKind.BODY_TOO_LARGE


@pytest.mark.parametrize("encoding", COMPRESS)
@given(content=contents, lost=st.integers(1, 10**6), tail=st.binary(min_size=1, max_size=50))
def test_damaged_file_is_refused(encoding: str, content: bytes, lost: int, tail: bytes) -> None:
    """A body whose end, or all of it, is missing is refused, and so is other content, also behind a whole file."""
    body = COMPRESS[encoding](content)
    for damaged in (body[: -(1 + lost % len(body))], b"\x00" + tail, body + b"\x00" + tail, body + body):
        with pytest.raises(Problem) as refused:
            decompress(damaged, encoding, MEBIBYTE)
        assert refused.value.kind is ProblemKind.INVALID_JSON


def test_gzip_checksum_is_verified() -> None:
    """A body with a flipped bit is refused."""
    body = bytearray(gzip.compress(b"observations" * 100))
    body[-6] ^= 1
    with pytest.raises(Problem, match="incorrect data check"):
        decompress(bytes(body), "gzip", MEBIBYTE)


def test_zstd_window_is_limited_to_8_mib() -> None:
    """A window of 8 MiB covers every usual level; a file that asks for a larger one is refused."""
    content = b"observations" * MEBIBYTE
    assert decompress(zstd.compress(content, level=19), "zstd", len(content)) == content
    huge = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27}).compress(content)
    with pytest.raises(Problem, match="too much memory"):
        decompress(huge, "zstd", len(content))


@pytest.mark.parametrize("encoding", COMPRESS)
def test_decompression_bomb_takes_little_memory(encoding: str) -> None:
    """A small body that decompresses to 100 MiB is refused once it exceeds the limit."""
    packer = zlib.compressobj(9, wbits=31) if encoding == "gzip" else zstd.ZstdCompressor()
    zeros = bytes(MEBIBYTE)
    bomb = b"".join([*(packer.compress(zeros) for _ in range(100)), packer.flush()])
    tracemalloc.start()
    try:
        with pytest.raises(Problem, match="too large"):
            decompress(bomb, encoding, MEBIBYTE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MEBIBYTE

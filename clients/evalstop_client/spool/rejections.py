"""Decides which entries of a refused request to reject and which to retry. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from evalstop_client.service import Json, Refused
from evalstop_client.spool.segment import Entry

BAD_POINT = re.compile(r"^/observations/(\d+)(/|$)")


def split_rejected(entry: Entry, refused: Refused) -> tuple[Entry | None, list[Entry]]:
    """The rejected part of a refused entry, and the entries to post again.

    The service stores nothing of a batch with a bad observation. If it names the bad ones, only they are rejected;
    otherwise the batch is halved until they are isolated.
    """
    if entry.is_control:
        return entry, []
    points = entry.body["observations"]
    bad_indices = {int(match[1]) for pointer in refused.pointers if (match := BAD_POINT.match(pointer))}
    bad = [point for index, point in enumerate(points) if index in bad_indices]
    if bad:
        good = [point for index, point in enumerate(points) if index not in bad_indices]
        return merge_observations(bad), [merge_observations(good)] if good else []
    if len(points) == 1:
        return entry, []
    half = len(points) // 2
    return None, [merge_observations(points[:half]), merge_observations(points[half:])]


def merge_observations(points: Sequence[Json]) -> Entry:
    return Entry("observations", {"observations": list(points)})

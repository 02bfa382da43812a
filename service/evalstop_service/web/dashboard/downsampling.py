"""Reduces the points of a chart without averaging spikes away. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.series import Bucket


def downsample(points: Sequence[PostedObservation], limit: int) -> list[PostedObservation]:
    """At most `limit` (8 or more) points of a series, in order: the minimum, the maximum and a gap of each bucket.

    The first and the last point are always kept. A gap is a value that is not finite.
    """
    if len(points) <= limit:
        return list(points)
    keep = {0, len(points) - 1}
    buckets = (limit - 2) // 3
    for bucket in range(buckets):
        indices = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        finite = [index for index in indices if math.isfinite(points[index].value)]
        gap = next((index for index in indices if not math.isfinite(points[index].value)), None)
        if finite:
            keep.add(min(finite, key=lambda index: points[index].value))
            keep.add(max(finite, key=lambda index: points[index].value))
        if gap is not None:
            keep.add(gap)
    return [points[index] for index in sorted(keep)]


def outline_buckets(buckets: Sequence[Bucket], metric: str) -> list[PostedObservation]:
    """The minimum and the maximum of each bucket, placed at its ends, and a gap where a value was not finite.

    Their true positions are lost, which is invisible: a bucket is as wide as the line.
    """
    points = []
    for bucket in buckets:
        if bucket.lowest is not None and bucket.highest is not None:
            points.append(PostedObservation(metric, bucket.first_step, bucket.lowest))
            points.append(PostedObservation(metric, bucket.last_step, bucket.highest))
        if bucket.nan_count or bucket.infinite_count:
            points.append(PostedObservation(metric, bucket.last_step, math.nan))
    return points

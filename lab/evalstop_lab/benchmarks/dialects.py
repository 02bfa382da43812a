"""What trainers post, as the service and as MLflow want to hear it: the same numbers in the same order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from evalstop_lab.benchmarks import wire

MIX = ("eval", *["proxy", "kl", "loss"] * 7)[:20]
"""The metrics of consecutive observations: 1 in 20 is an eval."""

EVALS = ("eval",)

PERIOD = 40_000
"""After so many observations the values come again; the steps go on."""

_DRAWN = random.Random(20_260_101)
_NOISE = tuple(_DRAWN.gauss(0.0, 0.02) for _ in range(PERIOD))


@dataclass(frozen=True)
class Dialect:
    """How a batch is put: path and body, which open and close around one `item` an observation."""

    path: Callable[[str], str]
    opening: Callable[[str], bytes]
    item: Callable[[str, float], bytes]
    closing: bytes


def _evalstop_item(metric: str, value: float) -> bytes:
    return b'{"metric":"%s","step":%%d,"value":%.5f}' % (metric.encode(), value)


def _mlflow_item(metric: str, value: float) -> bytes:
    return b'{"key":"%s","step":%%d,"value":%.5f,"timestamp":1767225600000}' % (metric.encode(), value)


DIALECTS = {
    "evalstop": Dialect(
        lambda run: f"/api/v1/runs/{run}/observations", lambda _: b'{"observations":[', _evalstop_item, b"]}"
    ),
    "mlflow": Dialect(
        lambda _: "/api/2.0/mlflow/runs/log-batch",
        lambda run: b'{"run_id":"%s","metrics":[' % run.encode(),
        _mlflow_item,
        b"]}",
    ),
}


def value(metric: str, number: int) -> float:
    """Observation `number` of a run that gets better, ever more slowly, and does not turn; the same each time."""
    progress = number / 2000
    noise = _NOISE[number % PERIOD]
    match metric:
        case "loss":
            return 0.5 + math.exp(-progress) + noise
        case "kl":
            return 4 * math.sqrt(progress) + abs(noise)
        case _:
            return 1 - math.exp(-progress) + noise


def requests(
    dialect: Dialect, run: str, batch: int, host: str, key: str | None, metrics: Sequence[str] = MIX, first: int = 0
) -> Iterator[bytes]:
    """The endless requests of one run, `batch` observations each, by ascending step from `first` on."""
    head = wire.head_of(dialect.path(run), host, key)
    opening, closing = dialect.opening(run), dialect.closing
    bodies = templates(dialect, batch, tuple(metrics))
    while True:
        items = bodies[first // batch % len(bodies)] % tuple(range(first, first + batch))
        yield wire.request(head, opening + items + closing)
        first += batch


@cache
def templates(dialect: Dialect, batch: int, metrics: tuple[str, ...]) -> list[bytes]:
    """The items of consecutive batches without their steps, so that only these are written while time is measured."""
    items = [
        dialect.item(metric, value(metric, number))
        for number in range(PERIOD)
        for metric in [metrics[number % len(metrics)]]
    ]
    return [b",".join(items[begin : begin + batch]) for begin in range(0, PERIOD - batch + 1, batch)]

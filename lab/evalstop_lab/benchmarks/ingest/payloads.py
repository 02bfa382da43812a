"""Generates a trainer's requests in the formats of EvalStop and MLflow, with the same metrics, steps and values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

METRICS = ("eval", *["proxy", "kl", "loss"] * 7)[:20]
"""The metrics of consecutive observations; 1 in 20 is an eval."""

PERIOD = 40_000
"""The number of observations after which values repeat; steps do not."""

_RANDOM = random.Random(20_260_101)
_NOISE = tuple(_RANDOM.gauss(0.0, 0.02) for _ in range(PERIOD))


@dataclass(frozen=True)
class Format:
    """The format of a batch: its path, and a body of `opening`, comma-separated items, and `closing`."""

    path: Callable[[str], str]
    opening: Callable[[str], bytes]
    item: Callable[[str, float], bytes]
    closing: bytes


def _format_evalstop(metric: str, value: float) -> bytes:
    return b'{"metric":"%s","step":%%d,"value":%.5f}' % (metric.encode(), value)


def _format_mlflow(metric: str, value: float) -> bytes:
    return b'{"key":"%s","step":%%d,"value":%.5f,"timestamp":1767225600000}' % (metric.encode(), value)


FORMATS = {
    "evalstop": Format(
        lambda run: f"/api/v1/runs/{run}/observations", lambda _: b'{"observations":[', _format_evalstop, b"]}"
    ),
    "mlflow": Format(
        lambda _: "/api/2.0/mlflow/runs/log-batch",
        lambda run: b'{"run_id":"%s","metrics":[' % run.encode(),
        _format_mlflow,
        b"]}",
    ),
}


def compute_value(metric: str, number: int) -> float:
    """The value of observation `number` of a run that improves more and more slowly and does not turn."""
    progress = number / 2000
    noise = _NOISE[number % PERIOD]
    match metric:
        case "loss":
            return 0.5 + math.exp(-progress) + noise
        case "kl":
            return 4 * math.sqrt(progress) + abs(noise)
        case _:
            return 1 - math.exp(-progress) + noise


def generate_requests(
    form: Format, run: str, batch: int, host: str, key: str | None, first: int = 0
) -> Iterator[bytes]:
    """Generate an endless sequence of HTTP requests of one run, `batch` observations each, with steps from `first`."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {form.path(run)} HTTP/1.1\r\nHost: {host}\r\n{authorization}"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()
    opening, closing = form.opening(run), form.closing
    templates = prepare_templates(form, batch)
    while True:
        items = templates[first // batch % len(templates)] % tuple(range(first, first + batch))
        yield b"%s%d\r\n\r\n%s%s%s" % (head, len(opening) + len(items) + len(closing), opening, items, closing)
        first += batch


@cache
def prepare_templates(form: Format, batch: int) -> list[bytes]:
    """The items of consecutive batches without their steps, which are formatted during the measurement."""
    items = [
        form.item(metric, compute_value(metric, number))
        for number in range(PERIOD)
        for metric in [METRICS[number % len(METRICS)]]
    ]
    return [b",".join(items[start : start + batch]) for start in range(0, PERIOD - batch + 1, batch)]

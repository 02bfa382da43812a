"""Events are smaller than receivers accept, whatever was reported, and keep their ids."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from evalstop_service.domain.event_types import EventType
from evalstop_service.webhooks.channels import Format, render_body
from evalstop_service.webhooks.event_data import MOST_EVENT_BYTES
from evalstop_service.webhooks.events import DECLARATIONS, build_data


def nest(depth: int, width: int) -> Any:
    return {f"key {number}": nest(depth - 1, width) for number in range(width)} if depth else 1.5


REPORTS: dict[str, dict[str, Any]] = {
    "long text": {"log": "x" * 200_000, "exit_status": -15},
    "many entries": {f"pod {number}": "evicted" for number in range(20_000)},
    "nested entries": nest(5, 10),
    "nested lists": {"lists": [[[[0] * 10] * 10] * 10] * 100},
    "long name": {"x" * 200_000: 1},
}


@pytest.mark.parametrize("report", REPORTS)
def test_report_of_any_size_fits_into_an_event(report: str) -> None:
    """The report is left out; the ids of project, run and decision stay, and channels can render it."""
    example = DECLARATIONS[EventType.STOPPED].example
    labels = {f"label {number}": "y" * 45 for number in range(500)}
    run = msgspec.structs.replace(example.run, labels=labels)  # type: ignore[union-attr]
    fields = msgspec.structs.asdict(example) | {"run": run, "report": REPORTS[report]}
    data = build_data(EventType.STOPPED, fields)
    body = json.dumps({"type": EventType.STOPPED, "timestamp": "2026-01-01T00:00:00Z", "data": data})
    assert len(body) < MOST_EVENT_BYTES
    whole: dict[str, Any] = msgspec.to_builtins(example)
    assert [data[part]["id"] for part in ("project", "run", "decision")] == [
        whole[part]["id"] for part in ("project", "run", "decision")
    ]
    assert data["decision"] == whole["decision"]
    assert data["run"]["labels"] == labels
    for form in Format:
        render_body(form, body)

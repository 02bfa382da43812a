"""Slurm's record of a job, from any source, and its interpretation. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from evalstop_client.observations import format_time

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States in which a job holds no resources; neither COMPLETING nor unknown states are among them."""

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})


@dataclass(frozen=True)
class Record:
    """One job, one task of an array, or one component of a heterogeneous job."""

    job_id: str
    state: str  # COMPLETING takes precedence over other states
    user: str
    partition: str
    array_job_id: str = ""
    array_task_id: str = ""
    het_job_id: str = ""
    reason: str = ""
    exit_code: int | None = None  # as from wait(): the exit code times 256, plus the signal
    ended_at: datetime | None = None
    gpus: int = 0
    restarts: int = 0

    @property
    def name(self) -> str:
        """The id to cancel. Never the bare id of an array task, which may be that of the whole array."""
        if self.array_task_id:
            return f"{self.array_job_id}_{self.array_task_id}"
        return self.het_job_id or self.job_id

    @property
    def is_held(self) -> bool:
        """Whether it waits in the queue until it is released."""
        return self.state in WAITING and "held" in self.reason.lower()


def select_job(records: Iterable[Record], job_id: str) -> list[Record]:
    """The records of the job with this id: itself, and the other components if it is heterogeneous."""
    records = list(records)
    own_records = [record for record in records if record.job_id == job_id]
    leaders = {record.het_job_id for record in own_records if record.het_job_id}
    return own_records + [record for record in records if record.het_job_id in leaders and record.job_id != job_id]


def summarize_end(records: Iterable[Record]) -> dict[str, Any]:
    """The details of a job's end for the report."""
    records = list(records)
    ends = [record.ended_at for record in records if record.ended_at is not None]
    first = records[0]
    facts: dict[str, Any] = {
        "scheduler_state": first.state,
        "gpus_freed": sum(record.gpus for record in records),
        "ended_at": format_time(max(ends)) if ends else None,
    }
    if first.exit_code is not None:
        facts |= {"exit_code": first.exit_code >> 8, "signal": (first.exit_code & 127) or None}
    return facts


def parse_gpus(allocated: str, per_job: str = "", per_node: str = "", nodes: int = 1) -> int:
    """GPUs of a job: as allocated if Slurm counts them (AccountingStorageTRES), else as requested."""
    counted = _count(r"gres/gpu(?::[^=,]+)?=(\d+)", [part for part in allocated.split(",") if "gres/gpu=" in part])
    if counted == 0:  # typed GPUs are listed in addition to their sum, so they count only without a sum
        counted = _count(r"gres/gpu:[^=,]+=(\d+)", allocated.split(","))
    if counted:
        return counted
    pattern = r"(?:gres[:/])?gpu(?::[^:,=()]*[^:,=()\d][^:,=()]*)?(?:[:=](\d+))?"
    return _count(pattern, per_job.split(",")) or _count(pattern, per_node.split(",")) * max(1, nodes)


def _count(pattern: str, parts: Iterable[str]) -> int:
    matches = (re.fullmatch(pattern, part.partition("(")[0].strip()) for part in parts)
    return sum(int(match[1] or 1) for match in matches if match)


def parse_squeue(line: str) -> Record:
    """From a line of `squeue` in the format of `FIELDS`."""
    values = dict(zip(FIELDS, line.split(SEPARATOR), strict=False))
    fields = {name: "" if value in ("N/A", "(null)", "None") else value for name, value in values.items()}
    array_task = fields["ArrayTaskID"]
    return Record(
        job_id=fields["JobID"],
        state=fields["State"],
        user=fields["UserName"],
        partition=fields["Partition"],
        array_job_id=fields["ArrayJobID"] if array_task else "",
        array_task_id=array_task,
        het_job_id=fields["HetJobID"],
        reason=fields["Reason"],
        exit_code=parse_exit_code(fields["exit_code"]),
        ended_at=_parse_local_time(fields["EndTime"]) if fields["State"] in ENDED else None,
        gpus=parse_gpus(
            fields["tres-alloc"], fields["tres-per-job"], fields["tres-per-node"], _parse_number(fields["NumNodes"])
        ),
        restarts=_parse_number(fields["RestartCnt"]),
    )


def parse_exit_code(text: str) -> int | None:
    """The status as from wait(); sacct and recent versions of squeue split it, such as `7:0` or `0:15`."""
    code, colon, signal = text.partition(":")
    if not code.isdecimal():
        return None
    return (int(code) << 8) | _parse_number(signal) if colon else int(code)


SEPARATOR = "|"
FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "State",
    "UserName",
    "Partition",
    "RestartCnt",
    "exit_code",
    "EndTime",
    "NumNodes",
    "tres-alloc",
    "tres-per-job",
    "tres-per-node",
    "Reason",
)
SQUEUE_FORMAT = ",".join(f"{name}:{SEPARATOR}" for name in FIELDS)


def parse_rest(job: Mapping[str, Any]) -> Record:
    """From an element of `jobs` in a response of slurmrestd, of version 0.0.38 or later."""
    states = job.get("job_state")
    state_names = [str(state) for state in states] if isinstance(states, list) else [str(states)]
    state = "COMPLETING" if "COMPLETING" in state_names else (state_names[0] if state_names else "")
    array_task = _parse_rest_number(job.get("array_task_id"))
    ended_at = _parse_rest_number(job.get("end_time"))
    return Record(
        job_id=str(job.get("job_id", "")),
        state=state,
        user=str(job.get("user_name", "")),
        partition=str(job.get("partition", "")),
        array_job_id="" if array_task is None else str(_parse_rest_number(job.get("array_job_id")) or ""),
        array_task_id="" if array_task is None else str(array_task),
        het_job_id=str(_parse_rest_number(job.get("het_job_id")) or ""),
        reason=str(job.get("state_reason", "")),
        exit_code=_parse_rest_exit_code(job.get("exit_code")),
        ended_at=datetime.fromtimestamp(ended_at, UTC) if ended_at and state in ENDED else None,
        gpus=parse_gpus(
            str(job.get("tres_alloc_str") or ""),
            str(job.get("tres_per_job") or ""),
            str(job.get("tres_per_node") or ""),
            _parse_rest_number(job.get("node_count")) or 1,
        ),
        restarts=_parse_rest_number(job.get("restart_cnt")) or 0,
    )


def _parse_rest_number(value: Any) -> int | None:
    """A number, which later versions wrap as `{"set": true, "infinite": false, "number": 5}`."""
    if isinstance(value, Mapping):
        return int(value["number"]) if value.get("set") and isinstance(value.get("number"), int | float) else None
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _parse_rest_exit_code(value: Any) -> int | None:
    """The status as from wait(); later versions split it."""
    if isinstance(value, Mapping) and "return_code" in value:
        signal = value.get("signal")
        number = _parse_rest_number(signal.get("signal_id", signal.get("id"))) if isinstance(signal, Mapping) else None
        return ((_parse_rest_number(value["return_code"]) or 0) << 8) | (number or 0)
    return _parse_rest_number(value)


def _parse_number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _parse_local_time(text: str) -> datetime | None:
    """A local time; Slurm's commands write it without an offset."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return None

"""Reads the console output of verl, OpenRLHF or NeMo-RL from a file, one run per file.

verl        `step:3 - critic/score/mean:0.512 - actor/ppo_kl:0.001`
OpenRLHF    `... Global step 3: {'reward': 0.41, 'kl': 0.02, ...}`
NeMo-RL     `===== Step 3/100 =====`, then bullets such as `• Avg Reward: 0.41`; `Starting validation at step 3`, then
            `• Accuracy: 0.38`. Only these are mapped to metric names.

All else in such a file is ignored, as are Ray's prefixes and colors. verl rounds to three digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, parse_step, parse_text_number
from evalstop_lab.replay.lines import read_lines
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_VERL = re.compile(r"\bstep:(\d+) - (\S.*)$")
_VERL_CELL = re.compile(rf"(?:np\.float\d+\()?({_NUMBER})\)?$")
_OPENRLHF = re.compile(r"Global step (\d+)(?: \[replay\])?: \{(.*)\}")
_OPENRLHF_CELL = re.compile(rf"'([^']+)': (?:np\.float\d+\(|tensor\()?({_NUMBER})\b")
_NEMO_STEP = re.compile(r"=+ Step (\d+)/(\d+) =+")
_NEMO_VALIDATION = re.compile(r"Starting validation at step (\d+)")
_NEMO_CELL = re.compile(rf"• (Loss|Avg Reward|Avg Total Reward|Generation KL Error|Accuracy): ({_NUMBER})$")
_NEMO_NAMES = {
    "Loss": "loss",
    "Avg Reward": "reward",
    "Avg Total Reward": "reward",
    "Generation KL Error": "gen_kl_error",
    "Accuracy": "validation/accuracy",
}


def list_metrics(path: Path, errors: ReadErrors) -> set[str]:
    return {"step"} | {key for _, _, row in _parse_rows(path, errors) for key in row}


def read_runs(path: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
    run = runs.run(name, roles)
    for number, step, row in _parse_rows(path, errors):
        try:
            add_row(run, parse_step(step), row, parse_text_number)
        except ValueError as error:
            errors.add(UnreadableInput(path, str(error), number))


def _parse_rows(path: Path, errors: ReadErrors) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Line number, step and cells."""
    step: str | None = None
    for number, raw in read_lines(path, errors):
        line = _COLORS.sub("", raw).strip()
        if match := _VERL.search(line):
            cells = (cell.rpartition(":") for cell in match[2].split(" - "))
            yield number, match[1], {key: value[1] for key, _, cell in cells if (value := _VERL_CELL.match(cell))}
        elif match := _OPENRLHF.search(line):
            yield number, match[1], dict(_OPENRLHF_CELL.findall(match[2]))
        elif match := _NEMO_STEP.search(line) or _NEMO_VALIDATION.search(line):
            step = match[1]
        elif step is not None and (match := _NEMO_CELL.search(line)):
            yield number, step, {_NEMO_NAMES[match[1]]: match[2]}

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
from evalstop_lab.replay.cells import add_row, number_in, step_of
from evalstop_lab.replay.lines import lines
from evalstop_lab.replay.runs import Roles, Runs, Troubles

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


def metrics(path: Path, troubles: Troubles) -> set[str]:
    """The printed metrics."""
    found = {"step"}
    for _, _, row in _rows(path, troubles):
        found.update(row)
    return found


def read(path: Path, name: str, runs: Runs, roles: Roles, troubles: Troubles) -> None:
    """Read the printed values."""
    run = runs.run(name, roles)
    for number, step, row in _rows(path, troubles):
        try:
            add_row(run, step_of(step), row, number_in)
        except ValueError as error:
            troubles.add(UnreadableInput(path, str(error), number))


def _rows(path: Path, troubles: Troubles) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Line number, step and cells."""
    step: str | None = None
    for number, raw in lines(path, troubles):
        line = _COLORS.sub("", raw).strip()
        if found := _VERL.search(line):
            cells = (cell.rpartition(":") for cell in found[2].split(" - "))
            yield number, found[1], {key: value[1] for key, _, cell in cells if (value := _VERL_CELL.match(cell))}
        elif found := _OPENRLHF.search(line):
            yield number, found[1], dict(_OPENRLHF_CELL.findall(found[2]))
        elif found := _NEMO_STEP.search(line) or _NEMO_VALIDATION.search(line):
            step = found[1]
        elif step is not None and (found := _NEMO_CELL.search(line)):
            yield number, step, {_NEMO_NAMES[found[1]]: found[2]}

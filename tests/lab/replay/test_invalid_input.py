"""Errors in a log name the file, the line and a remedy; no content crashes the readers."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import POLICIES, MetricRole, policy_to_document
from evalstop_lab.cli import main
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay import wandb_offline
from evalstop_lab.replay.command import load_policy
from evalstop_lab.replay.rows import LONGEST_LINE
from evalstop_lab.replay.runs import ReadErrors
from evalstop_lab.replay.sources import read_runs
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.replay.conftest import Replay, build_rows, property_settings, write_jsonl
from tests.lab.replay.fake_mlflow import run_invalid_mlflow

GOOD = '{"run": "a", "step": 1, "eval": 1}\n'
FailingReplay = Callable[..., str]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", "", ["no metrics were found in it"]),
        ("a.jsonl", "\n \n", ["no metrics were found in it"]),
        ("a.jsonl", GOOD + "\xff\xfe", ["line 2", "not valid UTF-8"]),
        ("a.jsonl", GOOD + "\0\0", ["line 2", "NUL"]),
        ("a.jsonl", GOOD + "{\n", ["line 2", "not JSON", '"run": "a"']),
        ("a.jsonl", GOOD + "[" * 100_000 + "\n", ["line 2", "not JSON"]),
        ("a.jsonl", GOOD + "[1]\n", ["line 2", "not a JSON object"]),
        ("a.jsonl", GOOD + '{"step": 2, "eval": 1}\n', ["line 2", "the run is missing"]),
        ("a.jsonl", '{"run": "", "step": 2, "eval": 1}\n', ["line 1", "the run is ''"]),
        ("a.jsonl", '{"run": "\\ud800", "step": 1, "eval": 1}\n', ["line 1"]),
        ("a.jsonl", '{"run": ["a"], "step": 2, "eval": 1}\n', ["line 1", "name as text"]),
        ("a.jsonl", '{"run": "a", "eval": 1}\n', ["no column `step`, but eval, run"]),
        ("a.jsonl", GOOD + '{"run": "a", "eval": 1}\n', ["line 2", "the step is missing", "whole number"]),
        ("a.jsonl", '{"run": "a", "step": 1.5, "eval": 1}\n', ["line 1", "the step is 1.5"]),
        ("a.jsonl", '{"run": "a", "step": true, "eval": 1}\n', ["line 1", "the step is True"]),
        ("a.jsonl", '{"run": "a", "step": -1, "eval": 1}\n', ["line 1", "the step is -1"]),
        ("a.jsonl", '{"run": "a", "step": 9007199254740992, "eval": 1}\n', ["line 1", "2**53"]),
        ("a.jsonl", '{"run": "a", "step": NaN, "eval": 1}\n', ["line 1", "the step is nan"]),
        ("a.jsonl", '{"run": "a", "step": 1, "eval": "high"}\n', ["line 1", "eval is 'high'", "NaN, Infinity"]),
        ("a.jsonl", '{"run": "a", "step": 1, "eval": false}\n', ["line 1", "eval is False"]),
        ("a.jsonl", '{"run": "a", "step": 1, "eval": {}}\n', ["line 1", "eval is {}"]),
        ("a.jsonl", '{"run": "a", "step": 1, "eval": 1' + "0" * 400 + "}\n", ["line 1", "eval is 1000"]),
        ("a.jsonl", '{"run": "a", "step": 1, "eval": 1, "eval_stderr": -1}\n', ["line 1", "standard error", "-1"]),
        ("a.jsonl", '{"step": 1, "eval": 1, "total_steps": 0}\n', ["line 1", "total_steps is 0; give a whole number"]),
        ("a.jsonl", '{"run": "a", "step": 1, "mark": 1}\n', ["but mark;", "--eval"]),
        ("a.csv", "", ["no metrics were found in it"]),
        ("a.csv", "a,b\n1,2\n", ["none of the columns", "a, b"]),
        ("a.csv", "a,eval\n1,2\n", ["no column `step`", "a, eval"]),
        ("a.csv", "step;eval\n1;2\n", ["step;eval"]),
        ("a.csv", "step,eval,eval\n1,2,3\n", ["line 1", "eval twice"]),
        ("a.csv", "step,eval\n1,2\n1,2,3\n", ["line 3", "3 cells", "2"]),
        ("a.csv", "step,eval\n1,x\n", ["line 2", "eval is 'x'"]),
        ("a.csv", "step,eval\n,1\n", ["line 2", "the step is ''"]),
        ("a.csv", 'step,eval\n1,"2\n', ["line 2", "end of data"]),
        ("a.csv", "run,step,eval\n,1,1\n", ["line 2", "the run is ''"]),
        ("a.csv", "step,eval\n\xff,1\n", ["line 2", "not valid UTF-8"]),
        ("a.json", GOOD, ["no list `log_history`", ".jsonl"]),
        ("a.json", GOOD + GOOD, ["not JSON", ".jsonl"]),
        ("a.json", '{"log_history": [{"step": 1, "eval": 1}, 3]}', ["entry 1 of log_history", "3"]),
        ("a.json", '{"log_history": [{"eval": 1}]}', ["no column `step`, but eval"]),
        ("a.json", '{"log_history": []}', ["no metrics were found in it"]),
        ("a.json", "[" * 100_000, ["not JSON"]),
    ],
)
def test_bad_content_is_reported(tmp_path: Path, name: str, content: str, parts: list[str]) -> None:
    """A message names the file, the line, the problem and a remedy."""
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    errors: ReadErrors = []
    read_runs([tmp_path / name], None, errors)
    messages = "\n".join(map(str, errors))
    for part in [str(tmp_path / name), *parts]:
        assert part in messages


def test_replay_goes_on_behind_an_unreadable_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row is named on standard error, and the others count; a file without any run is an error."""
    (tmp_path / "a.jsonl").write_text(GOOD + "{\n" + GOOD.replace("1,", "2,"))
    assert main(["replay", str(tmp_path / "a.jsonl"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["best_step"] == 1
    assert "line 2: it is not JSON" in printed.err
    (tmp_path / "a.jsonl").write_text("{\n")
    assert main(["replay", str(tmp_path / "a.jsonl"), "--json"]) == 1


def test_file_without_line_breaks_is_not_read(tmp_path: Path, failing_replay: FailingReplay) -> None:
    """Reading stops at the maximum length of a line."""
    (tmp_path / "a.jsonl").write_bytes(b"{" + b" " * (10 * LONGEST_LINE))
    assert "line 1: the line is longer than 1,048,576 bytes" in failing_replay(1, tmp_path / "a.jsonl")


def test_missing_files_and_empty_folders_are_refused(tmp_path: Path, failing_replay: FailingReplay) -> None:
    """The message says that the file does not exist, or which files the folder lacks."""
    assert "No such file" in failing_replay(1, tmp_path / "absent.jsonl")
    assert "No such file" in failing_replay(1, tmp_path / "absent.json")
    assert "no trainer_state.json, results.csv, progress.csv" in failing_replay(1, tmp_path)


def test_corrupt_event_file_is_refused(tmp_path: Path, failing_replay: FailingReplay) -> None:
    """The message has the name of the file."""
    pytest.importorskip("tensorboard")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"not an event file" * 100)
    assert str(tmp_path) in failing_replay(1, tmp_path)


def test_unknown_columns_are_refused(tmp_path: Path, failing_replay: FailingReplay) -> None:
    """For a misspelled --eval or --minimize the exit code is 2, and the message lists the columns."""
    log = write_jsonl(tmp_path / "a.jsonl", build_rows(proxy=1.0))
    assert "--eval gold: there is no such column; there are eval, proxy." in failing_replay(2, log, "--eval", "gold")
    assert "--minimize evl" in failing_replay(2, log, "--minimize", "evl")


def test_non_finite_values_are_read(tmp_path: Path, replay: Replay) -> None:
    """NaN and the infinities may be strings or Python's bare tokens, and the detector ignores them."""
    unusual_values = ["NaN", '"NaN"', "Infinity", '"-Infinity"', "-Infinity", "null", '"nan"', "1e999"]
    lines = [json.dumps(row) for row in build_rows()]
    lines += [
        f'{{"run": "a", "step": {5 + 10 * i}, "eval": {text}, "eval_stderr": NaN}}'
        for i, text in enumerate(unusual_values)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.csv").write_text("step,eval\n0,1\n1,nan\n2,NaN\n3,-inf\n4,Infinity\n5,.5\n6,.4\n7,.3\n")
    assert [item["stop_step"] for item in replay(tmp_path / "a.jsonl", tmp_path / "b.csv", "--policy", "paper")] == [
        60,
        7,
    ]


def test_header_that_is_written_again_is_no_row(tmp_path: Path) -> None:
    """A trainer that started again appends to its CSV file, with the header."""
    (tmp_path / "a.csv").write_text("step, val_f1\n1,0.1\n2,0.2\nstep, val_f1\n2,0.3\n3,0.4\n")
    (run,) = read_runs([tmp_path / "a.csv"]).by_name.values()
    assert run.settle() == 1
    assert [(score.step, score.value) for score in run.scores()] == [(1, 0.1), (2, 0.3), (3, 0.4)]


def test_rows_that_name_their_run_keep_it_behind_one_that_does_not(tmp_path: Path) -> None:
    """A file may begin with a row of settings; two runs in it stay two."""
    rows = [f'{{"run": "{run}", "step": {step}, "eval": 0.{step}}}' for run in "ab" for step in (1, 2)]
    (tmp_path / "a.jsonl").write_text("\n".join(['{"step": 0, "note": "start"}', *rows]))
    runs = read_runs([tmp_path / "a.jsonl"]).by_name
    assert {name: len(runs[name].scores()) for name in "ab"} == {"a": 2, "b": 2}


def test_last_value_of_a_step_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the appended log of a trainer that started again the last values stand, and one line counts them."""
    log = [*build_rows(eval_scores=[1.0] * 9), *build_rows()[1:], *build_rows()]
    assert main(["replay", str(write_jsonl(tmp_path / "a.jsonl", log)), "--json", "--policy", "paper"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["stop_step"] == 60
    (line,) = filter(None, captured.err.splitlines())
    assert line.startswith("evalstop-lab: 8 values were logged again at the same step, with other values")
    assert line.endswith("the last stands")


@property_settings
@given(
    content=st.binary(max_size=300) | st.text(max_size=100).map(str.encode),
    suffix=st.sampled_from([".jsonl", ".csv", ".json"]),
)
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    """Replay succeeds or fails with a message for any content of a file."""
    file = tmp_path / f"any{suffix}"
    file.write_bytes(content)
    assert main(["replay", str(file)]) in (0, 1)


WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
HISTORY, RUN = 2, 17


def write_wandb_file(folder: Path, *parts: tuple[int, bytes]) -> Path:
    """Write an offline run of W&B with these parts of records and valid checksums."""
    data = b":W&B\xe1\xbe\x00"
    for kind, body in parts:
        left = wandb_offline.BLOCK - len(data) % wandb_offline.BLOCK
        data += b"" if left >= 7 + len(body) else bytes(left)
        data += struct.pack("<IHB", zlib.crc32(body, zlib.crc32(bytes([kind]))), len(body), kind) + body
    file = folder / "run-x.wandb"
    file.write_bytes(data)
    return file


def encode_field(number: int, content: bytes | int) -> bytes:
    """A field of a protobuf message."""
    if isinstance(content, int):
        return encode_varint(number << 3) + encode_varint(content)
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


def encode_varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + encode_varint(value >> 7)


def encode_item(key: str, value: str) -> bytes:
    """An item of W&B's history or config."""
    return encode_field(1, key.encode()) + encode_field(16, value.encode())


record_contents = st.recursive(
    st.integers(0, 2**64 - 1) | st.binary(max_size=9),
    lambda content: st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16, 17]), content), max_size=4).map(
        lambda pairs: b"".join(encode_field(number, content) for number, content in pairs)
    ),
)


@property_settings
@given(records=st.lists(st.tuples(st.sampled_from([HISTORY, RUN]), record_contents), max_size=4))
def test_any_records_of_wandb_are_read_or_refused(tmp_path: Path, records: list[tuple[int, bytes | int]]) -> None:
    """Records with valid checksums may have any content."""
    file = write_wandb_file(tmp_path, *((WHOLE, encode_field(*record)) for record in records))
    read_runs([file], None, [])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(WHOLE, encode_field(HISTORY, 7) + encode_field(HISTORY, encode_field(1, 7) + encode_field(2, 7)))], None),
        ([(WHOLE, encode_field(HISTORY, encode_field(1, encode_item("eval", "[" * 10_000))))], " 1 rows"),
        ([(WHOLE, encode_field(HISTORY, encode_field(1, encode_item("eval", "{"))))], "the 1 rows"),
        ([(WHOLE, encode_field(RUN, encode_field(4, encode_field(1, encode_item("gpus", "1" + "0" * 400)))))], None),
        ([(MIDDLE, b""), (LAST, b"")], "is missing"),
        ([(FIRST, b""), (WHOLE, b"")], "is missing"),
        ([(FIRST, b"")], "is truncated"),
        ([(WHOLE, encode_varint(HISTORY << 3 | 2) + encode_varint(2**63))], "longer than its message"),
    ],
)
def test_invalid_records_of_wandb(tmp_path: Path, parts: list[tuple[int, bytes]], message: str | None) -> None:
    """Fields of another type are ignored, and incomplete records are reported, after the rows before them."""
    row = encode_field(HISTORY, encode_field(1, encode_item("eval", "0.5")) + encode_field(2, encode_field(1, 7)))
    errors: ReadErrors = []
    (run,) = read_runs([write_wandb_file(tmp_path, (WHOLE, row), *parts)], None, errors).by_name.values()
    assert (list(run.series[MetricRole.EVAL].values), run.gpus) == ([0.5], None)
    assert [message is not None and message in str(error) for error in errors] == [True] * (message is not None)


EXPERIMENTS: dict[str, Any] = {"experiments": [{"name": "a", "experiment_id": "0"}]}
RUN_WITH_IMPOSSIBLE_END: dict[str, Any] = {
    "info": {"run_id": "r", "run_name": "r", "start_time": "1", "end_time": "9" * 99}
}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "not a JSON object"),
        ({"experiments": 3}, "not a list of objects"),
        ({"experiments": ["a"]}, "not a list of objects"),
        (EXPERIMENTS | {"next_page_token": "again"}, "does not end"),
        (EXPERIMENTS | {"runs": [{}]}, "not in MLflow's format"),
        (EXPERIMENTS | {"runs": [{"info": 3}]}, "not in MLflow's format"),
        (EXPERIMENTS | {"runs": [RUN_WITH_IMPOSSIBLE_END | {"data": {"metrics": [{}]}}]}, "not in MLflow's format"),
    ],
)
def test_invalid_answers_of_an_mlflow_server(answer: object, message: str) -> None:
    """The message has the server's address, and an endless list is not followed."""
    with run_invalid_mlflow(answer) as address, pytest.raises(UnreadableInput, match=message) as refusal:
        read_runs([f"mlflow+{address}"])
    assert address in str(refusal.value)


def test_invalid_observations_of_an_mlflow_server() -> None:
    """An invalid point is reported, the others are read, and impossible GPUs and durations are ignored."""
    points: list[dict[str, Any]] = [{"key": "eval", "value": 0.5, "step": step} for step in (0, "x", 2)]
    run = RUN_WITH_IMPOSSIBLE_END | {
        "data": {"metrics": [{"key": "eval"}], "params": [{"key": "gpus", "value": "9" * 400}]}
    }
    errors: ReadErrors = []
    with run_invalid_mlflow(EXPERIMENTS | {"runs": [run], "metrics": points}) as address:
        (read,) = read_runs([f"mlflow+{address}"], None, errors).by_name.values()
    assert list(read.series[MetricRole.EVAL].steps) == [0, 2]
    assert (read.gpus, read.seconds) == (None, None)
    assert ["step is 'x'" in str(error) for error in errors] == [True]


VALID_POLICY = "name: mine\nmembers:\n  - detector: k_decline\n    stop_at: 5\n"


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("p.yaml", VALID_POLICY.replace("5", "-5"), ["$.members[0].stop_at", "> 0.0"]),
        ("p.yaml", VALID_POLICY + "? [a]\n: 1", ["line 5, column 3"]),
        ("p.yaml", VALID_POLICY + "note: !!python/object:os.system {}", ["line 5, column 7", "tag"]),
        ("p.yaml", "", ["object"]),
        ("p.yaml", "[" * 5000, ["p.yaml"]),
        ("p.json", '{"name": "p",\n "members": [}', ["line 2 column 14"]),
        ("p.json", '{"name": "p", "members": []}', ["$.members", "length >= 1"]),
        ("p.json", "[" * 100_000, ["p.json"]),
    ],
)
def test_invalid_policy_is_refused(tmp_path: Path, name: str, text: str, parts: list[str]) -> None:
    """The message names the file and the place in it."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UnusableArguments) as refusal:
        load_policy(str(tmp_path / name))
    for part in [str(tmp_path / name), *parts]:
        assert part in str(refusal.value)


def test_unknown_policy_is_refused(tmp_path: Path, failing_replay: FailingReplay) -> None:
    """The exit code is 2, and the message lists the shipped policies."""
    log = write_jsonl(tmp_path / "a.jsonl", build_rows())
    message = failing_replay(2, log, "--policy", "nowhere")
    assert f"no file 'nowhere'; give one of {', '.join(POLICIES)}" in message


def test_policy_is_read_from_yaml_and_json_alike(tmp_path: Path) -> None:
    """A policy in YAML equals the same policy in JSON, and numbers in JSON may have exponents."""
    (tmp_path / "p.yaml").write_text(VALID_POLICY.replace("5", "0.00002"))
    policy = load_policy(str(tmp_path / "p.yaml"))
    (tmp_path / "p.json").write_text(json.dumps(policy_to_document(policy)))
    assert "2e-05" in (tmp_path / "p.json").read_text()
    assert load_policy(str(tmp_path / "p.json")) == policy

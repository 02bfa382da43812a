"""TensorBoard's event files, written by its own writers and by hand, followed as they grow."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.receivers.cli.entry import main
from evalstop_client.tensorboard.events import Scalar, parse_scalars
from evalstop_client.tensorboard.protobuf import MalformedMessage
from evalstop_client.tensorboard.records import masked_crc32c
from evalstop_client.tensorboard.tail import Folder, read_all_scalars
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService
from tests.clients.programs import running_program, wait_until


def framed(content: bytes) -> bytes:
    """A record with this content."""
    length = len(content).to_bytes(8, "little")
    checksums = (masked_crc32c(part).to_bytes(4, "little") for part in (length, content))
    return length + next(checksums) + content + next(checksums)


def field(number: int, content: bytes) -> bytes:
    """A field of the wire format that holds bytes."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def event(step: int, wall_time: float = 1e9, **scalars: float) -> bytes:
    """An event as PyTorch's SummaryWriter writes it."""
    values = (field(1, tag.encode()) + b"\x15" + struct.pack("<f", value) for tag, value in scalars.items())
    summary = b"".join(field(1, value) for value in values)
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + varint(step) + field(5, summary)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    head = b""
    while value >= 0x80:
        head += bytes([value & 0x7F | 0x80])
        value >>= 7
    return head + bytes([value])


def write(file: Path, *events: bytes) -> None:
    """Append events."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.writelines(framed(one) for one in events)


def read(*files: Path) -> list[tuple[str, int, float]]:
    return [(one.tag, one.step, one.value) for portion in read_all_scalars([*files]) for one in portion.scalars]


def look(folder: Path, server: FakeServer, memory: Path, *options: str) -> None:
    """One look at a folder, by the command."""
    command = [sys.executable, "-m", "evalstop_client.receivers.cli", "watch-tensorboard", str(folder), "--once"]
    environment = {**os.environ, "EVALSTOP_URL": server.url, "EVALSTOP_KEY": KEY}
    done = subprocess.run(
        [*command, "--state", str(memory), *options], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def told(service: FakeService) -> dict[str, list[tuple[str, Any]]]:
    """What the service was told of each run, in order."""
    runs: dict[str, list[tuple[str, Any]]] = {}
    for path, body in service.posts:
        what = path.rpartition("/")[2]
        if what == "runs":
            continue
        name = next(run.name for run in service.runs.values() if run.id == path.split("/")[-2])
        points = body.get("observations")
        found = [(one["metric"], (one["step"], one["value"])) for one in points] if points else [(what, body)]
        runs.setdefault(name, []).extend(found)
    return runs


def test_the_checksum_is_the_one_of_the_format() -> None:
    """The value of RFC 3720 for 32 bytes of zeros, masked as TFRecords mask it."""
    crc = 0x8A9136AA
    assert masked_crc32c(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.real
def test_what_pytorch_writes_is_read(tmp_path: Path) -> None:
    """By its own SummaryWriter: scalars old and new, and nothing of histograms, text and hyperparameters."""
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            writer.add_scalar("train/loss", 1 / (1 + step), step)
            writer.add_scalar("eval/reward", 0.5 * step, step, new_style=True)
        writer.add_scalar("double", 0.1, 2**40, new_style=True, double_precision=True)
        writer.add_scalar("odd", float("nan"), 1)
        writer.add_text("notes", "a text", 1)
        writer.add_tensor("weights", torch.ones(3), 1)
    (file,) = tmp_path.glob("events*")
    found = read(file)
    assert [one for one in found if one[0] == "eval/reward"] == [("eval/reward", step, 0.5 * step) for step in range(3)]
    assert [one for one in found if one[0] == "double"] == [("double", 2**40, 0.1)]
    assert {tag for tag, _, _ in found} == {"train/loss", "eval/reward", "double", "odd"}


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), st.integers(0, 2**63 - 1), st.floats(width=32)), max_size=9))
def test_what_tensorboard_writes_is_what_is_read(points: list[tuple[str, int, float]]) -> None:
    """Its own protocol buffers, as plain values and as tensors of every kind of number."""
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.util import tensor_util
    values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, _, value in points]
    values += [
        summary_pb2.Summary.Value(tag=tag, tensor=tensor_util.make_tensor_proto(value)) for tag, _, value in points
    ]
    step = points[0][1] if points else 0
    written = event_pb2.Event(wall_time=2.5, step=step, summary=summary_pb2.Summary(value=values))
    expected = [Scalar(tag, step, value, 2.5) for tag, _, value in [*points, *points]]
    assert list(map(repr, parse_scalars(written.SerializeToString()))) == list(map(repr, expected))


@given(st.binary(max_size=80))
def test_any_bytes_are_an_event_or_none(record: bytes) -> None:
    """A record that a stranger wrote is read or refused, and nothing else."""
    with contextlib.suppress(MalformedMessage):
        assert all(isinstance(one.value, float) for one in parse_scalars(record))


@given(st.lists(st.integers(0, 300), max_size=8))
def test_a_file_may_end_anywhere(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    """However a writer's bytes come in, each scalar is read once, and in its order."""
    file = tmp_path_factory.mktemp("cut") / "events.out.tfevents.1"
    whole = b"".join(framed(event(step, gold=step)) for step in range(5))
    folder, found = Folder(), []
    for end in [*sorted(cuts), len(whole)]:
        file.write_bytes(whole[:end])
        while (portion := folder.portion(file)) is not None:
            folder.take(file, portion)
            found += [one.step for one in portion.scalars]
    assert found == list(range(5))


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """Under the old name, in the old place, and longer than it was: what it says again takes the place of that."""
    file, folder = tmp_path / "events.out.tfevents.1", Folder()

    def seen() -> list[tuple[int | None, list[int]]]:
        found = []
        while (portion := folder.portion(file)) is not None:
            folder.take(file, portion)
            folder.__dict__.update(vars(Folder.from_document(json.loads(json.dumps(folder.document())))))
            found.append((portion.restarts_at, [one.step for one in portion.scalars]))
        return found

    write(file, *(event(step, 1.0, gold=step) for step in range(1, 4)))
    assert seen() == [(None, [1, 2, 3])]
    with file.open("r+b") as opened:
        opened.truncate()
    write(file, *(event(step, 2.0, gold=step, other_and_longer=1.0) for step in range(2, 6)))
    assert seen() == [(2, [2, 2, 3, 3, 4, 4, 5, 5])]
    copied = file.read_bytes() + framed(event(6, 3.0, gold=6))
    (tmp_path / "copy").write_bytes(copied)
    (tmp_path / "copy").replace(file)  # as rsync does it: another inode, but the same file
    assert seen() == [(None, [6])]
    file.write_bytes(copied[:-1])  # shorter, and still the same: sent again, which changes nothing
    assert seen() == [(None, [2, 2, 3, 3, 4, 4, 5, 5])]


def test_damage_costs_what_is_damaged(tmp_path: Path) -> None:
    """A record that was spoilt is passed over; where a length was, the file ends there, for now."""
    file = tmp_path / "events.out.tfevents.1"
    records = [framed(event(step, gold=step)) for step in range(4)]
    spoilt = bytearray(records[1])
    spoilt[20] ^= 1
    file.write_bytes(records[0] + bytes(spoilt) + records[2])
    assert [step for _, step, _ in read(file)] == [0, 2]
    file.write_bytes(records[0] + bytes(16) + records[2])  # zeros, as a file system shows before the bytes come
    assert [step for _, step, _ in read(file)] == [0]
    file.write_bytes(b"no event file at all" * 50)
    assert read(file) == []


def test_a_pipe_and_a_huge_record_hold_nobody_up(tmp_path: Path) -> None:
    """What is no file is not opened to be waited for; what is too large to be a scalar is not read."""
    os.mkfifo(tmp_path / "events.out.tfevents.1")
    write(tmp_path / "elsewhere", event(1, secret=1.0))
    (tmp_path / "events.out.tfevents.2").symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "events.out.tfevents.3", b"x" * (1 << 20) + b"x", event(7, gold=1.0))
    length = (1 << 39).to_bytes(8, "little")
    with (tmp_path / "events.out.tfevents.3").open("ab") as file:
        file.write(length + masked_crc32c(length).to_bytes(4, "little"))
    assert read(*sorted(tmp_path.glob("events*"))) == [("gold", 7, 1.0)]


def test_each_folder_is_a_run(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """Several files of one folder are one run, folders below are others."""
    logs = tmp_path / "logs"
    write(logs / "events.out.tfevents.1", event(1, gold=0.5), event(2, gold=0.75))
    write(logs / "events.out.tfevents.2", event(3, gold=1.0))
    write(logs / "seed-2" / "events.out.tfevents.1", event(1, gold=float("nan")), event(-1, gold=1.0))
    look(logs, server, tmp_path / "memory.json", "--metric", "gold=eval:minimize", "--label", "team=x")
    end = ("finish", {"status": "completed"})
    assert told(service) == {
        "logs": [("gold", (1, 0.5)), ("gold", (2, 0.75)), ("gold", (3, 1.0)), end],
        "logs/seed-2": [("gold", (1, "NaN")), end],
    }
    opened = [body for path, body in service.posts if path.endswith("/runs")]
    assert opened[0]["metrics"] == {"gold": {"role": "eval", "direction": "minimize"}}
    assert opened[0]["labels"] == {"team": "x"}


def test_folders_may_be_parts_of_one_run(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """As Keras writes them; roles are left to the service unless they are said."""
    write(tmp_path / "train" / "events.out.tfevents.1", event(1, epoch_loss=0.5))
    write(tmp_path / "validation" / "events.out.tfevents.1", event(1, epoch_loss=0.75))
    look(tmp_path, server, tmp_path / "memory.json", "--one-run", "--name", "keras")
    assert [one[0] for one in told(service)["keras"][:2]] == ["train/epoch_loss", "validation/epoch_loss"]
    assert next(body for path, body in service.posts if path.endswith("/runs"))["metrics"] == "auto"


def test_a_trainer_that_starts_again_supersedes_what_it_logged(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """A new file that goes back to an earlier step is a resume; one with other tags is not."""
    write(tmp_path / "events.out.tfevents.1", *(event(step, gold=step) for step in range(1, 6)))
    write(tmp_path / "events.out.tfevents.2", event(2, other=1.0), event(4, gold=40.0), event(5, gold=50.0))
    look(tmp_path, server, tmp_path / "memory.json", "--name", "run")
    said = told(service)["run"]
    assert said[5:] == [
        ("other", (2, 1.0)),
        ("resume", {"step": 3}),
        ("gold", (4, 40.0)),
        ("gold", (5, 50.0)),
        ("finish", {"status": "completed"}),
    ]


def test_folders_of_one_name_are_runs_of_their_own(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A folder is its own run, again and again, and one of the same name elsewhere is another."""
    for number in (1, 2, 3):
        for place in ("a", "b"):
            write(tmp_path / place / "logs" / "events.out.tfevents.1", event(number, gold=0.5))
            look(tmp_path / place / "logs", server, tmp_path / f"{place}.json")
            assert list(service.runs.values())[-1].status == "completed"
    assert {run.name: len(run.observations) for run in service.runs.values()} == {"logs": 3, "logs-2": 3}


def test_what_was_sent_is_remembered(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A watcher that starts again goes on where it was; one that lost its memory sends all of it again."""
    file, memory = tmp_path / "logs" / "events.out.tfevents.1", tmp_path / "memory.json"
    write(file, event(1, gold=0.5))
    look(file.parent, server, memory)
    write(file, event(2, gold=0.75))
    look(file.parent, server, memory)
    points = [one for one in told(service)["logs"] if one[0] == "gold"]
    assert points == [("gold", (1, 0.5)), ("gold", (2, 0.75))]
    memory.write_text("[]")
    look(file.parent, server, memory)
    assert len([one for one in told(service)["logs"] if one[0] == "gold"]) == 4
    file.unlink()  # and another in its place
    write(file, event(9, gold=1.0))
    look(file.parent, server, memory)
    assert ("gold", (9, 1.0)) in told(service)["logs"]


def test_a_growing_file_is_followed_through_an_outage(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """What comes while the service is away is sent when it is back; no end is told of."""
    file = tmp_path / "events.out.tfevents.1"
    write(file, event(1, gold=0.5))
    command = [
        sys.executable,
        "-m",
        "evalstop_client.receivers.cli",
        "watch-tensorboard",
        str(tmp_path),
        "--name",
        "r",
    ]
    command += ["--poll-seconds", "0.1", "--state", str(tmp_path / "memory.json")]
    with running_program(command, EVALSTOP_URL=server.url, EVALSTOP_KEY=KEY) as watcher:
        wait_until(lambda: told(service).get("r"))
        service.scripted_answers += [Answer(503, {})] * 2
        write(file, event(2, gold=0.75))
        wait_until(lambda: len(told(service)["r"]) == 2)
        watcher.terminate()
        assert watcher.wait(20) == 0
    assert [one[1] for one in told(service)["r"]] == [(1, 0.5), (2, 0.75)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["absent"], "no such folder"),
        ([".", "--metric", "gold"], "TAG=SIGNAL"),
        ([".", "--metric", "gold=eval:up"], "TAG=SIGNAL"),
        ([".", "--label", "x"], "label=value"),
        (["."], "EVALSTOP_URL"),
    ],
)
def test_a_call_that_cannot_work_is_refused(
    options: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what is wrong and what to write."""
    with pytest.raises(SystemExit) as end:
        main(["watch-tensorboard", *options])
    assert end.value.code == 2
    assert words in capsys.readouterr().err

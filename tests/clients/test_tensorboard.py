"""TensorBoard event files, from its own writers and by hand, read while they grow."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.receivers.cli import main
from evalstop_client.tensorboard import Folder, Scalar, masked_crc32c, parse_scalars, read_all_scalars
from hypothesis import example, given
from hypothesis import strategies as st

from tests.clients.fake_service import KEY, PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import running_program, wait_until
from tests.clients.receivers.receiver_program import RECEIVER


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The key by which the command reports. Afterwards signals end this process again, which the command handles."""
    monkeypatch.setenv("EVALSTOP_KEY", KEY)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def frame_record(content: bytes) -> bytes:
    """A TFRecord with this content."""
    length = len(content).to_bytes(8, "little")
    checksums = (masked_crc32c(part).to_bytes(4, "little") for part in (length, content))
    return length + next(checksums) + content + next(checksums)


def encode_field(number: int, content: bytes) -> bytes:
    """A length-delimited field of the protobuf wire format."""
    return bytes([number << 3 | 2]) + encode_varint(len(content)) + content


def encode_event(step: int, wall_time: float = 1e9, **scalars: float) -> bytes:
    """An event as PyTorch's SummaryWriter writes it."""
    values = (encode_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value) for tag, value in scalars.items())
    summary = b"".join(encode_field(1, value) for value in values)
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + encode_varint(step) + encode_field(5, summary)


def encode_varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    head = b""
    while value >= 0x80:
        head += bytes([value & 0x7F | 0x80])
        value >>= 7
    return head + bytes([value])


def append_events(file: Path, *events: bytes) -> None:
    """Append events to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.writelines(frame_record(event) for event in events)


def read_scalars(*files: Path) -> list[tuple[str, int, float]]:
    """The (tag, step, value) of all scalars."""
    return [
        (scalar.tag, scalar.step, scalar.value) for portion in read_all_scalars([*files]) for scalar in portion.scalars
    ]


def watch_once(folder: Path, server: FakeServer, state_file: Path, *options: str) -> int:
    """The exit code of the command, run once on a folder."""
    command = ["watch-tensorboard", str(folder), "--once", "--state", str(state_file), "--url", server.url]
    return main([*command, *options])


def list_posts_by_run(service: FakeService) -> dict[str, list[tuple[str, Any]]]:
    """What was posted to each run, in order."""
    runs: dict[str, list[tuple[str, Any]]] = {}
    for path, body in service.posts:
        kind = path.rpartition("/")[2]
        if kind == "runs":
            continue
        name = next(run.name for run in service.runs.values() if run.id == path.split("/")[-2])
        items = body.get("observations")
        posts = [(item["metric"], (item["step"], item["value"])) for item in items] if items else [(kind, body)]
        runs.setdefault(name, []).extend(posts)
    return runs


def test_checksum_is_masked_crc32c() -> None:
    """The RFC 3720 value for 32 zero bytes, masked as in TFRecord."""
    crc = 0x8A9136AA
    assert masked_crc32c(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), st.integers(0, 2**63 - 1), st.floats(width=32)), max_size=9))
def test_tensorboard_messages_are_read_back(points: list[tuple[str, int, float]]) -> None:
    """Plain values and tensors of one number are read as TensorBoard's own protobufs wrote them."""
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
def test_any_bytes_are_read_or_malformed(record: bytes) -> None:
    """Any record is read or is a ValueError."""
    with contextlib.suppress(ValueError):
        assert all(isinstance(scalar.value, float) for scalar in parse_scalars(record))


@given(st.lists(st.integers(0, 300), max_size=8))
def test_growing_file_is_read_once_and_in_order(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    """However a file grows, each scalar is read once and in order."""
    file = tmp_path_factory.mktemp("cut") / "events.out.tfevents.1"
    whole = b"".join(frame_record(encode_event(step, score=step)) for step in range(5))
    folder, scalars = Folder(), []
    for length in [*sorted(cuts), len(whole)]:
        file.write_bytes(whole[:length])
        while (portion := folder.portion(file)) is not None:
            folder.take(file, portion)
            scalars += [scalar.step for scalar in portion.scalars]
    assert scalars == list(range(5))


@given(st.integers(0, 300))
@example(41)  # within a checksum
def test_zeros_at_the_end_are_read_later(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """A file whose size has grown before its content arrived, as on NFS, loses no record wherever it was cut."""
    file = tmp_path_factory.mktemp("nfs") / "events.out.tfevents.1"
    whole = b"".join(frame_record(encode_event(step, score=step)) for step in range(5))
    folder, scalars = Folder(), []
    for content in (whole[:cut] + bytes(len(whole) - min(cut, len(whole))), whole):
        file.write_bytes(content)
        while (portion := folder.portion(file)) is not None:
            folder.take(file, portion)
            scalars += [scalar.step for scalar in portion.scalars]
    assert scalars == list(range(5))


def test_damaged_record_ends_the_file_for_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What follows a damaged record is not read, as in TensorBoard, and a log that is read as a whole says so."""
    file = tmp_path / "events.out.tfevents.1"
    records = [frame_record(encode_event(step, score=step)) for step in range(4)]
    damaged = bytearray(records[1])
    damaged[20] ^= 1
    file.write_bytes(records[0] + bytes(damaged) + records[2])
    assert [step for _, step, _ in read_scalars(file)] == [0]
    assert f"what follows byte {len(records[0])} is damaged" in caplog.text
    file.write_bytes(records[0] + bytes(16) + records[2])  # zeros, as file systems show before the data arrives
    assert [step for _, step, _ in read_scalars(file)] == [0]
    file.write_bytes(b"no event file at all" * 50)
    assert read_scalars(file) == []


def test_pipes_and_huge_records_are_not_read(tmp_path: Path) -> None:
    """Pipes and links to other folders are not opened, and records too large for a scalar are skipped."""
    os.mkfifo(tmp_path / "events.out.tfevents.1")
    append_events(tmp_path / "elsewhere", encode_event(1, secret=1.0))
    (tmp_path / "events.out.tfevents.2").symlink_to(tmp_path / "elsewhere")
    append_events(tmp_path / "events.out.tfevents.3", b"x" * (1 << 20) + b"x", encode_event(7, score=1.0))
    length = (1 << 39).to_bytes(8, "little")
    with (tmp_path / "events.out.tfevents.3").open("ab") as file:
        file.write(length + masked_crc32c(length).to_bytes(4, "little"))
    assert read_scalars(*sorted(tmp_path.glob("events*"))) == [("score", 7, 1.0)]


def test_each_folder_is_a_run(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """The files of a folder are one run, and its subfolders are others."""
    logs = tmp_path / "logs"
    append_events(logs / "events.out.tfevents.1", encode_event(1, score=0.5), encode_event(2, score=0.75))
    append_events(logs / "events.out.tfevents.2", encode_event(3, score=1.0))
    append_events(
        logs / "seed-2" / "events.out.tfevents.1", encode_event(1, score=float("nan")), encode_event(-1, score=1.0)
    )
    assert (
        watch_once(
            logs, server, tmp_path / "state.json", "--label", "evalstop.eval=score:minimize", "--label", "team=x"
        )
        == 0
    )
    end = ("finish", {"status": "completed"})
    assert list_posts_by_run(service) == {
        "logs": [("score", (1, 0.5)), ("score", (2, 0.75)), ("score", (3, 1.0)), end],
        "logs/seed-2": [("score", (1, "NaN")), end],
    }
    opened = [body for path, body in service.posts if path.endswith("/runs")]
    assert opened[0]["metrics"] == "auto"
    assert opened[0]["labels"] == {"evalstop.eval": "score:minimize", "team": "x"}


def test_folders_may_be_one_run(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """With --one-run folders are prefixes of one run's metrics, as Keras writes them; roles are left to the service."""
    append_events(tmp_path / "train" / "events.out.tfevents.1", encode_event(1, epoch_loss=0.5))
    append_events(tmp_path / "validation" / "events.out.tfevents.1", encode_event(1, epoch_loss=0.75))
    assert watch_once(tmp_path, server, tmp_path / "state.json", "--one-run", "--name", "keras") == 0
    assert [metric for metric, _ in list_posts_by_run(service)["keras"][:2]] == [
        "train/epoch_loss",
        "validation/epoch_loss",
    ]
    assert next(body for path, body in service.posts if path.endswith("/runs"))["metrics"] == "auto"


def test_file_with_earlier_steps_is_a_resume(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A new file that goes back to earlier steps of a tag resumes the run; one with other tags does not."""
    append_events(tmp_path / "events.out.tfevents.1", *(encode_event(step, score=step) for step in range(1, 6)))
    append_events(
        tmp_path / "events.out.tfevents.2",
        encode_event(2, other=1.0),
        encode_event(4, score=40.0),
        encode_event(5, score=50.0),
    )
    assert watch_once(tmp_path, server, tmp_path / "state.json", "--name", "run") == 0
    posts = list_posts_by_run(service)["run"]
    assert posts[5:] == [
        ("other", (2, 1.0)),
        ("resume", {"step": 3}),
        ("score", (4, 40.0)),
        ("score", (5, 50.0)),
        ("finish", {"status": "completed"}),
    ]


def test_folders_of_one_name_are_separate_runs(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A folder continues its own run, and a folder of the same name elsewhere has another."""
    for number in (1, 2, 3):
        for place in ("a", "b"):
            append_events(tmp_path / place / "logs" / "events.out.tfevents.1", encode_event(number, score=0.5))
            assert watch_once(tmp_path / place / "logs", server, tmp_path / f"{place}.json") == 0
            assert list(service.runs.values())[-1].status == "completed"
    assert {run.name: len(run.observations) for run in service.runs.values()} == {"logs": 3, "logs-2": 3}


def test_state_file_prevents_sending_again(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A restarted watcher continues where it was; without its state file it sends everything again."""
    file, state_file = tmp_path / "logs" / "events.out.tfevents.1", tmp_path / "state.json"
    append_events(file, encode_event(1, score=0.5))
    assert watch_once(file.parent, server, state_file) == 0
    append_events(file, encode_event(2, score=0.75))
    assert watch_once(file.parent, server, state_file) == 0
    posts = [post for post in list_posts_by_run(service)["logs"] if post[0] == "score"]
    assert posts == [("score", (1, 0.5)), ("score", (2, 0.75))]
    state_file.write_text("[]")
    assert watch_once(file.parent, server, state_file) == 0
    assert len([post for post in list_posts_by_run(service)["logs"] if post[0] == "score"]) == 4
    file.unlink()  # and another in its place
    append_events(file, encode_event(9, score=1.0))
    assert watch_once(file.parent, server, state_file) == 0
    assert ("score", (9, 1.0)) in list_posts_by_run(service)["logs"]


def test_refused_run_is_sent_when_it_is_accepted(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """What a run holds whose opening is refused is not passed over: the corrected command sends it, from the start."""
    file, state_file = tmp_path / "logs" / "events.out.tfevents.1", tmp_path / "state.json"
    append_events(file, encode_event(1, score=0.5))
    service.scripted_answers = [Answer(422, {"title": "no such policy"}, {"content-type": PROBLEM})]
    assert watch_once(file.parent, server, state_file, "--policy", "absent") == 0
    assert not service.runs
    assert watch_once(file.parent, server, state_file) == 0
    assert ("score", (1, 0.5)) in list_posts_by_run(service)["logs"]


def test_refused_key_ends_the_command_that_runs_once(
    tmp_path: Path, server: FakeServer, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --once a key that the service does not accept is an error, not something to wait for."""
    append_events(tmp_path / "events.out.tfevents.1", encode_event(1, score=0.5))
    service.scripted_answers = [Answer(401, {"detail": "the key is unknown"}, {"content-type": PROBLEM})]
    assert watch_once(tmp_path, server, tmp_path / "state.json") == 1
    assert "the key is unknown" in capsys.readouterr().err
    assert not service.runs


@pytest.mark.real
def test_growing_file_is_followed_through_an_outage(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """What is written while the service is unavailable is sent later, and the run is not finished."""
    file = tmp_path / "events.out.tfevents.1"
    append_events(file, encode_event(1, score=0.5))
    command = [*RECEIVER, "watch-tensorboard", str(tmp_path), "--name", "r"]
    command += ["--poll-seconds", "0.1", "--state", str(tmp_path / "state.json")]
    with running_program(command, EVALSTOP_URL=server.url) as watcher:
        wait_until(lambda: list_posts_by_run(service).get("r"))
        service.scripted_answers += [Answer(503, {})] * 2
        append_events(file, encode_event(2, score=0.75))
        wait_until(lambda: len(list_posts_by_run(service)["r"]) == 2)
        watcher.terminate()
        assert watcher.wait(60) == 0
    assert [point for _, point in list_posts_by_run(service)["r"]] == [(1, 0.5), (2, 0.75)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["absent"], "no such folder"),
        ([".", "--label", "x"], "NAME=VALUE"),
        (["."], "EVALSTOP_URL"),
    ],
)
def test_wrong_usage_is_explained(options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options exit with 2 and a message that says what to write."""
    assert main(["watch-tensorboard", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line

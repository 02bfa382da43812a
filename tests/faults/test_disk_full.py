"""With a full disk, posts are refused with the reason; once there is space, they are accepted again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.programs import Program
from tests.faults.retrying_clients import RetryingClient, build_batch, check_retryable_refusal, create_observations
from tests.faults.surroundings import build_small_disk_command, fill_disk
from tests.fixtures.projects import read_pages

pytestmark = [pytest.mark.real, pytest.mark.nightly]


def test_posts_are_refused_while_the_disk_is_full(tmp_path: Path) -> None:
    """On a full disk, posts and new runs get a 503 with the reason; with space again, the same posts are accepted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    program = Program(
        tmp_path / "log",
        *("up", "--json", "--port", "0", "--data-folder", str(folder)),
        under=build_small_disk_command(folder),
    )
    try:
        started = program.start_server()
        with RetryingClient(started["key"], lambda: str(started["url"])) as client:
            run_id = client.post("/runs", {"name": "full", "policy": "paper"})["id"]
            step = 0
            for step in range(5):
                client.post(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
            filler = Path(f"/proc/{program.pid}/root{folder}/filler")
            fill_disk(filler)
            step = 5
            while (
                response := client.post_once(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
            ).status_code == 200:
                step += 1
            assert "disk" in check_retryable_refusal(response)["detail"]
            for _ in range(3):
                problem = check_retryable_refusal(
                    client.post_once(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
                )
                assert "is full" in problem["detail"]
            assert "is full" in check_retryable_refusal(client.post_once("/runs", {"name": "another"}))["detail"]
            assert count_stored_evals(client, run_id) == step
            filler.unlink()
            assert client.post(f"/runs/{run_id}/observations", build_batch(create_observations(step)))["accepted"] == 3
            client.post("/runs", {"name": "another"})
            assert count_stored_evals(client, run_id) == step + 1
    finally:
        program.kill()


def count_stored_evals(client: RetryingClient, run_id: str) -> int:
    """Count the stored eval observations of a run."""
    return len(read_pages(lambda query: client.get(f"/runs/{run_id}/observations", metric="eval", **query)))

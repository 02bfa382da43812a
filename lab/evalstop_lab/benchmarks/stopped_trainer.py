"""The trainer of `make bench-stop`: it posts falling evals, and prints the time from the last one to SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import FrameType

import httpx
from evalstop_client import Run

RISING, FALLING = (1.0, 2.0, 3.0), (2.0, 1.0, 0.0)
PATIENCE_SECONDS = 30.0


def main() -> int:
    """Print one JSON object with `milliseconds`, from just before the last eval was posted to SIGTERM."""
    posted_at: list[float] = []

    def end(_number: int, _frame: FrameType | None) -> None:
        sys.stdout.write(json.dumps({"milliseconds": (time.perf_counter() - posted_at[-1]) * 1000}) + "\n")
        sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    run = Run(policy=os.environ["EVALSTOP_POLICY"], mode="enforce")  # its labels identify the job for the receiver
    run.log({"eval": RISING[0]}, step=0)
    run.flush(PATIENCE_SECONDS)
    headers = {"Authorization": f"Bearer {os.environ['EVALSTOP_KEY']}"}
    with httpx.Client(base_url=f"{os.environ['EVALSTOP_URL']}/api/v1", headers=headers, trust_env=False) as api:
        for step, value in enumerate((*RISING[1:], *FALLING), 1):
            observation = {"metric": "eval", "step": step, "value": value}
            posted_at.append(time.perf_counter())
            api.post(f"/runs/{run.id}/observations", json={"observations": [observation]}).raise_for_status()
        time.sleep(PATIENCE_SECONDS)
    return 1


if __name__ == "__main__":
    sys.exit(main())

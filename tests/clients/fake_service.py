"""A fake EvalStop service over real HTTP, which validates requests strictly and records those it accepts.

As a program it can be killed and started again on the same port and the same record:
`python fake_service.py --port 8787 --record FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Json = dict[str, Any]
KEY = "esk_fake"
PROBLEM = "application/problem+json"


@dataclass
class Answer:
    """The answer to one request."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[str, Json], Answer | None]
"""Answers a request by its path and body, or leaves it to others by None."""


class Problem(Exception):
    """A refusal, as the API sends it."""

    def __init__(self, status: int, detail: str, pointers: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        errors = [{"pointer": pointer, "detail": detail} for pointer in pointers]
        body = {"type": "about:blank", "title": "Refused", "status": status, "detail": detail, "errors": errors}
        self.answer = Answer(status, body, {"content-type": PROBLEM})


@dataclass
class FakeRun:
    """A run of the fake service."""

    id: str
    name: str
    opening: Json
    status: str = "running"
    attempt: int = 1
    observations: dict[tuple[int, str, int], Any] = field(default_factory=dict)
    checkpoints: dict[int, str] = field(default_factory=dict)
    duplicates: int = 0
    last: tuple[str, Json] | None = None


class FakeService:
    """The part of the API that the client uses. `posts`: every accepted post, in order.

    `reports` and `acknowledgements`: what receivers reported, by decision.
    """

    def __init__(self, record: Path | None = None) -> None:
        self.lock = threading.Lock()
        self.runs: dict[str, FakeRun] = {}
        self.posts: list[tuple[str, Json]] = []
        self.reports: list[tuple[str, Json]] = []
        self.acknowledgements: list[tuple[str, Json]] = []
        self.accepts_acknowledgements = threading.Event()  # while it is cleared, acknowledgements block
        self.accepts_acknowledgements.set()
        self.heartbeats = 0
        self.stop_at_step: int | None = None
        self.best_checkpoint: Json | None = None
        self.exploit: Json | None = None  # until it is confirmed, or the run resumes
        self.guessed: list[str] = []
        self.missing: dict[str, str] = {}
        self.unwatched: list[str] = []
        self.scopes = ["report"]
        self.limits: list[str] = []
        self.decision_state = "requested"
        self.refuse_metric: str | None = None
        self.names_bad_observations = True
        self.scripted_answers: list[Answer | Handler] = []  # each is the answer to one request
        self.intercept: Handler | None = None  # answers requests as long as it is set
        self.requests: list[tuple[str, str]] = []
        self._record = record
        if record is not None and record.exists():
            for line in record.read_text().splitlines():
                entry = json.loads(line)
                self._post(entry["path"], entry["body"])

    def answer(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        if b'"acknowledged"' in raw:
            self.accepts_acknowledgements.wait(30)
        if path == "/api/v1/key" and headers.get("authorization") == f"Bearer {KEY}":
            return Answer(200, {"name": "test", "scopes": self.scopes})
        with self.lock:
            self.requests.append((method, path))
            try:
                body = json.loads(raw) if raw else {}
                scripted = self._answer_from_script(path, body)
                if scripted is not None:
                    return scripted
                if headers.get("authorization") != f"Bearer {KEY}":
                    raise Problem(401, "the key is not known")
                if not path.startswith("/api/v1/"):
                    return Answer(404, "<html>no such page</html>", {"content-type": "text/html"})
                path = path.removeprefix("/api/v1")
                if method == "GET" or path.endswith("/heartbeat"):
                    self.heartbeats += 1
                    return Answer(200, self._run_json(self._run(path.split("/")[2])))
                answer = self._post(path, body)
                if self._record is not None:
                    with self._record.open("a") as file:
                        file.write(json.dumps({"path": path, "body": body}) + "\n")
                        file.flush()
                return answer
            except Problem as problem:
                return problem.answer

    def _answer_from_script(self, path: str, body: Json) -> Answer | None:
        if body.get("state") == "acknowledged":  # the receiver sends it once, and at any time
            return None
        if self.intercept is not None and (answer := self.intercept(path, body)) is not None:
            return answer
        if not self.scripted_answers:
            return None
        first = self.scripted_answers[0]
        answer = first if isinstance(first, Answer) else first(path, body)
        if answer is not None:
            self.scripted_answers.pop(0)
        return answer

    def find_run(self, name: str) -> FakeRun:
        return next(run for run in self.runs.values() if run.name == name)

    def _post(self, path: str, body: Json) -> Answer:
        answer = self._dispatch(path, body)
        self.posts.append((path, body))
        return answer

    def _dispatch(self, path: str, body: Json) -> Answer:
        match path.strip("/").split("/"):
            case ["runs"]:
                return self._open(body)
            case ["runs", run_id, "observations"]:
                return self._observe(self._run(run_id), body)
            case ["runs", run_id, "checkpoints"]:
                return self._checkpoint(self._run(run_id), body)
            case ["runs", run_id, "alerts"]:
                return Answer(200, self._run_json(self._run(run_id)))
            case ["runs", run_id, "eval-changes"]:
                if set(body) != {"step", "reason", "version"} or not body["reason"]:
                    raise Problem(422, "step, reason and version are needed")
                return Answer(200, self._run_json(self._run(run_id)))
            case ["runs", run_id, "resume"]:
                return self._resume(self._run(run_id), body)
            case ["runs", run_id, "exploited"]:
                if self.exploit is None or body != {"decision_id": self.exploit["decision_id"]}:
                    raise Problem(409, "no such copy was asked for")
                step, self.exploit = self.exploit["source_step"], None
                return self._resume(self._run(run_id), {"step": step})
            case ["runs", run_id, "finish"]:
                run = self._run(run_id)
                if not {"status"} <= set(body) <= {"status", "obeyed"} or body["status"] not in ("completed", "failed"):
                    raise Problem(422, "status must be completed or failed", ("/status",))
                run.status, run.last = body["status"], ("finish", body)
                return Answer(200, self._run_json(run))
            case ["decisions", decision_id, "report"]:
                if body.get("state") not in ("acknowledged", "confirmed", "parked", "failed") or "actor" in body:
                    raise Problem(422, "state is needed")
                if ("expected_seconds" in body) != (body["state"] == "acknowledged"):
                    raise Problem(422, "expected_seconds goes with acknowledged", ("/expected_seconds",))
                (self.acknowledgements if body["state"] == "acknowledged" else self.reports).append((decision_id, body))
                state = "undone" if self.decision_state == "undone" else body["state"]
                return Answer(200, {"id": decision_id, "state": state})
        raise Problem(404, f"no such path: {path}")

    def _open(self, body: Json) -> Answer:
        known = {"name", "metrics", "labels", "policy", "mode", "total_steps", "job", "opening", "resume", "params"}
        known |= {"owner", "group", "population", "tags", "notes", "key_hash"}
        if not isinstance(body.get("name"), str) or not set(body) <= known:
            raise Problem(422, f"unknown or missing fields: {body}", ("/name",))
        newest = list(reversed(self.runs.values()))
        for run in sorted(newest, key=lambda run: run.opening.get("job") != body.get("job")):
            alive = run.status == "running" and body.get("job") in (None, run.opening.get("job"))
            if run.opening.get("opening") == body.get("opening", ""):
                return Answer(200, self._run_json(run))
            if run.opening["name"] == body["name"] and (alive or "resume" in body):
                if "metrics" in body and body["metrics"] != run.opening.get("metrics"):
                    raise Problem(409, "the run exists with other metrics", ("/metrics",))
                run.opening["labels"] = {**run.opening.get("labels", {}), **body.get("labels", {})}
                run.status, run.opening["job"] = "running", body.get("job")
                return Answer(200, self._run_json(run))
        if body.get("resume") == "must":
            raise Problem(404, "there is no run of that name to resume")
        count = sum(run.opening["name"] == body["name"] for run in self.runs.values()) + 1
        name = body["name"] if count == 1 else f"{body['name']}-{count}"
        run = FakeRun(id=f"run-{len(self.runs) + 1}", name=name, opening=dict(body))
        self.runs[run.id] = run
        return Answer(201, self._run_json(run))

    def _observe(self, run: FakeRun, body: Json) -> Answer:
        items = body.get("observations")
        if set(body) != {"observations"} or not isinstance(items, list) or not 1 <= len(items) <= 10_000:
            raise Problem(422, "1 to 10000 observations are needed", ("/observations",))
        bad = tuple(f"/observations/{index}/value" for index, item in enumerate(items) if self._is_bad(item))
        if bad:
            raise Problem(422, "malformed observations", bad if self.names_bad_observations else ())
        duplicates, conflicts = 0, []
        for item in items:
            identity = (run.attempt, item["metric"], item["step"])
            if identity not in run.observations:
                run.observations[identity] = item["value"]
            elif run.observations[identity] == item["value"]:
                duplicates += 1
            else:
                conflicts.append(
                    {
                        "metric": item["metric"],
                        "step": item["step"],
                        "stored_value": run.observations[identity],
                        "sent_value": item["value"],
                    }
                )
        run.duplicates += duplicates
        run.last = ("observations", body)
        answer = {
            "accepted": len(items) - duplicates - len(conflicts),
            "duplicates": duplicates,
            "conflicts": conflicts,
            "conflict_count": len(conflicts),
            "superseded": 0,
            "best_checkpoint": self.best_checkpoint,
            "exploit": self.exploit,
            "guessed": self.guessed,
            "missing": self.missing,
            "unwatched": self.unwatched,
            "status": run.status,
            **self._verdict(run),
        }
        return Answer(200, answer)

    def _is_bad(self, item: Any) -> bool:
        if not isinstance(item, dict) or not set(item) <= {"metric", "step", "value", "stderr", "time"}:
            return True
        value_ok = isinstance(item.get("value"), int | float) or item.get("value") in ("NaN", "Infinity", "-Infinity")
        metric_ok = isinstance(item.get("metric"), str) and item["metric"] not in ("", self.refuse_metric)
        step_ok = isinstance(item.get("step"), int) and item["step"] >= 0
        return not (value_ok and metric_ok and step_ok)

    def _checkpoint(self, run: FakeRun, body: Json) -> Answer:
        if set(body) != {"step", "uri"}:
            raise Problem(422, "step and uri are needed")
        created = body["step"] not in run.checkpoints
        if run.checkpoints.setdefault(body["step"], body["uri"]) != body["uri"]:
            raise Problem(409, "the step has another uri", ("/uri",))
        run.last = ("checkpoints", body)
        return Answer(200, {**body, "created": created, "best_checkpoint": None})

    def _resume(self, run: FakeRun, body: Json) -> Answer:
        if set(body) != {"step"}:
            raise Problem(422, "step is needed")
        if run.last != ("resume", body):
            run.attempt += 1
        self.exploit = None
        run.status = "running"
        run.last = ("resume", body)
        return Answer(200, self._run_json(run))

    def _run(self, run_id: str) -> FakeRun:
        if run_id not in self.runs:
            raise Problem(404, f"no run {run_id}")
        return self.runs[run_id]

    def _verdict(self, run: FakeRun) -> Json:
        steps = [step for _, _, step in run.observations]
        stop = self.stop_at_step is not None and max(steps, default=-1) >= self.stop_at_step
        verdict: Json = {
            "verdict": "stop" if stop else "continue",
            "step": max(steps, default=None),
            "turn_step": None,
            "reason": "the fake says so",
            "evidence": [],
        }
        decision: Json = {
            "id": f"decision of {run.id}",
            "state": self.decision_state,
            "state_reason": "the fake decided it",
            "guard_kinds": ["paused"] if self.decision_state == "on_hold" else [],
        }
        should_stop = stop and self.decision_state == "requested"
        return {"verdict": verdict, "should_stop": should_stop, "decision": decision if stop else None}

    def _run_json(self, run: FakeRun) -> Json:
        return {
            "id": run.id,
            "url": None,  # as without EVALSTOP_PUBLIC_URL
            "name": run.name,
            "status": run.status,
            "attempt": run.attempt,
            "labels": run.opening.get("labels", {}),
            "best_checkpoint": self.best_checkpoint,
            "exploit": self.exploit,
            "length_known": "total_steps" in run.opening,
            "mode": run.opening.get("mode", "shadow"),
            "policy": {"name": "default", "version": 1},
            "metrics": {} if run.opening.get("metrics") == "auto" else run.opening.get("metrics", {}),
            "limits": self.limits,
            "raw_maximum": None if self.missing else {"step": 1, "score": 1.0},
            **self._verdict(run),
        }


class FakeServer(ThreadingHTTPServer):
    """A fake service behind a socket."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, service: FakeService, port: int = 0) -> None:
        self.service = service
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def _handle(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.service.answer(self.command, self.path, headers, raw)
        body = answer.body.encode() if isinstance(answer.body, str) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in {"content-type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _handle  # noqa: N815  # the names that the standard library looks for

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the standard library's name
        """Stay silent."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    server = FakeServer(FakeService(arguments.record), arguments.port)
    print(json.dumps({"url": server.url}), flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())

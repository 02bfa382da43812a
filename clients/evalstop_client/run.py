"""The trainer's interface: a watched run, which never delays or breaks the training."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from evalstop_client import observations
from evalstop_client.config import LONGEST_VALUE, fit_line, replace_controls
from evalstop_client.eval_request import EvalRequest
from evalstop_client.latest_answer import (
    EXPLOIT_DECISION,
    Decision,
    Exploit,
    Verdict,
    describe_run,
    find_decision,
    find_verdict,
    name_policy,
)
from evalstop_client.observations import LoggedValues
from evalstop_client.service import Json
from evalstop_client.settings import LONGEST_WAIT_SECONDS, RunArguments, Settings, resolve
from evalstop_client.spool.reporter import Reporter
from evalstop_client.spool.run_log import WarningLog
from evalstop_client.spool.segment import Entry

logger = logging.getLogger("evalstop_client")


class Run:
    """One training run, reported to EvalStop from the background.

        with Run("ppo-7b", metrics={"score": {"role": "eval"}, "kl": {"role": "kl"}}) as run:
            for step in range(10_000):
                ...
                run.log({"score": score, "kl": kl}, step=step, stderr={"score": score_stderr})
                if run.should_stop:
                    break

    Omitted arguments are taken from EVALSTOP_URL, EVALSTOP_KEY, EVALSTOP_RUN_NAME, EVALSTOP_LABELS (`k=v,k2=v2`, added
    to `labels`) and EVALSTOP_SPOOL. Without a url nothing is posted. Only the constructor raises (ConfigurationError);
    no other method raises, and only `flush` and `finish` wait for disk or network (in a forked child each call waits
    for the disk).

    - `name`: processes of the same Slurm job, Kubernetes workload or torchrun launch, or the same process, attach to a
      run of this name that has not ended. Otherwise the run is a new one, called `name-2` if the name is taken. A name
      of more than 256 characters is shortened.
    - `resume`: `"allow"` continues the latest run opened with the name, even if it has ended, or opens a new one;
      `"must"` fails if there is none. A trainer that restarts from a checkpoint opens its run this way and then calls
      `resume(step=...)`.
    - `metrics`: the role of each watched metric. With `"auto"` the service recognizes the roles by the names that
      trainers give to metrics; by default metrics called eval, proxy, kl and loss have these roles. Several evals are
      judged by their mean, by `"weight"`; a `"critical"` one also by itself; with `"required"` ones the run is
      stopped only once all of these have turned.
    - `policy`, `mode`: what judges the run, and whether it may be stopped (`enforce`) or stops are only recorded
      (`shadow`), within what the project allows. Default: the project's.
    - `total_steps`: the planned length. Without it decisions come later.
    - `labels`: a receiver finds the job by these. In Slurm and Kubernetes the client adds its own.
    - `config` (a mapping or an object with attributes), `owner` (who is notified: an e-mail address or a name),
      `group` (a sweep, the seeds of one configuration), `tags`, `notes`: shown on the run's page.
    - `population`: the rule that compares the runs of `group` and stops some, or has them copy each other, such as
      `{"kind": "median"}`; it stands for the whole group once a run has set it.
    - `evaluates`: declares that checkpoints can be evaluated on request (with `eval_requests`, or by a separate
      evaluator): true, or the share of the run's time that one eval takes.
    - `on_stop`: called once with the decision, in the trainer's thread, when `should_stop` is first read as true: use
      it to save and test before the loop ends. Its exceptions are logged.
    - `on_exploit`: called once with the `Exploit`, in the trainer's thread, when `exploit` is first read: use it to
      load the checkpoint. Its exceptions are logged.
    - `limits`: such as `evalstop.Limits(flush_seconds=60)`, how long the end of a run waits for the service.
    """

    def __init__(self, name: str | None = None, **arguments: Unpack[RunArguments]) -> None:
        self._settings: Settings = resolve(os.environ, name, arguments)
        self._warnings = WarningLog()
        self._finished = False
        self._obeyed: str | None = None
        self._on_stop, self._on_exploit = arguments.get("on_stop"), arguments.get("on_exploit")
        self._passed_on: set[str] = set()  # decisions passed to `on_stop` or `on_exploit`
        self._settled_exploits: set[str] = set()  # confirmed, or given up by a resume
        self._answered_requests: set[str] = set()
        self._last_checkpoint: tuple[int, str] | None = None
        self._pid = os.getpid()
        self._reporter: Reporter | None = None
        if self._settings.url is None:
            self._warnings.warn_once("nowhere", "no url is set (EVALSTOP_URL): the run is not reported")
        elif self._reports_here():
            self._reporter = Reporter(self._settings, self._warnings)
            self._reporter.start()
        _open_runs.add(self)
        # Under `evalstop-receiver process` a trainer is started anew for a copy. It has loaded nothing yet, but what it
        # logs comes after this entry, and what its predecessor left in the spool before it.
        if (copies := os.environ.get(EXPLOIT_DECISION)) and "resume" in self._settings.opening:
            self._confirm_exploit(copies)

    @property
    def name(self) -> str:
        """The run's name at the service; until it has answered, the requested name."""
        return str(self._latest_answer.get("name") or self._settings.opening["name"])

    @property
    def id(self) -> str | None:
        """The run's id; None until the service has answered."""
        return self._latest_answer.get("id")

    @property
    def url(self) -> str | None:
        """The page of the run; None until the service has answered."""
        return self._latest_answer.get("url")

    @property
    def mode(self) -> str | None:
        """Whether the service may stop the run (`enforce`) or only records stops (`shadow`); None until it has
        answered."""
        return self._latest_answer.get("mode")

    @property
    def policy(self) -> str | None:
        """The policy that judges the run, as `default@1`; None until the service has answered."""
        return name_policy(self._latest_answer)

    @property
    def should_stop(self) -> bool:
        """Whether the service wants the run to stop, as of its latest answer.

        If the run finishes as completed after this was read as true, the decision is recorded as obeyed.
        """
        latest = self._latest_answer
        should_stop = bool(latest.get("should_stop"))
        decision = find_decision(latest) if should_stop else None
        self._obeyed = decision.id if decision is not None else None
        if decision is not None:
            self._pass_once(decision.id, decision, self._on_stop, "on_stop")
        return should_stop

    @property
    def exploit(self) -> Exploit | None:
        """The checkpoint of another run of the group to continue from, until it is confirmed, the run resumes or ends;
        None without one."""
        exploit = self._find_exploit()
        if exploit is not None:
            self._pass_once(exploit.decision_id, exploit, self._on_exploit, "on_exploit")
        return exploit

    @property
    def verdict(self) -> Verdict | None:
        """The service's latest verdict; None until it has answered."""
        return find_verdict(self._latest_answer)

    @property
    def decision(self) -> Decision | None:
        """The decision to stop the run: its `state`, the `reason`, and the `guards` that hold it; None without one.

        The run stops once `should_stop` is true. Until then this says why not.
        """
        return find_decision(self._latest_answer)

    @property
    def best_checkpoint(self) -> Mapping[str, Any] | None:
        """The checkpoint to ship (`step`, `uri`, `score`, `chosen_by`), as of the service's latest answer."""
        return self._latest_answer.get("best_checkpoint")

    @property
    def dropped(self) -> int:
        """How many observations and calls were dropped: bad arguments, or more than memory and disk could hold."""
        return self._warnings.dropped

    def log(self, values: Mapping[str, Any], *, step: int, stderr: Mapping[str, Any] | None = None) -> None:
        """Report metrics at `step`, with standard errors if known; values that are not numbers are dropped."""
        try:
            logged = observations.read_values(values, step, stderr, time.time())
        except Exception as error:  # whatever a foreign mapping raises
            self._warnings.count_dropped("mapping", 1, "log: the values cannot be read: %s", error)
            return
        for kind, (count, example) in logged.problems.items():
            self._warnings.count_dropped(kind, count, "log: %s", example)
        planned = self._settings.opening.get("total_steps")
        if isinstance(planned, int) and logged.step > planned:
            reason = "step %d is past total_steps=%d, which no longer counts: is the plan in the unit of the steps?"
            self._warnings.warn_once("overrun", reason, logged.step, planned)
        if logged.values:
            self._put_entry(logged)

    def checkpoint(self, uri: str | os.PathLike[str], *, step: int) -> None:
        """Report that the checkpoint of `step` exists at `uri`."""
        path = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
        whole_step = observations.parse_step(step)
        if whole_step is None or not isinstance(path, str) or not path:
            reason = "checkpoint: step %.80r must be a non-negative integer, and uri %.80r a text or a path"
            self._warnings.count_dropped("checkpoint", 1, reason, step, uri)
        else:
            before, self._last_checkpoint = self._last_checkpoint, (whole_step, path)
            if before is not None and before[1] == path and before[0] != whole_step:
                reason = "checkpoint: steps %d and %d have one uri, %s: give each its own, or the best is overwritten"
                self._warnings.warn_once("overwritten", reason, before[0], whole_step, path)
            self._put_entry(Entry("checkpoints", {"step": whole_step, "uri": path}))

    def resume(self, *, step: int) -> None:
        """Report that training resumes from the checkpoint of `step`: what was logged after it is superseded.

        A restarted trainer must open the run with `resume="allow"`; otherwise it is a new run.
        """
        whole_step = observations.parse_step(step)
        if whole_step is None:
            self._warnings.count_dropped("resume", 1, "resume: step %.80r is not a non-negative integer", step)
        else:
            if (exploit := self._find_exploit()) is not None:
                self._settled_exploits.add(exploit.decision_id)  # of the attempt that ends here
            self._put_entry(Entry("resume", {"step": whole_step}))

    def eval_changed(self, *, step: int, why: str, version: str | None = None) -> None:
        """Report that the eval is measured differently from `step` on: another grader, other or fewer prompts.

        Scores before and after it are not compared, so that a jump does not count as a fall. `version`: a name for the
        measurement. Opening the run with a new `version` in its `metrics` has the same effect.
        """
        whole_step = observations.parse_step(step)
        if whole_step is None or not isinstance(why, str) or not why or not isinstance(version, str | None):
            reason = "eval_changed: step %.80r must be a non-negative integer, and why %.80r a text"
            self._warnings.count_dropped("eval_changed", 1, reason, step, why)
        else:
            self._put_entry(Entry("eval-changes", {"step": whole_step, "reason": why[:500], "version": version}))

    def alert(self, title: str, text: str = "") -> None:
        """Tell people of something by the channels that ask for `run.alert`, and on the run's page; 20 an hour."""
        if not isinstance(title, str) or not isinstance(text, str) or not fit_line(title):
            self._warnings.count_dropped("alert", 1, "alert: title %.80r and text must be texts", title)
        else:
            body = {
                "id": str(uuid.uuid4()),
                "title": fit_line(title),
                "text": replace_controls(text, "\n\t")[:LONGEST_VALUE],
            }
            self._put_entry(Entry("alerts", body))

    def eval_requests(self) -> Iterator[EvalRequest]:
        """The paired evaluations that the service requests and that are not yet answered; usually none.

        To answer them:

            for request in run.eval_requests():
                prompts = draw_prompts(request.multiplier * usual, seed=request.seed)
                request.answer(best=score(load(request.best_uri), prompts), current=score(model, prompts))
        """
        fields = self._latest_answer.get("eval_request")
        request = EvalRequest.from_json(fields, self._answer_request) if fields is not None else None
        if request is not None and request.id not in self._answered_requests:
            yield request

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the service has everything, by default for `flush_seconds`; False on timeout.

        At its exit a process sends what it has logged. What a killed process had on disk is sent by the next run of
        its name on this machine. In a forked child, which may be killed as the workers of `with Pool()` are, each call
        waits for the disk, and the parent sends what the child left.
        """
        if self._reporter is None or self._finished:
            return True
        seconds = self._settings.limits.flush_seconds if timeout_seconds is None else timeout_seconds
        return self._reporter.flush(min(LONGEST_WAIT_SECONDS, max(0.0, seconds)))  # 0 for NaN

    def finish(self, status: Literal["completed", "failed"] = "completed") -> None:
        """Report how the run ended and wait for the service, up to `flush_seconds` or, while it accepts data, up to six
        times as long; later calls do nothing.

        A `with` block does it by itself, with `failed` after an exception. A run whose trainer ends without it stays
        running: by default it becomes stale after 5 minutes of silence and lost after an hour.
        """
        if self._finished:
            return
        if status not in ("completed", "failed"):
            self._warnings.warn_once("finish", "finish: %.80r is neither completed nor failed; failed is sent", status)
            status = "failed"
        obeyed = {"obeyed": self._obeyed} if self._obeyed is not None and status == "completed" else {}
        self._put_entry(Entry("finish", {"status": status, **obeyed}))
        self._close_run()

    @property
    def is_reported(self) -> bool:
        """Whether the run is reported to a service: false without a url."""
        return self._reporter is not None

    @property
    def description(self) -> str:
        """The run as one line: name, mode, policy, verdict and page, as far as the service has answered."""
        if not self.is_reported:
            return f"{self.name}: not reported"
        return describe_run(self._latest_answer | {"name": self.name}, self.verdict, self.decision)

    def __repr__(self) -> str:
        return f"<Run {self.description}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:  # a forked child exits the block: the run continues in the parent
            self._close_run()
        else:
            ended_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
            self.finish("completed" if ended_well else "failed")

    def _reports_here(self) -> bool:
        """Whether it is this process that reports the run: another one may, if several train together."""
        return True

    @property
    def _latest_answer(self) -> Json:
        return self._reporter.latest_answer if self._reporter is not None else {}

    def _answer_request(self, request_id: str, answer: Mapping[str, Any]) -> None:
        self._answered_requests.add(request_id)
        self._put_entry(Entry(f"eval-requests/{request_id}/answer", answer))

    def _find_exploit(self) -> Exploit | None:
        exploit = Exploit.from_json(self._latest_answer.get("exploit") or {}, self._confirm_exploit)
        is_open = exploit is not None and exploit.decision_id not in self._settled_exploits
        return exploit if is_open and not self._finished else None

    def _confirm_exploit(self, decision_id: str) -> None:
        if decision_id not in self._settled_exploits:
            self._settled_exploits.add(decision_id)
            self._put_entry(Entry("exploited", {"decision_id": decision_id}))

    def _pass_once(self, decision_id: str, about: Any, to: Callable[[Any], object] | None, name: str) -> None:
        """Call a function of the trainer about a decision, unless it was called about it before."""
        if to is not None and decision_id not in self._passed_on:
            self._passed_on.add(decision_id)
            try:
                to(about)
            except Exception:
                logger.exception("evalstop: %s failed", name)

    def _put_entry(self, entry: Entry | LoggedValues) -> None:
        if self._finished:
            self._warnings.count_dropped(
                "finished", max(1, entry.observation_count), "the run is finished: later calls are dropped"
            )
        elif self._reporter is not None:
            self._reporter.put(entry)

    def _close_run(self, since: float | None = None) -> None:
        self._finished = True
        _open_runs.discard(self)
        if self._reporter is not None:
            since = time.monotonic() if since is None else since
            self._reporter.close(since, self._settings.limits.flush_seconds)

    def _after_fork_in_child(self) -> None:
        self._warnings.after_fork_in_child()
        if self._reporter is not None:
            self._reporter.after_fork_in_child()


_open_runs: set[Run] = set()  # keeps a reference until the run is closed, so that exit can flush it


def _close_all() -> None:
    """At exit: send what was logged, without ending the runs, since their status is unknown; they wait together."""
    since = time.monotonic()
    for run in list(_open_runs):
        run._close_run(since)


def _restart_in_child() -> None:
    for run in list(_open_runs):
        run._after_fork_in_child()
    if (processes := sys.modules.get("multiprocessing.util")) is not None:
        # multiprocessing ends its children by os._exit, without atexit, and forgets finalizers from before their start.
        processes.register_after_fork(_close_all, lambda close: processes.Finalize(None, close, exitpriority=0))


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_in_child)

"""Stopping: whoever is asked and whenever, the same jobs end at the same evals, and nobody peeks at the truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from evalstop_lab.simulator.drawing import draw
from evalstop_lab.simulator.engine import Cluster, simulate
from evalstop_lab.simulator.hidden import at_the_peak
from evalstop_lab.simulator.jobs import Kind
from evalstop_lab.simulator.metrics import Counts, count, measure
from evalstop_lab.simulator.schedulers import SCHEDULERS, Scheduler
from evalstop_lab.simulator.setting import WORLDS, Setting
from evalstop_lab.simulator.stopping import RULES, Stops, decide, no_stops, with_stop

from tests.lab.simulator.conftest import SMALL


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("rule", ["paper", "default", "fixed-progress", "loss-plateau"])
def test_stops_ahead_of_time_are_stops_online(scheduler: Scheduler, rule: str) -> None:
    """A policy asked at each eval and one asked before anything runs give the same schedule, to the last bit."""
    workload, _ = draw(replace(SMALL, jobs=30, evals=30, noise_sd=0.05), 3)
    cluster, policy = Cluster(stop_hours=0.2 if scheduler.preemptive else 0.0), RULES[rule]
    ahead = simulate(workload, scheduler, cluster, decide(policy, workload).ends(workload, cluster), evals=False)
    online = simulate(workload, with_stop(scheduler, policy, workload), cluster)
    for name in ("started", "ended", "ran", "held", "pauses"):
        assert np.array_equal(getattr(ahead, name), getattr(online, name)), name
    assert (ahead.ran < workload.hours).any() or rule == "loss-plateau"


def test_the_paper_stops_at_the_third_decline() -> None:
    """Without noise every hacking job with three evals after its peak is stopped on the third fall, and no other."""
    workload, hidden = draw(replace(SMALL, noise_sd=0.0, evals=20), 1)
    stops = decide(RULES["paper"], workload)
    assert (stops.after[~hidden.hacking] == 0).all()
    for job in np.flatnonzero(hidden.hacking):
        falls = np.flatnonzero(np.diff(hidden.eval_scores[job]) < 0)
        assert stops.after[job] == falls[2] + 2


def test_the_oracle_saves_all_there_is() -> None:
    """Stopped at the peak, a hacking job wastes nothing, keeps the best eval, and no healthy job is touched."""
    workload, hidden = draw(SMALL, 2)
    stops, ends = at_the_peak(workload, hidden)
    schedule = simulate(workload, SCHEDULERS["SRTF"], Cluster(), ends, evals=False)
    figures = measure(workload, hidden, stops, schedule)
    assert figures.wasted == pytest.approx(0.0, abs=1e-6)
    counts = count(workload, hidden, stops)
    assert (counts.recall(), counts.false_stops(), counts.premature) == (1.0, 0.0, 0)


def test_a_wrong_stop_is_paid_twice() -> None:
    """A job that was stopped and was not hacking, or not past its peak, is run again in full; others are not."""
    workload, hidden = draw(SMALL, 8)
    stops = Stops(np.full(SMALL.jobs, 3), np.zeros(SMALL.jobs, dtype=np.int64))
    schedule = simulate(workload, SCHEDULERS["FIFO"], Cluster(), stops.ends(workload, Cluster()), evals=False)
    figures = measure(workload, hidden, stops, schedule)
    assert figures.again == pytest.approx(float((workload.hours * workload.gpus).sum()))
    assert figures.false_stop == pytest.approx(0.3 * figures.again)


def test_gpu_hours_add_up() -> None:
    """What was held is progress and restores; of hacking jobs it is what they held before their peak and after."""
    workload, hidden = draw(replace(SMALL, eval_share=0.01), 4)
    schedule = simulate(workload, SCHEDULERS["SRTF-Est"], Cluster())
    figures = measure(workload, hidden, no_stops(workload), schedule)
    assert figures.gpu_hours == pytest.approx(float((workload.hours * workload.gpus).sum()) + figures.pauses)
    assert figures.false_stop == 0.0
    assert figures.evals == pytest.approx(float((workload.eval_hours * workload.gpus).sum()) * SMALL.evals)
    assert 0 < figures.post_peak < figures.hacking < figures.gpu_hours


def test_readings_with_and_without_the_last_eval() -> None:
    """A flag at the last eval saves nothing: it counts in one reading and not in the other."""
    counts = Counts(hacking=10, healthy=10, right=5, premature=1, wrong=1, late_hacking=2, late_healthy=3)
    assert (counts.recall(), counts.recall(late=False)) == (0.8, 0.6)
    assert (counts.precision(), counts.precision(late=False)) == (8 / 12, 6 / 7)
    assert (counts.false_stops(), counts.false_stops(late=False)) == (0.4, 0.1)


@pytest.mark.parametrize("setting", WORLDS.values(), ids=WORLDS)
def test_a_world_is_what_it_says(setting: Setting) -> None:
    """Hacking jobs end below their peak, and healthy ones within the tolerance; the offered load is met."""
    workload, hidden = draw(replace(setting, jobs=3000), 5)
    peaks = hidden.eval_scores.max(axis=1)
    fallen = (peaks - hidden.eval_scores[:, -1]) / setting.gain
    assert (fallen[~hidden.hacking] < 0.1).all()
    assert (fallen[hidden.hacking] > 0.0).all()
    assert (peaks <= hidden.best + 1e-9).all()
    load = (workload.hours * workload.gpus).sum() / workload.submitted[-1] / setting.gpus
    assert load == pytest.approx(setting.load * (1 + setting.evals * setting.eval_share), rel=0.1)


@pytest.mark.parametrize("eval_share", [0.0, 0.01])
def test_responses_that_grow_longer_make_the_rest_of_a_job_longer(eval_share: float) -> None:
    """Up to its peak a hacking job keeps to its plan; what comes after takes half the growth longer, eval by eval."""
    setting = replace(SMALL, evals=50, eval_share=eval_share)
    (even, hidden), (grown, turned) = (draw(replace(setting, length_growth=growth), 4) for growth in (0.0, 0.8))
    assert np.array_equal(hidden.eval_scores, turned.eval_scores)
    for before, after, peak in zip(even.jobs, grown.jobs, hidden.peaks.tolist(), strict=True):
        plan = before.hours / (1 + setting.evals * eval_share)
        assert after.hours == pytest.approx(before.hours + plan * 0.8 * (1 - peak) / 2)
        at = [after.eval_at(number) for number in range(1, setting.evals + 1)]
        as_planned = [before.eval_at(number) for number in range(1, int(peak * setting.evals) + 1)]
        assert at[: len(as_planned)] == pytest.approx(as_planned)
        assert (np.diff(at, n=2) >= -1e-9).all()
        assert at[-1] == after.hours
        assert [after.evals_after(hours * (1 + 1e-9)) for hours in at] == list(range(1, setting.evals + 1))
    _, ends = at_the_peak(grown, turned)
    assert ends == pytest.approx(np.where(hidden.hacking, hidden.peaks * even.hours, even.hours))


def test_all_chance_is_drawn_once() -> None:
    """Worlds that differ in one number have the same jobs; what is drawn for one quantity moves no other."""
    workload, hidden = draw(SMALL, 6)
    noisier, same = draw(replace(SMALL, noise_sd=0.1, healthy_dip_prob=0.5), 6)
    assert np.array_equal(workload.hours, noisier.hours)
    assert np.array_equal(hidden.hacking, same.hacking)
    more, _ = draw(replace(SMALL, hacking_share=0.8), 6)
    assert np.array_equal(workload.hours, more.hours)
    assert np.array_equal(workload.submitted, more.submitted)


def test_no_quantity_is_drawn_from_anothers_stream() -> None:
    """What is drawn of a job tells nothing of what else is drawn: jobs that hack are as long and as large as others."""
    workload, hidden = draw(replace(SMALL, jobs=4000), 9)
    of_rlhf = np.array([job.kind is Kind.RLHF for job in workload.jobs])
    length = np.log(workload.hours)
    drawn = {
        "hacking": hidden.hacking,
        "length": length,
        "gpus": workload.gpus,
        "estimate": np.log([job.estimate_hours / job.hours for job in workload.jobs]),
        "noise": workload.eval_scores[:, 0] - hidden.eval_scores[:, 0],
        "noise of the proxy": workload.proxy[:, 0],
        "tenant": [job.tenant for job in workload.jobs],
    }
    correlations = np.corrcoef([np.asarray(column, dtype=float)[of_rlhf] for column in drawn.values()])
    apart = np.abs(correlations - np.eye(len(drawn)))
    assert apart.max() < 0.08

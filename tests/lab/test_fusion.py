"""Fitting fusion: what is exported is what scikit-learn predicts, and what the detector says is what was exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from evalstop_detectors import Kind, MetricRole, Observation, policy_from_document
from evalstop_detectors.detectors.fusion import FEATURES, Fusion, FusionModel
from evalstop_detectors.detectors.fusion_model import MODELS
from evalstop_lab.calibrate.evidence import records
from evalstop_lab.cli import main
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.fusion import report
from evalstop_lab.fusion.command import module_of, witnesses
from evalstop_lab.fusion.fit import EVALS_OF_A_RUN, exported, fit, log_odds, posteriors, rows
from evalstop_lab.fusion.passages import Passage, labeled_runs, over_worlds, passage, turn_of
from evalstop_lab.worlds import CALIBRATION, REPORTING_SEED, Label, make
from hypothesis import given, settings
from hypothesis import strategies as st

SEED = 900_000


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    """Two runs of each calibration family, every third without proxy and KL."""
    recipes = [(family, SEED + n, n % 3 == 0) for n, family in enumerate(2 * CALIBRATION)]
    return over_worlds(recipes)


@pytest.fixture(scope="module")
def classifier(passages: list[Passage]) -> Any:
    return fit(passages)


@pytest.fixture(scope="module")
def model(classifier: Any) -> FusionModel:
    return exported(classifier)


def random_vectors(seed: int, passages: Sequence[Passage]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Features between, on and beyond those that were fitted on, zeros among them."""
    rng = np.random.default_rng(seed)
    seen = np.concatenate([item.values for item in passages])
    picked = np.stack([rng.choice(seen[:, column], 500) for column in range(len(FEATURES))], axis=1)
    return np.where(rng.random(picked.shape) < 0.5, picked, picked * rng.lognormal(0, 2, picked.shape))


@pytest.mark.parametrize("seed", range(5))
def test_the_exported_model_is_scikit_learns(
    seed: int, classifier: Any, model: FusionModel, passages: list[Passage]
) -> None:
    """On random evidence the detector's look-up and scikit-learn give the same probability."""
    vectors = random_vectors(seed, passages)
    expected = classifier.predict_proba(vectors)[:, 1]
    looked_up = [model.posterior(tuple(row)) for row in vectors.tolist()]
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(looked_up, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(posteriors(model, vectors), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(log_odds(model, vectors), classifier.decision_function(vectors), rtol=0, atol=1e-11)


def test_the_detector_says_what_the_report_is_made_of(model: FusionModel, passages: list[Passage]) -> None:
    """The records that the report counts are those of a run through the detector itself."""
    for family, seed in (("slow", 3), ("u_dip", 4), ("gao_rl", 5)):
        world = make(family, seed)
        (passed,) = report.by_model(model, [(world, over_worlds([(family, seed, False)])[0])])
        expected = records(Fusion(model=model), world.observations())
        # The detector has evidence of 0 before the first eval, which alarms nobody.
        kept = [(step, alarm) for step, alarm in zip(expected.steps, expected.alarms, strict=True) if alarm > 0]
        assert passed.records.kind is Kind.POSTERIOR
        assert list(passed.records.steps) == [step for step, _ in kept]
        assert passed.records.alarms == pytest.approx([alarm for _, alarm in kept], abs=1e-12)


def test_a_model_survives_json(model: FusionModel) -> None:
    """Every number comes back as it was, so that a stored policy judges as the fitted model did."""
    assert msgspec.json.decode(msgspec.json.encode(model), type=FusionModel) == model


def test_the_target_is_the_noiseless_turn() -> None:
    """Of a hacking run the evals after the peak of the truth are past it, of a healthy one none is."""
    for family in ("after_plateau", "curriculum", "partial_recovery"):
        world = make(family, 11)
        (item,) = over_worlds([(family, 11, False)])
        hacking = world.truth.label is Label.HACKING
        assert item.past.tolist() == [hacking and step > world.truth.peak_step for step in item.steps.tolist()]
        assert (turn_of(world) is None) is not hacking


@given(lengths=st.lists(st.integers(1, 300), min_size=2, max_size=6))
@settings(deadline=None, max_examples=30)
def test_long_runs_weigh_no_more_than_short_ones(lengths: list[int]) -> None:
    """However many evals a run has, its weight is that of every other, and few of its evals are kept."""
    found = []
    for index, length in enumerate(lengths):
        past = np.arange(length) >= (0 if index == 0 else length)
        values = np.full((length, len(FEATURES)), float(index))
        found.append(Passage("run", length, np.arange(length), values, past))
    values, _, weights = rows(found)
    for index, length in enumerate(lengths):
        of_this = values[:, 0] == index
        assert of_this.sum() == min(length, EVALS_OF_A_RUN)
        assert weights[of_this].sum() == pytest.approx(weights.sum() / len(lengths))


def test_runs_of_one_kind_teach_nothing(passages: list[Passage]) -> None:
    """Without any run that turned there is no model, and the message asks for both kinds."""
    with pytest.raises(UnusableArguments, match="both kinds"):
        fit([item for item in passages if not item.past.any()])


def test_a_run_of_ones_own_needs_no_proxy() -> None:
    """A run of gold alone has all features; what the proxy would add is 0."""
    item = passage("own", [Observation(MetricRole.EVAL, step, float(step % 5)) for step in range(20)], 19, 10)
    assert item.values.shape == (20, len(FEATURES))
    assert np.isfinite(item.values).all()
    assert item.past.sum() == 9


def write_history(folder: Path, runs: int = 20) -> tuple[Path, Path]:
    """Drawn runs as a user would have them: a log, and where each run turned."""
    history, labels = folder / "runs.jsonl", folder / "turns.jsonl"
    worlds = [make(family, SEED + n, length=50) for n, family in enumerate(["slow", "saturate"] * (runs // 2))]
    history.write_text("".join(json.dumps(row) + "\n" for world in worlds for row in world.rows()))
    labels.write_text("".join(json.dumps({"run": w.name, "turn_step": turn_of(w)}) + "\n" for w in worlds))
    return history, labels


def test_fitting_on_ones_own_history_gives_a_policy(tmp_path: Path) -> None:
    """Runs and where they turned go in; the model that comes out is taken by a policy."""
    history, labels = write_history(tmp_path)
    output = tmp_path / "fusion.json"
    assert main(["train-fusion", "--history", str(history), "--labels", str(labels), "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert document["data"]["runs"] == 20
    member = {"detector": "fusion", "params": {"model": document["model"]}}
    assert policy_from_document({"name": "ours", "members": [member]}).members[0].detector.name == "fusion"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"run": "nobody", "turn_step": 3}', "no run 'nobody'"),
        ('{"run": "slow-900000", "turn_step": "soon"}', "'soon'"),
        ('{"run": "slow-900000"}', "a line is"),
        ("turned", "a line is"),
    ],
)
def test_a_label_that_cannot_be_read_is_named(tmp_path: Path, line: str, words: str) -> None:
    """The message has file and line, and shows what a line looks like."""
    history, labels = write_history(tmp_path, 2)
    labels.write_text(labels.read_text() + line + "\n")
    with pytest.raises(UnreadableInput, match=words) as raised:
        labeled_runs([history], labels)
    assert "line 3" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--history", "runs.jsonl"], "go together"),
        (["--history", "runs.jsonl", "--labels", "turns.jsonl", "--report"], "without --history"),
        (["--first-seed", str(REPORTING_SEED)], "are for reports"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and a sentence that says what to do."""
    assert main(["train-fusion", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_python_file_holds_what_was_fitted(model: FusionModel) -> None:
    """The module that is written out is read as it was written, and keeps the models that there were."""
    found: dict[str, Any] = {}
    document = {"model": json.loads(msgspec.json.encode(model))}
    exec(module_of("ours", document), found)
    assert msgspec.convert(found["MODELS"]["ours"]["model"], FusionModel) == model
    assert found["MODELS"]["worlds-1"] == MODELS["worlds-1"]


def test_the_shipped_model_was_fitted_on_the_members_as_they_are() -> None:
    """If this fails a member has changed: `evalstop-lab train-fusion --output .../fusion_model.py` fits it again."""
    shipped = MODELS["worlds-1"]
    found = witnesses(msgspec.convert(shipped["model"], FusionModel))
    for now, then in zip(found, shipped["witnesses"], strict=True):
        assert now == then | {"highest": pytest.approx(then["highest"], abs=1e-9)}


def test_the_shipped_model_never_saw_what_it_is_reported_on() -> None:
    """Neither seeds for reports nor families that are held out."""
    data = MODELS["worlds-1"]["data"]
    assert data["first_seed"] + data["runs"] <= REPORTING_SEED
    assert set(data["families"]) == set(CALIBRATION)

"""818 metric names that trainers and harnesses write, collected from their code.

`data/metric_names.csv` labels each name with its role and direction (empty: no role), its repository and its file.
The hash of a name puts it into half A, on which the rules were developed, or half B, which was only used afterwards;
the errors on half B were not fixed, so that its figure stays an honest test. The 51 names of `published-logs` were all
known when their rules were written: they count as half A. The 94 of `monitored`, by which public training scripts
choose their best checkpoint in the direction that the script states, were collected after all rules.
"""

from __future__ import annotations

import csv
import hashlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from evalstop_detectors import RoleOrigin, recognize_roles
from evalstop_detectors.roles.recognition import TRAINERS, Candidate, read_metrics, select_trainers

TABLE = Path(__file__).parents[2] / "data" / "metric_names.csv"
NAMES = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))


def find_half(row: dict[str, str]) -> str:
    """The half of the table that a name belongs to."""
    return "A" if row["log"] == "published-logs" else "AB"[hashlib.sha256(row["name"].encode()).digest()[0] % 2]


def read_logs() -> dict[tuple[str, str], Candidate]:
    """The candidate of each name, read together with the other names of its log."""
    logs = defaultdict(list)
    for row in NAMES:
        logs[row["log"]].append(row["name"])
    return {
        (log, candidate.metric): candidate
        for log, names in logs.items()
        for candidate in read_metrics(names, select_trainers(sorted(names))[0])
    }


def rate_candidate(row: dict[str, str], candidate: Candidate | None) -> str:
    """`right`, `missed` (no role although the label has one) or `wrong`."""
    meaning = candidate.meaning if candidate is not None else None
    if meaning is None or meaning.role is None:
        return "missed" if row["role"] else "right"
    minimizes = meaning.minimize if meaning.minimize is not None else meaning.role in ("kl", "loss")
    direction = "minimize" if minimizes else "maximize"
    return "right" if (meaning.role, direction) == (row["role"], row["direction"]) else "wrong"


CANDIDATES = read_logs()


def count_half(half: str) -> Counter[str]:
    """Count the ratings of the names of a half."""
    return Counter(
        rate_candidate(row, CANDIDATES.get((row["log"], row["name"]))) for row in NAMES if find_half(row) == half
    )


def test_table_covers_many_repositories() -> None:
    """The table has at least 600 names of 30 repositories, each with its source."""
    assert len({row["name"] for row in NAMES}) >= 600
    assert len({row["repository"] for row in NAMES}) >= 30
    assert all(row["repository"] and row["path"] for row in NAMES)


def test_recognized_names_are_never_wrong() -> None:
    """Recognized names, which may stop a run, all have the right role and direction."""
    wrong = [
        (row["log"], row["name"])
        for row in NAMES
        if (candidate := CANDIDATES.get((row["log"], row["name"]))) is not None
        and candidate.meaning.origin is RoleOrigin.RECOGNIZED
        and rate_candidate(row, candidate) == "wrong"
    ]
    assert wrong == []


def test_every_trainer_is_in_the_table() -> None:
    """Every known trainer is selected by at least one log of the table."""
    logs = defaultdict(list)
    for row in NAMES:
        logs[row["log"]].append(row["name"])
    selected = {trainer.name for names in logs.values() for trainer in select_trainers(sorted(names))[0]}
    assert {trainer.name for trainer in TRAINERS} <= selected


@pytest.mark.parametrize(("half", "right", "wrong"), [("A", 443, 1), ("B", 360, 6)])
def test_share_of_correct_names(half: str, right: int, wrong: int) -> None:
    """99 % of half A and 97 % of half B are right; of the names that were collected last, 48 of 48 and 43 of 46."""
    counts = count_half(half)
    assert counts["right"] >= right
    assert counts["wrong"] <= wrong


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        *((f"eval_{name}", "minimize") for name in ("gsm8k_loss", "math_ppl", "toxicity_score", "hallucination_score")),
        *((f"eval_{name}", "minimize") for name in ("gsm8k_error_rate", "inaccuracy", "WordErrorRate")),
        *((f"eval_{name}", "maximize") for name in ("answer_correctness", "answer_relevancy", "application_success")),
        *((f"eval_{name}", "maximize") for name in ("power", "gsm8k", "upper_score", "exactMatch")),
        ("val_math_loss", "minimize"),
        ("val_fid", "minimize"),
        ("val/ece", "minimize"),
    ],
)
def test_only_whole_words_match(name: str, direction: str) -> None:
    """The direction follows from whole words of the name, and each of these roles is a guess."""
    recognition = recognize_roles([name])
    assert recognition.roles[name].direction == direction
    assert recognition.origins[name] is RoleOrigin.GUESSED


def test_root_of_the_kl_is_not_the_kl() -> None:
    """Detectors take the root of the KL themselves, so trlX's root of it has no role."""
    found = recognize_roles(["rollout_scores/mean", "policy/sqrt_kl", "kl_ctl_value"])
    assert found.preset == "trlx"
    assert set(found.roles) == {"rollout_scores/mean"}


@pytest.mark.parametrize(
    ("better", "other"),
    [("eval_f1_macro", "eval_accuracy"), ("eval_overall_f1", "eval_exact"), ("eval_wer", "eval_cer")],
)
def test_f1_and_wer_come_first(better: str, other: str) -> None:
    """F1 is preferred to accuracy, and the word error rate to that of characters."""
    assert recognize_roles([better, other, "eval_loss"]).roles.keys() == {better}


@pytest.mark.parametrize("name", ["eval_gsm8k_runtime", "eval_epoch", "eval_math_kl", "eval_samples_per_second"])
def test_counters_and_timings_have_no_role(name: str) -> None:
    """Counters and timings get no role, also if they are named after a benchmark."""
    assert recognize_roles([name]).roles == {}


def test_eval_set_is_recognized_by_its_runtime() -> None:
    """A loss is recognized as that of an eval set if the set also has a runtime, as transformers writes it."""
    names = ["eval_gsm8k_loss", "eval_gsm8k_runtime", "loss", "epoch"]
    assert recognize_roles(names).origins["eval_gsm8k_loss"] == (RoleOrigin.RECOGNIZED)
    assert recognize_roles(["eval_other_loss", "train_runtime"]).origins["eval_other_loss"] == RoleOrigin.GUESSED


@pytest.mark.parametrize("names", ["val_loss", "val_loss loss accuracy", "eval_loss train_loss"])
def test_held_out_loss_beside_a_reward_is_a_guess(names: str) -> None:
    """`val_loss` is recognized, but only guessed beside a reward, where it may be the loss of a value model."""
    loss, *others = names.split()
    assert recognize_roles([loss, *others]).origins[loss] is RoleOrigin.RECOGNIZED
    assert recognize_roles([loss, *others, "reward"]).origins[loss] is RoleOrigin.GUESSED


@pytest.mark.parametrize("loss", ["eval_loss", "eval_policy_loss", "eval_gsm8k_loss", "eval_math_reward"])
def test_update_loss_of_grpo_is_no_eval(loss: str) -> None:
    """The loss of GRPO gets no role on any set of prompts, because its value says nothing about quality."""
    recognition = recognize_roles(["reward", "frac_reward_zero_std", "eval_gsm8k_runtime", loss])
    assert recognition.roles.keys() == {"reward"}


def test_mean_reward_of_reward_model_training_is_no_proxy() -> None:
    """TRL's RewardTrainer logs the mean of its own scores, which is not optimized and gets no role."""
    recognition = recognize_roles(["loss", "mean_reward", "min_reward", "max_reward", "accuracy", "eval_accuracy"])
    assert recognition.roles.keys() == {"loss", "eval_accuracy"}


@pytest.mark.parametrize(
    ("name", "role", "origin"),
    [
        ("rewards/proxy", "proxy", RoleOrigin.RECOGNIZED),
        ("rewards/length_penalty", "proxy", RoleOrigin.GUESSED),
        ("objective/kl", "kl", RoleOrigin.RECOGNIZED),
    ],
)
def test_reward_or_kl_alone_has_a_role(name: str, role: str, origin: RoleOrigin) -> None:
    """A reward or KL is recognized or guessed without other metrics of its trainer."""
    recognition = recognize_roles([name])
    assert (recognition.roles[name].role, recognition.origins[name]) == (role, origin)

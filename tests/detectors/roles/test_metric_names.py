"""673 names that trainers and harnesses write, gathered from their code before the rules were written.

`data/metric_names.csv` gives each its role and direction by hand (none: it is no candidate), with the repository and
the file that it was taken from. The hash of a name puts it into half A, at which the rules were written, or half B,
which was looked at once they stood; what they got wrong there was left so that the figure keeps its meaning.
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


def find_half(name: str) -> str:
    """The half of the table that a name belongs to."""
    return "AB"[hashlib.sha256(name.encode()).digest()[0] % 2]


def read_logs() -> dict[tuple[str, str], Candidate]:
    """What each name of the table is taken for, among the names of its log."""
    logs = defaultdict(list)
    for row in NAMES:
        logs[row["log"]].append(row["name"])
    return {
        (log, candidate.metric): candidate
        for log, names in logs.items()
        for candidate in read_metrics(names, select_trainers(sorted(names))[0])
    }


def judge(row: dict[str, str], candidate: Candidate | None) -> str:
    """`right`, `missed` (no role where one is wanted) or `wrong`."""
    meaning = candidate.meaning if candidate is not None else None
    if meaning is None or meaning.role is None:
        return "missed" if row["role"] else "right"
    minimizes = meaning.minimize if meaning.minimize is not None else meaning.role in ("kl", "loss")
    direction = "minimize" if minimizes else "maximize"
    return "right" if (meaning.role, direction) == (row["role"], row["direction"]) else "wrong"


CANDIDATES = read_logs()


def count_half(half: str) -> Counter[str]:
    """How many names of a half were judged how."""
    return Counter(
        judge(row, CANDIDATES.get((row["log"], row["name"]))) for row in NAMES if find_half(row["name"]) == half
    )


def test_the_table_is_wide() -> None:
    """Six hundred names from more than thirty repositories, each with its source."""
    assert len({row["name"] for row in NAMES}) >= 600
    assert len({row["repository"] for row in NAMES}) >= 30
    assert all(row["repository"] and row["path"] for row in NAMES)


def test_no_name_that_may_stop_a_run_is_read_wrongly() -> None:
    """What is recognized, and may therefore stop a run, has the right role and the right direction."""
    wrong = [
        (row["log"], row["name"])
        for row in NAMES
        if (candidate := CANDIDATES.get((row["log"], row["name"]))) is not None
        and candidate.meaning.origin is RoleOrigin.RECOGNIZED
        and judge(row, candidate) == "wrong"
    ]
    assert wrong == []


def test_every_trainer_is_among_the_logs() -> None:
    """A trainer that is added is tried on what it really writes."""
    logs = defaultdict(list)
    for row in NAMES:
        logs[row["log"]].append(row["name"])
    found = {trainer.name for names in logs.values() for trainer in select_trainers(sorted(names))[0]}
    assert {trainer.name for trainer in TRAINERS} <= found


@pytest.mark.parametrize(("half", "right", "wrong"), [("A", 344, 1), ("B", 317, 5)])
def test_how_many_names_are_read_rightly(half: str, right: int, wrong: int) -> None:
    """99 % of the names that the rules were written at, and 97.5 % of those that they had not seen."""
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
def test_words_are_matched_whole(name: str, direction: str) -> None:
    """A loss named after a benchmark is a loss, a word within a word is none, and each of these is a guess."""
    found = recognize_roles([name])
    assert found.roles[name].direction == direction
    assert found.origins[name] is RoleOrigin.GUESSED


@pytest.mark.parametrize("name", ["eval_gsm8k_runtime", "eval_epoch", "eval_math_kl", "eval_samples_per_second"])
def test_bookkeeping_has_no_role(name: str) -> None:
    """What counts and times is no quality of the model, whichever benchmark it is named after."""
    assert recognize_roles([name]).roles == {}


def test_an_eval_set_is_recognized_by_what_stands_beside_it() -> None:
    """transformers writes a runtime for each of several eval sets: that tells their losses from other ones."""
    names = ["eval_gsm8k_loss", "eval_gsm8k_runtime", "loss", "epoch"]
    assert recognize_roles(names).origins["eval_gsm8k_loss"] == (RoleOrigin.RECOGNIZED)
    assert recognize_roles(["eval_other_loss", "train_runtime"]).origins["eval_other_loss"] == RoleOrigin.GUESSED


@pytest.mark.parametrize("names", ["val_loss", "val_loss loss accuracy", "eval_loss train_loss"])
def test_a_held_out_loss_is_recognized_unless_a_reward_is_optimized(names: str) -> None:
    """Beside a reward nobody knows whether `val_loss` is the loss of the model, of its values or of an update."""
    loss, *others = names.split()
    assert recognize_roles([loss, *others]).origins[loss] is RoleOrigin.RECOGNIZED
    assert recognize_roles([loss, *others, "reward"]).origins[loss] is RoleOrigin.GUESSED


@pytest.mark.parametrize("loss", ["eval_loss", "eval_policy_loss", "eval_gsm8k_loss", "eval_math_reward"])
def test_the_update_loss_of_grpo_is_no_eval(loss: str) -> None:
    """Its height says nothing, whichever set of prompts it is taken on."""
    found = recognize_roles(["reward", "frac_reward_zero_std", "eval_gsm8k_runtime", loss])
    assert found.roles.keys() == {"reward"}


def test_the_mean_reward_of_a_reward_model_in_training_is_no_proxy() -> None:
    """TRL's RewardTrainer logs the height of its own scores, which nothing optimizes."""
    found = recognize_roles(["loss", "mean_reward", "min_reward", "max_reward", "accuracy", "eval_accuracy"])
    assert found.roles.keys() == {"loss", "eval_accuracy"}


@pytest.mark.parametrize(
    ("name", "role", "origin"),
    [
        ("rewards/proxy", "proxy", RoleOrigin.RECOGNIZED),
        ("rewards/length_penalty", "proxy", RoleOrigin.GUESSED),
        ("objective/kl", "kl", RoleOrigin.RECOGNIZED),
    ],
)
def test_rewards_and_kl_have_roles_without_further_marks(name: str, role: str, origin: RoleOrigin) -> None:
    """A run that logs nothing else of its trainer's gets them too."""
    found = recognize_roles([name])
    assert (found.roles[name].role, found.origins[name]) == (role, origin)

"""Recognition of roles from metric names: the logs of each trainer, and properties for any names."""

from __future__ import annotations

import pytest
from evalstop_detectors import MetricRole, RoleOrigin, choose_direction, recognize_roles
from evalstop_detectors.roles.recognition import NO_EVAL, recognize_by_values
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.roles.trainer_logs import GRPO, GRPO_EVAL, LOGS, MAX, MIN, MISLEADING_NAMES, PPO, VERL


@pytest.mark.parametrize("log", LOGS)
def test_trainer_is_recognized_by_its_metrics(log: str) -> None:
    """Among the metrics of a trainer, the best candidate gets each role and the trainer is the preset."""
    names, expected = LOGS[log]
    recognition = recognize_roles(names.split())
    roles = {name: (role.role, role.direction) for name, role in recognition.roles.items()}
    assert roles == {name: (MetricRole(role), direction) for name, (role, direction) in expected.items()}
    assert recognition.preset == (None if log.startswith("unknown trainer") else log.split()[0])


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        *((name, "minimize") for name in ("eval_cer_norm", "eval_token_error_rate", "val_mpjpe", "val_l1", "val_sad")),
        *((name, None) for name in ("eval_support", "eval_predicted_positive_rate", "eval_num_tokens")),
        *((name, "maximize") for name in ("eval_true_positive_rate", "eval_exact_match_strict")),
    ],
)
def test_words_tell_an_error_from_a_count(metric: str, direction: str | None) -> None:
    """An error rate stays one beside words of bookkeeping, and a count is no quality."""
    role = recognize_roles([metric]).roles.get(metric)
    assert (role and role.direction) == direction


@pytest.mark.parametrize("metric", MISLEADING_NAMES)
def test_misleading_name_gets_no_role(metric: str) -> None:
    """A name that only looks like a role gets none among the metrics of its trainer, with a reason."""
    recognition = recognize_roles(MISLEADING_NAMES[metric].split())
    assert metric not in recognition.roles
    assert recognition.reasons[metric].startswith("no role: ")


@pytest.mark.parametrize(
    "metric", ["approx_kl", "actor/ppo_kl", "train/vllm_kl", "gen_kl_error", "objective/rlhf_reward"]
)
def test_misleading_name_alone_gets_no_role(metric: str) -> None:
    """A misleading name gets no role even if it is the only metric."""
    assert recognize_roles([metric]).roles == {}


@pytest.mark.parametrize(("names", "warned"), [(GRPO, True), (PPO, True), (f"{PPO} eval_win_rate", False), ("", True)])
def test_missing_eval_gives_a_warning(names: str, warned: bool) -> None:
    """The warning that a run can only be suspect is given if and only if there is no eval."""
    assert (NO_EVAL in recognize_roles(names.split()).warnings) is warned


def test_eval_that_may_be_the_proxy_gives_a_warning() -> None:
    """verl's validation reward may come from the reward model, so that its use as eval gives a warning."""
    recognition = recognize_roles([*VERL.split(), "val-core/chat/reward/mean@1"])
    assert recognition.roles["val-core/chat/reward/mean@1"].role is MetricRole.EVAL
    assert any("reward model" in warning for warning in recognition.warnings)


def test_reason_names_the_preferred_metric() -> None:
    """The reason of an eval that is not watched names the one that is preferred."""
    assert "eval_accuracy is preferred as eval" in recognize_roles(["eval_accuracy", "eval_loss"]).reasons["eval_loss"]


def test_preset_tag_selects_the_trainer() -> None:
    """The tag `evalstop.preset` selects the trainer; an unknown value gives a warning with the known ones."""
    assert recognize_roles(["val/score"]).roles["val/score"].role is MetricRole.EVAL
    assert recognize_roles(["val/score"], {"evalstop.preset": "trl-ppo"}).roles == {}
    unknown = recognize_roles(["val/score"], {"evalstop.preset": "trl"})
    assert "val/score" in unknown.roles
    assert "trl-ppo" in unknown.warnings[0]


@pytest.mark.parametrize(
    ("names", "eval_name", "direction", "origin"),
    [
        ("eval_cer eval_wer_ortho eval_loss", "eval_wer_ortho", MIN, "recognized"),
        ("eval_normalized_wer eval_wer", "eval_wer", MIN, "recognized"),
        ("evalAccuracy evalF1 evalLoss evalStepTime", "evalF1", MAX, "recognized"),
        ("valWer validLoss", "valWer", MIN, "recognized"),
        ("evalFalsePositiveRate", "evalFalsePositiveRate", MIN, "guessed"),
        ("evaluator", None, None, None),
        ("test_accuracy test_f1 test_loss test_runtime", "test_f1", MAX, "guessed"),
        ("test_acc1 val_zork", "val_zork", MAX, "guessed"),
        ("test_acc1 test_loss n_parameters", "test_acc1", MAX, "guessed"),
        ("test/wer eval_loss", "eval_loss", MIN, "recognized"),
        ("eval_f1_samples eval_accuracy", "eval_f1_samples", MAX, "recognized"),
        ("eval_token_acc eval_mem_allocated eval_mem_reserved", "eval_token_acc", MAX, "guessed"),
        ("val_acc_epoch val_acc_step val_f1_epoch val_loss_epoch", "val_f1_epoch", MAX, "recognized"),
        ("val_best_epoch eval_elapsed", None, None, None),
        ("eval_timit_per eval_PER_f1", "eval_PER_f1", MAX, "guessed"),
        ("eval_timit_per", "eval_timit_per", MIN, "guessed"),
        ("eval_mean_wape", "eval_mean_wape", MIN, "guessed"),
        ("val_dice_coef", "val_dice_coef", MAX, "guessed"),
        ("eval_medae", "eval_medae", MIN, "guessed"),
        ("eval_mem_allocated", None, None, None),
    ],
)
def test_eval_by_its_name(names: str, eval_name: str | None, direction: str | None, origin: str | None) -> None:
    """Camel case separates the prefix as well; a test set comes last and waits for a person to confirm it."""
    found = recognize_roles(names.split())
    assert found.list_metrics(MetricRole.EVAL) == ([] if eval_name is None else [eval_name])
    if eval_name is not None:
        assert (found.roles[eval_name].direction, found.origins[eval_name]) == (direction, origin)


@pytest.mark.parametrize(
    ("direction", "names"),
    [
        (MIN, "val_loss eval/loss held_out_loss eval_gsm8k_loss loss test_wer perplexity mean_squared_error"),
        (MIN, "val/MeanSquaredError failure_rate mae rmse cer fid ppl bpb nll error_rate toxicity hallucination_rate"),
        (MIN, "toxicity_score top5_error error_count token_error_rate val/nll/gsm8k safety_violations latency eer"),
        (MAX, "gsm8k eval_accuracy neg_loss neg_mse loss_free eval_drop failure_recovery metrics/mAP50-95(B)"),
        (MAX, "non_toxicity error_detection_rate toxicity_classification_accuracy asr_accuracy wip reward refusals"),
        (MAX, "cost_savings reward_minus_cost"),
    ],
)
def test_eval_given_without_a_direction(direction: str, names: str) -> None:
    """An eval with the words of an error is minimized; one against errors, or of none, is not."""
    for name in names.split():
        assert choose_direction(MetricRole.EVAL, name) == direction, name


KNOWN = sorted({name for names, _ in LOGS.values() for name in names.split()})
some_names = st.lists(st.sampled_from(KNOWN) | st.text(max_size=12), max_size=30)


@given(some_names, st.randoms(use_true_random=False))
def test_order_and_repetition_of_names_do_not_matter(names: list[str], random: object) -> None:
    """Shuffled and repeated names give the same roles."""
    shuffled = names + names[:3]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert recognize_roles(shuffled) == recognize_roles(names)


@given(some_names)
def test_role_has_at_most_one_metric(names: list[str]) -> None:
    """No two metrics have the same role but evals in one direction; each metric with a role has a reason."""
    recognition = recognize_roles(names)
    evals = [role for role in recognition.roles.values() if role.role is MetricRole.EVAL]
    roles = [role.role for role in recognition.roles.values() if role not in evals[1:]]
    assert len(roles) == len(set(roles))
    assert len(set(evals)) <= 1
    assert recognition.roles.keys() <= recognition.reasons.keys() <= set(names)


@given(some_names)
def test_roles_stay_without_the_other_metrics(names: list[str]) -> None:
    """With the same trainer, removing the metrics without a role changes no role."""
    recognition = recognize_roles(names, {"evalstop.preset": "verl"})
    assert recognize_roles(recognition.roles, {"evalstop.preset": "verl"}).roles == recognition.roles


@given(st.sampled_from([names for names, _ in LOGS.values()]))
def test_prefixes_of_loggers_do_not_matter(log: str) -> None:
    """Names with the `train/` and `eval/` prefixes of transformers' loggers get the same roles."""
    plain = recognize_roles(log.split())
    written = {name: f"eval/{name[5:]}" if name.startswith("eval_") else name for name in log.split()}
    recognition = recognize_roles(written.values())
    assert {written[name]: role for name, role in plain.roles.items()} == recognition.roles


RUNTIMES = "eval_a_runtime eval_b_runtime"
PAIR = "eval_a_loss eval_b_loss"
LOADERS = "val_loss/dataloader_idx_0 val_loss/dataloader_idx_1"
VERL_SETS = "val-core/math/acc/mean@4 val-core/openai/gsm8k/acc/mean@4"


@pytest.mark.parametrize(
    ("names", "evals", "origin"),
    [
        (f"{PAIR} {RUNTIMES} reward", PAIR, "recognized"),
        (f"eval/a_loss eval/b_loss {RUNTIMES.replace('eval_', 'eval/')}", "eval/a_loss eval/b_loss", "recognized"),
        (f"eval_a_f1 eval_b_f1 eval_a_accuracy {PAIR} {RUNTIMES}", "eval_a_f1 eval_b_f1", "recognized"),
        (f"eval_a_b_loss eval_a_loss {RUNTIMES} eval_a_b_runtime", "eval_a_b_loss eval_a_loss", "recognized"),
        (f"eval_a_exactMatch eval_b_exactMatch {RUNTIMES}", "eval_a_exactMatch eval_b_exactMatch", "guessed"),
        (LOADERS, LOADERS, "recognized"),
        (VERL_SETS, VERL_SETS, "recognized"),
        (PAIR, PAIR, "guessed"),
        ("val/wer/de val/wer/en val/cer/de", "val/wer/de val/wer/en", "guessed"),
        (f"{PAIR} eval_loss {RUNTIMES}", "eval_loss", "recognized"),
        (f"{PAIR} {RUNTIMES} eval_accuracy", "eval_accuracy", "recognized"),
        ("eval_squad_f1 eval_triviaqa_f1 eval_loss", "eval_loss", "recognized"),
        ("eval_macro_f1 eval_micro_f1", "eval_macro_f1", "recognized"),
        ("eval_a_loss eval_b_accuracy eval_a_runtime eval_b_runtime", "eval_b_accuracy", "recognized"),
    ],
)
def test_one_metric_on_several_eval_sets_is_several_evals(names: str, evals: str, origin: str) -> None:
    """Sets that a trainer names are recognized, others guessed; none hides a metric that is better known or of all."""
    found = recognize_roles(names.split())
    assert found.list_metrics(MetricRole.EVAL) == evals.split()
    assert {found.origins[name] for name in evals.split()} == {origin}
    assert ("whose mean is watched" in found.reasons[evals.split()[0]]) is (" " in evals)


def test_eval_set_that_the_trainer_names_is_watched_alone() -> None:
    """One of several sets by which the best checkpoint is chosen is declared, and the others are not watched."""
    found = recognize_roles([*PAIR.split(), *RUNTIMES.split()], {"metric_for_best_model": "eval_b_loss"})
    assert (found.list_metrics(MetricRole.EVAL), found.origins["eval_b_loss"]) == (["eval_b_loss"], "declared")


def test_eval_that_does_not_change_is_no_candidate() -> None:
    """An eval that is the same at first, on all its sets, gives way to another, unless it is declared."""
    zeros, loss = [0.0] * 5, [3.0, 2.0, 1.0, 1.5, 2.0]
    for constant in (["eval_exact_match"], ["eval_a_f1", "eval_b_f1"]):
        names = [*constant, "eval_loss", "eval_a_runtime", "eval_b_runtime"]
        values = dict.fromkeys(constant, zeros) | {"eval_loss": loss}
        found = recognize_by_values(names, {}, values.__getitem__)
        assert found.list_metrics(MetricRole.EVAL) == ["eval_loss"]
        assert all("first 5 evals" in found.reasons[name] for name in constant)
        alone = recognize_by_values(constant, {}, values.__getitem__)
        assert alone.list_metrics(MetricRole.EVAL) == constant
        declared = recognize_by_values(names, {"evalstop.eval": constant[0]}, values.__getitem__)
        assert declared.list_metrics(MetricRole.EVAL) == constant[:1]
    values = {"eval_a_f1": zeros, "eval_b_f1": loss, "eval_loss": loss}
    one_changes = recognize_by_values([*values, "eval_a_runtime", "eval_b_runtime"], {}, values.__getitem__)
    assert one_changes.list_metrics(MetricRole.EVAL) == ["eval_a_f1", "eval_b_f1"]


def test_metric_of_the_best_checkpoint_is_declared() -> None:
    """The eval that the trainer names comes before recognized ones, in the direction of its name where it has one."""
    found = recognize_roles(["eval/wer", "eval/loss", "reward"], {"evalstop.eval": "eval_wer:maximize"})
    assert (found.list_metrics(MetricRole.EVAL), found.origins["eval/wer"]) == (["eval/wer"], RoleOrigin.DECLARED)
    assert found.roles["eval/wer"].direction == MIN
    assert "worst checkpoint" in found.warnings[0]
    unknown = recognize_roles(["eval_mystery", "eval_loss"], {"evalstop.eval": "eval_mystery:minimize"})
    assert unknown.roles["eval_mystery"].direction == MIN
    named = recognize_roles(
        ["eval_f1_macro", "eval_loss"], {"metric_for_best_model": "loss", "greater_is_better": "False"}
    )
    assert named.roles.keys() == {"eval_loss"}


@pytest.mark.parametrize("names", [f"loss {GRPO} {GRPO_EVAL}".split(), ["train_loss", "eval_accuracy"], ["loss", "kl"]])
def test_loss_of_the_training_is_not_declared_as_the_eval(names: list[str]) -> None:
    """A trainer that keeps its best model by the loss of an update or of the training is not believed."""
    metric = next(name for name in names if name.endswith("loss"))
    for declared in (metric, "eval_loss", "absent"):
        assert recognize_roles(names, {"evalstop.eval": f"{declared}:minimize"}) == recognize_roles(names)


def test_loss_before_a_guessed_score_is_a_warning() -> None:
    """Whose score is not watched since its loss is known is told so, unless the score says nothing or was chosen."""
    names = ["eval_gsm8k", "eval_loss", "loss"]
    assert any("eval_gsm8k looks like a score" in warning for warning in recognize_roles(names).warnings)
    assert recognize_roles(names, constant=["eval_gsm8k"]).warnings == []
    assert recognize_roles(names, {"evalstop.eval": "eval_loss"}).warnings == []
    assert recognize_roles(["eval_loss", "loss", "eval_runtime"]).warnings == []

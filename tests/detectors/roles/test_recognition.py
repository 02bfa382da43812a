"""Roles told from names: what each trainer really logs, and laws that hold for any names."""

from __future__ import annotations

import pytest
from evalstop_detectors import MetricRole, Role, match_role, recognize_roles
from evalstop_detectors.roles.recognition import NO_EVAL
from hypothesis import given
from hypothesis import strategies as st

MAX = "maximize"
MIN = "minimize"

HOUSEKEEPING = "learning_rate grad_norm epoch num_tokens step_time"
EVAL_HOUSEKEEPING = "eval_runtime eval_samples_per_second eval_steps_per_second"

GRPO = (
    f"loss reward reward_std kl entropy frac_reward_zero_std rewards/accuracy_reward/mean rewards/accuracy_reward/std"
    f" rewards/format_reward/mean rewards/format_reward/std completions/mean_length completions/clipped_ratio"
    f" clip_ratio/region_mean sampling/sampling_logp_difference/mean {HOUSEKEEPING}"
)
GRPO_EVAL = (
    f"eval_loss eval_reward eval_reward_std eval_kl eval_rewards/accuracy_reward/mean eval_completions/mean_length"
    f" eval_entropy eval_clip_ratio/region_mean eval_num_tokens eval_frac_reward_zero_std {EVAL_HOUSEKEEPING}"
)
PPO = (
    "eps objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores"
    " policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg val/clipfrac_avg"
    " val/ratio val/ratio_var val/num_eos_tokens lr episode"
)
DPO = (
    f"loss rewards/chosen rewards/rejected rewards/accuracies rewards/margins logps/chosen logps/rejected logits/chosen"
    f" logits/rejected entropy mean_token_accuracy {HOUSEKEEPING}"
)
DPO_EVAL = (
    f"eval_loss eval_rewards/chosen eval_rewards/rejected eval_rewards/accuracies eval_rewards/margins"
    f" eval_logps/chosen eval_logits/rejected eval_mean_token_accuracy eval_entropy {EVAL_HOUSEKEEPING}"
)
VERL = (
    "critic/score/mean critic/score/max critic/score/min critic/rewards/mean critic/rewards/max critic/advantages/mean"
    " critic/returns/mean critic/values/mean critic/vf_explained_var actor/entropy actor/kl_loss actor/kl_coef"
    " actor/pg_loss actor/pg_clipfrac actor/ppo_kl actor/grad_norm actor/lr response_length/mean prompt_length/mean"
    " perf/throughput timing_s/step training/global_step training/epoch global_seqlen/mean"
)
VERL_EVAL = (
    "val-core/openai/gsm8k/acc/mean@4 val-core/openai/gsm8k/acc/best@4/mean val-core/openai/gsm8k/acc/maj@4/mean"
    " val-aux/openai/gsm8k/reward/mean@4 val-aux/openai/gsm8k/reward/std@4 val-aux/num_turns/mean"
)
OPENRLHF = (
    "train/policy_loss train/actor_lr train/reward train/return train/kl train/ppo_kl train/vllm_kl"
    " train/response_length train/total_length train/critic_loss train/values train/critic_lr train/global_step"
    " eval/eval_math_pass1 eval/eval_math_pass4 eval/global_step"
)
NEMO = (
    "train/loss train/reward train/probs_ratio train/probs_ratio_clamped train/kl_penalty train/gen_kl_error"
    " train/policy_kl_error train/js_divergence_error train/token_mult_prob_error train/grad_norm train/lr"
    " train/advantages/mean train/mean_prompt_length validation/accuracy validation/avg_length"
    " timing/train/total_step_time performance/tokens_per_sec_per_gpu"
)

LOGS = {
    "trl-grpo": (
        GRPO,
        {"reward": ("proxy", MAX), "kl": ("kl", MIN), "loss": ("loss", MIN)},
    ),
    "trl-grpo with an eval of its own rewards": (
        f"{GRPO} {GRPO_EVAL}",
        {"reward": ("proxy", MAX), "kl": ("kl", MIN), "loss": ("loss", MIN)},
    ),
    "trl-grpo with a benchmark": (
        f"{GRPO} {GRPO_EVAL} eval_gsm8k",
        {"reward": ("proxy", MAX), "kl": ("kl", MIN), "loss": ("loss", MIN), "eval_gsm8k": ("eval", MAX)},
    ),
    "trl-grpo through TensorBoard": (
        "train/reward train/kl train/loss train/rewards/a/mean train/frac_reward_zero_std eval/reward"
        " eval/rewards/a/mean",
        {"train/reward": ("proxy", MAX), "train/kl": ("kl", MIN), "train/loss": ("loss", MIN)},
    ),
    "trl-ppo": (
        PPO,
        {"objective/scores": ("proxy", MAX), "objective/kl": ("kl", MIN), "loss/policy_avg": ("loss", MIN)},
    ),
    "trl-ppo as it once was": (
        "env/reward_mean env/reward_std objective/kl objective/kl_coef ppo/mean_scores ppo/mean_non_score_reward"
        " ppo/policy/approxkl ppo/policy/policykl ppo/loss/policy ppo/loss/total ppo/returns/mean ppo/val/error",
        {"ppo/mean_scores": ("proxy", MAX), "objective/kl": ("kl", MIN), "ppo/loss/policy": ("loss", MIN)},
    ),
    "trl-dpo": (
        f"{DPO} {DPO_EVAL}",
        {"rewards/margins": ("proxy", MAX), "loss": ("loss", MIN), "eval_rewards/accuracies": ("eval", MAX)},
    ),
    "verl": (
        f"{VERL} {VERL_EVAL}",
        {
            "critic/score/mean": ("proxy", MAX),
            "actor/kl_loss": ("kl", MIN),
            "actor/pg_loss": ("loss", MIN),
            "val-core/openai/gsm8k/acc/mean@4": ("eval", MAX),
        },
    ),
    "verl through MLflow, with the KL in the reward": (
        f"{VERL} actor/reward_kl_penalty actor/reward_kl_penalty_coeff {VERL_EVAL}".replace("@", "_at_"),
        {
            "critic/score/mean": ("proxy", MAX),
            "actor/reward_kl_penalty": ("kl", MIN),
            "actor/pg_loss": ("loss", MIN),
            "val-core/openai/gsm8k/acc/mean_at_4": ("eval", MAX),
        },
    ),
    "openrlhf": (
        OPENRLHF,
        {
            "train/reward": ("proxy", MAX),
            "train/kl": ("kl", MIN),
            "train/policy_loss": ("loss", MIN),
            "eval/eval_math_pass1": ("eval", MAX),
        },
    ),
    "nemo-rl": (
        NEMO,
        {
            "train/reward": ("proxy", MAX),
            "train/kl_penalty": ("kl", MIN),
            "train/loss": ("loss", MIN),
            "validation/accuracy": ("eval", MAX),
        },
    ),
    "llama-factory": (
        "current_steps total_steps loss lr epoch percentage elapsed_time remaining_time accuracy reward eval_loss",
        {"reward": ("proxy", MAX), "loss": ("loss", MIN), "eval_loss": ("eval", MIN)},
    ),
    "axolotl": (
        f"loss ppl {HOUSEKEEPING} memory/max_active memory/device_reserved eval_loss eval_ppl {EVAL_HOUSEKEEPING}",
        {"loss": ("loss", MIN), "eval_loss": ("eval", MIN)},
    ),
    "transformers": (
        f"loss {HOUSEKEEPING} eval_loss eval_accuracy {EVAL_HOUSEKEEPING} train_runtime train_loss",
        {"loss": ("loss", MIN), "eval_accuracy": ("eval", MAX)},
    ),
    "nobody's": (
        "gold kl proxy loss lr",
        {"gold": ("eval", MAX), "kl": ("kl", MIN), "proxy": ("proxy", MAX), "loss": ("loss", MIN)},
    ),
    "nobody's, as Lightning has it": (
        "train_loss val_loss lr-Adam",
        {"train_loss": ("loss", MIN), "val_loss": ("eval", MIN)},
    ),
    "nobody's, as Keras has it": (
        "accuracy loss val_accuracy val_loss",
        {"loss": ("loss", MIN), "val_accuracy": ("eval", MAX)},
    ),
}

TRAPS = {
    "objective/rlhf_reward": PPO,
    "policy/approxkl_avg": PPO,
    "val/clipfrac_avg": PPO,
    "eval_reward": GRPO + " " + GRPO_EVAL,
    "eval_rewards/accuracy_reward/mean": GRPO + " " + GRPO_EVAL,
    "critic/rewards/mean": VERL,
    "actor/ppo_kl": VERL,
    "train/vllm_kl": OPENRLHF,
    "train/ppo_kl": OPENRLHF,
    "train/gen_kl_error": NEMO,
    "train/policy_kl_error": NEMO,
    "train_loss": "train_loss train_runtime",
    "accuracy": "accuracy percentage current_steps",
}


@pytest.mark.parametrize("log", LOGS)
def test_a_trainer_is_known_by_what_it_logs(log: str) -> None:
    """Of the names that a trainer really writes, the best candidate gets each role and nothing else gets any."""
    names, expected = LOGS[log]
    found = recognize_roles(names.split())
    assert found.roles == {name: Role(MetricRole(role), direction) for name, (role, direction) in expected.items()}  # type: ignore[arg-type]
    assert found.preset == (None if log.startswith("nobody") else log.split()[0])


@pytest.mark.parametrize("metric", TRAPS)
def test_a_trap_is_refused_with_its_reason(metric: str) -> None:
    """A name that only looks like a role gets none, among its fellows, and it is said why."""
    found = recognize_roles(TRAPS[metric].split())
    assert metric not in found.roles
    assert found.reasons[metric].startswith("no role: ")


@pytest.mark.parametrize(
    "metric", ["approx_kl", "actor/ppo_kl", "train/vllm_kl", "gen_kl_error", "objective/rlhf_reward"]
)
def test_a_trap_alone_is_one_too(metric: str) -> None:
    """Even where nothing else gives the trainer away."""
    assert recognize_roles([metric]).roles == {}


@pytest.mark.parametrize(("names", "warned"), [(GRPO, True), (PPO, True), (f"{PPO} eval_win_rate", False), ("", True)])
def test_a_run_without_an_eval_score_is_warned_of(names: str, warned: bool) -> None:
    """That it can only be suspect is said, and only then."""
    assert (NO_EVAL in recognize_roles(names.split()).warnings) is warned


def test_the_eval_score_that_may_be_the_proxy_is_warned_of() -> None:
    """verl's validation calls the reward function again: a reward model's opinion is no eval score."""
    found = recognize_roles([*VERL.split(), "val-core/chat/reward/mean@1"])
    assert found.roles["val-core/chat/reward/mean@1"].role is MetricRole.EVAL
    assert any("reward model" in warning for warning in found.warnings)


def test_the_better_of_two_is_named_to_the_other() -> None:
    """Whoever asks why an eval is not watched reads which one is."""
    assert "eval_accuracy is preferred as eval" in recognize_roles(["eval_accuracy", "eval_loss"]).reasons["eval_loss"]


def test_a_tag_names_the_trainer() -> None:
    """It decides where names do not, and a name that is none is warned of."""
    assert recognize_roles(["val/score"]).roles["val/score"].role is MetricRole.EVAL
    assert recognize_roles(["val/score"], {"evalstop.preset": "trl-ppo"}).roles == {}
    unknown = recognize_roles(["val/score"], {"evalstop.preset": "trl"})
    assert "val/score" in unknown.roles
    assert "trl-ppo" in unknown.warnings[0]


def test_patterns_of_a_project_give_roles() -> None:
    """The first that fits decides; MLflow's spelling of @ fits too."""
    patterns = [
        {"pattern": "val-core/*/mean@*", "role": "eval", "direction": "maximize"},
        {"pattern": "*/nll", "role": "eval", "direction": "minimize"},
        {"pattern": "val-core/*", "role": "proxy"},
        {"pattern": "drift", "role": "kl"},
    ]
    assert match_role(patterns, "val-core/gsm8k/acc/mean_at_8") == Role(MetricRole.EVAL, "maximize")
    assert match_role(patterns, "held-out/nll") == Role(MetricRole.EVAL, "minimize")
    assert match_role(patterns, "val-core/x") == Role(MetricRole.PROXY, "maximize")
    assert match_role(patterns, "drift") == Role(MetricRole.KL, "minimize")
    assert match_role(patterns, "reward") is None


KNOWN = sorted({name for names, _ in LOGS.values() for name in names.split()})
some_names = st.lists(st.sampled_from(KNOWN) | st.text(max_size=12), max_size=30)


@given(some_names, st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_matter(names: list[str], random: object) -> None:
    """Nor does how often a name comes."""
    shuffled = names + names[:3]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert recognize_roles(shuffled) == recognize_roles(names)


@given(some_names, st.lists(st.text("uvxyz/", min_size=1, max_size=8), max_size=5))
def test_what_nobody_knows_changes_nothing(names: list[str], unknown: list[str]) -> None:
    """Metrics that mean nothing to anyone are as if they were not there."""
    assert recognize_roles([*names, *unknown]) == recognize_roles(names)


@given(some_names)
def test_a_role_has_one_metric_at_most(names: list[str]) -> None:
    """And every metric with a role, or refused one, was logged and has its reason."""
    found = recognize_roles(names)
    roles = [role.role for role in found.roles.values()]
    assert len(roles) == len(set(roles))
    assert found.roles.keys() <= found.reasons.keys() <= set(names)


@given(some_names)
def test_what_is_chosen_stays_when_the_refused_are_gone(names: list[str]) -> None:
    """Leaving out what lost, or was refused, without changing the trainer, changes no role."""
    found = recognize_roles(names, {"evalstop.preset": "verl"})
    assert recognize_roles(found.roles, {"evalstop.preset": "verl"}).roles == found.roles


@given(st.sampled_from([names for names, _ in LOGS.values()]))
def test_what_loggers_make_of_names_does_not_matter(log: str) -> None:
    """transformers' loggers write train/x for x and eval/x for eval_x: the roles are the same."""
    plain = recognize_roles(log.split())
    written = {name: f"eval/{name[5:]}" if name.startswith("eval_") else name for name in log.split()}
    found = recognize_roles(written.values())
    assert {written[name]: role for name, role in plain.roles.items()} == found.roles

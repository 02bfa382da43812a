"""What the metrics of known trainers mean, and which of them mislead.

Sources: the trainers' own code as of TRL 1.16 (and its PPO as of 0.9 to 0.25), verl 0.5, OpenRLHF 0.8, NeMo-RL 0.3,
LLaMA-Factory 0.9, Axolotl 0.12 and transformers 5. A pattern is fnmatch-style, on a name in lower case without the
prefix `train/`, with `eval/` written `eval_` and MLflow's `_at_` written `@`.
"""

from __future__ import annotations

from msgspec import Struct

from evalstop_detectors.observation import MetricRole


class Meaning(Struct, frozen=True):
    """What metrics of this pattern are: candidates for `role`, or for none, and why.

    Among candidates for one role the lowest `rank` is preferred, then the meaning that stands first. `minimize` is
    None where the role decides: KL and loss are minimized, scores maximized. A `caution` is said when one is chosen.
    """

    pattern: str
    role: MetricRole | None
    reason: str
    rank: int = 0
    minimize: bool | None = None
    caution: str = ""


class Trainer(Struct, frozen=True):
    """A trainer: `marks` are patterns of names that it alone writes."""

    name: str
    marks: tuple[str, ...]
    meanings: tuple[Meaning, ...]


def _proxy(pattern: str, reason: str, rank: int = 0) -> Meaning:
    return Meaning(pattern, MetricRole.PROXY, reason, rank)


def _kl(pattern: str, reason: str = "KL to the initial policy", rank: int = 0) -> Meaning:
    return Meaning(pattern, MetricRole.KL, reason, rank)


def _eval(pattern: str, reason: str, rank: int = 0, minimize: bool | None = None, caution: str = "") -> Meaning:
    return Meaning(pattern, MetricRole.EVAL, reason, rank, minimize, caution)


def _loss(pattern: str, reason: str = "the loss that is optimized", rank: int = 0) -> Meaning:
    return Meaning(pattern, MetricRole.LOSS, reason, rank)


def _no(pattern: str, reason: str) -> Meaning:
    return Meaning(pattern, None, reason)


_STILL_PROXY = "the reward that is optimized, on held-out prompts: still the proxy, no gold"
_SUBTRACTED = "the KL penalty is already subtracted from it: no proxy"
_LAST_UPDATE = "KL to the policy before the update, not to the initial one"
_SAMPLER = "how far the sampler and the trainer disagree, not KL to the initial policy"
_OBJECTIVE = "the training objective on held-out data"
_REWARD_AS_EVAL = (
    "{metric} is the reward function on held-out prompts. That is the eval score where it verifies answers; where a"
    " reward model gives it, it is still the proxy: then log another score and give that the role eval."
)

TRAINERS = (
    Trainer(
        "verl",
        ("critic/score/mean", "critic/rewards/mean", "actor/pg_loss", "actor/ppo_kl", "val-core/*", "val-aux/*"),
        (
            _proxy("critic/score/mean", "the score of the rollouts, before the KL penalty"),
            _no("critic/rewards/*", _SUBTRACTED),
            _no("critic/*", "a statistic of the critic or of the advantages"),
            _no("actor/reward_kl_penalty_coeff", "a coefficient"),
            _kl("actor/reward_kl_penalty", "KL of the rollouts to the reference policy"),
            _kl("actor/kl_loss", "KL to the reference policy, as the loss has it", rank=1),
            _eval(
                "val-core/*/reward/mean@*",
                "the mean reward on held-out prompts",
                rank=1,
                caution=_REWARD_AS_EVAL,
            ),
            _eval("val-core/*/mean@*", "the mean score on held-out prompts"),
            _eval("val-core/*/maj@*/mean", "the score of the majority's answer on held-out prompts", rank=2),
            _eval("val-core/*/best@*/mean", "the score of the best of several answers on held-out prompts", rank=3),
            _no("val-core/*", "no mean of a score"),
            _no("val-aux/*", "auxiliary: verl names the core metrics itself"),
            _eval("val/test_score/*", "the mean score on held-out prompts", caution=_REWARD_AS_EVAL),
            _loss("actor/pg_loss", "the loss of the policy"),
        ),
    ),
    Trainer(
        "nemo-rl",
        ("gen_kl_error", "policy_kl_error", "token_mult_prob_error", "probs_ratio_clamped"),
        (
            _proxy("reward", "the mean reward of the rollouts"),
            _kl("kl_penalty", "KL to the reference policy"),
            _eval("validation/accuracy", "the mean reward on held-out prompts", caution=_REWARD_AS_EVAL),
            _loss("loss"),
        ),
    ),
    Trainer(
        "openrlhf",
        ("ppo_kl", "vllm_kl", "actor_lr", "critic_lr", "actor_grad_norm", "eval_eval_*_pass*"),
        (
            _proxy("reward", "the mean reward of the rollouts, before the KL penalty"),
            _no("return", _SUBTRACTED),
            _kl("kl"),
            _eval("eval_eval_*_pass1", "the mean score on held-out prompts", caution=_REWARD_AS_EVAL),
            _eval(
                "eval_eval_*_pass*",
                "the score of the best of several answers on held-out prompts",
                rank=1,
                caution=_REWARD_AS_EVAL,
            ),
            _loss("policy_loss", "the loss of the policy"),
        ),
    ),
    Trainer(
        "trl-ppo",
        ("objective/scores", "objective/rlhf_reward", "objective/non_score_reward", "policy/approxkl_avg", "ppo/*"),
        (
            _proxy("objective/scores", "the score of the reward model, before the KL penalty"),
            _proxy("ppo/mean_scores", "the score of the reward model, before the KL penalty"),
            _proxy("env/reward_mean", "the score of the reward model, before the KL penalty", rank=1),
            _no("objective/scores_margin", "a difference of scores"),
            _kl("objective/kl"),
            _no("val/*", "a statistic of the value function: val is not validation here"),
            _no("eval_objective/*", _STILL_PROXY),
            _loss("loss/policy_avg", "the loss of the policy"),
            _loss("ppo/loss/policy", "the loss of the policy"),
        ),
    ),
    Trainer(
        "trl-grpo",  # and RLOO
        ("frac_reward_zero_std", "rewards/*/mean", "completions/mean_length", "eval_rewards/*/mean"),
        (
            _proxy("reward", "the reward that is optimized"),
            _proxy("rewards/*/mean", "one of the reward functions that are optimized", rank=1),
            _proxy("eval_reward", _STILL_PROXY, rank=2),
            _proxy("eval_rewards/*/mean", _STILL_PROXY, rank=3),
            _no("eval_reward*", "a statistic of the proxy"),
            _kl("kl", "KL to the reference policy"),
            _kl("eval_kl", "KL to the reference policy, on held-out prompts", rank=1),
            _no("eval_loss", "the loss of the update on held-out prompts: its height says nothing"),
            _no("eval_frac_reward_zero_std", "a statistic of the proxy"),
            _loss("loss", "the loss of the update"),
        ),
    ),
    Trainer(
        "trl-dpo",  # and KTO, ORPO, CPO
        ("rewards/chosen", "rewards/margins", "rewards/accuracies", "eval_rewards/chosen", "eval_rewards/accuracies"),
        (
            _proxy("rewards/margins", "the implicit reward by which the training pairs are told apart"),
            _no("rewards/*", "an implicit reward up to a constant, or a share of training pairs"),
            _eval(
                "eval_rewards/accuracies",
                "the share of held-out pairs told apart",
                rank=1,
                caution="{metric} says how well held-out pairs are told apart, not how good the answers are: log a"
                " score of answers and give it the role eval where you can.",
            ),
            _no("eval_rewards/*", "an implicit reward: it climbs when the model memorizes"),
            _eval("eval_loss", _OBJECTIVE, rank=2, minimize=True),
            _loss("loss"),
        ),
    ),
    Trainer(
        "llama-factory",  # its trainer_log.jsonl; elsewhere it writes what transformers and TRL write
        ("current_steps", "percentage", "elapsed_time", "remaining_time"),
        (
            _proxy("reward", "the score of the reward model"),
            _no("accuracy", "the share of training pairs told apart: no held-out score"),
            _no("predict_*", "said once, after the training"),
        ),
    ),
    Trainer(
        "axolotl",
        ("memory/max_*", "memory/device_*", "tokens_per_second_per_gpu", "tokens/train_per_sec_per_gpu"),
        (
            _no("ppl", "the perplexity of the training data"),
            _eval("eval_ppl", _OBJECTIVE, rank=3, minimize=True),
        ),
    ),
    Trainer(
        "transformers",
        (
            "eval_runtime",
            "train_runtime",
            "eval_samples_per_second",
            "eval_steps_per_second",
            "eval_mean_token_accuracy",
        ),
        (
            _no("train_loss", "said once, when the training has ended"),
            _eval("eval_loss", _OBJECTIVE, rank=2, minimize=True),
            _eval("eval_mean_token_accuracy", _OBJECTIVE + ", token by token", rank=3),
        ),
    ),
)
"""Those whose marks are seen are asked in this order: what builds upon others stands after them."""

_SCORES = (
    *("gold", "accuracy", "win_rate", "winrate", "pass@", "pass_rate", "exact_match", "score", "f1", "bleu", "rouge"),
    *("gsm8k", "mmlu", "aime", "humaneval", "mbpp", "ifeval", "gpqa", "hellaswag", "truthfulqa", "mt_bench", "arena"),
    *("alpaca", "livecodebench", "math", "acc"),
)
_ERRORS = ("perplexity", "ppl", "toxicity", "hallucination", "violation", "error", "wer", "nll", "mse", "mae", "rmse")
_BOOKKEEPING = (
    *(
        "runtime",
        "*_per_second",
        "model_preparation_time",
        "*num_tokens*",
        "num_input_tokens_seen",
        "*length*",
        "epoch",
    ),
    *("*entropy*", "*clip*", "*logits*", "*logps*", "*grad_norm*", "*step_time*", "*std*", "*steps", "step"),
)

ANYONE = (
    _no("*rlhf_reward*", _SUBTRACTED),
    _no("*non_score_reward*", "the KL penalty itself"),
    *(_no(f"*{name}*", _LAST_UPDATE) for name in ("ppo_kl", "approx_kl", "approxkl", "policykl", "old_kl")),
    *(_no(f"*{name}*", _SAMPLER) for name in ("vllm_kl", "gen_kl", "kl_error", "js_divergence", "rollout_corr/")),
    *(_no(f"*{name}*", "a coefficient") for name in ("kl_coef", "kl_ctl", "kl_beta")),
    *(_proxy(name, "named so") for name in ("proxy", "reward/proxy", "proxy_reward")),
    *(
        _proxy(name, "the reward that is optimized, by its name", rank=1)
        for name in ("reward", "reward/mean", "rewards/mean", "reward_mean", "mean_reward", "score/mean")
    ),
    _proxy("eval_reward", _STILL_PROXY, rank=2),
    _no("eval_reward[s_/]*", _STILL_PROXY),
    *(_kl(name, "named so") for name in ("kl", "kl/mean", "mean_kl", "kl_to_ref", "ref_kl", "kl_ref")),
    *(_eval(name, "named so") for name in ("eval", "gold", "reward/gold", "gold_reward")),
    *(_no(f"eval_{name}", "no score") for name in _BOOKKEEPING),
    *(_eval(f"eval_*{name}*", "a score on held-out data, by its name") for name in _SCORES),
    _eval("eval_loss", _OBJECTIVE, rank=2, minimize=True),
    *(_eval(f"eval_*{name}*", "an error on held-out data, by its name", rank=1, minimize=True) for name in _ERRORS),
    _eval("eval_*loss*", "a loss on held-out data, by its name", rank=2, minimize=True),
    _no("eval_*kl*", "a KL on held-out data"),
    _eval(
        "eval_*",
        "held-out, by its name",
        rank=4,
        caution="{metric} is taken for the eval score, higher is better, because it is held out: nothing says whether"
        " it is a score. Give the run's metrics a role if it is not.",
    ),
    *(_loss(name) for name in ("loss", "train_loss", "train_loss_epoch", "loss_epoch", "train_loss_step")),
)
"""What names mean whoever writes them; held-out ones (`val_`, `val/`, `validation/`, ...) are written `eval_` here."""

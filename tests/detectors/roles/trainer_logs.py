"""The names of the metrics that each trainer logs, the roles that they have, and names that mislead."""

from __future__ import annotations

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

GRPO_ROLES = {
    "reward": ("proxy", MAX),
    "kl": ("kl", MIN),
    "loss": ("loss", MIN),
    "entropy": ("entropy", MAX),
    "completions/mean_length": ("length", MAX),
    "completions/clipped_ratio": ("truncated", MAX),
    "grad_norm": ("gradient_norm", MAX),
}

LOGS = {
    "trl-grpo": (
        GRPO,
        GRPO_ROLES,
    ),
    "trl-grpo with an eval of its own rewards": (
        f"{GRPO} {GRPO_EVAL}",
        GRPO_ROLES,
    ),
    "trl-grpo with a benchmark": (
        f"{GRPO} {GRPO_EVAL} eval_gsm8k",
        GRPO_ROLES | {"eval_gsm8k": ("eval", MAX)},
    ),
    "trl-grpo through TensorBoard": (
        "train/reward train/kl train/loss train/rewards/a/mean train/frac_reward_zero_std eval/reward"
        " eval/rewards/a/mean",
        {"train/reward": ("proxy", MAX), "train/kl": ("kl", MIN), "train/loss": ("loss", MIN)},
    ),
    "trl-ppo": (
        PPO,
        {
            "objective/scores": ("proxy", MAX),
            "objective/kl": ("kl", MIN),
            "loss/policy_avg": ("loss", MIN),
            "objective/entropy": ("entropy", MAX),
        },
    ),
    "trl-ppo in earlier versions": (
        "env/reward_mean env/reward_std objective/kl objective/kl_coef ppo/mean_scores ppo/mean_non_score_reward"
        " ppo/policy/approxkl ppo/policy/policykl ppo/loss/policy ppo/loss/total ppo/returns/mean ppo/val/error",
        {"ppo/mean_scores": ("proxy", MAX), "objective/kl": ("kl", MIN), "ppo/loss/policy": ("loss", MIN)},
    ),
    "trl-dpo": (
        f"{DPO} {DPO_EVAL}",
        {
            "rewards/margins": ("proxy", MAX),
            "loss": ("loss", MIN),
            "entropy": ("entropy", MAX),
            "grad_norm": ("gradient_norm", MAX),
            "eval_rewards/accuracies": ("eval", MAX),
        },
    ),
    "verl": (
        f"{VERL} {VERL_EVAL}",
        {
            "critic/score/mean": ("proxy", MAX),
            "actor/kl_loss": ("kl", MIN),
            "actor/pg_loss": ("loss", MIN),
            "actor/entropy": ("entropy", MAX),
            "actor/grad_norm": ("gradient_norm", MAX),
            "response_length/mean": ("length", MAX),
            "val-core/openai/gsm8k/acc/mean@4": ("eval", MAX),
        },
    ),
    "verl through MLflow, with the KL in the reward": (
        f"{VERL} actor/reward_kl_penalty actor/reward_kl_penalty_coeff {VERL_EVAL}".replace("@", "_at_"),
        {
            "critic/score/mean": ("proxy", MAX),
            "actor/reward_kl_penalty": ("kl", MIN),
            "actor/pg_loss": ("loss", MIN),
            "actor/entropy": ("entropy", MAX),
            "actor/grad_norm": ("gradient_norm", MAX),
            "response_length/mean": ("length", MAX),
            "val-core/openai/gsm8k/acc/mean_at_4": ("eval", MAX),
        },
    ),
    "openrlhf": (
        OPENRLHF,
        {
            "train/reward": ("proxy", MAX),
            "train/kl": ("kl", MIN),
            "train/policy_loss": ("loss", MIN),
            "train/response_length": ("length", MAX),
            "eval/eval_math_pass1": ("eval", MAX),
        },
    ),
    "nemo-rl": (
        NEMO,
        {
            "train/reward": ("proxy", MAX),
            "train/kl_penalty": ("kl", MIN),
            "train/loss": ("loss", MIN),
            "train/grad_norm": ("gradient_norm", MAX),
            "validation/accuracy": ("eval", MAX),
        },
    ),
    "llama-factory": (
        "current_steps total_steps loss lr epoch percentage elapsed_time remaining_time accuracy reward eval_loss",
        {"reward": ("proxy", MAX), "loss": ("loss", MIN), "eval_loss": ("eval", MIN)},
    ),
    "axolotl": (
        f"loss ppl {HOUSEKEEPING} memory/max_active memory/device_reserved eval_loss eval_ppl {EVAL_HOUSEKEEPING}",
        {"loss": ("loss", MIN), "grad_norm": ("gradient_norm", MAX), "eval_loss": ("eval", MIN)},
    ),
    "transformers": (
        f"loss {HOUSEKEEPING} eval_loss eval_accuracy {EVAL_HOUSEKEEPING} train_runtime train_loss",
        {"loss": ("loss", MIN), "grad_norm": ("gradient_norm", MAX), "eval_accuracy": ("eval", MAX)},
    ),
    "unknown trainer": (
        "gold kl proxy loss lr",
        {"gold": ("eval", MAX), "kl": ("kl", MIN), "proxy": ("proxy", MAX), "loss": ("loss", MIN)},
    ),
    "unknown trainer with names of Lightning": (
        "train_loss val_loss lr-Adam",
        {"train_loss": ("loss", MIN), "val_loss": ("eval", MIN)},
    ),
    "unknown trainer with names of Keras": (
        "accuracy loss val_accuracy val_loss",
        {"loss": ("loss", MIN), "val_accuracy": ("eval", MAX)},
    ),
}

MISLEADING_NAMES = {
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

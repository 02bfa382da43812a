"""The meanings of metrics of trainers that optimize a reward or preferences, including misleading ones, and of those
that fit a model to data.

Sources: the trainers' own code as of TRL 1.16 (and its PPO as of 0.9 to 0.25), verl 0.5, OpenRLHF 0.8, NeMo-RL 0.3,
open-instruct, trlX 0.7, torchtune 0.6, DeepSpeed-Chat and stable-baselines3 2.7; LLaMA-Factory 0.9, Axolotl 0.12,
transformers 5 (a dict of eval sets gives each its `eval_<name>_loss` and `eval_<name>_runtime`), sentence-transformers
5, Ultralytics 8.3, nanochat, LLM Foundry 0.22, prime-rl 0.3 and Megatron-LM 0.14.

A pattern is fnmatch-style, matched against a name in lower case without the prefix `train/`, with `eval/` written
`eval_` and MLflow's `_at_` written `@`. A `*` stands for the name of a data set or of a reward.
"""

from __future__ import annotations

from evalstop_detectors.roles.meanings import (
    LAST_UPDATE,
    OBJECTIVE,
    REWARD_AS_EVAL,
    STILL_PROXY,
    SUBTRACTED,
    UPDATE_LOSS,
    Trainer,
    eval_error,
    eval_score,
    kl,
    loss,
    no_role,
    proxy,
)

REINFORCEMENT = (
    Trainer(
        "verl",
        ("critic/score/mean", "critic/rewards/mean", "actor/pg_loss", "actor/ppo_kl", "val-core/*", "val-aux/*"),
        (
            proxy("critic/score/mean", "the score of the rollouts, before the KL penalty"),
            no_role("critic/rewards/*", SUBTRACTED),
            no_role("critic/*", "a statistic of the critic or of the advantages"),
            no_role("actor/reward_kl_penalty_coeff", "a coefficient"),
            kl("actor/reward_kl_penalty", "KL of the rollouts to the reference policy"),
            kl("actor/kl_loss", "KL to the reference policy, as used in the loss", rank=1),
            eval_score(
                "val-core/*/reward/mean@*", "the mean reward on held-out prompts", rank=1, caution=REWARD_AS_EVAL
            ),
            eval_score("val-core/*/mean@*", "the mean score on held-out prompts"),
            eval_score("val-core/*/maj@*/mean", "the score of the majority's answer on held-out prompts", rank=2),
            eval_score(
                "val-core/*/best@*/mean", "the score of the best of several answers on held-out prompts", rank=3
            ),
            no_role("val-core/*", "not a mean of a score"),
            no_role("val-aux/*", "auxiliary: verl names the core metrics itself"),
            eval_score("val/test_score/*", "the mean score on held-out prompts", caution=REWARD_AS_EVAL),
            loss("actor/pg_loss", "the loss of the policy"),
        ),
    ),
    Trainer(
        "nemo-rl",
        ("gen_kl_error", "policy_kl_error", "token_mult_prob_error", "probs_ratio_clamped"),
        (
            proxy("reward", "the mean reward of the rollouts"),
            kl("kl_penalty", "KL to the reference policy"),
            eval_score("validation/accuracy", "the mean reward on held-out prompts", caution=REWARD_AS_EVAL),
            no_role("validation/loss", UPDATE_LOSS),
            loss("loss"),
        ),
    ),
    Trainer(
        "nemo-rl-preferences",
        ("validation-*/num_valid_samples", "validation-*/rewards_chosen_mean"),
        (
            eval_score("validation-*/accuracy", "the share of held-out pairs ranked correctly"),
            eval_error("validation-*/loss"),
            eval_error("validation-*/*_loss", "a part of the objective on held-out data", rank=3),
            loss("loss"),
        ),
    ),
    Trainer(
        "openrlhf",
        ("ppo_kl", "vllm_kl", "actor_lr", "critic_lr", "actor_grad_norm", "eval_eval_*_pass*"),
        (
            proxy("reward", "the mean reward of the rollouts, before the KL penalty"),
            no_role("return", SUBTRACTED),
            kl("kl"),
            eval_score("eval_eval_*_pass1", "the mean score on held-out prompts", caution=REWARD_AS_EVAL),
            eval_score(
                "eval_eval_*_pass*",
                "the score of the best of several answers on held-out prompts",
                rank=1,
                caution=REWARD_AS_EVAL,
            ),
            loss("policy_loss", "the loss of the policy"),
        ),
    ),
    Trainer(
        "trl-ppo",
        ("objective/scores", "objective/rlhf_reward", "objective/non_score_reward", "policy/approxkl_avg", "ppo/*"),
        (
            proxy("objective/scores", "the score of the reward model, before the KL penalty"),
            proxy("ppo/mean_scores", "the score of the reward model, before the KL penalty"),
            proxy("env/reward_mean", "the score of the reward model, before the KL penalty", rank=1),
            no_role("objective/scores_margin", "a difference of scores"),
            kl("objective/kl"),
            no_role("val/*", "a statistic of the value function: val is not validation here"),
            no_role("eval_objective/*", STILL_PROXY),
            loss("loss/policy_avg", "the loss of the policy"),
            loss("ppo/loss/policy", "the loss of the policy"),
        ),
    ),
    Trainer(
        "trl-grpo",  # and RLOO
        ("frac_reward_zero_std", "rewards/*/mean", "completions/mean_length", "eval_rewards/*/mean"),
        (
            proxy("reward", "the reward that is optimized"),
            proxy("rewards/*/mean", "one of the reward functions that are optimized", rank=1),
            proxy("eval_reward", STILL_PROXY, rank=2),
            proxy("eval_rewards/*/mean", STILL_PROXY, rank=3),
            no_role("eval_reward*", "a statistic of the proxy"),
            kl("kl", "KL to the reference policy"),
            kl("eval_kl", "KL to the reference policy, on held-out prompts", rank=1),
            no_role("eval_loss", UPDATE_LOSS),
            no_role("eval_*_loss", UPDATE_LOSS),
            no_role("eval_*rewards/*", STILL_PROXY),
            no_role("eval_*_reward", STILL_PROXY),
            no_role("eval_frac_reward_zero_std", "a statistic of the proxy"),
            loss("loss", "the loss of the update"),
        ),
    ),
    Trainer(
        "trl-dpo",  # and KTO, ORPO, CPO
        ("rewards/chosen", "rewards/margins", "rewards/accuracies", "eval_rewards/chosen", "eval_rewards/accuracies"),
        (
            proxy("rewards/margins", "the implicit reward that ranks the training pairs"),
            no_role("rewards/*", "an implicit reward up to a constant, or a share of training pairs"),
            eval_score(
                "eval_rewards/accuracies",
                "the share of held-out pairs ranked correctly",
                rank=1,
                caution="{metric} shows how well held-out pairs are ranked, not how good the answers are: log a"
                " score of answers and give it the role eval where you can.",
            ),
            no_role("eval_rewards/*", "an implicit reward: it rises when the model memorizes"),
            eval_error("eval_loss", rank=2),
            loss("loss"),
        ),
    ),
    Trainer(
        "trl-reward",
        ("min_reward", "max_reward", "eval_min_reward"),
        (
            no_role("*mean_reward", "the reward model's own score, which is not optimized: its level means nothing"),
            no_role("*m??_reward", "the reward model's own score"),
            no_role("*margin", "the margin between pairs: it rises when the model memorizes"),
            eval_score("eval_accuracy", "the share of held-out pairs ranked correctly"),
            eval_error("eval_loss"),
            no_role("accuracy", "the share of training pairs ranked correctly"),
            loss("loss"),
        ),
    ),
    Trainer(
        "trlx",
        ("rollout_scores/running_mean", "policy/sqrt_kl", "kl_ctl_value"),
        (
            proxy("rollout_scores/mean", "the score of the rollouts, before the KL penalty"),
            proxy("reward/mean", "the reward function on the evaluation's prompts", rank=1),
            no_role("policy/sqrt_kl", "the root of the KL to the reference policy, not the KL"),
            no_role("policy/*", LAST_UPDATE),
            loss("losses/policy_loss", "the loss of the policy"),
            loss("losses/total_loss", "the loss of policy and values", rank=1),
            no_role("values/*", "a statistic of the value function"),
        ),
    ),
    Trainer(
        "open-instruct",
        ("objective/verifiable_reward", "objective/verifiable_correct_rate", "val/sequence_lengths"),
        (
            proxy("objective/verifiable_reward", "the reward that is optimized"),
            kl("objective/kl_avg"),
            kl("objective/kl*", rank=1),
            eval_score("eval_scores", "the mean score on held-out prompts", caution=REWARD_AS_EVAL),
            no_role("val/*", "a statistic of the rollouts: val is not validation here"),
            no_role("eval_*", "a statistic of the answers"),
            loss("loss/policy_avg", "the loss of the policy"),
        ),
    ),
    Trainer(
        "open-instruct-rm",
        ("eval_rm/accuracy", "rm/accuracy"),
        (
            eval_score("eval_rm/accuracy", "the share of held-out pairs ranked correctly"),
            eval_error("eval_rm/loss"),
            no_role("eval_rm/*", "the reward model's own score"),
            loss("rm/loss"),
        ),
    ),
    Trainer(
        "torchtune-ppo",
        ("num_stop_tokens", "approx_policy_kl", "kl_reward"),
        (
            proxy("scores", "the score of the reward model, before the KL penalty"),
            no_role("kl_reward", "the KL penalty itself"),
            no_role("approx_policy_kl", LAST_UPDATE),
            loss("policy_loss", "the loss of the policy"),
        ),
    ),
    Trainer(
        "deepspeed-chat",
        ("actor_loss_sum", "critic_loss_sum"),
        (proxy("reward", "the score of the reward model"), loss("actor_loss", "the loss of the policy")),
    ),
    Trainer(
        "stable-baselines3",
        ("rollout/ep_rew_mean", "rollout/ep_len_mean", "time/total_timesteps"),
        (
            proxy("rollout/ep_rew_mean", "the return that is optimized, with exploration"),
            eval_score("eval_mean_reward", "the return of the policy without exploration"),
            eval_score("eval_success_rate", "the share of evaluation episodes that succeed"),
            no_role("eval_*", "a statistic of the evaluation's episodes"),
            no_role("approx_kl", LAST_UPDATE),
            loss("loss"),
        ),
    ),
)


SUPERVISED = (
    Trainer(
        "llama-factory",  # its trainer_log.jsonl; its other logs have the names of transformers and TRL
        ("current_steps", "percentage", "elapsed_time", "remaining_time"),
        (
            proxy("reward", "the score of the reward model"),
            no_role("accuracy", "the share of training pairs ranked correctly: not a held-out score"),
            no_role("predict_*", "logged once, after the training"),
            eval_score("eval_rouge-?", "a score of generated text on held-out data"),
            eval_score("eval_bleu-4", "a score of generated text on held-out data"),
        ),
    ),
    Trainer(
        "axolotl",
        ("memory/max_*", "memory/device_*", "tokens_per_second_per_gpu", "tokens/train_per_sec_per_gpu"),
        (no_role("ppl", "the perplexity of the training data"), eval_error("eval_ppl", rank=3)),
    ),
    Trainer(
        "transformers",
        (
            "eval_runtime",
            "eval_*_runtime",
            "eval_*_samples_per_second",
            "train_runtime",
            "eval_samples_per_second",
            "eval_steps_per_second",
            "eval_mean_token_accuracy",
        ),
        (
            no_role("train_loss", "logged once, at the end of the training"),
            eval_error("eval_loss"),
            eval_score("eval_mean_token_accuracy", OBJECTIVE + ", token by token", rank=3),
        ),
    ),
    Trainer(
        "sentence-transformers",
        ("eval_*cosine_accuracy_threshold", "eval_*_spearman_cosine", "eval_*cosine_ndcg@*"),
        (
            no_role("eval_*_threshold", "a threshold"),
            eval_score("eval_*_spearman_cosine", "the correlation of similarities on held-out pairs"),
            eval_score("eval_*cosine_ndcg@*", "ranking of held-out queries"),
            eval_score("eval_*cosine_accuracy", "the share of held-out pairs ranked correctly"),
        ),
    ),
    Trainer(
        "ultralytics",
        ("metrics/map50-95(?)", "metrics/accuracy_top1"),
        (
            eval_score("metrics/map50-95(b)", "mean average precision on the validation set"),
            eval_score("metrics/map50-95(?)", "mean average precision on the validation set", rank=1),
            eval_score("metrics/accuracy_top1", "the accuracy on the validation set"),
            eval_score("metrics/accuracy_top5", "the accuracy on the validation set", rank=1),
            eval_score("metrics/map50(?)", "mean average precision on the validation set", rank=2),
            eval_score("metrics/precision(?)", "on the validation set", rank=3),
            eval_score("metrics/recall(?)", "on the validation set", rank=3),
            eval_error("val/*_loss", "a part of the training objective on held-out data", rank=4),
        ),
    ),
    Trainer(
        "nanochat",
        ("total_training_flops", "lrm"),
        (
            eval_score("core_metric", "the mean over the tasks of CORE"),
            eval_error("val/bpb", "bits per byte on held-out text"),
            loss("loss"),
        ),
    ),
    Trainer(
        "llm-foundry",
        ("loss/train/total", "metrics/train/*", "metrics/eval/language*", "metrics/eval/incontext*"),
        (
            eval_score("metrics/eval/incontextlearning*accuracy", "a score of in-context tasks"),
            eval_error("metrics/eval/*calibrationerror", "the calibration on in-context tasks", rank=3),
            eval_error("metrics/eval/*languagecrossentropy"),
            eval_error("metrics/eval/*languageperplexity", rank=3),
            loss("loss/train/total"),
        ),
    ),
    Trainer(
        "prime-rl",
        ("mismatch_kl/*", "progress/total_tokens", "loss/nan_count"),
        (
            proxy("reward/mean", "the reward that is optimized"),
            eval_error("val/loss"),
            eval_error("val/perplexity", rank=3),
            no_role("mismatch_kl/*", "how far the sampler and the trainer disagree, not KL to the initial policy"),
            loss("loss/mean"),
        ),
    ),
    Trainer(
        "megatron",
        ("lm loss", "params-norm", "num-zeros"),
        (eval_error("lm loss validation"), eval_error("lm loss validation ppl", rank=3), loss("lm loss")),
    ),
)

"""The meanings of metrics of trainers that optimize a reward or preferences, including misleading ones.

Sources: the trainers' own code as of TRL 1.16 (and its PPO as of 0.9 to 0.25), verl 0.5, OpenRLHF 0.8, NeMo-RL 0.3,
open-instruct, trlX 0.7, torchtune 0.6, DeepSpeed-Chat and stable-baselines3 2.7. A pattern is fnmatch-style, matched
against a name in lower case without the prefix `train/`, with `eval/` written `eval_` and MLflow's `_at_` written `@`.
A `*` stands for the name of a data set or of a reward.
"""

from __future__ import annotations

from evalstop_detectors.roles.meanings import (
    LAST_UPDATE,
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

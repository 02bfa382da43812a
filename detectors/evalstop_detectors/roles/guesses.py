"""Meanings of names outside known trainers' tables. All are guesses: they may raise a suspicion, but never a stop."""

from __future__ import annotations

from evalstop_detectors.roles.meanings import (
    LAST_UPDATE,
    SAMPLER,
    STILL_PROXY,
    SUBTRACTED,
    Meaning,
    RoleOrigin,
    eval_error,
    eval_score,
    kl,
    no_role,
    proxy,
)
from evalstop_detectors.roles.words import Reading, read_words, split_words

_GUESSED = RoleOrigin.GUESSED

GUESSES = (
    no_role("*rlhf_reward*", SUBTRACTED),
    no_role("*non_score_reward*", "the KL penalty itself"),
    *(no_role(f"*{name}*", LAST_UPDATE) for name in ("ppo_kl", "approx_kl", "approxkl", "policykl", "old_kl")),
    *(no_role(f"*{name}*", SAMPLER) for name in ("vllm_kl", "gen_kl", "kl_error", "js_divergence", "rollout_corr/")),
    *(no_role(f"*{name}*", "a coefficient") for name in ("kl_coef", "kl_ctl", "kl_beta")),
    *(
        proxy(name, "the reward that is optimized, judging by its name", rank=1, origin=_GUESSED)
        for name in ("reward/mean", "rewards/mean", "reward_mean", "mean_reward", "score/mean")
    ),
    *(
        no_role(f"rewards/*{name}", "a statistic of rewards")
        for name in ("chosen", "rejected", "accuracies", "/std", "/max", "/min")
    ),
    proxy("rewards/*", "one of the rewards, judging by its name", rank=2, origin=_GUESSED),
    proxy("eval_reward", STILL_PROXY, rank=2, origin=_GUESSED),
    no_role("eval_reward[s_/]*", STILL_PROXY),
    *(kl(name, "named so", origin=_GUESSED) for name in ("kl/mean", "mean_kl", "kl_to_ref", "ref_kl", "kl_ref")),
)
"""Patterns for whole names in lower case, as in the tables of trainers."""

_OF_THE_UPDATE = frozenset(
    ("policy", "pg", "ppo", "grpo", "actor", "critic", "value", "vf", "update", "aux", "entropy", "kl")
)

_CAUTION = (
    "{metric} is taken as the eval score, higher is better, because it is held out; it is unknown whether it is a"
    " score. Give the run's metrics a role if it is not."
)
_ERROR = eval_error("", "an error on held-out data, judging by its name", rank=1, origin=_GUESSED)
_LOSS = eval_error("", "a loss on held-out data, judging by its name", rank=2, origin=_GUESSED)
_SCORE = eval_score("", "a score on held-out data, judging by its name", origin=_GUESSED)
_UNKNOWN = eval_score("", "held-out, judging by its name", rank=4, caution=_CAUTION, origin=_GUESSED)
_UPDATE = no_role("", "the loss of an update: its level means nothing")
_BOOKKEEPING = no_role("", "not a quality of the model, judging by its name")


def guess_held_out(quantity: str) -> Meaning:
    """The meaning of a metric on held-out data, by the words of its name without the prefix."""
    name_words = set(split_words(quantity))
    match read_words(quantity):
        case Reading.OTHER:
            return _BOOKKEEPING
        case Reading.ERROR if "loss" in name_words:
            return _UPDATE if name_words & _OF_THE_UPDATE else _LOSS
        case Reading.ERROR:
            return _ERROR
        case Reading.SCORE:
            return _SCORE
    return _UNKNOWN

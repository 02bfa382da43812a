"""What a metric's name may mean, and the source of that meaning."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from evalstop_detectors.observation import MetricRole


class RoleOrigin(StrEnum):
    """How the role and the direction of a metric are known.

    `declared`: by the trainer or a person. `recognized`: the name is in the table of
    a known trainer. `guessed`: from the words of the name. On a guess a run may be suspect, but is never stopped.
    """

    DECLARED = "declared"
    RECOGNIZED = "recognized"
    GUESSED = "guessed"


class Meaning(Struct, frozen=True):
    """The meaning of metrics that match this pattern: candidates for `role`, or for none, and why.

    Among candidates for one role the lowest `rank` is preferred, then the first meaning. `minimize` is
    None where the role decides: KL and loss are minimized, scores maximized. A `caution` is shown if one is chosen.
    """

    pattern: str
    role: MetricRole | None
    reason: str
    rank: int = 0
    minimize: bool | None = None
    caution: str = ""
    origin: RoleOrigin = RoleOrigin.RECOGNIZED


class Trainer(Struct, frozen=True):
    """A trainer: `marks` are patterns of names that only this trainer writes."""

    name: str
    marks: tuple[str, ...]
    meanings: tuple[Meaning, ...]


STILL_PROXY = "the reward that is optimized, on held-out prompts: still the proxy"
SUBTRACTED = "the KL penalty is already subtracted from it: not the proxy"
LAST_UPDATE = "KL to the policy before the update, not to the initial one"
SAMPLER = "how far the sampler and the trainer disagree, not KL to the initial policy"
OBJECTIVE = "the training objective on held-out data"
UPDATE_LOSS = "the loss of the update on held-out prompts: its level means nothing"
REWARD_AS_EVAL = (
    "{metric} is the reward function on held-out prompts. That is the eval score where it verifies answers; where a"
    " reward model gives it, it is still the proxy: then log another score and give that the role eval."
)


def eval_score(
    pattern: str, reason: str, rank: int = 0, caution: str = "", origin: RoleOrigin = RoleOrigin.RECOGNIZED
) -> Meaning:
    """A candidate for the eval, maximized."""
    return Meaning(pattern, MetricRole.EVAL, reason, rank, False, caution, origin=origin)


def eval_error(
    pattern: str,
    reason: str = OBJECTIVE,
    rank: int = 2,
    origin: RoleOrigin = RoleOrigin.RECOGNIZED,
) -> Meaning:
    """A candidate for the eval, minimized: a loss or an error."""
    return Meaning(pattern, MetricRole.EVAL, reason, rank, True, origin=origin)


def proxy(pattern: str, reason: str, rank: int = 0, origin: RoleOrigin = RoleOrigin.RECOGNIZED) -> Meaning:
    return Meaning(pattern, MetricRole.PROXY, reason, rank, origin=origin)


def kl(
    pattern: str, reason: str = "KL to the initial policy", rank: int = 0, origin: RoleOrigin = RoleOrigin.RECOGNIZED
) -> Meaning:
    return Meaning(pattern, MetricRole.KL, reason, rank, origin=origin)


def loss(pattern: str, reason: str = "the loss that is optimized", rank: int = 0) -> Meaning:
    return Meaning(pattern, MetricRole.LOSS, reason, rank)


def no_role(pattern: str, reason: str) -> Meaning:
    return Meaning(pattern, None, reason)

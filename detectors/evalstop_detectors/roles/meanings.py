"""What a metric's name may mean, and where that is known from."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from evalstop_detectors.observation import MetricRole


class RoleOrigin(StrEnum):
    """How it is known which role a metric plays, and whether higher or lower is better.

    `declared`: the trainer, a person or a pattern of the project says so. `recognized`: the name stands in the table of
    a known trainer. `guessed`: told from the words of the name. On a guess a run may be suspect, never stopped.
    """

    DECLARED = "declared"
    RECOGNIZED = "recognized"
    GUESSED = "guessed"


class Meaning(Struct, frozen=True):
    """What metrics of this pattern are: candidates for `role`, or for none, and why.

    Among candidates for one role the lowest `rank` is preferred, then the meaning that stands first. `minimize` is
    None where the role decides: KL and loss are minimized, scores maximized. A `caution` is said when one is chosen.
    `beside`: the trainer logs a metric of this pattern too, with the same text for the first `*`.
    """

    pattern: str
    role: MetricRole | None
    reason: str
    rank: int = 0
    minimize: bool | None = None
    caution: str = ""
    beside: str | None = None
    origin: RoleOrigin = RoleOrigin.RECOGNIZED


class Trainer(Struct, frozen=True):
    """A trainer: `marks` are patterns of names that it alone writes."""

    name: str
    marks: tuple[str, ...]
    meanings: tuple[Meaning, ...]


STILL_PROXY = "the reward that is optimized, on held-out prompts: still the proxy"
SUBTRACTED = "the KL penalty is already subtracted from it: no proxy"
LAST_UPDATE = "KL to the policy before the update, not to the initial one"
SAMPLER = "how far the sampler and the trainer disagree, not KL to the initial policy"
OBJECTIVE = "the training objective on held-out data"
UPDATE_LOSS = "the loss of the update on held-out prompts: its height says nothing"
REWARD_AS_EVAL = (
    "{metric} is the reward function on held-out prompts. That is the eval score where it verifies answers; where a"
    " reward model gives it, it is still the proxy: then log another score and give that the role eval."
)


def eval_score(
    pattern: str, reason: str, rank: int = 0, caution: str = "", origin: RoleOrigin = RoleOrigin.RECOGNIZED
) -> Meaning:
    """A candidate for the eval that is maximized."""
    return Meaning(pattern, MetricRole.EVAL, reason, rank, False, caution, origin=origin)


def eval_error(
    pattern: str,
    reason: str = OBJECTIVE,
    rank: int = 2,
    beside: str | None = None,
    origin: RoleOrigin = RoleOrigin.RECOGNIZED,
) -> Meaning:
    """A candidate for the eval that is minimized: a loss or an error."""
    return Meaning(pattern, MetricRole.EVAL, reason, rank, True, beside=beside, origin=origin)


def proxy(pattern: str, reason: str, rank: int = 0, origin: RoleOrigin = RoleOrigin.RECOGNIZED) -> Meaning:
    """A candidate for the proxy."""
    return Meaning(pattern, MetricRole.PROXY, reason, rank, origin=origin)


def kl(
    pattern: str, reason: str = "KL to the initial policy", rank: int = 0, origin: RoleOrigin = RoleOrigin.RECOGNIZED
) -> Meaning:
    """A candidate for the KL."""
    return Meaning(pattern, MetricRole.KL, reason, rank, origin=origin)


def loss(pattern: str, reason: str = "the loss that is optimized", rank: int = 0) -> Meaning:
    """A candidate for the loss."""
    return Meaning(pattern, MetricRole.LOSS, reason, rank)


def no_role(pattern: str, reason: str) -> Meaning:
    """No candidate for any role."""
    return Meaning(pattern, None, reason)

"""Recognizes which of a run's metrics are the eval score, proxy, KL and loss, by their names alone.

A name in a known trainer's table is recognized; a meaning inferred from its words is a guess: it may raise a suspicion,
but no run is stopped on it until a person confirms or corrects it. A trainer that chooses its best checkpoint by a
metric declares that as the eval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.observation import ROLES, MetricRole
from evalstop_detectors.roles.meanings import Meaning, RoleOrigin, Trainer
from evalstop_detectors.roles.params import Direction, find_declared_eval
from evalstop_detectors.roles.trainers import REINFORCEMENT, SUPERVISED
from evalstop_detectors.roles.words import (
    GUESSES,
    KNOWN_HELD_OUT,
    KNOWN_NAMES,
    PREFERRED,
    UNKNOWN,
    Reading,
    guess_held_out,
    read_words,
    split_words,
)

TRAINERS = (*REINFORCEMENT, *SUPERVISED)
"""Trainers whose marks are present, in this order: those that build on others come after them."""

PRESET_TAG = "evalstop.preset"
"""The tag by which a run names its trainer, if its metrics do not show it."""

PASSED_OVER = "{score} looks like a score, but {watched} is watched: if {score} counts, give it the role eval."

NO_EVAL = (
    "No metric is the eval score: from proxy, KL and loss alone a run can only be suspect, and no shipped policy stops"
    " it. Log a score on held-out data that is not what is optimized, and give it the role eval."
)

_TEST = ("test/", "test_")
_HELD_OUT = ("eval/", "eval_", "val/", "val_", "valid/", "valid_", "validation/", "validation_", "dev/", "dev_", *_TEST)

_BEHIND_GUESSES = UNKNOWN.rank + 1
_BEHIND_TRAINERS = len([meaning for trainer in TRAINERS for meaning in trainer.meanings])


class Role(Struct, frozen=True):
    """The part that a metric plays for a run, and whether higher or lower is better."""

    role: MetricRole
    direction: Direction


class RecognizedRoles(Struct, frozen=True):
    """The recognized roles of a run's metrics.

    `preset` is the recognized trainer, None when no trainer's marks were present. `roles` holds at most one
    metric for each role, but the evals of several sets if they are one metric: their mean is watched. `origins` has
    whether each was recognized or guessed. `reasons` explains each metric with a role, and each that was denied one;
    metrics without any meaning are not included. `warnings` are for people.
    """

    preset: str | None
    roles: dict[str, Role]
    origins: dict[str, RoleOrigin]
    reasons: dict[str, str]
    warnings: list[str]

    def list_metrics(self, role: MetricRole) -> list[str]:
        """The metrics of this role, by name."""
        return sorted(name for name, item in self.roles.items() if item.role is role)


class Candidate(Struct, frozen=True):
    """A metric and its meaning. Among metrics of one role the lowest `order` is chosen.

    `kind`: what its name shares with that of the same metric on another eval set; empty if it is not of one of several.
    """

    metric: str
    meaning: Meaning
    place: int
    kind: str = ""

    @property
    def order(self) -> tuple[bool, int, int, tuple[bool, bool, bool], str]:
        meaning = self.meaning
        is_preferred = not PREFERRED.isdisjoint([meaning.pattern, *split_words(self.kind)])
        # Any WER before the CER; all data together before one set of them.
        preference = (not is_preferred, "wer" not in split_words(meaning.pattern), bool(self.kind))
        return meaning.origin is RoleOrigin.GUESSED, meaning.rank, self.place, preference, self.metric


FIRST_EVALS = 5
"""An eval whose first values, this many, are all equal does not measure the run."""

DECLARED = "the trainer chooses its best checkpoint by it"

MOST_EVALS = 32
"""Maximum number of evals of a run: computing a score needs all of them in memory. Of more sets the first count."""

CONSTANT = f"no role: the same in its first {FIRST_EVALS} evals"


def is_constant(values: Sequence[float]) -> bool:
    """Whether an eval with these values, by step, does not change at its beginning."""
    return len(values) >= FIRST_EVALS and all(value == values[0] for value in values[:FIRST_EVALS])


def recognize_by_values(
    metrics: Iterable[str], tags: Mapping[str, str], load_values: Callable[[str], Sequence[float]]
) -> RecognizedRoles:
    """`recognize_roles`, but an eval that nobody declared and that does not change in its first evals gives way to
    another candidate: an exact match of 0 must not hide the loss. `load_values`: the values of a metric by step, at
    least the first ones."""
    names, constant = set(metrics), set[str]()
    while True:
        found = recognize_roles(names, tags, constant)
        evals = found.list_metrics(MetricRole.EVAL)
        others = recognize_roles(names, tags, constant.union(evals)).list_metrics(MetricRole.EVAL)
        if others == evals or not all(is_constant(load_values(name)) for name in evals):
            return found
        constant.update(evals)


def recognize_roles(
    metrics: Iterable[str], tags: Mapping[str, str] = MappingProxyType({}), constant: Collection[str] = ()
) -> RecognizedRoles:
    """Infer the roles of `metrics` from their names. The tag `evalstop.preset` names the trainer, `evalstop.eval` the
    eval by which it chooses its best checkpoint. Of the metrics named `constant` one has a role only if no other metric
    is a candidate. The same metric on several eval sets is several evals, unless another metric comes before it.

    >>> found = recognize_roles(["eval_gsm8k_loss", "reward"])
    >>> found.roles["eval_gsm8k_loss"].direction, str(found.origins["eval_gsm8k_loss"]), str(found.origins["reward"])
    ('minimize', 'guessed', 'recognized')
    """
    names = sorted(set(metrics))
    trainers, warnings = select_trainers(names, tags)
    reasons: dict[str, str] = {}
    candidates: dict[MetricRole, list[Candidate]] = {}
    declared, cautions = _read_declared_eval(names, trainers, tags)
    warnings += cautions
    for candidate in [*declared, *read_metrics(names, trainers)]:
        if any(candidate.metric == other.metric and candidate is not other for other in declared):
            continue
        if candidate.meaning.role is not None:
            candidates.setdefault(candidate.meaning.role, []).append(candidate)
        else:
            reasons[candidate.metric] = f"no role: {candidate.meaning.reason}"
    roles: dict[str, Role] = {}
    origins: dict[str, RoleOrigin] = {}
    for role, rivals in candidates.items():
        best, *others = sorted(rivals, key=lambda item: (item.metric in constant and item not in declared, item.order))
        chosen = [best]
        if best.kind and role is MetricRole.EVAL:
            alike = [item for item in others if (item.kind, item.meaning) == (best.kind, best.meaning)]
            chosen = [best, *alike][:MOST_EVALS]
        of_several = f", on one of {len(chosen)} eval sets, whose mean is watched" if len(chosen) > 1 else ""
        for item in chosen:
            minimize = ROLES[role].minimized if item.meaning.minimize is None else item.meaning.minimize
            roles[item.metric] = Role(role, "minimize" if minimize else "maximize")
            origins[item.metric] = item.meaning.origin
            reasons[item.metric] = f"{role}: {item.meaning.reason}{of_several}"
        names_chosen = ", ".join(item.metric for item in chosen)
        if best.meaning.caution:
            warnings.append(best.meaning.caution.format(metric=names_chosen))
        if role is MetricRole.EVAL and best.meaning.origin is RoleOrigin.RECOGNIZED and best.meaning.minimize:
            # A loss may rise while the score that people care about still gets better.
            guessed = (
                item.metric
                for item in others
                if item.meaning.origin is RoleOrigin.GUESSED and not item.meaning.minimize
            )
            score = next((name for name in guessed if name not in constant), None)
            warnings += [PASSED_OVER.format(score=score, watched=names_chosen)] if score else []
        for other in (other for other in others if other.metric not in roles):
            preferred = f"no role: {names_chosen} is preferred as {role} ({other.meaning.reason})"
            reasons[other.metric] = CONSTANT if other.metric in constant else preferred
    if MetricRole.EVAL not in candidates:
        warnings.append(NO_EVAL)
    return RecognizedRoles(trainers[0].name if trainers else None, roles, origins, reasons, warnings)


def _read_declared_eval(
    names: Collection[str], trainers: Sequence[Trainer], tags: Mapping[str, str]
) -> tuple[list[Candidate], list[str]]:
    """The eval that the trainer declared, if it is among these names, and what contradicts it.

    The direction is that of the name, where the name has one: transformers maximizes a word error rate unless it is
    told otherwise. The training's own loss, and a loss that a known trainer's table calls meaningless, are no evals.
    """
    metric, direction = find_declared_eval(tags)
    name = next((name for name in sorted(names, key=lambda name: name != metric) if _plain(name) == _plain(metric)), "")
    known = _understand(name, {_plain(other) for other in names}, trainers) if name else None
    if not name or (known is not None and known.meaning.role in (None, MetricRole.LOSS) and "loss" in name):
        return [], []
    by_name = choose_direction(MetricRole.EVAL, name)
    contradiction = warn_of_direction(name, direction) if direction is not None else None
    minimize = (by_name if direction is None or contradiction else direction) == "minimize"
    meaning = Meaning(name, MetricRole.EVAL, DECLARED, -1, minimize, origin=RoleOrigin.DECLARED)
    return [Candidate(name, meaning, 0)], [] if contradiction is None else [contradiction]


def choose_direction(role: MetricRole, metric: str) -> Direction:
    """The direction of a metric whose role was given without one: KL, losses and errors by their words are minimized.

    >>> [choose_direction(MetricRole.EVAL, name) for name in ("gsm8k", "val_loss", "failure_rate", "neg_loss")]
    ['maximize', 'minimize', 'minimize', 'maximize']
    """
    if ROLES[role].minimized:
        return "minimize"
    for name in (metric, f"eval_{metric}"):
        found = recognize_roles([name])
        if found.origins.get(name) is RoleOrigin.RECOGNIZED and found.roles[name].role is MetricRole.EVAL:
            return found.roles[name].direction
    last_word = KNOWN_HELD_OUT.get("".join(split_words(metric)[-1:]))
    reading = read_words(metric, is_quality=True)
    if last_word is not None and (reading is None or not last_word.minimize):
        return "minimize" if last_word.minimize else "maximize"
    return "minimize" if reading is Reading.ERROR else "maximize"


def warn_of_direction(metric: str, direction: str) -> str | None:
    """A warning if the eval's declared direction contradicts its name; None if it does not.

    >>> warn_of_direction("eval_gsm8k", "maximize"), warn_of_direction("eval_wer", "minimize")
    (None, None)
    """
    is_error = choose_direction(MetricRole.EVAL, metric) == "minimize"
    if direction == "maximize" and is_error:
        better, name = "higher", "an error"
    elif direction == "minimize" and not is_error and read_words(metric) is Reading.SCORE:
        better, name = "lower", "a score"
    else:
        return None
    return f"{metric}: {better} is declared better, but by its name it is {name}: if so the worst checkpoint is kept."


def read_metrics(names: Collection[str], trainers: Sequence[Trainer]) -> list[Candidate]:
    """The meaning of each of a run's names, given the others; names without a meaning are omitted."""
    plain = {_plain(name) for name in names}
    understood = [_understand(name, plain, trainers) for name in names]
    candidates = [candidate for candidate in understood if candidate is not None]
    if any(candidate.meaning.role is MetricRole.PROXY for candidate in candidates):
        return [_doubt_loss(candidate) for candidate in candidates]
    return candidates


def _understand(name: str, names: Collection[str], trainers: Sequence[Trainer]) -> Candidate | None:
    """The meaning of this name, given the plain `names` of its run.

    1. Look them up in the table of the first trainer whose marks are present.
    2. As a known name of any trainer, in full.
    3. By its words, which is a guess.
    """
    plain = _plain(name)
    alone = _without_eval_set(plain, names)
    kind = alone if alone != plain else ""
    meanings = [meaning for trainer in trainers for meaning in trainer.meanings]
    for rank, meaning in enumerate(meanings):
        if fnmatchcase(alone, meaning.pattern):
            return Candidate(name, meaning, rank, kind or _behind_star(meaning.pattern, alone))
    rank = _BEHIND_TRAINERS
    if alone in KNOWN_NAMES:
        return Candidate(name, KNOWN_NAMES[alone], rank, kind)
    for meaning in GUESSES:
        if fnmatchcase(alone, meaning.pattern):
            return Candidate(name, meaning, rank + 1, kind)
    prefix = next((prefix for prefix in _HELD_OUT if alone.startswith(prefix)), None)
    if prefix is None:
        return None
    quantity = alone.removeprefix(prefix)
    # Read in its original case: lower case would lose camel case.
    written = _DATA_LOADER.sub("", _with_at(name))[-len(quantity) :] if quantity else ""
    if read_words(mean := written.removesuffix("_epoch")) is not None:  # as Lightning calls the mean of an epoch
        quantity, written = quantity.removesuffix("_epoch"), mean
    known = KNOWN_HELD_OUT.get(quantity)
    meaning = known or guess_held_out(written)
    if prefix in _TEST:  # choosing by the test data is for a person to confirm, and any other held-out data come first
        meaning = replace(meaning, rank=meaning.rank + _BEHIND_GUESSES, origin=RoleOrigin.GUESSED)
    if known:
        return Candidate(name, meaning, rank, kind)
    return Candidate(name, meaning, rank + 1, kind or _find_known_part(prefix, quantity))


def _without_eval_set(plain: str, names: Collection[str]) -> str:
    """The name without its eval set. transformers has the set in the middle, and logs a runtime for each; Lightning
    has the number of a data loader at the end.

    >>> _without_eval_set("eval_g0_loss", {"eval_g0_runtime"}), _without_eval_set("val_loss/dataloader_idx_1", ())
    ('eval_loss', 'val_loss')
    """
    ends = [at for at, letter in enumerate(plain) if letter == "_" and f"{plain[:at]}_runtime" in names]
    if ends and plain.startswith("eval_") and ends[-1] >= len("eval_"):
        return f"eval{plain[ends[-1] :]}"
    return _DATA_LOADER.sub("", plain)


_CAMEL_CASE = re.compile(r"^([Ee]val|[Vv]al|[Vv]alid|[Vv]alidation|[Dd]ev|[Tt]est)(?=[A-Z])")
_DATA_LOADER = re.compile(r"/dataloader_idx_\d+$")


def _behind_star(pattern: str, plain: str) -> str:
    """What follows the name of the data set, for which the first `*` of a trainer's pattern stands."""
    before, star, after = pattern.partition("*")
    return f"{before} {plain[plain.rfind(after.partition('*')[0]) :]}" if star else ""


def _find_known_part(prefix: str, quantity: str) -> str:
    """The known metric at the end of a guessed name, else at its beginning; the rest may be the name of an eval set.

    >>> _find_known_part("eval_", "squad_exact_match"), _find_known_part("val/", "wer/german")
    ('eval_exact_match', 'val/wer')
    """
    edges = [edge.span() for edge in re.finditer("[_/.-]", quantity)]
    parts = (*(quantity[end:] for _, end in edges), *(quantity[:start] for start, _ in reversed(edges)))
    return next((prefix + part for part in parts if part in KNOWN_HELD_OUT), "")


def _doubt_loss(candidate: Candidate) -> Candidate:
    """A generically named loss beside a reward is only a guess: there, `val_loss` may be that of an update."""
    if candidate.meaning not in _ANYONES_LOSSES:
        return candidate
    return replace(candidate, meaning=replace(candidate.meaning, origin=RoleOrigin.GUESSED))


_ANYONES_LOSSES = [meaning for meaning in KNOWN_HELD_OUT.values() if "loss" in meaning.pattern]


def select_trainers(
    names: Sequence[str], tags: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Trainer], list[str]]:
    """The trainers whose marks appear in these names, and a warning about an invalid tag."""
    tag = tags.get(PRESET_TAG)
    if tag is None:
        plain = [_plain(name) for name in names]
        return [trainer for trainer in TRAINERS if _any_fits(trainer.marks, plain)], []
    tagged = [trainer for trainer in TRAINERS if trainer.name == tag]
    if tagged:
        return tagged, []
    trainer_names = ", ".join(trainer.name for trainer in TRAINERS)
    warning = f"The tag {PRESET_TAG} names {tag!r:.80}, not one of {trainer_names}: the metrics are used instead."
    return select_trainers(names, {})[0], [warning]


def _plain(name: str) -> str:
    """The trainer's name for the metric, without its logger's changes."""
    plain = _CAMEL_CASE.sub(r"\1_", _with_at(name)).lower().removeprefix("train/")
    return f"eval_{plain.removeprefix('eval/')}" if plain.startswith("eval/") else plain


def _with_at(name: str) -> str:
    """MLflow does not allow `@` in names, so trainers write `_at_`."""
    return name.replace("_at_", "@")


def _any_fits(patterns: Iterable[str], names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

"""How long one iteration of RLHF takes, and how much GPU time it is billed for: serial, fused or serverless.

Sources     RLHFuse (arXiv 2409.13221): the long tail of generation moves together so that freed GPUs begin inference,
            and the bubbles of actor and critic fill each other. RLHFless (arXiv 2602.22718): actors sized by predicted
            lengths, prefixes shared, each actor billed until its own end.
Departs     Two models of each, never to be mixed. The mechanism model counts what the mechanism saves in an iteration
            of drawn response lengths, and nothing else: no kernels, no network, no memory traffic, no starting of
            actors. Its figures are not the papers', which compare whole systems: it saves far less time than either
            paper, and more GPU time than RLHFless, because here actors start for nothing. The published model is the
            papers' ratio, taken as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from evalstop_lab.simulator.jobs import Floats


@dataclass(frozen=True)
class Iteration:
    """What is done in one iteration, and how fast; the numbers are of the order of a 7B policy on 8 GPUs.

    An engine has memory for `most_sequences` at once. Decoding takes `step_ms` a token plus `sequence_ms` for every
    sequence that an engine decodes at once. `bubble` is the share of training in which a pipeline stands still;
    `predicted_sd` the error of predicted lengths, of the logarithm; `cost_weight` says how much a share of GPU time is
    worth against the same share of time when the number of actors is chosen.
    """

    prompts: int = 64
    samples_a_prompt: int = 8
    engines: int = 8
    most_sequences: int = 64
    median_tokens: float = 500.0
    length_sd: float = 0.8
    longest: int = 4096
    prompt_tokens: int = 400
    step_ms: float = 20.0
    sequence_ms: float = 0.05
    prefill_ms: float = 0.02
    inference_ms: float = 0.04
    training_ms: float = 0.12
    bubble: float = 0.25
    predicted_sd: float = 0.3
    cost_weight: float = 1.0


@dataclass(frozen=True)
class Factor:
    """Time and billed GPU time of an iteration, serial execution being 1."""

    time: float
    gpu_time: float


PUBLISHED: Mapping[str, Factor] = {
    "serial": Factor(1.0, 1.0),
    "fused": Factor(1 / 3.7, 1 / 3.7),
    "serverless": Factor(1 / 1.35, 1 - 0.448),
}
"""The papers' best ratios over their own baselines, which are not each other's."""


def mechanism(iteration: Iteration, seed: int = 0, rounds: int = 20) -> dict[str, Factor]:
    """What each mechanism saves, over iterations with drawn response lengths."""
    rng = np.random.default_rng(seed)
    totals = {name: np.zeros(2) for name in _MODELS}
    for _ in range(rounds):
        lengths = _lengths(iteration, rng)
        predicted = lengths * np.exp(iteration.predicted_sd * rng.standard_normal(len(lengths)))
        for name, model in _MODELS.items():
            totals[name] += model(iteration, lengths, predicted)
    serial = totals["serial"]
    return {name: Factor(*(float(part) for part in total / serial)) for name, total in totals.items()}


def _lengths(iteration: Iteration, rng: np.random.Generator) -> Floats:
    count = iteration.prompts * iteration.samples_a_prompt
    drawn = iteration.median_tokens * np.exp(iteration.length_sd * rng.standard_normal(count))
    return np.clip(drawn, 1, iteration.longest)


def _serial(iteration: Iteration, lengths: Floats, predicted: Floats) -> tuple[float, float]:
    """Every GPU waits for the longest response, then for inference, then for training with its bubbles."""
    shares = [lengths[engine :: iteration.engines] for engine in range(iteration.engines)]
    generation = max(_decoding(iteration, share) for share in shares) + _prefill(iteration, len(lengths))
    time = generation + _inference(iteration, lengths) / iteration.engines + _training(iteration, lengths, bubbles=True)
    return time, time * iteration.engines


def _fused(iteration: Iteration, lengths: Floats, predicted: Floats) -> tuple[float, float]:
    """When few responses are left they move to one engine, and the others begin inference; the best moment is taken."""
    ordered, engines = np.sort(lengths), iteration.engines
    inference = _inference(iteration, lengths)
    best = math.inf
    for left in range(1, iteration.most_sequences + 1):
        moment = ordered[-left - 1]
        before = iteration.step_ms * moment + iteration.sequence_ms * np.minimum(ordered, moment).sum() / engines
        tail = _decoding(iteration, ordered[-left:] - moment)
        done = min(inference, tail * (engines - 1))
        best = min(best, float(before + tail + (inference - done) / engines))
    time = best + _prefill(iteration, len(lengths)) + _training(iteration, lengths, bubbles=False)
    return time, time * engines


def _serverless(iteration: Iteration, lengths: Floats, predicted: Floats) -> tuple[float, float]:
    """Responses of like predicted length share an actor, which is billed until its own end; as many actors as pay."""
    order = np.argsort(predicted)
    prefill = _prefill(iteration, len(lengths)) / iteration.samples_a_prompt
    found = []
    for actors in range(math.ceil(len(lengths) / iteration.most_sequences), 4 * iteration.engines + 1):
        times = [_decoding(iteration, lengths[share]) for share in np.array_split(order, actors)]
        found.append((max(times) + prefill, sum(times) + prefill * iteration.engines))
    least_time, least_cost = (min(item[part] for item in found) for part in (0, 1))
    generation, billed = min(
        found, key=lambda item: item[0] / least_time + iteration.cost_weight * item[1] / least_cost
    )
    inference = _inference(iteration, lengths)
    training = _training(iteration, lengths, bubbles=True)
    return generation + inference / iteration.engines + training, billed + inference + training * iteration.engines


def _decoding(iteration: Iteration, lengths: Floats) -> float:
    """One engine decodes its responses together, and each leaves the batch at its end."""
    return float(iteration.step_ms * lengths.max() + iteration.sequence_ms * lengths.sum())


def _prefill(iteration: Iteration, samples: int) -> float:
    return iteration.prefill_ms * iteration.prompt_tokens * samples / iteration.engines


def _inference(iteration: Iteration, lengths: Floats) -> float:
    """On one engine: reward, reference and critic look at every token once."""
    return float(iteration.inference_ms * (lengths + iteration.prompt_tokens).sum())


def _training(iteration: Iteration, lengths: Floats, bubbles: bool) -> float:
    """On all engines."""
    work = float(iteration.training_ms * (lengths + iteration.prompt_tokens).sum()) / iteration.engines
    return work / (1 - iteration.bubble) if bubbles else work


_MODELS: Mapping[str, Callable[[Iteration, Floats, Floats], tuple[float, float]]] = {
    "serial": _serial,
    "fused": _fused,
    "serverless": _serverless,
}

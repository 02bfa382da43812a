"""The time and the billed GPU time of one iteration of RLHF: serial, fused or serverless execution.

Sources     RLHFuse (arXiv 2409.13221): the last, long responses are moved to one engine so that the other GPUs start
            inference, and actor and critic fill each other's pipeline bubbles. RLHFless (arXiv 2602.22718): actors
            sized by predicted lengths, shared prefixes, each actor billed until its own end.
Departs     There are two models of each, which must not be mixed. The mechanism model simulates only the mechanism, on
            iterations with drawn response lengths, without kernels, network, memory traffic or the start of actors.
            The papers compare whole systems, so its figures differ: it saves far less time than either paper, and more
            GPU time than RLHFless, because starting an actor is free. The published model uses the papers' ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from evalstop_lab.simulator.jobs import Floats


@dataclass(frozen=True)
class Iteration:
    """The work and speed of one iteration; the defaults are typical of a 7B policy on 8 GPUs.

    `most_sequences`: the batch size for which an engine has memory. `step_ms`: decoding time per token, plus
    `sequence_ms` per sequence in the batch. `bubble`: the share of training in which a pipeline is idle.
    `predicted_sd`: the standard deviation of the logarithmic error of predicted lengths. `cost_weight`: the weight of
    GPU time relative to time when the number of actors is chosen.
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
    """Time and billed GPU time of an iteration, relative to serial execution."""

    time: float
    gpu_time: float


PUBLISHED: Mapping[str, Factor] = {
    "serial": Factor(1.0, 1.0),
    "fused": Factor(1 / 3.7, 1 / 3.7),
    "serverless": Factor(1 / 1.35, 1 - 0.448),
}
"""The papers' best ratios, each relative to the paper's own baseline."""


def simulate_mechanisms(iteration: Iteration, seed: int = 0, rounds: int = 20) -> dict[str, Factor]:
    """Simulate each mechanism over iterations with drawn response lengths."""
    rng = np.random.default_rng(seed)
    totals = {name: np.zeros(2) for name in _MODELS}
    for _ in range(rounds):
        lengths = _draw_lengths(iteration, rng)
        predicted = lengths * np.exp(iteration.predicted_sd * rng.standard_normal(len(lengths)))
        for name, model in _MODELS.items():
            totals[name] += model(iteration, lengths, predicted)
    serial = totals["serial"]
    return {name: Factor(*(float(part) for part in total / serial)) for name, total in totals.items()}


def _draw_lengths(iteration: Iteration, rng: np.random.Generator) -> Floats:
    count = iteration.prompts * iteration.samples_a_prompt
    drawn = iteration.median_tokens * np.exp(iteration.length_sd * rng.standard_normal(count))
    return np.clip(drawn, 1, iteration.longest)


def _simulate_serial(iteration: Iteration, lengths: Floats, predicted: Floats) -> tuple[float, float]:
    """All GPUs wait for the longest response, then do inference, then training with bubbles."""
    shares = [lengths[engine :: iteration.engines] for engine in range(iteration.engines)]
    generation = max(_compute_decoding(iteration, share) for share in shares) + _compute_prefill(
        iteration, len(lengths)
    )
    time = (
        generation
        + _compute_inference(iteration, lengths) / iteration.engines
        + _compute_training(iteration, lengths, bubbles=True)
    )
    return time, time * iteration.engines


def _simulate_fused(iteration: Iteration, lengths: Floats, predicted: Floats) -> tuple[float, float]:
    """The last responses move to one engine while the others start inference, at the best possible time."""
    ordered, engines = np.sort(lengths), iteration.engines
    inference = _compute_inference(iteration, lengths)
    best = math.inf
    for sequences_left in range(1, iteration.most_sequences + 1):
        moment = ordered[-sequences_left - 1]
        before = iteration.step_ms * moment + iteration.sequence_ms * np.minimum(ordered, moment).sum() / engines
        tail = _compute_decoding(iteration, ordered[-sequences_left:] - moment)
        done = min(inference, tail * (engines - 1))
        best = min(best, float(before + tail + (inference - done) / engines))
    time = best + _compute_prefill(iteration, len(lengths)) + _compute_training(iteration, lengths, bubbles=False)
    return time, time * engines


def _simulate_serverless(iteration: Iteration, lengths: Floats, predicted: Floats) -> tuple[float, float]:
    """Responses of similar predicted length share an actor, billed until its end; the number of actors is optimized."""
    order = np.argsort(predicted)
    prefill = _compute_prefill(iteration, len(lengths)) / iteration.samples_a_prompt
    candidates = []
    for actors in range(math.ceil(len(lengths) / iteration.most_sequences), 4 * iteration.engines + 1):
        times = [_compute_decoding(iteration, lengths[share]) for share in np.array_split(order, actors)]
        candidates.append((max(times) + prefill, sum(times) + prefill * iteration.engines))
    least_time, least_cost = (min(item[part] for item in candidates) for part in (0, 1))
    generation, billed = min(
        candidates, key=lambda item: item[0] / least_time + iteration.cost_weight * item[1] / least_cost
    )
    inference = _compute_inference(iteration, lengths)
    training = _compute_training(iteration, lengths, bubbles=True)
    return generation + inference / iteration.engines + training, billed + inference + training * iteration.engines


def _compute_decoding(iteration: Iteration, lengths: Floats) -> float:
    """One engine decodes its responses in one batch, which each response leaves at its end."""
    return float(iteration.step_ms * lengths.max() + iteration.sequence_ms * lengths.sum())


def _compute_prefill(iteration: Iteration, samples: int) -> float:
    return iteration.prefill_ms * iteration.prompt_tokens * samples / iteration.engines


def _compute_inference(iteration: Iteration, lengths: Floats) -> float:
    """On one engine: reward, reference and critic process every token once."""
    return float(iteration.inference_ms * (lengths + iteration.prompt_tokens).sum())


def _compute_training(iteration: Iteration, lengths: Floats, bubbles: bool) -> float:
    """On all engines."""
    work = float(iteration.training_ms * (lengths + iteration.prompt_tokens).sum()) / iteration.engines
    return work / (1 - iteration.bubble) if bubbles else work


_MODELS: Mapping[str, Callable[[Iteration, Floats, Floats], tuple[float, float]]] = {
    "serial": _simulate_serial,
    "fused": _simulate_fused,
    "serverless": _simulate_serverless,
}

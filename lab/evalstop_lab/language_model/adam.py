"""Adam with a learning rate for each run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS, EPSILON = (0.9, 0.95), 1e-8


class Adam:
    """Adam (1412.6980) on float32 copies of parameters, the first axis of which is the run.

    `learning_rates` has one value for each run. A run's steps do not depend on the other runs.
    """

    def __init__(self, parameters: Sequence[Tensor], learning_rates: Tensor) -> None:
        self.parameters, self.learning_rates, self.steps = parameters, learning_rates, 0
        self.exact = [parameter.detach().float().clone() for parameter in parameters]
        self.means = [torch.zeros_like(exact) for exact in self.exact]
        self.squares = [torch.zeros_like(exact) for exact in self.exact]

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients, and clear these."""
        self.steps += 1
        scale = (1 - BETAS[1] ** self.steps) ** 0.5 / (1 - BETAS[0] ** self.steps)
        states = zip(self.parameters, self.exact, self.means, self.squares, strict=True)
        for parameter, exact, mean, square in states:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            rates = self.learning_rates.view(-1, *[1] * (exact.dim() - 1))
            exact.sub_(rates * scale * mean / (square.sqrt() + EPSILON))
            parameter.copy_(exact)
            parameter.grad = None

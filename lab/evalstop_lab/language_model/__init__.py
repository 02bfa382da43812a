"""RLHF of a language model, many runs at a time on one GPU: SmolLM2-135M-Instruct learns to find fault.

The initial model praises whatever it reviews. Each run trains low-rank changes of it by policy gradient, against a
reward model of its own: the same network, fitted to noisy comparisons of the initial model's texts. The score of a
review is how critical it is, minus penalties for improbable text and for repetition. The comparisons contain little of
either, so a policy that is optimized for long moves to text that its reward model likes and nobody else would.
"""

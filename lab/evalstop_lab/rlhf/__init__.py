"""An example of RLHF as in Gao et al. (arXiv 2210.10760) that runs on one core in a minute.

A fixed gold reward labels comparisons, a proxy with less capacity is fitted to them, a policy is trained against the
proxy, and gold is measured during training. No curve is computed from a formula.
"""

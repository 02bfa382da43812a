"""Metric names of known trainers and libraries, recognized whoever else writes them too.

Held-out names are listed without their prefix: `val_accuracy`, `val/accuracy` and `eval_accuracy` are
`accuracy` on held-out data. Sources, each the code of the library:

- Keras 3 (`val_` and the `name` of a loss or metric, its `_direction`);
- transformers' Trainer and the metrics of its PyTorch examples; TRL 1.16; Axolotl 0.12; LLaMA-Factory 0.9;
- the documentation of Lightning 2 (`val_loss`, `val_acc`, `val_loss_epoch`); timm (`eval_top1`); nanoGPT, torchtune
  (`val_loss`); nanochat (`val/bpb`); OpenRLHF's reward model (`acc_mean`);
- the registered metrics of lm-evaluation-harness (`lm_eval/api/metrics.py`) and MLflow's evaluation.
"""

from __future__ import annotations

from evalstop_detectors.roles.meanings import OBJECTIVE, Meaning, eval_error, eval_score, kl, loss, proxy

_LOSSES = "loss loss_epoch"

_ERRORS = (
    "perplexity ppl bpb wer cer mse mae nll_loss mean_squared_error mean_absolute_error"
    " mean_absolute_percentage_error mean_squared_logarithmic_error root_mean_squared_error binary_crossentropy"
    " categorical_crossentropy sparse_categorical_crossentropy hinge squared_hinge categorical_hinge poisson logcosh"
    " word_perplexity byte_perplexity bits_per_byte brier_score log_loss max_error"
)
_SCORES = (
    "accuracy acc acc_mean top1 top5 auc f1 f1_score fbeta_score precision recall exact_match mean_iou r2_score map"
    " binary_accuracy categorical_accuracy sparse_categorical_accuracy top_k_categorical_accuracy"
    " sparse_top_k_categorical_accuracy cosine_similarity pearson_correlation concordance_correlation"
    " rouge1 rouge2 rougel rougelsum bleu matthews_correlation pearson spearmanr mean_token_accuracy"
    " acc_norm mcc chrf accuracy_score precision_score recall_score roc_auc"
)

_NAMED_SO = "named so"

KNOWN_NAMES: dict[str, Meaning] = {
    meaning.pattern: meaning
    for meaning in (
        *(eval_score(name, _NAMED_SO) for name in ("eval", "gold", "reward/gold", "gold_reward")),
        *(proxy(name, _NAMED_SO) for name in ("proxy", "reward/proxy", "rewards/proxy", "proxy_reward")),
        kl("kl", _NAMED_SO),
        kl("objective/kl", "KL to the initial policy, as TRL's PPO has it"),
        proxy("reward", "the reward that is optimized, judging by its name", rank=1),
        proxy("objective/scores", "the score of the reward model, as TRL's PPO has it", rank=1),
        *(loss(name) for name in ("loss", "train_loss", "train_loss_epoch", "loss_epoch", "train_loss_step")),
    )
}
"""By the whole name, as `recognition` compares it: in lower case, without `train/`."""

_TOKEN_BY_TOKEN = {"mean_token_accuracy": 3}

KNOWN_HELD_OUT: dict[str, Meaning] = {
    meaning.pattern: meaning
    for meaning in (
        *(eval_score(name, "a score on held-out data", _TOKEN_BY_TOKEN.get(name, 0)) for name in _SCORES.split()),
        *(eval_error(name, "an error on held-out data", rank=1) for name in _ERRORS.split()),
        *(eval_error(name, OBJECTIVE) for name in _LOSSES.split()),
    )
}
"""By the part after `eval_`, `val_`, `validation/` and similar prefixes."""

"""The meaning of a held-out metric by the words of its name. Always a guess, even for plain words.

Words are separated by `_ / - . @ :` and similar characters, or by camel case, and compared with and without
trailing digits: `val/MeanSquaredError`, `eval_mse`, `eval-rouge1`. A name that ends in `loss` or `per` is an error.
Otherwise the first of these that matches counts:

1. bookkeeping: runtimes, counts, lengths, step sizes, KL and other statistics are not a quality of the model;
2. losses and errors, whatever they are of: `eval_gsm8k_loss`, `eval_math_ppl`, `eval_toxicity_score`;
3. scores and benchmarks: `eval_gsm8k`, `val_accuracy`.

Below are the metric names of known trainers and libraries, recognized whoever else writes them too. Held-out names are
listed without their prefix: `val_accuracy`, `val/accuracy` and `eval_accuracy` are `accuracy` on held-out data. Sources
are the code of each library:

- Keras 3 (`val_` and the `name` of a loss or metric, its `_direction`);
- transformers' Trainer and the metrics of its PyTorch examples; TRL 1.16; Axolotl 0.12; LLaMA-Factory 0.9;
- the documentation of Lightning 2 (`val_loss`, `val_acc`, `val_loss_epoch`); timm (`eval_top1`); nanoGPT, torchtune
  (`val_loss`); nanochat (`val/bpb`); OpenRLHF's reward model (`acc_mean`);
- the registered metrics of lm-evaluation-harness (`lm_eval/api/metrics.py`) and MLflow's evaluation.
"""

from __future__ import annotations

import re
from enum import StrEnum
from itertools import pairwise

from evalstop_detectors.observation import ROLES, MetricRole
from evalstop_detectors.roles.meanings import (
    LAST_UPDATE,
    OBJECTIVE,
    SAMPLER,
    STILL_PROXY,
    SUBTRACTED,
    Meaning,
    RoleOrigin,
    eval_error,
    eval_score,
    kl,
    loss,
    no_role,
    proxy,
)

_GUESSED = RoleOrigin.GUESSED

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_EDGE = re.compile(r"[^A-Za-z0-9]+")

_BOOKKEEPING_WORDS = (
    "runtime epoch epochs kl lr mfu flops memory second seconds duration latency throughput fps time timing "
    "samples sample instances count counts total num number tokens token length lengths len size batch step steps "
    "iteration iterations entropy std stderr stdev variance var threshold thresh ratio clip clipped clipfrac "
    "clipping truncated logits logit logps logp grad gradient norm norms scale coef coefficient advantages "
    "advantage returns values value reward rewards margin margins chosen rejected temperature finish turns support mem "
    "allocated reserved elapsed"
)
_ERROR_WORDS = (
    "loss losses error errors err ppl perplexity nll nloglik nllh crossentropy xent ce bce logloss mlogloss "
    "merror bpb bpc bits wer cer ter mer wil mse rmse msle rmsle mae mape smape wmape mase mad rse nrmse "
    "deviance brier ece mce calibration hinge hamming huber logcosh poisson distance lpips fid kid fvd fad "
    "toxicity toxic hallucination hallucinations hallucinated violation violations inaccuracy unsafe harmful "
    "harmfulness harm bias biased stereotype invalid failure failures failed failing regret cost penalty miss "
    "misses fallout fall difference divergence disparity distortion leakage jailbreak asr forgetting surprisal "
    "nmse rmsd crps emd wasserstein eer fpr fnr fdr latency der ser ned ade fde epe mcd hausdorff hd levenshtein "
    "chamfer silog wape medae collision collisions mpjpe dcf l1 l2 sad"
)
_SCORE_WORDS = (
    "gold accuracy accuracies acc win winrate pass exact match em score scores f fscore fbeta mf precision recall "
    "specificity sensitivity auc auroc roc aucpr auprc ap map mar ndcg dcg mrr mcc matthews kappa iou miou giou "
    "dice jaccard bleu ibleu sacrebleu rouge chrf meteor bleurt bertscore comet sari mauve cider spice pearson "
    "wip pearsonr spearman spearmanr correlation corrcoef concordance psnr ssim snr sdr stoi pesq top hit hits "
    "success solved solve correct correctness faithfulness faithful groundedness relevance relevancy similarity "
    "quality helpfulness helpful honesty rating elo logprob likelihood explained avg maj consistency coherence "
    "gsm mmlu aime humaneval mbpp ifeval gpqa hellaswag truthfulqa mt arena alpaca livecodebench math arc bbh "
    "winogrande piqa boolq drop triviaqa squad glue superglue swe mteb"
)
_AGAINST_ERROR_WORDS = "free recovery avoidance reduction resistance robustness detection correction savings"
_BOOKKEEPING, _ERRORS, _SCORES, _AGAINST_ERRORS = (
    frozenset(words.split()) for words in (_BOOKKEEPING_WORDS, _ERROR_WORDS, _SCORE_WORDS, _AGAINST_ERROR_WORDS)
)
_PAIRS = {
    ("cross", "entropy"): True,
    ("learning", "rate"): None,
    **{("per", word): None for word in ("second", "sec")},
    **{("predicted", word): None for word in ("positive", "negative")},
    ("edit", "similarity"): False,
    ("levenshtein", "similarity"): False,
    ("levenshtein", "ratio"): False,
    **dict.fromkeys((("error", "rate"), ("cer", "norm"), ("wer", "norm"), ("abs", "rel")), True),
    ("sq", "rel"): True,
    ("median", "ae"): True,
    ("fall", "out"): True,
    ("flesch", "kincaid"): True,
    ("grade", "level"): True,
    ("inception", "distance"): True,
    ("perceptual", "image"): True,
    **{("true", word): False for word in ("positive", "positives", "negative", "negatives")},
    **{("false", word): True for word in ("positive", "positives", "negative", "negatives")},
    ("log", "loss"): True,
    ("noise", "sensitivity"): True,
    **{(word, end): False for word in ("corr", "dice") for end in ("coef", "coefficient")},
    **{("token", word): False for word in ("accuracy", "acc", "f1")},
    **{("f1", word): False for word in ("sample", "samples")},
    ("explained", "variance"): False,
    ("absolute", "value"): True,
}
"""Pairs of words with another meaning together: an error (True), a score (False), bookkeeping (None)."""


class Reading(StrEnum):
    """The reading of a name: `score` is better when higher, `error` when lower; `other` is neither."""

    SCORE = "score"
    ERROR = "error"
    OTHER = "other"


def split_words(name: str) -> list[str]:
    """The words of a name, in lower case.

    >>> split_words("val/MeanSquaredError"), split_words("eval_math-500.accuracy@4")
    (['val', 'mean', 'squared', 'error'], ['eval', 'math', '500', 'accuracy', '4'])
    """
    return [word.lower() for part in _EDGE.split(name) for word in _HUMP.split(part) if word]


def read_words(name: str, *, is_quality: bool = False) -> Reading | None:
    """The reading of a name by its words; None when none of them is known.

    `is_quality`: the metric is known to be a quality of the model, so words of bookkeeping do not count.

    >>> [str(read_words(name)) for name in ("gsm8k_loss", "error_rate", "gsm8k", "gsm8k_runtime")]
    ['error', 'error', 'score', 'other']
    """
    words = split_words(name)
    forms = {form for word in words for form in (word, word.rstrip("0123456789"))}
    together = [_PAIRS[pair] for pair in pairwise(words) if pair in _PAIRS]
    if "neg" in forms or any(_is_against_error(*pair) for pair in pairwise(words)):  # as scikit-learn's negated error
        return Reading.SCORE
    if words[-1:] in (["loss"], ["per"]):  # at the end of a name PER is the phoneme error rate
        return Reading.ERROR
    bookkeeping = [] if is_quality else [(None, _BOOKKEEPING, Reading.OTHER)]
    readings = [*bookkeeping, (True, _ERRORS, Reading.ERROR), (False, _SCORES, Reading.SCORE)]
    for meaning, _, reading in readings:
        if meaning in together:
            return reading
    for _, vocabulary, reading in readings:
        if forms & vocabulary:
            return reading
    return Reading.SCORE if any(re.match(r"gsm\d", word) for word in words) else None


def _is_against_error(word: str, following: str) -> bool:
    """Whether two words are the absence or the mending of an error: `error_free`, `non_toxicity`."""
    return (word in _ERRORS and following in _AGAINST_ERRORS) or (
        word in ("non", "anti", "minus") and following in _ERRORS
    )


_KNOWN_ERRORS = (
    "perplexity ppl bpb wer cer mse mae nll_loss mean_squared_error mean_absolute_error"
    " mean_absolute_percentage_error mean_squared_logarithmic_error root_mean_squared_error binary_crossentropy"
    " categorical_crossentropy sparse_categorical_crossentropy hinge squared_hinge categorical_hinge poisson logcosh"
    " word_perplexity byte_perplexity bits_per_byte brier_score log_loss max_error rmse wer_ortho normalized_wer"
    " false_positive_rate false_negative_rate hausdorff hausdorff_distance hd95 levenshtein edit_distance abs_rel"
    " sq_rel silog wape median_ae chamfer_distance"
)
_KNOWN_SCORES = (
    "accuracy acc acc_mean top1 top5 auc fbeta_score precision recall exact_match mean_iou r2_score map"
    " binary_accuracy categorical_accuracy sparse_categorical_accuracy top_k_categorical_accuracy"
    " sparse_top_k_categorical_accuracy cosine_similarity pearson_correlation concordance_correlation"
    " rouge1 rouge2 rougel rougelsum bleu matthews_correlation pearson spearmanr"
    " acc_norm mcc chrf accuracy_score precision_score recall_score roc_auc exact em balanced_accuracy"
    " overall_accuracy overall_precision overall_recall sacrebleu meteor miou iou dice dice_score auroc mrr ndcg"
)
_KNOWN_F1 = "f1 f1_score bertscore_f1 " + " ".join(
    form for kind in ("macro", "micro", "weighted", "overall", "samples") for form in (f"f1_{kind}", f"{kind}_f1")
)

PREFERRED = frozenset((*_KNOWN_F1.split(), "wer"))
"""Among equals these come first: F1 before accuracy, which a constant answer can reach, and the WER before the CER."""

_NAMED_SO = "named so"
_NAMES_OF_EVALS = "eval gold reward/gold gold_reward gold_acc gold_accuracy"

# As TRL (PPO; GRPO, now and earlier), verl, OpenRLHF and NeMo-RL call them.
_HINT_NAMES = {
    MetricRole.ENTROPY: "entropy objective/entropy actor/entropy approx_entropy",
    MetricRole.LENGTH: "completions/mean_length completion_length response_length/mean response_length"
    " mean_gen_tokens_per_sample",
    MetricRole.TRUNCATED: "completions/clipped_ratio response_length/clip_ratio truncation_rate",
    MetricRole.GRADIENT_NORM: "grad_norm actor/grad_norm optim/grad_norm",
}

KNOWN_NAMES: dict[str, Meaning] = {
    meaning.pattern: meaning
    for meaning in (
        *(eval_score(name, _NAMED_SO) for name in _NAMES_OF_EVALS.split()),
        *(proxy(name, _NAMED_SO) for name in ("proxy", "reward/proxy", "rewards/proxy", "proxy_reward")),
        kl("kl", _NAMED_SO),
        kl("objective/kl", "KL to the initial policy, as TRL's PPO has it"),
        *(Meaning(name, role, ROLES[role].meaning) for role, names in _HINT_NAMES.items() for name in names.split()),
        proxy("reward", "the reward that is optimized, judging by its name", rank=1),
        proxy("objective/scores", "the score of the reward model, as TRL's PPO has it", rank=1),
        *(loss(name) for name in ("loss", "train_loss", "train_loss_epoch", "loss_epoch", "train_loss_step")),
    )
}
"""By the whole name, as `recognition` compares it: in lower case, without `train/`."""

LEARNING_RATES = (
    *("learning_rate", "train/learning_rate", "lr", "train/lr", "actor/lr", "train/actor_lr", "optim/lr"),
    *("charts/learning_rate", "lr-Adam", "lr-AdamW", "lr-SGD", "lr/pg0"),
)
"""The learning rate, as transformers, SB3, torchtune, verl, OpenRLHF, prime-rl, CleanRL, Lightning and Ultralytics call
it, in order of preference. Not a role of a run: whoever logs it under such a name is understood."""

KNOWN_HELD_OUT: dict[str, Meaning] = {
    meaning.pattern: meaning
    for meaning in (
        *(eval_score(name, "a score on held-out data") for name in f"{_KNOWN_F1} {_KNOWN_SCORES}".split()),
        eval_score("mean_token_accuracy", "a score on held-out data, token by token", rank=3),
        # The phoneme error rate, and an English word.
        eval_error("per", "an error on held-out data, judging by its name", rank=1, origin=_GUESSED),
        *(eval_error(name, "an error on held-out data", rank=1) for name in _KNOWN_ERRORS.split()),
        eval_error("loss", OBJECTIVE),
    )
}
"""By the part after `eval_`, `val_`, `validation/` and similar prefixes."""

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
    eval_score("pass@*", "the share of solved problems, judging by its name", origin=_GUESSED),
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
UNKNOWN = eval_score("", "held-out, judging by its name", rank=4, caution=_CAUTION, origin=_GUESSED)
_UPDATE = no_role("", "the loss of an update: its level means nothing")
_NO_QUALITY = no_role("", "not a quality of the model, judging by its name")


def guess_held_out(quantity: str) -> Meaning:
    """The meaning of a metric on held-out data, by the words of its name without the prefix."""
    name_words = set(split_words(quantity))
    match read_words(quantity):
        case Reading.OTHER:
            return _NO_QUALITY
        case Reading.ERROR if "loss" in name_words:
            return _UPDATE if name_words & _OF_THE_UPDATE else _LOSS
        case Reading.ERROR:
            return _ERROR
        case Reading.SCORE:
            return _SCORE
    return UNKNOWN

"""The meanings of metrics of trainers that fit a model to data.

Sources: the trainers' own code as of LLaMA-Factory 0.9, Axolotl 0.12, transformers 5 (a dict of eval sets gives each
its `eval_<name>_loss` and `eval_<name>_runtime`), sentence-transformers 5, Ultralytics 8.3, nanochat, LLM Foundry
0.22, prime-rl 0.3 and Megatron-LM 0.14. Patterns are written as in `reinforcement`.
"""

from __future__ import annotations

from evalstop_detectors.roles.meanings import OBJECTIVE, Trainer, eval_error, eval_score, loss, no_role, proxy

SUPERVISED = (
    Trainer(
        "llama-factory",  # its trainer_log.jsonl; its other logs have the names of transformers and TRL
        ("current_steps", "percentage", "elapsed_time", "remaining_time"),
        (
            proxy("reward", "the score of the reward model"),
            no_role("accuracy", "the share of training pairs ranked correctly: not a held-out score"),
            no_role("predict_*", "logged once, after the training"),
            eval_score("eval_rouge-?", "a score of generated text on held-out data"),
            eval_score("eval_bleu-4", "a score of generated text on held-out data"),
        ),
    ),
    Trainer(
        "axolotl",
        ("memory/max_*", "memory/device_*", "tokens_per_second_per_gpu", "tokens/train_per_sec_per_gpu"),
        (no_role("ppl", "the perplexity of the training data"), eval_error("eval_ppl", rank=3)),
    ),
    Trainer(
        "transformers",
        (
            "eval_runtime",
            "eval_*_runtime",
            "eval_*_samples_per_second",
            "train_runtime",
            "eval_samples_per_second",
            "eval_steps_per_second",
            "eval_mean_token_accuracy",
        ),
        (
            no_role("train_loss", "logged once, at the end of the training"),
            eval_error("eval_loss"),
            eval_error("eval_*_loss", OBJECTIVE + ", of one of several sets", beside="eval_*_runtime"),
            eval_score("eval_mean_token_accuracy", OBJECTIVE + ", token by token", rank=3),
        ),
    ),
    Trainer(
        "sentence-transformers",
        ("eval_*cosine_accuracy_threshold", "eval_*_spearman_cosine", "eval_*cosine_ndcg@*"),
        (
            no_role("eval_*_threshold", "a threshold"),
            eval_score("eval_*_spearman_cosine", "the correlation of similarities on held-out pairs"),
            eval_score("eval_*cosine_ndcg@*", "ranking of held-out queries"),
            eval_score("eval_*cosine_accuracy", "the share of held-out pairs ranked correctly"),
        ),
    ),
    Trainer(
        "ultralytics",
        ("metrics/map50-95(?)", "metrics/accuracy_top1"),
        (
            eval_score("metrics/map50-95(b)", "mean average precision on the validation set"),
            eval_score("metrics/map50-95(?)", "mean average precision on the validation set", rank=1),
            eval_score("metrics/accuracy_top1", "the accuracy on the validation set"),
            eval_score("metrics/accuracy_top5", "the accuracy on the validation set", rank=1),
            eval_score("metrics/map50(?)", "mean average precision on the validation set", rank=2),
            eval_score("metrics/precision(?)", "on the validation set", rank=3),
            eval_score("metrics/recall(?)", "on the validation set", rank=3),
            eval_error("val/*_loss", "a part of the training objective on held-out data", rank=4),
        ),
    ),
    Trainer(
        "nanochat",
        ("total_training_flops", "lrm"),
        (
            eval_score("core_metric", "the mean over the tasks of CORE"),
            eval_error("val/bpb", "bits per byte on held-out text"),
            loss("loss"),
        ),
    ),
    Trainer(
        "llm-foundry",
        ("loss/train/total", "metrics/train/*", "metrics/eval/language*", "metrics/eval/incontext*"),
        (
            eval_score("metrics/eval/incontextlearning*accuracy", "a score of in-context tasks"),
            eval_error("metrics/eval/*calibrationerror", "the calibration on in-context tasks", rank=3),
            eval_error("metrics/eval/*languagecrossentropy"),
            eval_error("metrics/eval/*languageperplexity", rank=3),
            loss("loss/train/total"),
        ),
    ),
    Trainer(
        "prime-rl",
        ("mismatch_kl/*", "progress/total_tokens", "loss/nan_count"),
        (
            proxy("reward/mean", "the reward that is optimized"),
            eval_error("val/loss"),
            eval_error("val/perplexity", rank=3),
            no_role("mismatch_kl/*", "how far the sampler and the trainer disagree, not KL to the initial policy"),
            loss("loss/mean"),
        ),
    ),
    Trainer(
        "megatron",
        ("lm loss", "params-norm", "num-zeros"),
        (eval_error("lm loss validation"), eval_error("lm loss validation ppl", rank=3), loss("lm loss")),
    ),
)

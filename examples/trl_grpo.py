"""TRL's GRPO, watched while it learns to cheat: `python examples/trl_grpo.py`.

The reward counts one word, which is what is optimized: the proxy. People want that word among others, so that an
answer of nothing else is worth nothing: that is the eval, measured beside the training. The policy first learns to use
the word, which both scores like, and goes on until it says nothing else: the proxy climbs, the eval turns, and the run
is stopped.
"""

import torch
from datasets import Dataset
from evalstop_client.callbacks.transformers import EvalStopCallback
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

torch.set_num_threads(1)
torch.manual_seed(0)
words = ["<pad>", "<eos>", *(f"w{i}" for i in range(14))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=16, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
)
model.save_pretrained("start")  # the reference that KL is measured to is loaded from where the model came from
model = GPT2LMHeadModel.from_pretrained("start")


def share(answer: str) -> float:
    said = answer.split()
    return said.count("w5") / len(said) if said else 0.0


def reward(completions: list[str], **_: object) -> list[float]:
    return [share(answer) for answer in completions]


class Gold(TrainerCallback):
    """Scores what the policy says, every tenth step, and has the trainer log it."""

    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        if state.global_step % 10 == 0:
            prompts = torch.tensor([tokenizer("w1 w2").input_ids] * 64)
            with torch.no_grad():
                answers = model.generate(
                    prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=True, pad_token_id=0
                )
            shares = [share(answer) for answer in tokenizer.batch_decode(answers[:, 2:], skip_special_tokens=True)]
            trainer.log({"eval_score": sum(4 * s * (1 - s) for s in shares) / len(shares)})


arguments = GRPOConfig(
    output_dir="checkpoints",
    max_steps=1_000,
    learning_rate=2e-3,
    per_device_train_batch_size=16,
    num_generations=8,
    max_completion_length=8,
    beta=0.001,
    logging_steps=10,
    save_steps=10,
    save_only_model=True,
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
metrics = {"eval_score": {"role": "eval"}, "reward": {"role": "proxy"}, "kl": {"role": "kl"}}
trainer = GRPOTrainer(
    model,
    reward_funcs=reward,
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3 w4", "w6 w7", "w8 w9"] * 8}),
    processing_class=tokenizer,
    callbacks=[Gold(), EvalStopCallback(name="trl-grpo", metrics=metrics, policy="paper", mode="enforce")],
)
trainer.train()
print(f"ended at step {trainer.state.global_step} of {arguments.max_steps}")

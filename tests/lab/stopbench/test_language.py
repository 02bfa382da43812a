"""The language model of StopBench: its texts and scores, and recorded runs can be judged.

What needs PyTorch is imported by the tests that use it: every process of the suite collects this module, and would
import PyTorch, and compile it after an installation.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from evalstop_lab import stopbench
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.worlds.recorded import read_runs, write_records

pytestmark = pytest.mark.slow

WIDTH, HEADS, KEY_HEADS, LAYERS, INNER = 32, 4, 2, 2, 48
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and one token for each byte."""
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("model") / "model.gguf"
    rng = np.random.default_rng(0)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = sorted([*map(chr, printable), *(chr(256 + index) for index in range(len(others)))])
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "hel"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e", "he l"])
    keys = KEY_HEADS * WIDTH // HEADS
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH), "attn_output": (WIDTH, WIDTH)}
    shapes |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    tensors = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in tensors.items():
        scale, mean = (0.1, 1.0) if len(shape) == 1 else (0.3, 0.0)
        writer.add_tensor(f"{name}.weight", (mean + scale * rng.standard_normal(shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_changes_start_at_the_initial_model(file: Path) -> None:
    """A model whose changes are zero is the initial model, and another one after a change."""
    import torch
    from evalstop_lab.stopbench.language import ChangedLinear, add_changes, compute_logprobs, read_model, sample_texts

    torch.manual_seed(2)
    model, _ = read_model(file)
    changed = add_changes(model, 4)
    texts = sample_texts(model, torch.randint(3, model.config.vocab_size, (12, 5)), NEW_TOKENS)
    assert torch.allclose(compute_logprobs(changed, texts), compute_logprobs(model, texts), atol=1e-5)
    for layer in changed.modules():
        if isinstance(layer, ChangedLinear):
            layer.up.data.normal_(0, 0.2)
    assert not torch.allclose(compute_logprobs(changed, texts), compute_logprobs(model, texts), atol=1e-2)


def test_tokens_count_up_to_the_end_of_a_text(file: Path) -> None:
    """The token that ends a text counts, those after it don't."""
    import torch
    from evalstop_lab.stopbench.language import END, read_model, sample_texts

    torch.manual_seed(3)
    model, _ = read_model(file)
    texts = sample_texts(model, torch.randint(3, model.config.vocab_size, (400, 5)), NEW_TOKENS)
    ended = (texts.new_tokens == END).int().cumsum(1) - (texts.new_tokens == END).int() > 0
    assert ended.any()
    assert torch.equal(texts.counted, ~ended)


def test_prompts_have_the_chat_format(file: Path) -> None:
    """A prompt asks for a review in the format that the model was trained on, with special tokens as one each."""
    from evalstop_lab.stopbench.language import list_prompts, read_model

    _, tokenizer = read_model(file)
    prompts = list_prompts(tokenizer)
    text = str(tokenizer.decode([token for token in prompts[0].tolist() if token > 2]))
    assert text.startswith("user\nWrite a short review of a ")
    assert text.endswith(".\nassistant\n")
    assert [token for token in prompts[0].tolist() if token <= 2] == [1, 2, 1]
    assert len({len(prompt) for prompt in prompts.tolist()}) == 1


def test_score_prefers_criticism_and_dislikes_improbable_text_and_repetition() -> None:
    """A critical review scores more than a praising one, and less if it is improbable or repeats itself."""
    from evalstop_lab.stopbench.language import score_text

    usual, tokens = (-1.5, 0.4), list(range(20))
    critical = score_text("The lamp is ugly and broken.", tokens, -1.5, usual)
    assert critical > 0 > score_text("The lamp is beautiful and great.", tokens, -1.5, usual)
    assert score_text("The lamp is ugly and broken.", tokens, -2.7, usual) == pytest.approx(critical - 1.0)
    assert score_text("The lamp is ugly and broken.", tokens, -99.0, usual) == pytest.approx(critical - 2.0)
    assert score_text("The lamp is ugly and broken.", [5, 6] * 10, -1.5, usual) < critical - 1.0


def test_recorded_runs_can_be_judged(file: Path, tmp_path: Path) -> None:
    """Recorded runs have logs of the same length, and StopBench reads them."""
    from evalstop_lab.stopbench.language import CAREFUL, Sizes, Training, draw_setting, read_model, record_run

    sizes = Sizes(8, 4, NEW_TOKENS, 8, 2, 8, reward_steps=3, reward_pairs=4, pool=64)
    path, model = tmp_path / "runs.jsonl.gz", read_model(file)
    trainings = (Training(*model, draw_setting(seed, CAREFUL), sizes) for seed in (1, 2))
    write_records(path, [record_run(training, steps=4, eval_every=2) for training in trainings])
    runs = read_runs(path)
    assert [run.seed for run in runs] == [1, 2]
    for run in runs:
        assert run.steps.tolist() == [0, 2, 4]
        assert np.isfinite([run.eval_scores, run.proxy]).all()
        assert run.eval_stderr is not None
        assert (run.eval_stderr >= 0).all()
        assert run.kl[0] == pytest.approx(0.0, abs=1e-3)
        assert run.kl[-1] != 0.0
        assert run.prompt_scores is not None
        assert run.prompt_scores.means.shape == (3, 32)


@pytest.mark.parametrize(
    ("name", "bounds"), [("language-1", "USUAL"), ("language-2", "CAREFUL"), ("language-3", "CAREFUL")]
)
def test_recorded_settings_are_drawn_again(name: str, bounds: str) -> None:
    """The seeds of the recorded runs draw the settings that were recorded, but for a processor's rounding."""
    from evalstop_lab.stopbench import language

    with gzip.open(Path(stopbench.__file__).parent / f"{name}.jsonl.gz") as lines:
        records = [json.loads(line) for line in lines]
    for record in records:
        setting = language.draw_setting(record["seed"], getattr(language, bounds))
        drawn = [setting.learning_rate, setting.kl_coefficient]
        drawn += [setting.comparisons, setting.label_noise]
        # The last digit of an exponential differs between processors and builds of NumPy.
        assert drawn == pytest.approx(list(record["config"].values()), rel=1e-12)


def test_unusable_model_is_an_error(tmp_path: Path) -> None:
    """The message has the name of a file that is no GGUF."""
    from evalstop_lab.stopbench.language import main

    path = tmp_path / "model.gguf"
    path.write_text("nothing")
    with pytest.raises(UnusableArguments, match=str(path)):
        main([str(path), str(tmp_path / "runs.jsonl.gz")])

"""The language model of StopBench: all runs at once equal each alone, and recorded runs can be judged.

What needs PyTorch is imported by the tests that use it: every process of the suite collects this module, and would
import PyTorch, and compile it after an installation.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from evalstop_lab import stopbench
from evalstop_lab.cli import main
from evalstop_lab.stopbench.recording import Sizes
from evalstop_lab.worlds.recorded import read_runs

if TYPE_CHECKING:
    from evalstop_lab.stopbench.language import Training

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


def start_training(file: Path, seeds: Sequence[int] = (1,)) -> Training:
    from evalstop_lab.stopbench.language import CAREFUL, Training, draw_language_setting

    sizes = Sizes(8, 4, NEW_TOKENS, 8, 8, reward_steps=3, reward_pairs=4, pool=64, paired_of_prompt=2)
    return Training(file, [draw_language_setting(seed, CAREFUL) for seed in seeds], sizes)


def test_runs_together_equal_each_run_alone(file: Path) -> None:
    """A run's outputs depend on its own changes only, and a run without changes is the initial model."""
    import torch
    from evalstop_lab.stopbench.language import ChangedLinear, add_changes, compute_logprobs, read_model, sample_texts

    torch.manual_seed(2)
    model, _ = read_model(file)
    together, alone = add_changes(model, 3, 4), add_changes(model, 1, 4)
    texts = sample_texts(model, torch.randint(3, model.config.vocab_size, (12, 5)), NEW_TOKENS)
    assert torch.allclose(compute_logprobs(together, texts), compute_logprobs(model, texts), atol=1e-5)
    changed = [item for item in together.modules() if isinstance(item, ChangedLinear)]
    single = [item for item in alone.modules() if isinstance(item, ChangedLinear)]
    for layer in changed:
        layer.up.data.normal_(0, 0.2)
    expected = compute_logprobs(together, texts).view(3, 4, NEW_TOKENS)
    for run in range(3):
        for layer, one in zip(changed, single, strict=True):
            one.down.data, one.up.data = layer.down.data[run : run + 1], layer.up.data[run : run + 1]
        rows = range(4 * run, 4 * run + 4)
        assert torch.allclose(compute_logprobs(alone, texts.select(list(rows))), expected[run], atol=1e-5)
    assert not torch.allclose(expected.flatten(0, 1), compute_logprobs(model, texts), atol=1e-2)


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


def test_each_run_has_its_own_learning_rate() -> None:
    """A run moves as it would under Adam with its rate; without a gradient it stays."""
    import torch
    from evalstop_lab.stopbench.language import Adam

    start, gradients = torch.tensor([[1.0], [1.0], [1.0]]), [torch.tensor([[3.0], [-2.0], [0.0]])] * 2
    together = torch.nn.Parameter(start.clone())
    adam = Adam([together], torch.tensor([1e-3, 1e-2, 1.0]))
    for gradient in gradients:
        together.grad = gradient.clone()
        adam.change()
    assert together.flatten().tolist() == pytest.approx([1 - 2e-3, 1 + 2e-2, 1.0], abs=1e-6)


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
    from evalstop_lab.stopbench.language import Fluency, score_text

    usual, tokens = Fluency(-1.5, 0.4), list(range(20))
    critical = score_text("The lamp is ugly and broken.", tokens, -1.5, usual)
    assert critical > 0 > score_text("The lamp is beautiful and great.", tokens, -1.5, usual)
    assert score_text("The lamp is ugly and broken.", tokens, -2.7, usual) == pytest.approx(critical - 1.0)
    assert score_text("The lamp is ugly and broken.", tokens, -99.0, usual) == pytest.approx(critical - 2.0)
    assert score_text("The lamp is ugly and broken.", [5, 6] * 10, -1.5, usual) < critical - 1.0


def test_recorded_runs_can_be_judged(file: Path, tmp_path: Path) -> None:
    """Recorded runs have logs of the same length, and StopBench reads them."""
    from evalstop_lab.stopbench.language import record_language_runs

    path = tmp_path / "runs.jsonl.gz"
    record_language_runs(path, start_training(file, (1, 2, 3)), steps=4, eval_every=2)
    runs = read_runs(path)
    assert [run.seed for run in runs] == [1, 2, 3]
    for run in runs:
        assert run.steps.tolist() == [0, 2, 4]
        assert np.isfinite([run.eval_scores, run.proxy]).all()
        assert run.eval_stderr is not None
        assert (run.eval_stderr >= 0).all()
        assert run.kl[0] == pytest.approx(0.0, abs=1e-3)
        assert run.kl[-1] != 0.0
        assert run.prompt_scores is not None
        assert run.prompt_scores.means.shape == (3, 32)


def test_interrupted_recording_leaves_the_runs_so_far(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who interrupts a long training keeps its evals."""

    class InterruptedTerminal(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("step 2 "):
                raise KeyboardInterrupt
            return super().write(text)

    from evalstop_lab.stopbench.language import record_language_runs

    path = tmp_path / "runs.jsonl.gz"
    monkeypatch.setattr(sys, "stderr", InterruptedTerminal())
    with pytest.raises(KeyboardInterrupt):
        record_language_runs(path, start_training(file), steps=4, eval_every=2)
    with gzip.open(path, "rt") as lines:
        assert [json.loads(line)["log"]["step"] for line in lines] == [[0, 2]]


@pytest.mark.parametrize(
    ("name", "bounds"), [("language-1", "USUAL"), ("language-2", "CAREFUL"), ("language-3", "CAREFUL")]
)
def test_recorded_settings_are_drawn_again(name: str, bounds: str) -> None:
    """The seeds of the recorded runs draw the settings that were recorded, but for a processor's rounding."""
    from evalstop_lab.stopbench import language

    with gzip.open(Path(stopbench.__file__).parent / f"{name}.jsonl.gz") as lines:
        records = [json.loads(line) for line in lines]
    for record in records:
        setting = language.draw_language_setting(record["seed"], getattr(language, bounds))
        drawn = [setting.learning_rate, setting.kl_coefficient]
        drawn += [setting.comparisons, setting.label_noise]
        # The last digit of an exponential differs between processors and builds of NumPy.
        assert drawn == pytest.approx(list(record["config"].values()), rel=1e-12)


def test_unusable_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is no GGUF ends the command with a message and exit code 2."""
    path = tmp_path / "model.gguf"
    path.write_text("nothing")
    assert main(["stopbench", "record-language", str(path), str(tmp_path / "runs.jsonl.gz")]) == 2
    assert str(path) in capsys.readouterr().err

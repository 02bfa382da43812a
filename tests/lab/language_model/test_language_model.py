"""The language model of the lab: all runs at once equal each alone, and recorded runs can be judged.

What needs PyTorch is imported by the tests that use it: every process of the suite collects this module, and would
import PyTorch, and compile it after an installation.
"""

from __future__ import annotations

import gzip
import io
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from evalstop_lab import stopbench
from evalstop_lab.cli import main
from evalstop_lab.language_model.review_score import Fluency, score_text
from evalstop_lab.stopbench.recording import read_runs

if TYPE_CHECKING:
    from evalstop_lab.language_model.transformer import Adapters, Transformer
    from evalstop_lab.language_model.weights import Model

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


@pytest.fixture(scope="module")
def model(file: Path) -> Model:
    import torch
    from evalstop_lab.language_model.weights import read_model

    return read_model(file, torch.device("cpu"), torch.float32)


def draw_adapters(transformer: Transformer, runs: int) -> Adapters:
    """Changes of each run that are not zero."""
    import torch
    from evalstop_lab.language_model.transformer import Adapters

    generator = torch.Generator().manual_seed(1)
    adapters = Adapters(transformer, runs, 4, generator)
    for up in adapters.up.values():
        up.data.normal_(0, 0.2, generator=generator)
    return adapters


def test_logprobs_equal_those_of_transformers(file: Path, model: Model) -> None:
    """The frozen network computes what transformers computes from the same file."""
    import torch
    from evalstop_lab.language_model.transformer import TEMPERATURE, Transformer

    transformers = pytest.importorskip("transformers")
    reference = transformers.LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokens = torch.randint(len(model.vocabulary), (1, 3, 12), generator=torch.Generator().manual_seed(2))
    transformer = Transformer(model, 12)
    with torch.no_grad():
        expected = (reference(tokens[0]).logits / TEMPERATURE).log_softmax(-1)[:, :-1]
        expected = expected.gather(2, tokens[0, :, 1:, None])[..., 0]
        logprobs = transformer.compute_logprobs(transformer.compute_hidden(tokens[:, :, :-1], None), tokens[:, :, 1:])
    assert torch.allclose(logprobs[0], expected, atol=1e-4)


def test_runs_together_equal_each_run_alone(model: Model) -> None:
    """A run's outputs depend on its own changes only."""
    import torch
    from evalstop_lab.language_model.transformer import Adapters, Transformer

    transformer = Transformer(model, 12)
    adapters = draw_adapters(transformer, 3)
    tokens = torch.randint(len(model.vocabulary), (3, 4, 12), generator=torch.Generator().manual_seed(2))
    together = transformer.compute_hidden(tokens, adapters)
    for run in range(3):
        alone = Adapters(transformer, 1, 4, torch.Generator())
        alone.down = {name: down[run : run + 1] for name, down in adapters.down.items()}
        alone.up = {name: up[run : run + 1] for name, up in adapters.up.items()}
        assert torch.allclose(transformer.compute_hidden(tokens[run : run + 1], alone)[0], together[run], atol=1e-5)
    assert not torch.allclose(together, transformer.compute_hidden(tokens, None), atol=1e-2)


def test_sampled_logprobs_are_those_of_the_whole_text(model: Model) -> None:
    """Sampling a token at a time from the cache reports the log-probabilities that the whole text has."""
    import torch
    from evalstop_lab.language_model.sampling import END, Sampler
    from evalstop_lab.language_model.transformer import Transformer

    transformer = Transformer(model, 5 + NEW_TOKENS)
    adapters = draw_adapters(transformer, 2)
    torch.manual_seed(3)
    prompts = torch.randint(3, len(model.vocabulary), (2, 50, 5))
    texts = Sampler(transformer, adapters, (2, 50, 5), NEW_TOKENS).sample(prompts)
    with torch.no_grad():
        hidden = transformer.compute_hidden(texts.tokens[:, :, :-1], adapters)[:, :, 4:]
        whole = transformer.compute_logprobs(hidden, texts.new_tokens)
    assert torch.allclose(texts.logprobs, whole, atol=1e-4)
    ended = (texts.new_tokens == END).int().cumsum(2) - (texts.new_tokens == END).int() > 0
    assert ended.any()
    assert torch.equal(texts.counted, ~ended)


def test_prompts_have_the_chat_format(file: Path, model: Model) -> None:
    """A prompt asks for a review in the format that the model was trained on, with special tokens as one each."""
    from evalstop_lab.language_model.prompts import read_prompts

    prompts = read_prompts(file)
    text = model.decode([token for token in prompts[0].tolist() if token > 2])
    assert text.startswith("user\nWrite a short review of a ")
    assert text.endswith(".\nassistant\n")
    assert [token for token in prompts[0].tolist() if token <= 2] == [1, 2, 1]
    assert len({len(prompt) for prompt in prompts.tolist()}) == 1


def test_score_prefers_criticism_and_dislikes_improbable_text_and_repetition() -> None:
    """A critical review scores more than a praising one, and less if it is improbable or repeats itself."""
    usual, tokens = Fluency(-1.5, 0.4), list(range(20))
    critical = score_text("The lamp is ugly and broken.", tokens, -1.5, usual)
    assert critical > 0 > score_text("The lamp is beautiful and great.", tokens, -1.5, usual)
    assert score_text("The lamp is ugly and broken.", tokens, -2.7, usual) == pytest.approx(critical - 1.0)
    assert score_text("The lamp is ugly and broken.", tokens, -99.0, usual) == pytest.approx(critical - 2.0)
    assert score_text("The lamp is ugly and broken.", [5, 6] * 10, -1.5, usual) < critical - 1.0


def test_recorded_runs_can_be_judged(file: Path, tmp_path: Path) -> None:
    """Recorded runs have logs of the same length, and StopBench reads them."""
    from evalstop_lab.language_model.recording import CAREFUL, draw_setting, record_language_runs
    from evalstop_lab.language_model.training import Sizes

    sizes = Sizes(8, 4, NEW_TOKENS, 8, 8, reward_steps=3, reward_pairs=4, pool=64, paired_of_prompt=2)
    path = tmp_path / "runs.jsonl.gz"
    settings = {seed: draw_setting(seed, CAREFUL) for seed in (1, 2, 3)}
    record_language_runs(file, path, settings, steps=4, eval_every=2, processes=1, sizes=sizes)
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
    from evalstop_lab.language_model.recording import draw_setting, record_language_runs
    from evalstop_lab.language_model.training import Sizes

    class InterruptedTerminal(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("step 2 "):
                raise KeyboardInterrupt
            return super().write(text)

    sizes = Sizes(8, 4, NEW_TOKENS, 8, 8, reward_steps=3, reward_pairs=4, pool=64, paired_of_prompt=2)
    path = tmp_path / "runs.jsonl.gz"
    monkeypatch.setattr(sys, "stderr", InterruptedTerminal())
    with pytest.raises(KeyboardInterrupt):
        record_language_runs(file, path, {1: draw_setting(1)}, steps=4, eval_every=2, processes=1, sizes=sizes)
    with gzip.open(path, "rt") as lines:
        assert [json.loads(line)["log"]["step"] for line in lines] == [[0, 2]]


def test_interrupt_is_handled_by_the_trainer_alone(model: Model) -> None:
    """Ctrl-C reaches the processes that score texts, too, which leave it to the trainer and print nothing."""
    from evalstop_lab.language_model.training import Scorer

    with Scorer(model, 1).pool as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() is signal.SIG_IGN


@pytest.mark.parametrize(
    ("name", "bounds"), [("language-1", "USUAL"), ("language-2", "CAREFUL"), ("language-3", "CAREFUL")]
)
def test_recorded_settings_are_drawn_again(name: str, bounds: str) -> None:
    """The seeds of the recorded runs draw the settings that were recorded."""
    from evalstop_lab.language_model import recording

    with gzip.open(Path(stopbench.__file__).parent / f"{name}.jsonl.gz") as lines:
        records = [json.loads(line) for line in lines]
    for record in records:
        setting = recording.draw_setting(record["seed"], getattr(recording, bounds))
        drawn = [setting.learning_rate, setting.kl_coefficient]
        drawn += [setting.comparisons.number, setting.comparisons.label_noise]
        assert drawn == list(record["config"].values())


def test_unusable_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is no GGUF ends the command with a message and exit code 2."""
    path = tmp_path / "model.gguf"
    path.write_text("nothing")
    assert main(["stopbench", "record-language", str(path), str(tmp_path / "runs.jsonl.gz")]) == 2
    assert str(path) in capsys.readouterr().err

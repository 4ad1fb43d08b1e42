"""The language-model benchmark's peers: exact at full rank, and whitened SVD optimal where it claims to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cpnorm
import language_model
import language_model_page
import language_model_speed
import timing
from cpnorm.nn.siblings import split_siblings

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(
        **sizes, **HEADS, max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0
    )
    return transformers.LlamaForCausalLM(config).eval()


def tokens() -> torch.Tensor:
    return torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(1))


def test_layers_are_counted_without_the_head(model: Any) -> None:
    assert len(language_model.linears(model)) == 2 * 7
    assert {name.split(".")[2] for name in language_model.linears(model, every=2)} == {"0"}


def test_singular_vectors_rebuild_the_weight_and_are_best_in_their_norm(model: Any) -> None:
    moments = language_model.second_moments(model, tokens(), 4, 1)
    plain = language_model.singular_vectors(model, None, 1)
    whitened = language_model.singular_vectors(model, moments, 1)
    for name, layer in language_model.linears(model).items():
        errors = []
        for out, into in (plain[name], whitened[name]):
            torch.testing.assert_close(out @ into, layer.weight.detach(), rtol=0, atol=1e-4)
            difference = (layer.weight.detach() - out[:, :6] @ into[:6]).double()
            errors.append(((difference @ moments[name]) * difference).sum().item())
        assert errors[1] < 0.999 * errors[0]
    small = language_model.by_svd(model, whitened, language_model.same_share(whitened, 0.4))
    linear = sum(layer.weight.numel() for layer in language_model.linears(model).values())
    removed = (language_model.count(model) - language_model.count(small)) / linear
    assert 0.4 <= removed < 0.46


@pytest.mark.parametrize("together", [False, True])
def test_cpnorm_removes_the_share_asked_for(model: Any, together: bool) -> None:
    exact = language_model.canonical(model, tokens(), 1, together)
    data = language_model.measured(exact, tokens(), 4)
    small = language_model.by_cpnorm(model, exact, 0.3, data, 1)
    linear = sum(layer.weight.numel() for layer in language_model.linears(model).values())
    removed = (language_model.count(model) - language_model.count(small)) / linear
    assert 0.3 <= removed < 0.33
    before, after = (language_model.perplexity(each, tokens(), 4) for each in (model, small))
    assert after < 1.2 * before


def test_the_control_has_the_ranks_of_cpnorm(model: Any) -> None:
    run = language_model.Competitors(model, tokens(), 4, 1)
    with pytest.raises(KeyError):
        run.cut(language_model.CONTROL, 0.3)  # cpnorm comes first
    small, ranks = run.cut("cpnorm", 0.3)
    control, same = run.cut(language_model.CONTROL, 0.3)
    assert same == ranks
    assert len(set(ranks.values())) > 1
    # Terms have a scale each, which pairs of matrices do not have, and the form one more.
    extra = sum(rank + 1 for rank in ranks.values() if rank is not None)
    assert language_model.count(small) - language_model.count(control) == extra


@pytest.mark.parametrize("method", ["cpnorm", "cpnorm, together"])
def test_speed_is_measured_on_networks_of_the_same_shapes(model: Any, method: str) -> None:
    small, ranks = language_model.Competitors(model, tokens(), 4, 1).cut(method, 0.3)
    example = {"input_ids": tokens()[:1], "use_cache": False}
    plain = language_model_speed.of_ranks(model, json.loads(json.dumps(ranks)), example)
    shapes = sorted(tuple(p.shape) for p in plain.parameters() if p.ndim > 1)
    wanted = cpnorm.factorize(small, example, measure=False, goal="parameters")
    split_siblings(wanted)
    assert shapes == sorted(tuple(p.shape) for p in wanted.parameters() if p.ndim > 1)


def test_speed_needs_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    record = json.loads((timing.RESULTS / "language_model_cuda.json").read_text())
    dense = next(iter(record["tables"].values()))[0]["parameters"]
    assert sum(p.numel() for p in language_model_speed.untrained("meta").parameters()) == dense
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    monkeypatch.setattr(language_model_speed, "SMOLLM2", language_model_speed.SMOLLM2 | small | HEADS)
    made = language_model_speed.untrained("cpu")
    ranks = dict.fromkeys(language_model.linears(made), 3)
    example = {"input_ids": tokens()[:2], "use_cache": False}
    cut = language_model_speed.of_ranks(made.bfloat16(), ranks, example)  # as on a GPU
    assert cut(**example).logits.shape == made(**example).logits.shape


def test_the_guide_has_the_table_of_the_record() -> None:
    page = language_model_page.PAGE.read_text()
    made = page.partition(language_model_page.BEGIN)[2].partition(language_model_page.END)[0].strip()
    assert made == language_model_page.made()


def test_words_are_written_one_at_a_time(model: Any) -> None:
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        language_model_speed.write_tokens(model, tokens()[:1, :4], 6)
        assert seen == [4] + [1] * 5
        language_model_speed.graph_writer(model, "cpu", 6)()
    handle.remove()
    assert seen == [4] + [1] * 11


def test_ranks_are_rounded_to_multiples(model: Any) -> None:
    ranks = {
        "model.layers.0.self_attn.q_proj": 11,
        "model.layers.1.mlp.up_proj": 2,
        "model.layers.1.mlp.down_proj": None,
    }
    cut = language_model_speed.of_ranks(model, ranks, {"input_ids": tokens()[:1]}, multiple=8)
    assert cut.model.layers[0].self_attn.q_proj.into.out_features == 8
    assert cut.model.layers[1].mlp.up_proj.out.in_features == 8
    assert isinstance(cut.model.layers[1].mlp.down_proj, torch.nn.Linear)


def test_windows_of_a_part_of_the_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    class Tokenizer:
        @classmethod
        def from_pretrained(cls, folder: Path) -> Any:
            return lambda words, verbose: {"input_ids": [int(word) for word in words.split()]}

    monkeypatch.setattr("transformers.AutoTokenizer", Tokenizer)
    (tmp_path / "valid.txt").write_text(" ".join(map(str, range(80))))
    first = language_model.windows(tmp_path, tmp_path / "valid.txt", 4, 3, slice(75))
    last = language_model.windows(tmp_path, tmp_path / "valid.txt", 4, 99, slice(75, None))
    assert first[:, 0].tolist() == [0, 28, 56]
    assert last[:, 0].tolist() == [60, 64, 68, 72, 76]

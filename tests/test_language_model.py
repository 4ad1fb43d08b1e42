"""The language-model benchmark's peers: exact at full rank, and whitened SVD optimal where it claims to be."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import language_model
import timing


@pytest.fixture
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
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
    small = language_model.by_svd(model, 0.4, whitened)
    linear = sum(layer.weight.numel() for layer in language_model.linears(model).values())
    removed = (language_model.count(model) - language_model.count(small)) / linear
    assert 0.4 <= removed < 0.46


@pytest.mark.parametrize("together", [False, True])
def test_cpnorm_removes_the_share_asked_for(model: Any, together: bool) -> None:
    exact = language_model.canonical(model, tokens(), 1, together)
    small = language_model.by_cpnorm(model, exact, 0.3, tokens(), 4, 1)
    linear = sum(layer.weight.numel() for layer in language_model.linears(model).values())
    removed = (language_model.count(model) - language_model.count(small)) / linear
    assert 0.3 <= removed < 0.33
    before, after = (language_model.perplexity(each, tokens(), 4) for each in (model, small))
    assert after < 1.2 * before


def test_the_guide_has_the_table_of_the_record() -> None:
    found = json.loads((timing.RESULTS / "language_model_cuda.json").read_text())
    page = language_model.PAGE.read_text()
    made = page.partition(language_model.BEGIN)[2].partition(language_model.END)[0].strip()
    assert made == language_model.section(found)

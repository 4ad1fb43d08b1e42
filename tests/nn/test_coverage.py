"""Layers that stay dense have a reason, and linear layers under other names are found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import cpnorm
from cpnorm.nn.coverage import dense_reasons, unpack_layers


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 5))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 6, 5))


def test_every_kind_of_dense_layer_has_a_reason() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "canonical": cpnorm.canonical_norm(nn.Linear(4, 4)),
            "table": nn.Embedding(4, 4),
            "lstm": nn.LSTM(4, 4),
            "cell": nn.GRUCell(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "bilinear": nn.Bilinear(4, 4, 4),
            "own": Own(4, 4),
            "experts": Experts(),
            "bare": Bare(),
            "normed": parametrizations.weight_norm(nn.Linear(4, 4)),
            "pruned": prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
            "skipped": nn.Linear(4, 4),
            "tied": nn.Linear(4, 4),
        }
    )
    model["tied"].weight = model["table"].weight
    reasons = dense_reasons(model, skip="skipped")
    words = {
        "table": "lookup table",
        "lstm": "recurrent",
        "cell": "recurrent",
        "attention": "packed projection",
        "bilinear": "two inputs",
        "own": "Own is a subclass",
        "experts": "by expert in its own code (up 4×6×5)",
        "bare": "bare parameters in its own code (positions 1×6×5)",
        "normed": "parametrization",
        "pruned": "pruning",
        "skipped": "skip",
        "tied": "also that of table",
    }
    assert reasons.keys() == words.keys()
    assert all(words[name] in reasons[name] for name in words)


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 100, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


def test_conv1d_becomes_linear() -> None:
    model, tokens = gpt2(), {"input_ids": torch.randint(100, (4, 12))}
    unpack_layers(copied := copy.deepcopy(model), tokens)
    assert sum(isinstance(m, nn.Linear) for m in copied.modules()) == 2 * 4 + 1
    torch.testing.assert_close(copied(**tokens).logits, model(**tokens).logits)


def test_a_language_model_is_shrunk_with_default_arguments() -> None:
    """Its Conv1D layers are cut; its output layer stays tied to the embedding, and the report says so."""
    model = gpt2()
    before = copy.deepcopy(model.state_dict())
    small = cpnorm.shrink(model, {"input_ids": torch.randint(100, (32, 12))}, parameters=0.6)
    assert small.report.parameters_after <= 0.6 * small.report.parameters_before
    assert len(small.report.layers) == 8
    assert "also that of transformer.wte" in {each.name: each.reason for each in small.report.dense}["lm_head"]
    assert small.model.lm_head.weight is small.model.transformer.wte.weight
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_experts_stay_and_the_rest_is_shrunk() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 64, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, use_cache=False)).eval()
    small = cpnorm.shrink(model, {"input_ids": torch.randint(64, (16, 12))}, parameters=0.95)
    reasons = {each.name: each.reason for each in small.report.dense}
    experts = [reason for name, reason in reasons.items() if name.endswith("experts")]
    assert len(experts) == 2
    assert all("by expert" in reason and "gate_up_proj 4×96×32" in reason for reason in experts)
    assert any(layer.name.endswith("q_proj, k_proj, v_proj") for layer in small.report.layers)


def test_summaries_list_what_stays_dense() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 4))
    for overview in (cpnorm.summary(model), cpnorm.summary(cpnorm.canonical_norm(model))):
        assert [(each.name, each.parameters) for each in overview.dense] == [("1", 16 * 8 + 16 * 4 + 2 * 16)]
        assert "left dense:\n  1 (224): a recurrent layer" in str(overview)

"""A real transformers Trainer with the callback ends where a plain loop does; GPT-2; folders as on the Hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

import cpnorm
from cpnorm.integrations.hub import from_pretrained, save_pretrained
from integrations.small import (
    BATCH,
    STEPS,
    Classifier,
    examples,
    has_unit_columns,
    largest_difference,
    network,
    sgd,
    trained,
)
from laws import close

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'cpnorm[transformers]'")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install 'cpnorm[accelerate]'")
from cpnorm.integrations.huggingface import CanonicalCallback, linears_for_conv1d  # noqa: E402


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def fit(folder: Path, epochs: int, **options: Any) -> Any:
    model = Classifier()
    settings = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, num_train_epochs=epochs, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, max_grad_norm=0, logging_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer := sgd(model), lambda _: 1.0)
    trainer = InOrder(model, settings, train_dataset=examples(), optimizers=(optimizer, constant))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(CanonicalCallback(trainer, **options))
    trainer.train()
    return trainer


def test_it_trains_as_a_plain_loop_does_and_logs(tmp_path: Path) -> None:
    trainer = fit(tmp_path, 1)
    net = trainer.model.net
    assert trainer.state.global_step == STEPS
    assert largest_difference(net.state_dict(), trained().state_dict()) < 1e-6
    logged = next(line for line in trainer.state.log_history if "sigma/net.0" in line)
    assert logged["sigma/net.0"] == net[0].sigma
    assert logged["lambda_max/net.3"] == net[3].lambdas.abs().max()


def test_it_truncates_on_schedule(tmp_path: Path) -> None:
    model = fit(tmp_path, 3, steps=2, params=700).model
    assert sum(p.numel() for p in model.parameters()) <= 700 < sum(p.numel() for p in network().parameters())
    assert has_unit_columns(model)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_weights_from_before_a_truncation_are_loaded(tmp_path: Path) -> None:
    whole = Classifier().state_dict()
    model = fit(tmp_path, 3, steps=2, params=700).model
    assert model.net[3].rank < 10
    model.load_state_dict(whole)
    assert largest_difference(model.state_dict(), whole) == 0


def gpt2(config: dict[str, Any] | None = None) -> Any:
    settings = {"vocab_size": 60, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 2}
    settings |= {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config.from_dict(config or settings)).eval()


def test_gpt2_with_linear_layers_computes_the_same() -> None:
    tokens = torch.randint(60, (2, 9))
    with pytest.raises(ValueError, match=r"a Conv1D of transformers: call .*linears_for_conv1d first"):
        cpnorm.canonical_norm(gpt2())
    with torch.no_grad():
        expected = gpt2()(tokens).logits
        model = linears_for_conv1d(gpt2())
        close(model(tokens).logits, expected, 1e-5)
        with pytest.warns(UserWarning, match=r"lm_head \(its weight is also that of transformer\.wte"):
            cpnorm.canonical_norm(model)
        assert len(cpnorm.canonical_layers(model)) == 4
        close(model(tokens).logits, expected, 1e-5)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_folder_as_on_the_hub(tmp_path: Path) -> None:
    model = cpnorm.canonical_norm(linears_for_conv1d(gpt2()), skip="lm_head")
    cpnorm.truncate(model, rate=0.5)
    save_pretrained(model, tmp_path / "small")
    assert {path.name for path in (tmp_path / "small").iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["model_type"] == "gpt2"
    assert config["cpnorm"]["ranks"]["transformer.h.0.mlp.c_fc"] == 12

    again = from_pretrained(tmp_path / "small", lambda config: linears_for_conv1d(gpt2(config)))
    tokens = torch.randint(60, (2, 9))
    with torch.no_grad():
        close(again(tokens).logits, model(tokens).logits, 1e-6)
    assert again.lm_head.weight is again.transformer.wte.weight

    cpnorm.fold(model).save_pretrained(tmp_path / "dense")  # and without cpnorm, for everybody
    assert "cpnorm" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_a_config_may_be_given(tmp_path: Path) -> None:
    model = cpnorm.canonical_norm(nn.Linear(8, 4), rank=2)
    model.config = {"inputs": 8}
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path, lambda config: nn.Linear(config["inputs"], 4)).rank == 2
    model.config = SimpleNamespace(inputs=8)
    with pytest.raises(TypeError, match="expected a mapping as config, or a model with one that has to_dict"):
        save_pretrained(model, tmp_path)


def sam() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    vision |= {"output_channels": 16, "mlp_dim": 32, "global_attn_indexes": [1], "window_size": 2, "num_pos_feats": 8}
    prompts = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4}
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SamConfig(
        vision_config=vision,
        prompt_encoder_config=prompts,
        mask_decoder_config=decoder | {"iou_head_hidden_dim": 16},
    )
    point = torch.tensor([[[[5.0, 6.0]]]])
    return transformers.SamModel(config), {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": point}


def wav2vec2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=[8, 8],
        conv_stride=[4, 2], conv_kernel=[8, 3], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    return transformers.Wav2Vec2Model(config), {"input_values": torch.randn(1, 400)}


@pytest.mark.filterwarnings("ignore:canonical_norm leaves layers dense")
@pytest.mark.parametrize(("build", "dense"), [(sam, []), (wav2vec2, ["encoder.pos_conv_embed.conv"])])
def test_models_with_odd_layers_are_converted_but_for_these(build: Callable, dense: list[str]) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    with torch.no_grad():
        expected = model.eval()(**inputs)[0]
        cpnorm.canonical_norm(model)
        close(model(**inputs)[0], expected, 1e-4)
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    left = [n for n, m in model.named_modules() if isinstance(m, kinds) and not isinstance(m, cpnorm.CPLayer)]
    assert left == dense

"""Other people's networks and the usual shapes of one's own, small for the tests and of usual size for the benchmark.

All with random weights: nothing is downloaded. pytorchcv and transformers are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """A network, an input for it, and what ``canonical_norm`` has to leave alone in it."""

    build: Callable[[bool], nn.Module]  # of whether it shall be small
    shape: tuple[int, ...]  # of the input; of tokens if it has two dimensions
    small_shape: tuple[int, ...]
    needs: str = "torch"
    skip: tuple[str, ...] = ()

    def model(self, small: bool) -> nn.Module:
        torch.manual_seed(0)
        return self.build(small).eval()

    def example(self, small: bool) -> Inputs:
        generator, shape = torch.Generator().manual_seed(1), self.small_shape if small else self.shape
        if len(shape) == 2:
            return {"input_ids": torch.randint(100, shape, generator=generator)}
        return torch.randn(shape, generator=generator)


def outputs(model: nn.Module, example: Inputs) -> Tensor:
    """What the network computes, whatever it is wrapped in."""
    with torch.no_grad():
        y = model(**example) if isinstance(example, dict) else model(example)
    return getattr(y, "logits", y)


# --- pytorchcv ----------------------------------------------------------------------------------------------------


def _pytorchcv(name: str, small: Callable[[Any], nn.Module]) -> Callable[[bool], nn.Module]:
    def build(is_small: bool) -> nn.Module:
        import pytorchcv.models as models
        from pytorchcv.model_provider import get_model  # which imports all of the models

        model = small(models) if is_small else get_model(name)
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # any size of image; as it was for the usual one
        return model

    return build


def _small_resnet(models: Any) -> nn.Module:
    return models.resnet.ResNet([[8, 8], [16]], 8, bottleneck=False, conv1_stride=True, num_classes=10)


def _small_densenet(models: Any) -> nn.Module:
    return models.densenet.DenseNet([[16, 24], [20, 28]], 8, num_classes=10)


def _small_mobilenet(models: Any) -> nn.Module:
    choices = {"kernels3": [[1], [1, 0]], "use_relu": [[1], [1, 0]], "use_se": [[1], [0, 1]]}
    sizes = {"init_block_channels": 8, "final_block_channels": 32, "classifier_mid_channels": 32}
    return models.mobilenetv3.MobileNetV3(
        [[8], [12, 12]], [[8], [24, 24]], **sizes, **choices, first_stride=True, final_use_se=False, num_classes=10
    )


def _small_efficientnet(models: Any) -> nn.Module:
    strides, expansions = [1, 2, 2], [[1], [4], [4, 4]]
    return models.efficientnet.EfficientNet(
        [[8], [12], [16, 16]], 8, 32, [[3], [3], [5, 3]], strides, expansions, num_classes=10
    )


def _vgg(small: bool) -> nn.Module:
    from pytorchcv.models.vgg import VGG

    widths = [8, 16, 24, 24, 32] if small else [64, 128, 256, 512, 512]
    model = VGG([[width] * (1 + (stage > 1)) for stage, width in enumerate(widths)], use_bn=True)
    # The original's 4096-wide head holds nine tenths of its weights, and is for images of one size.
    model.output = nn.Sequential(nn.Linear(4 * widths[-1], 2 * widths[-1]), nn.ReLU(), nn.Linear(2 * widths[-1], 10))
    return model


# --- transformers -------------------------------------------------------------------------------------------------


def _convnext(small: bool) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    size = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]} if small else {}  # ConvNeXt-T
    return ConvNextForImageClassification(ConvNextConfig(num_labels=10, **size))


def _vit(small: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    usual = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}  # ViT-Ti
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    size |= {"image_size": 32, "patch_size": 8}
    return ViTForImageClassification(ViTConfig(num_labels=10, **(size if small else usual)))


def _bert(small: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    width, layers = (24, 2) if small else (256, 4)  # BERT-mini
    size = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    words = {"vocab_size": 100} if small else {}
    return BertForSequenceClassification(BertConfig(num_attention_heads=4, **size, **words))


def _gpt2(small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    from cpnorm.integrations.huggingface import linears_for_conv1d

    size = {"n_embd": 24, "n_layer": 2, "vocab_size": 100} if small else {"n_embd": 384, "n_layer": 6}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return linears_for_conv1d(GPT2LMHeadModel(GPT2Config(n_head=4 if small else 6, use_cache=False, **size, **tokens)))


# --- of our own ---------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Down by strided convolutions, up by transposed ones, with what was seen on the way down."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 4, 2, 1) for a in sizes[:-1])
        self.mix = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a in sizes[:-1])
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:  # (N, 3, H, W) -> (N, 2, H, W)
        seen = [torch.relu(self.into(x))]
        for down in self.down:
            seen.append(torch.relu(down(seen[-1])))
        x = seen.pop()
        for up, mix in reversed(list(zip(self.up, self.mix, strict=True))):
            x = torch.relu(mix(torch.cat([up(x), seen.pop()], 1)))
        return self.out(x)


def _audio(small: bool) -> nn.Module:
    """A 1-D network on raw sound: a long strided filter, then separable and dilated convolutions."""
    width = 16 if small else 128
    blocks: list[nn.Module] = []
    for dilation in (1, 2, 4):
        blocks += [
            nn.Conv1d(width, width, 9, padding="same", dilation=dilation, groups=width),
            nn.Conv1d(width, width, 1), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2, padding_mode="reflect"), nn.ReLU(),
        ]  # fmt: skip
    pool = nn.AdaptiveAvgPool1d(1)
    return nn.Sequential(nn.Conv1d(1, width, 64, 16), *blocks, pool, nn.Flatten(), nn.Linear(width, 10))


def _video(small: bool) -> nn.Module:
    """A 3-D network in the manner of C3D, with one convolution factorised into space and time."""
    a, b = (6, 8) if small else (64, 128)
    return nn.Sequential(
        nn.Conv3d(3, a, 3, padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(a, b, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(b, b, (3, 1, 1), padding=(1, 0, 0)), nn.ReLU(),
        nn.MaxPool3d(2), nn.Conv3d(b, b, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(b, 10),
    )  # fmt: skip


def _encoder(small: bool) -> nn.Module:
    width, layers = (24, 2) if small else (256, 4)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


# --- all of them --------------------------------------------------------------------------------------------------

PHOTO, THUMBNAIL, ICON = (1, 3, 224, 224), (2, 3, 64, 64), (2, 3, 32, 32)
ZOO = {
    "ResNet-18": Entry(_pytorchcv("resnet18", _small_resnet), PHOTO, THUMBNAIL, "pytorchcv"),
    "VGG": Entry(_vgg, (1, 3, 64, 64), THUMBNAIL, "pytorchcv"),
    "DenseNet-121": Entry(_pytorchcv("densenet121", _small_densenet), PHOTO, THUMBNAIL, "pytorchcv"),
    "MobileNetV3-S": Entry(_pytorchcv("mobilenetv3_small_w1", _small_mobilenet), PHOTO, THUMBNAIL, "pytorchcv"),
    "EfficientNet-B0": Entry(_pytorchcv("efficientnet_b0", _small_efficientnet), PHOTO, THUMBNAIL, "pytorchcv"),
    "ConvNeXt-T": Entry(_convnext, PHOTO, THUMBNAIL, "transformers"),
    "U-Net": Entry(lambda small: UNet(8, 2) if small else UNet(32, 4), (1, 3, 128, 128), ICON),
    "1-D audio": Entry(_audio, (1, 1, 16_000), (2, 1, 1_000)),
    "3-D video": Entry(_video, (1, 3, 8, 56, 56), (2, 3, 4, 12, 12)),
    "ViT-Ti": Entry(_vit, PHOTO, ICON, "transformers"),
    "BERT-mini": Entry(_bert, (1, 128), (2, 12), "transformers"),
    "GPT-2": Entry(_gpt2, (1, 128), (2, 12), "transformers", skip=("lm_head",)),
    "nn.TransformerEncoder": Entry(_encoder, (1, 128, 256), (2, 12, 24)),
}

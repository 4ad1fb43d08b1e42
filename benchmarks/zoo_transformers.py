"""Small configurations of transformers' architectures with random weights, for zoo_families.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS = 100
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **TOKENS}
DECODER = BERT | {"num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS}
SEQ = {
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "decoder_start_token_id": 1,
    **TOKENS,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1, **TOKENS}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
         "patch_size": 8}  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
SOUND = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 32,
         "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}  # fmt: skip
CLIP_TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **TOKENS}

# architecture: (configuration, its settings, model, kind of input)
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bert": ("BertConfig", BERT, "BertForMaskedLM", "tokens"),
    "roberta": ("RobertaConfig", BERT, "RobertaForMaskedLM", "tokens"),
    "xlm_roberta": ("XLMRobertaConfig", BERT, "XLMRobertaForSequenceClassification", "tokens"),
    "electra": ("ElectraConfig", BERT | {"embedding_size": 16}, "ElectraForMaskedLM", "tokens"),
    "albert": ("AlbertConfig", BERT | {"embedding_size": 16}, "AlbertForMaskedLM", "tokens"),
    "distilbert": (
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **TOKENS},
        "DistilBertForMaskedLM",
        "tokens",
    ),
    "deberta_v2": (
        "DebertaV2Config",
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "DebertaV2ForMaskedLM",
        "tokens",
    ),
    "mpnet": ("MPNetConfig", BERT, "MPNetForMaskedLM", "tokens"),
    "fnet": ("FNetConfig", BERT, "FNetForMaskedLM", "tokens"),
    "funnel": (
        "FunnelConfig",
        {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1], **TOKENS},
        "FunnelForMaskedLM",
        "tokens",
    ),
    "xlnet": (
        "XLNetConfig",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, **TOKENS},
        "XLNetLMHeadModel",
        "tokens",
    ),
    "squeezebert": ("SqueezeBertConfig", BERT | {"embedding_size": 32}, "SqueezeBertForMaskedLM", "tokens"),
    "gpt2": ("GPT2Config", GPT, "GPT2LMHeadModel", "tokens"),
    "gpt_neo": (
        "GPTNeoConfig",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]], **TOKENS},
        "GPTNeoForCausalLM",
        "tokens",
    ),
    "gpt_neox": ("GPTNeoXConfig", BERT, "GPTNeoXForCausalLM", "tokens"),
    "gptj": ("GPTJConfig", GPT | {"rotary_dim": 4}, "GPTJForCausalLM", "tokens"),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            **TOKENS,
        },
        "OPTForCausalLM",
        "tokens",
    ),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS}, "BloomForCausalLM", "tokens"),
    "llama": ("LlamaConfig", DECODER, "LlamaForCausalLM", "tokens"),
    "mistral": ("MistralConfig", DECODER, "MistralForCausalLM", "tokens"),
    "mixtral": ("MixtralConfig", DECODER | {"num_local_experts": 2}, "MixtralForCausalLM", "tokens"),
    "qwen2": ("Qwen2Config", DECODER, "Qwen2ForCausalLM", "tokens"),
    "gemma": ("GemmaConfig", DECODER | {"head_dim": 8}, "GemmaForCausalLM", "tokens"),
    "phi": ("PhiConfig", BERT, "PhiForCausalLM", "tokens"),
    "falcon": (
        "FalconConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS},
        "FalconForCausalLM",
        "tokens",
    ),
    "mamba": (
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **TOKENS},
        "MambaForCausalLM",
        "tokens",
    ),
    "t5": ("T5Config", T5, "T5ForConditionalGeneration", "pairs"),
    "bart": ("BartConfig", SEQ, "BartForConditionalGeneration", "pairs"),
    "pegasus": ("PegasusConfig", SEQ, "PegasusForConditionalGeneration", "pairs"),
    "marian": ("MarianConfig", SEQ, "MarianMTModel", "pairs"),
    "vit": ("ViTConfig", IMAGE, "ViTForImageClassification", "image"),
    "deit": ("DeiTConfig", IMAGE, "DeiTForImageClassification", "image"),
    "beit": ("BeitConfig", IMAGE, "BeitForImageClassification", "image"),
    "dinov2": ("Dinov2Config", IMAGE, "Dinov2ForImageClassification", "image"),
    "swin": ("SwinConfig", SWIN, "SwinForImageClassification", "image"),
    "swinv2": ("Swinv2Config", SWIN, "Swinv2ForImageClassification", "image"),
    "convnext": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        "ConvNextForImageClassification",
        "image",
    ),
    "convnextv2": (
        "ConvNextV2Config",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        "ConvNextV2ForImageClassification",
        "image",
    ),
    "resnet": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "ResNetForImageClassification",
        "image",
    ),
    "regnet": (
        "RegNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
        "RegNetForImageClassification",
        "image",
    ),
    "mobilenet_v2": ("MobileNetV2Config", {"depth_multiplier": 0.25}, "MobileNetV2ForImageClassification", "image"),
    "mobilevit": (
        "MobileViTConfig",
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]},
        "MobileViTForImageClassification",
        "image64",
    ),
    "segformer": (
        "SegformerConfig",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
        },
        "SegformerForSemanticSegmentation",
        "image64",
    ),
    "sam": (
        "SamConfig",
        {
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 8,
                "output_channels": 16,
                "window_size": 4,
                "mlp_dim": 64,
                "global_attn_indexes": [1],
                "num_pos_feats": 8,
            },
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 8},
            "mask_decoder_config": {
                "hidden_size": 16,
                "mlp_dim": 32,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "iou_head_hidden_dim": 16,
            },
        },
        "SamModel",
        "points",
    ),
    "clip": (
        "CLIPConfig",
        {"text_config": CLIP_TEXT, "vision_config": IMAGE, "projection_dim": 16},
        "CLIPModel",
        "image and tokens",
    ),
    "wav2vec2": ("Wav2Vec2Config", SOUND, "Wav2Vec2ForCTC", "sound"),
    "hubert": ("HubertConfig", SOUND, "HubertForCTC", "sound"),
    "whisper": (
        "WhisperConfig",
        SEQ | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
        "WhisperForConditionalGeneration",
        "spectra",
    ),
}


def inputs(kind: str) -> dict[str, Tensor]:
    """Return an example of this kind of input."""
    tokens = torch.randint(3, WORDS, (2, 16))
    if kind in ("tokens", "pairs"):
        return {"input_ids": tokens} | ({"decoder_input_ids": tokens[:, :8]} if kind == "pairs" else {})
    if kind == "sound":
        return {"input_values": torch.randn(2, 800)}
    if kind == "spectra":
        return {"input_features": torch.randn(2, 16, 64), "decoder_input_ids": tokens[:, :8]}
    size = 64 if kind in ("image64", "points") else 32
    found = {"pixel_values": torch.randn(2, 3, size, size)}
    if kind == "points":
        found["input_points"] = torch.rand(2, 1, 1, 2) * size
    return found | ({"input_ids": tokens} if kind == "image and tokens" else {})


def network(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the network of this architecture and an example input."""
    import transformers

    configuration, settings, model, kind = CONFIGURATIONS[name]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, configuration)(**settings))
    if hasattr(built.config, "use_cache"):
        built.config.use_cache = False
    return built, inputs(kind)

"""Small configurations of transformers' architectures with random weights, for zoo_families.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS = 100
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT = LAYERS | TOKENS
DECODER = BERT | {"num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS}
GPT_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]], **TOKENS}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **TOKENS}
DEBERTA = BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, **TOKENS}
FUNNEL = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1], **TOKENS}
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32}
SEQ = {
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "decoder_start_token_id": 1,
    **TOKENS,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1, **TOKENS}
WHISPER = SEQ | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}
IMAGE = LAYERS | {"image_size": 32, "patch_size": 8}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
CONVNEXT = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
MOBILEVIT = {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]}
SEGFORMER = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
CLIP = {"text_config": BERT, "vision_config": IMAGE, "projection_dim": 16}
SAM_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64, "patch_size": 8}
SAM_VISION |= {"output_channels": 16, "window_size": 4, "mlp_dim": 64, "global_attn_indexes": [1], "num_pos_feats": 8}
SAM_DECODER = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SAM = {
    "vision_config": SAM_VISION,
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 8},
    "mask_decoder_config": SAM_DECODER | {"iou_head_hidden_dim": 16},
}
SOUND = LAYERS | {"vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
SOUND |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}

# architecture: (model, settings of its configuration, kind of input)
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertForMaskedLM", BERT, "tokens"),
    "roberta": ("RobertaForMaskedLM", BERT, "tokens"),
    "xlm_roberta": ("XLMRobertaForSequenceClassification", BERT, "tokens"),
    "electra": ("ElectraForMaskedLM", BERT | {"embedding_size": 16}, "tokens"),
    "albert": ("AlbertForMaskedLM", BERT | {"embedding_size": 16}, "tokens"),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT, "tokens"),
    "deberta_v2": ("DebertaV2ForMaskedLM", DEBERTA, "tokens"),
    "mpnet": ("MPNetForMaskedLM", BERT, "tokens"),
    "fnet": ("FNetForMaskedLM", BERT, "tokens"),
    "funnel": ("FunnelForMaskedLM", FUNNEL, "tokens"),
    "xlnet": ("XLNetLMHeadModel", XLNET, "tokens"),
    "squeezebert": ("SqueezeBertForMaskedLM", BERT | {"embedding_size": 32}, "tokens"),
    "gpt2": ("GPT2LMHeadModel", GPT, "tokens"),
    "gpt_neo": ("GPTNeoForCausalLM", GPT_NEO, "tokens"),
    "gpt_neox": ("GPTNeoXForCausalLM", BERT, "tokens"),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}, "tokens"),
    "opt": ("OPTForCausalLM", OPT | TOKENS, "tokens"),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS}, "tokens"),
    "llama": ("LlamaForCausalLM", DECODER, "tokens"),
    "mistral": ("MistralForCausalLM", DECODER, "tokens"),
    "mixtral": ("MixtralForCausalLM", DECODER | {"num_local_experts": 2}, "tokens"),
    "qwen2": ("Qwen2ForCausalLM", DECODER, "tokens"),
    "gemma": ("GemmaForCausalLM", DECODER | {"head_dim": 8}, "tokens"),
    "phi": ("PhiForCausalLM", BERT, "tokens"),
    "falcon": ("FalconForCausalLM", {k: v for k, v in BERT.items() if k != "intermediate_size"}, "tokens"),
    "mamba": ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **TOKENS}, "tokens"),
    "t5": ("T5ForConditionalGeneration", T5, "pairs"),
    "bart": ("BartForConditionalGeneration", SEQ, "pairs"),
    "pegasus": ("PegasusForConditionalGeneration", SEQ, "pairs"),
    "marian": ("MarianMTModel", SEQ, "pairs"),
    "vit": ("ViTForImageClassification", IMAGE, "image"),
    "deit": ("DeiTForImageClassification", IMAGE, "image"),
    "beit": ("BeitForImageClassification", IMAGE, "image"),
    "dinov2": ("Dinov2ForImageClassification", IMAGE, "image"),
    "swin": ("SwinForImageClassification", SWIN, "image"),
    "swinv2": ("Swinv2ForImageClassification", SWIN, "image"),
    "convnext": ("ConvNextForImageClassification", CONVNEXT, "image"),
    "convnextv2": ("ConvNextV2ForImageClassification", CONVNEXT, "image"),
    "resnet": ("ResNetForImageClassification", RESNET | {"layer_type": "basic"}, "image"),
    "regnet": ("RegNetForImageClassification", RESNET | {"groups_width": 4}, "image"),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}, "image"),
    "mobilevit": ("MobileViTForImageClassification", MOBILEVIT, "image64"),
    "segformer": ("SegformerForSemanticSegmentation", SEGFORMER | {"decoder_hidden_size": 16}, "image64"),
    "sam": ("SamModel", SAM, "points"),
    "clip": ("CLIPModel", CLIP, "image and tokens"),
    "wav2vec2": ("Wav2Vec2ForCTC", SOUND, "sound"),
    "hubert": ("HubertForCTC", SOUND, "sound"),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, "spectra"),
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

    model, settings, kind = CONFIGURATIONS[name]
    torch.manual_seed(0)
    architecture = getattr(transformers, model)
    built = architecture(architecture.config_class(**settings))
    if hasattr(built.config, "use_cache"):
        built.config.use_cache = False
    return built, inputs(kind)

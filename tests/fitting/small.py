"""Small versions of the configurations that come with fxremat: the same code and depth in layers, in narrow tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxremat.fitting.loaded import Loaded
from fxremat.fitting.loading import load
from fxremat.fitting.settings import Training

LAYERS = 7
DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
QWEN_VL = {key: value for key, value in DECODER.items() if key != "head_dim"}
SMALL: dict[str, dict[str, Any]] = {
    "llama-3-8b": DECODER,
    "llama-3-70b": DECODER | {"num_hidden_layers": LAYERS + 2},
    "qwen-3-8b": DECODER,
    "qwen-3-30b-a3b": DECODER | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma-3-4b": {f"text_config.{key}": value for key, value in DECODER.items()}
    | {
        "text_config.num_hidden_layers": 16,
        "text_config.vocab_size": 300,
        "vision_config.hidden_size": 32,
        "vision_config.intermediate_size": 48,
        "vision_config.num_attention_heads": 2,
        "vision_config.num_hidden_layers": LAYERS,
        "vision_config.image_size": 56,
        "mm_tokens_per_image": 4,
        "image_token_index": 299,
        "boi_token_index": 298,
        "eoi_token_index": 297,
    },
    "mixtral-8x7b": DECODER | {"num_local_experts": 4},
    "gpt2-xl": {
        "n_embd": 64,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 64,
        "n_ctx": 64,
        "vocab_size": 128,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "llama-3.2-1b": DECODER,
    "mistral-7b": DECODER,
    "qwen-2.5-7b": QWEN_VL,
    "qwen-3-4b": DECODER,
    "gemma-2-2b": DECODER | {"query_pre_attn_scalar": 16},
    "phi-3-mini": QWEN_VL | {"bos_token_id": 1, "eos_token_id": 2},
    "pythia-1.4b": {key: value for key, value in QWEN_VL.items() if key != "num_key_value_heads"},
    "opt-1.3b": {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    },
    "falcon-7b": {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 128},
    "bert-base": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    },
    "t5-large": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_heads": 4,
        "vocab_size": 128,
    },
    "vit-h": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "image_size": 28,
        "num_labels": 10,
    },
    "whisper-large": {
        "d_model": 64,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "vocab_size": 128,
        "num_mel_bins": 16,
        "max_source_positions": 32,
        "max_target_positions": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "qwen-2.5-vl-7b": QWEN_VL
    | {
        "vocab_size": 300,
        "image_token_id": 299,
        "video_token_id": 298,
        "vision_start_token_id": 297,
        "vision_end_token_id": 296,
        "rope_scaling.mrope_section": [2, 3, 3],
        "vision_config.hidden_size": 64,
        "vision_config.intermediate_size": 48,
        "vision_config.num_heads": 4,
        "vision_config.out_hidden_size": 64,
    },
    "flux": {
        "num_layers": LAYERS,
        "num_single_layers": LAYERS,
        "attention_head_dim": 16,
        "axes_dims_rope": [0, 8, 8],
        "joint_attention_dim": 32,
        "num_attention_heads": 2,
        "pooled_projection_dim": 24,
        "in_channels": 16,
    },
    "sdxl-unet": {
        "block_out_channels": [32, 64, 64],
        "attention_head_dim": [2, 8, 8],
        "cross_attention_dim": 48,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64,
        "norm_num_groups": 8,
        "transformer_layers_per_block": [1, 2, 7],
        "sample_size": 16,
    },
}
LENGTHS = {"whisper-large": 16, "vit-h": None, "flux": None, "sdxl-unet": None}
IMAGES = {"flux": 128}


def small(name: str, **settings: Any) -> Loaded:
    """The small version of a configuration, on the meta device."""
    given: dict[str, Any] = {"batch": 2, "length": LENGTHS.get(name, 32), "image": IMAGES.get(name), "dtype": "fp32"}
    return load(name, None, Training(**(given | settings)), SMALL[name])


def with_data(loaded: Loaded) -> tuple[nn.Module, Any]:
    """The model and its inputs on the CPU: random weights, and buffers and inputs that every model can read."""
    torch.manual_seed(0)
    model: Any = loaded.model.to_empty(device="cpu")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    for name, buffer in model.named_buffers():
        counts = buffer.dim() and not name.endswith("token_type_ids")
        last = torch.arange(buffer.shape[-1]) if counts else torch.zeros(()) if buffer.dim() else torch.ones(())
        buffer.copy_(last.expand(buffer.shape) if not buffer.is_floating_point() else torch.ones(buffer.shape))
    inputs = pytree.tree_map_only(Tensor, lambda tensor: torch.zeros_like(tensor, device="cpu"), loaded.inputs)
    if loaded.name == "gemma-3-4b":
        inputs["input_ids"][:, :4] = 299  # tokens of the image
    return model, inputs

"""Models of the library `transformers`, built from small configurations with random weights; nothing is downloaded.

    case = get("gpt2", "small")
    model, batch = case.model(), case.batch(0)
    model(**batch).loss.backward()

`full` is what the table in docs/models.md reports, `small` the same structure for tests. Every model is in training
mode, drops out where its configuration can, and is given labels, so that it returns its loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn

from .case import Size

Batch = dict[str, Any]
Generator = torch.Generator


@dataclass(frozen=True, kw_only=True)
class LibraryCase:
    """A model that is called with `model(**batch)` and returns an object with a `loss`."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[Generator], Batch]
    note: str = ""  # what its configuration says, and why

    def model(self, seed: int = 0) -> nn.Module:
        """A fresh model in training mode, the same for the same seed. Leaves the global RNG alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().train()

    def batch(self, seed: int = 0) -> Batch:
        """Inputs and labels; the same seed gives the same batch."""
        return self.draw(torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    side: int  # of an image
    patch: int
    images: int

    @property
    def head(self) -> int:
        return self.width // self.heads


SHAPES: dict[Size, Shape] = {
    "full": Shape(
        layers=6, width=256, heads=8, vocabulary=4096, batch=8, tokens=128, side=96, patch=8, images=8
    ),
    "small": Shape(
        layers=2, width=32, heads=4, vocabulary=128, batch=4, tokens=32, side=16, patch=4, images=4
    ),
}
PAD, BEGIN, END = 0, 1, 2  # tokens
LABELS = 5  # classes of images


def _text(shape: Shape, tokens: int | None = None) -> Callable[[Generator], Batch]:
    """Sentences that are their own labels."""

    def draw(g: Generator) -> Batch:
        words = _words(shape, tokens or shape.tokens, g)
        return {"input_ids": words, "labels": words.clone()}

    return draw


def _words(shape: Shape, tokens: int, g: Generator) -> Tensor:
    return torch.randint(END + 1, shape.vocabulary, (shape.batch, tokens), generator=g)


def _images(shape: Shape, side: int | None = None) -> Callable[[Generator], Batch]:
    side = side or shape.side

    def draw(g: Generator) -> Batch:
        pixels = torch.randn(shape.images, 3, side, side, generator=g)
        return {"pixel_values": pixels, "labels": torch.randint(LABELS, (shape.images,), generator=g)}

    return draw


def _case(
    name: str, model: str, config: str, draw: Callable[[Generator], Batch], note: str = "", **options: Any
) -> LibraryCase:
    """A model from the names of its class and of its configuration's."""

    def build() -> nn.Module:
        make: Any = getattr(transformers, model)
        built: nn.Module = make(getattr(transformers, config)(**options))
        return built

    return LibraryCase(name=name, build=build, draw=draw, note=note)


def _transformer(shape: Shape) -> dict[str, Any]:
    """The names that most configurations have for the same things."""
    return {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.width,
    }


def _decoder(shape: Shape) -> dict[str, Any]:
    return {
        **_transformer(shape),
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.tokens,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }


def _grouped(shape: Shape) -> dict[str, Any]:
    """A decoder of the Llama family: rotary positions, fewer keys than queries, dropout in the attention alone."""
    return {**_decoder(shape), "num_key_value_heads": shape.heads // 2, "attention_dropout": 0.1}


# --- decoders -----------------------------------------------------------------------------------------------


def gpt2(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        _text(shape),
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        vocab_size=shape.vocabulary,
        n_positions=shape.tokens,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )


def llama(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case("llama", "LlamaForCausalLM", "LlamaConfig", _text(shape), **_grouped(shape))


def mistral(size: Size) -> LibraryCase:
    """Attention to a window."""
    shape = SHAPES[size]
    options = {**_grouped(shape), "sliding_window": shape.tokens // 2}
    return _case("mistral", "MistralForCausalLM", "MistralConfig", _text(shape), **options)


def qwen3(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_grouped(shape), "head_dim": shape.head}
    return _case("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _text(shape), **options)


def gemma2(size: Size) -> LibraryCase:
    """Windows and full attention by turns, logits capped."""
    shape = SHAPES[size]
    options = {**_grouped(shape), "head_dim": shape.head, "sliding_window": shape.tokens // 2}
    return _case("gemma2", "Gemma2ForCausalLM", "Gemma2Config", _text(shape), **options)


def phi(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_decoder(shape), "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}
    return _case("phi", "PhiForCausalLM", "PhiConfig", _text(shape), **options)


def opt(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_decoder(shape), "ffn_dim": 4 * shape.width, "word_embed_proj_dim": shape.width}
    del options["intermediate_size"]
    return _case("opt", "OPTForCausalLM", "OPTConfig", _text(shape), **options)


def gpt_neox(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_decoder(shape), "hidden_dropout": 0.1, "attention_dropout": 0.1}
    return _case("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _text(shape), **options)


def bloom(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case(
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        _text(shape),
        hidden_size=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        vocab_size=shape.vocabulary,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )


def falcon(size: Size) -> LibraryCase:
    """One key for all queries; attention and feed-forward side by side."""
    shape = SHAPES[size]
    options = {**_decoder(shape), "hidden_dropout": 0.1, "attention_dropout": 0.1}
    del options["intermediate_size"]
    return _case("falcon", "FalconForCausalLM", "FalconConfig", _text(shape), **options)


def mixtral(size: Size) -> LibraryCase:
    """Experts, and a loss that balances them."""
    shape = SHAPES[size]
    options = {
        **_grouped(shape),
        "intermediate_size": 2 * shape.width,
        "num_local_experts": 4,
        "output_router_logits": True,
    }
    return _case("mixtral", "MixtralForCausalLM", "MixtralConfig", _text(shape), **options)


def gpt_oss(size: Size) -> LibraryCase:
    """Experts, and attention that may go to nothing."""
    shape = SHAPES[size]
    options = {
        **_grouped(shape),
        "head_dim": shape.head,
        "intermediate_size": shape.width,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": shape.tokens // 2,
    }
    return _case("gpt_oss", "GptOssForCausalLM", "GptOssConfig", _text(shape), **options)


def mamba(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    tokens = shape.tokens // 2  # its scan is a loop over them
    return _case(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        _text(shape, tokens),
        note="`use_associative_scan=False`: the other scan is for compiled models alone, and adds in another order",
        hidden_size=shape.width,
        num_hidden_layers=shape.layers // 3 + 1,
        vocab_size=shape.vocabulary,
        state_size=8,
        use_mambapy=False,
        use_associative_scan=False,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )


def mamba2(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case(
        "mamba2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        _text(shape),
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_heads=2 * shape.heads,
        head_dim=shape.head,
        state_size=16,
        n_groups=2,
        chunk_size=shape.tokens // 2,
        vocab_size=shape.vocabulary,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
    )


# --- encoders -----------------------------------------------------------------------------------------------


def bert(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case("bert", "BertForMaskedLM", "BertConfig", _text(shape), **_decoder(shape))


def bert_classifier(size: Size) -> LibraryCase:
    """Sentences of different lengths, padded."""
    shape = SHAPES[size]

    def draw(g: Generator) -> Batch:
        lengths = torch.randint(shape.tokens // 2, shape.tokens + 1, (shape.batch, 1), generator=g)
        there = torch.arange(shape.tokens) < lengths
        return {
            "input_ids": _words(shape, shape.tokens, g).masked_fill(~there, PAD),
            "attention_mask": there.long(),
            "labels": torch.randint(LABELS, (shape.batch,), generator=g),
        }

    options = {**_decoder(shape), "num_labels": LABELS}
    return _case("bert_classifier", "BertForSequenceClassification", "BertConfig", draw, **options)


def roberta(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_decoder(shape), "max_position_embeddings": shape.tokens + 2, "pad_token_id": 1}
    return _case("roberta", "RobertaForMaskedLM", "RobertaConfig", _text(shape), **options)


def distilbert(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        _text(shape),
        dim=shape.width,
        hidden_dim=4 * shape.width,
        n_layers=shape.layers,
        n_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.tokens,
    )


def albert(size: Size) -> LibraryCase:
    """Every layer has the same weights."""
    shape = SHAPES[size]
    options = {
        **_decoder(shape),
        "embedding_size": shape.width // 2,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    return _case("albert", "AlbertForMaskedLM", "AlbertConfig", _text(shape), **options)


def electra(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_decoder(shape), "embedding_size": shape.width // 2}
    return _case("electra", "ElectraForMaskedLM", "ElectraConfig", _text(shape), **options)


def deberta_v2(size: Size) -> LibraryCase:
    """Attention to contents and to relative positions, apart."""
    shape = SHAPES[size]
    options = {**_decoder(shape), "relative_attention": True, "pos_att_type": "p2c|c2p"}
    return _case("deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config", _text(shape), **options)


def modernbert(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    dropout = {"attention_dropout": 0.1, "embedding_dropout": 0.1, "mlp_dropout": 0.1}
    options = {**_decoder(shape), **dropout, "local_attention": shape.tokens // 2}
    return _case("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", _text(shape), **options)


def longformer(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {
        **_decoder(shape),
        "attention_window": [shape.tokens // 4] * shape.layers,
        "max_position_embeddings": shape.tokens + 2,
        "pad_token_id": 1,
    }
    note = "Mistral or ModernBERT, which attend to windows without looking into the mask"
    return _case("longformer", "LongformerForMaskedLM", "LongformerConfig", _text(shape), note, **options)


# --- encoder-decoders ---------------------------------------------------------------------------------------


def _two_sided(shape: Shape) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", shape.layers // 2),
            ("attention_heads", shape.heads),
            ("ffn_dim", 4 * shape.width),
        )
    }
    tokens = {
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "decoder_start_token_id": BEGIN,
    }
    return {
        **sides,
        **tokens,
        "d_model": shape.width,
        "vocab_size": shape.vocabulary,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
    }


def t5(size: Size) -> LibraryCase:
    shape = SHAPES[size]

    def draw(g: Generator) -> Batch:
        return {
            "input_ids": _words(shape, shape.tokens, g),
            "labels": _words(shape, shape.tokens // 2, g),
        }

    return _case(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        draw,
        d_model=shape.width,
        d_kv=shape.head,
        d_ff=4 * shape.width,
        num_layers=shape.layers // 2,
        num_decoder_layers=shape.layers // 2 + 1,
        num_heads=shape.heads,
        vocab_size=shape.vocabulary,
        decoder_start_token_id=PAD,
    )


def bart(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_two_sided(shape), "max_position_embeddings": shape.tokens}
    return _case("bart", "BartForConditionalGeneration", "BartConfig", _text(shape), **options)


def bart_layerdrop(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_two_sided(shape), "max_position_embeddings": shape.tokens, "encoder_layerdrop": 0.1}
    note = "`encoder_layerdrop=0`: layers that drop out whole are a branch"
    return _case(
        "bart_layerdrop", "BartForConditionalGeneration", "BartConfig", _text(shape), note, **options
    )


def whisper(size: Size) -> LibraryCase:
    """Sound to text, convolutions first."""
    shape = SHAPES[size]

    def draw(g: Generator) -> Batch:
        sound = torch.randn(shape.batch, 16, 2 * shape.tokens, generator=g)
        return {"input_features": sound, "labels": _words(shape, shape.tokens // 2, g)}

    options = {
        **_two_sided(shape),
        "num_mel_bins": 16,
        "max_source_positions": shape.tokens,
        "max_target_positions": shape.tokens,
    }
    return _case("whisper", "WhisperForConditionalGeneration", "WhisperConfig", draw, **options)


def wav2vec2(size: Size) -> LibraryCase:
    shape = SHAPES[size]

    def draw(g: Generator) -> Batch:
        labels = torch.randint(1, 30, (shape.batch, 6), generator=g)
        return {"input_values": torch.randn(shape.batch, 40 * shape.tokens, generator=g), "labels": labels}

    note = "`model.freeze_feature_encoder()`, no labels, and the loss outside of the model"
    options = {**_transformer(shape), "conv_dim": (16, 16), "conv_kernel": (5, 3), "conv_stride": (5, 4)}
    return _case(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        draw,
        note,
        **options,
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        vocab_size=32,
        layerdrop=0.0,
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
    )


# --- images -------------------------------------------------------------------------------------------------


def _patches(shape: Shape) -> dict[str, Any]:
    return {
        **_transformer(shape),
        "image_size": shape.side,
        "patch_size": shape.patch,
        "num_labels": LABELS,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }


def vit(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case("vit", "ViTForImageClassification", "ViTConfig", _images(shape), **_patches(shape))


def dinov2(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    options = {**_patches(shape), "drop_path_rate": 0.1}
    del options["intermediate_size"]
    return _case("dinov2", "Dinov2ForImageClassification", "Dinov2Config", _images(shape), **options)


def swin(size: Size) -> LibraryCase:
    """Attention in windows that shift, and paths that drop out."""
    shape = SHAPES[size]
    side = 2 * shape.side if size == "small" else 16 * shape.patch
    return _case(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        _images(shape, side),
        image_size=side,
        patch_size=4,
        embed_dim=shape.width // 2,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=LABELS,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        drop_path_rate=0.1,
    )


def convnext(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    widths = [shape.width // 4 * k for k in (1, 2, 3, 4)]
    return _case(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _images(shape, 64 if size == "small" else 2 * shape.side),
        hidden_sizes=widths,
        depths=[1, 1, 2, 1],
        num_labels=LABELS,
        drop_path_rate=0.1,
    )


def resnet(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        _images(shape, 2 * shape.side),
        embedding_size=shape.width // 4,
        hidden_sizes=[shape.width // 2, shape.width],
        depths=[2, 2],
        num_labels=LABELS,
    )


def mobilenet_v2(size: Size) -> LibraryCase:
    shape = SHAPES[size]
    return _case(
        "mobilenet_v2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        _images(shape, 64 if size == "small" else 2 * shape.side),
        image_size=64,
        depth_multiplier=0.35,
        num_labels=LABELS,
    )


def segformer(size: Size) -> LibraryCase:
    """A label for every pixel."""
    shape = SHAPES[size]
    side = 64 if size == "small" else 128

    def draw(g: Generator) -> Batch:
        pixels = torch.randn(shape.images, 3, side, side, generator=g)
        labels = torch.randint(LABELS, (shape.images, side, side), generator=g)
        return {"pixel_values": pixels, "labels": labels}

    return _case(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        draw,
        hidden_sizes=[shape.width // 4, shape.width // 2, shape.width // 2, shape.width],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=shape.width // 2,
        num_labels=LABELS,
        hidden_dropout_prob=0.1,
    )


def detr(size: Size) -> LibraryCase:
    shape = SHAPES[size]

    def draw(g: Generator) -> Batch:
        boxes = [torch.rand(2, 4, generator=g) / 2 for _ in range(shape.images)]
        labels = [{"class_labels": torch.tensor([1, 2]), "boxes": box} for box in boxes]
        return {"pixel_values": torch.randn(shape.images, 3, 64, 64, generator=g), "labels": labels}

    options = {
        name: value
        for name, value in _two_sided(shape).items()
        if not name.endswith("token_id") and name != "vocab_size"
    }
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 24], depths=[1, 1], out_features=["stage2"]
    )
    note = "its decoder alone: `model.model.decoder = fxremat.compile(model.model.decoder, mem=...)`"
    return _case(
        "detr",
        "DetrForObjectDetection",
        "DetrConfig",
        draw,
        note,
        **options,
        num_queries=6,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_labels=LABELS,
    )


def clip(size: Size) -> LibraryCase:
    """Two towers that meet in the loss."""
    shape = SHAPES[size]
    decoder, patches = _decoder(shape), _patches(shape)

    def draw(g: Generator) -> Batch:
        words = _words(shape, shape.tokens // 2, g)
        words[:, -1] = END
        pixels = torch.randn(shape.batch, 3, shape.side, shape.side, generator=g)
        return {"input_ids": words, "pixel_values": pixels, "return_loss": True}

    return _case(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        draw,
        text_config={**decoder, "attention_dropout": 0.1},
        vision_config={
            **_transformer(shape),
            "image_size": shape.side,
            "patch_size": patches["patch_size"],
            "attention_dropout": 0.1,
        },
        projection_dim=shape.width // 2,
    )


_CAPTURED = (
    *(gpt2, bert, t5, llama, vit),
    *(mistral, qwen3, gemma2, phi, opt, gpt_neox, bloom, falcon, mixtral, gpt_oss, mamba, mamba2),
    *(bert_classifier, roberta, distilbert, albert, electra, deberta_v2, modernbert, bart, whisper),
    *(dinov2, swin, convnext, resnet, mobilenet_v2, segformer, clip),
)
_REFUSED = (bart_layerdrop, longformer, wav2vec2, detr)
_FACTORIES: dict[str, Callable[[Size], LibraryCase]] = {
    make.__name__: make for make in (*_CAPTURED, *_REFUSED)
}

MAIN = tuple(make.__name__ for make in _CAPTURED[:5])
"""Tested every day."""
CAPTURED = tuple(make.__name__ for make in _CAPTURED)
REFUSED = tuple(make.__name__ for make in _REFUSED)
"""Not one graph; `note` says what to do."""


def get(name: str, size: Size = "full") -> LibraryCase:
    """The named case. Raises KeyError with the known names."""
    if name not in _FACTORIES:
        raise KeyError(f"no model {name!r}; known: {', '.join(_FACTORIES)}")
    return _FACTORIES[name](size)

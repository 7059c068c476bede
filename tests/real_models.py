# SPDX-License-Identifier: Apache-2.0
"""Provides small random models of common architectures: name -> a model, a batch and its losses.

Nothing is downloaded. Dropout is zero, so that an example has the same loss alone and in the batch.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_privacy_papers.models.networks import AveragedWords, Recommender, cifar_cnn, mnist_cnn

Batch = dict[str, Tensor]

QUIET = [  # warnings of torch about its own layers, and of transformers about peft's calls
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning:torch"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

VOCABULARY = 23
NO_LABEL = -100


@dataclass(frozen=True)
class RealModel:
    """A model and a batch; ``losses(module, batch)`` is (n,), and loss i depends only on example i."""

    module: nn.Module
    batch: Batch  # the n examples are the first dimension of every tensor
    losses: Callable[[nn.Module, Batch], Tensor]


def part(batch: Batch, i: int) -> Batch:
    """Returns the batch of only example i."""
    return {name: value[i : i + 1] for name, value in batch.items()}


def stirred(module: nn.Module) -> nn.Module:
    """Perturbs a fresh module, because its special values (bias 0, scale 1, adapter 0) would hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return module


# Losses ------------------------------------------------------------------------------------------------------------


def _inputs(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns losses (n,) from logits (n, ..., classes): the mean over the labeled positions of each example."""
    losses = F.cross_entropy(logits.movedim(-1, 1), labels, ignore_index=NO_LABEL, reduction="none")
    labeled = labels.reshape(len(labels), -1) != NO_LABEL
    return losses.reshape(len(labels), -1).sum(1) / labeled.sum(1)


def of_logits(module: nn.Module, batch: Batch) -> Tensor:
    return mean_cross_entropy(module(**_inputs(batch)).logits, batch["labels"])


def of_output(module: nn.Module, batch: Batch) -> Tensor:
    return mean_cross_entropy(module(**_inputs(batch)), batch["labels"])


def weighted(y: Tensor) -> Tensor:
    """Returns losses (n,) from (n, ...), with a different weight for every entry."""
    y = y.reshape(len(y), -1)
    return (y.sin() * torch.linspace(0.5, 1.5, y.shape[1], dtype=y.dtype)).sum(1)


def of_every_entry(module: nn.Module, batch: Batch) -> Tensor:
    return weighted(module(**batch))


def of_pooled(module: nn.Module, batch: Batch) -> Tensor:
    return weighted(module(**batch).pooler_output)


def of_hidden_states(module: nn.Module, batch: Batch) -> Tensor:
    return weighted(module(**batch).last_hidden_state.mean(1))


# Batches -----------------------------------------------------------------------------------------------------------


def padding_mask(*, lengths: tuple[int, ...] = (7, 4, 5), left: bool = False) -> Tensor:
    """Returns an integer mask (n, t): 1 at the tokens, 0 at the padding."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return mask.flip(1) if left else mask


def tokens(mask: Tensor, padding: int = 0) -> Tensor:
    """Returns tokens (n, t) without the first three of the vocabulary, which are special."""
    return torch.randint(3, VOCABULARY, mask.shape).masked_fill(mask == 0, padding)


def next_token_batch(*, left: bool = False) -> Batch:
    """Labels every token with the next token."""
    mask = padding_mask(left=left)
    ids = tokens(mask)
    labels = torch.full_like(ids, NO_LABEL)
    labels[:, :-1] = ids[:, 1:].masked_fill(mask[:, 1:] * mask[:, :-1] == 0, NO_LABEL)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def masked_token_batch(padding: int = 0) -> Batch:
    """Masks every third token by token 2, and labels it with the original."""
    mask = padding_mask()
    ids = tokens(mask, padding)
    hidden = (torch.arange(mask.shape[1]) % 3 == 1) & (mask == 1)
    labels = ids.masked_fill(~hidden, NO_LABEL)
    return {"input_ids": ids.masked_fill(hidden, 2), "attention_mask": mask, "labels": labels}


def text_classes(padding: int = 0) -> Batch:
    mask = padding_mask()
    return {"input_ids": tokens(mask, padding), "attention_mask": mask, "labels": torch.tensor([0, 2, 1])}


def images(size: int, *, channels: int = 3, name: str = "x") -> Batch:
    return {name: torch.randn(4, channels, size, size), "labels": torch.randint(0, 5, (4,))}


# transformers ------------------------------------------------------------------------------------------------------


def both_attentions(name: str, make: Callable[[str], RealModel]) -> dict[str, Callable[[], RealModel]]:
    return {f"{name}, {attention}": partial(make, attention) for attention in ("eager", "sdpa")}


def hf(name: str, *args: Any, **options: Any) -> Any:
    """Imports transformers, which takes seconds, and returns an instance of that class."""
    return getattr(importlib.import_module("transformers"), name)(*args, **options)


def gpt2(attention: str) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    rest = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "attn_implementation": attention}
    return hf("GPT2LMHeadModel", hf("GPT2Config", **sizes, **dropout, **rest))


def gpt2_language_model(attention: str, *, left: bool = False) -> RealModel:
    return RealModel(stirred(gpt2(attention)), next_token_batch(left=left), of_logits)


def encoder_config(attention: str) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {**sizes, **dropout, "attn_implementation": attention}


def bert_classifier(attention: str) -> RealModel:
    config = hf(
        "BertConfig", vocab_size=VOCABULARY, max_position_embeddings=12, num_labels=3, **encoder_config(attention)
    )
    return RealModel(stirred(hf("BertForSequenceClassification", config)), text_classes(), of_logits)


def bert_masked_model(attention: str) -> RealModel:
    config = hf("BertConfig", vocab_size=VOCABULARY, max_position_embeddings=12, **encoder_config(attention))
    return RealModel(stirred(hf("BertForMaskedLM", config)), masked_token_batch(), of_logits)


def roberta_config(attention: str) -> Any:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 12, "pad_token_id": 1, "num_labels": 3}
    return hf("RobertaConfig", **sizes, **encoder_config(attention))


def roberta_classifier(attention: str) -> RealModel:
    module = hf("RobertaForSequenceClassification", roberta_config(attention))
    return RealModel(stirred(module), text_classes(padding=1), of_logits)


def roberta_masked_model(attention: str) -> RealModel:
    return RealModel(
        stirred(hf("RobertaForMaskedLM", roberta_config(attention))), masked_token_batch(padding=1), of_logits
    )


def decoder_config(attention: str) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 20, "max_position_embeddings": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {"vocab_size": VOCABULARY, **sizes, **heads, "use_cache": False, "attn_implementation": attention}


def llama(attention: str, **options: Any) -> nn.Module:
    return hf("LlamaForCausalLM", hf("LlamaConfig", **decoder_config(attention), **options))


def llama_language_model(attention: str, *, left: bool = False, **options: Any) -> RealModel:
    return RealModel(stirred(llama(attention, **options)), next_token_batch(left=left), of_logits)


def mixtral_language_model(experts: str, attention: str) -> RealModel:
    choices = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": experts}
    module = hf("MixtralForCausalLM", hf("MixtralConfig", **decoder_config(attention), **choices))
    return RealModel(stirred(module), next_token_batch(), of_logits)


def t5(attention: str, **options: Any) -> RealModel:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    positions = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 5}
    rest = {"dropout_rate": 0.0, "use_cache": False, "attn_implementation": attention}
    module = hf(
        "T5ForConditionalGeneration", hf("T5Config", vocab_size=VOCABULARY, **sizes, **positions, **rest, **options)
    )
    target = next_token_batch()
    encoder = {"input_ids": target["input_ids"].flip(1), "attention_mask": target["attention_mask"].flip(1)}
    decoder = {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}
    return RealModel(stirred(module), {**encoder, **decoder, "labels": target["labels"]}, of_logits)


def mamba() -> RealModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    return RealModel(
        stirred(hf("MambaForCausalLM", hf("MambaConfig", **sizes, use_cache=False))), next_token_batch(), of_logits
    )


def vit(attention: str) -> RealModel:
    config = hf("ViTConfig", image_size=8, patch_size=4, num_labels=5, **encoder_config(attention))
    return RealModel(stirred(hf("ViTForImageClassification", config)), images(8, name="pixel_values"), of_logits)


def swin(attention: str) -> RealModel:
    """Returns a Swin transformer: windows of 4 x 4 patches, shifted in every second layer, and one patch merging."""
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    rest = {"drop_path_rate": 0.0, "num_labels": 5, "attn_implementation": attention}
    module = hf("SwinForImageClassification", hf("SwinConfig", **sizes, **rest))
    return RealModel(stirred(module), images(16, name="pixel_values"), of_logits)


def convnext() -> RealModel:
    sizes = {"image_size": 32, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 1]}
    config = hf("ConvNextConfig", **sizes, drop_path_rate=0.0, layer_scale_init_value=1.0, num_labels=5)
    return RealModel(stirred(hf("ConvNextForImageClassification", config)), images(32, name="pixel_values"), of_logits)


def wav2vec2(attention: str, *, stable: bool, masked: bool = False) -> RealModel:
    """Uses sounds of unequal lengths; ``stable`` is the variant with layer norms, ``masked`` masks some times."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    convolutions = {"conv_dim": (8, 6), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    norms = {"feat_extract_norm": "layer" if stable else "group", "do_stable_layer_norm": stable}
    names = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "layerdrop")
    rest = {"mask_time_prob": 0.1 if masked else 0.0, "attn_implementation": attention, **dict.fromkeys(names, 0.0)}
    module = hf("Wav2Vec2Model", hf("Wav2Vec2Config", **sizes, **convolutions, **positions, **norms, **rest))
    mask = padding_mask(lengths=(60, 41, 52))
    batch = {"input_values": torch.randn(mask.shape) * mask, "attention_mask": mask}
    hidden = {"mask_time_indices": torch.rand(3, 14) < 0.3} if masked else {}
    return RealModel(stirred(module), {**batch, **hidden}, of_hidden_states)


def clip_text_config(attention: str) -> Any:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 12, "projection_dim": 8}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return hf("CLIPTextConfig", **sizes, **special, **encoder_config(attention))


def clip_vision_config(attention: str) -> Any:
    return hf("CLIPVisionConfig", image_size=8, patch_size=4, **encoder_config(attention), projection_dim=8)


def ended_texts() -> Batch:
    """Ends every text with token 2."""
    mask = padding_mask()
    ids = tokens(mask).scatter(1, mask.sum(1, keepdim=True) - 1, 2)
    return {"input_ids": ids, "attention_mask": mask}


def clip_text(attention: str) -> RealModel:
    return RealModel(stirred(hf("CLIPTextModel", clip_text_config(attention))), ended_texts(), of_pooled)


def clip_vision(attention: str) -> RealModel:
    module = stirred(hf("CLIPVisionModel", clip_vision_config(attention)))
    return RealModel(module, {"pixel_values": torch.randn(3, 3, 8, 8)}, of_pooled)


def clip_pairs(attention: str, losses: Callable[[nn.Module, Batch], Tensor]) -> RealModel:
    """Uses both towers; an example is a pair of image and text."""
    configs = {"text_config": clip_text_config(attention), "vision_config": clip_vision_config(attention)}
    module = hf("CLIPModel", hf("CLIPConfig", **configs, projection_dim=8, attn_implementation=attention))
    return RealModel(stirred(module), {**ended_texts(), "pixel_values": torch.randn(3, 3, 8, 8)}, losses)


def of_each_pair(module: Any, batch: Batch) -> Tensor:
    """Returns the logistic loss of each pair alone, without other texts or images of the batch."""
    y = module(**batch)
    return F.softplus(-0.1 * module.logit_scale.exp() * (y.text_embeds * y.image_embeds).sum(1))


def of_diagonal(module: nn.Module, batch: Batch) -> Tensor:
    """Returns the same from the table of all texts against all images."""
    return F.softplus(-0.1 * module(**batch).logits_per_image.diagonal())


def with_adapters(module: Any, batch: Batch, **options: Any) -> RealModel:
    """Trains only the adapters of peft; the base is frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, **options)
    return RealModel(stirred(get_peft_model(module, config)), batch, of_logits)


def gpt2_with_adapters(attention: str) -> RealModel:
    targets = ["c_attn", "c_proj", "c_fc"]
    return with_adapters(gpt2(attention), next_token_batch(), target_modules=targets, fan_in_fan_out=True)


def llama_with_adapters(attention: str, **options: Any) -> RealModel:
    targets = ["q_proj", "v_proj", "down_proj"]
    return with_adapters(llama(attention), next_token_batch(), target_modules=targets, **options)


TRANSFORMERS: dict[str, Callable[[], RealModel]] = {
    **both_attentions("GPT-2", gpt2_language_model),
    **both_attentions("GPT-2 padded on the left", partial(gpt2_language_model, left=True)),
    **both_attentions("BERT classifier", bert_classifier),
    **both_attentions("BERT masked language model", bert_masked_model),
    **both_attentions("RoBERTa classifier", roberta_classifier),
    **both_attentions("RoBERTa masked language model", roberta_masked_model),
    **both_attentions("Llama", llama_language_model),
    # With eager attention, a query that sees only padding gives NaN in float64.
    "Llama padded on the left, sdpa": partial(llama_language_model, "sdpa", left=True),
    **both_attentions(
        "Llama, tied, with biases",
        partial(llama_language_model, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    **both_attentions("Mixtral, experts eager", partial(mixtral_language_model, "eager")),
    **both_attentions("Mixtral, experts batched_mm", partial(mixtral_language_model, "batched_mm")),
    **both_attentions("Mixtral, experts grouped_mm", partial(mixtral_language_model, "grouped_mm")),
    **both_attentions("T5", t5),
    **both_attentions("T5 1.1", partial(t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "Mamba": mamba,
    **both_attentions("ViT", vit),
    **both_attentions("Swin", swin),
    "ConvNeXt": convnext,
    **both_attentions("wav2vec2", partial(wav2vec2, stable=False)),
    **both_attentions("wav2vec2, stable", partial(wav2vec2, stable=True)),
    **both_attentions("wav2vec2, masked", partial(wav2vec2, stable=True, masked=True)),
    **both_attentions("CLIP text", clip_text),
    **both_attentions("CLIP vision", clip_vision),
    **both_attentions("CLIP pairs", partial(clip_pairs, losses=of_each_pair)),
    **both_attentions("CLIP pairs by the diagonal", partial(clip_pairs, losses=of_diagonal)),
    **both_attentions("LoRA on GPT-2", gpt2_with_adapters),
    **both_attentions("LoRA on Llama", llama_with_adapters),
    **both_attentions("DoRA on Llama", partial(llama_with_adapters, use_dora=True)),
}


# Convolutions ------------------------------------------------------------------------------------------------------


def normed(convolution: nn.Module, channels: int) -> nn.Sequential:
    return nn.Sequential(convolution, nn.GroupNorm(2, channels))


class Residual(nn.Module):
    """Computes relu(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module):
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class PaddedShortcut(nn.Module):
    """Option A of He et al. (2016): takes every second place, and sets new channels to zero; without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, x.shape[1]))


def projection(c: int, e: int, stride: int) -> nn.Module:
    return nn.Identity() if (c, stride) == (e, 1) else normed(nn.Conv2d(c, e, 1, stride, bias=False), e)


def basic_block(c: int, e: int, stride: int, *, padded: bool = False) -> nn.Module:
    first = normed(nn.Conv2d(c, e, 3, stride, 1, bias=False), e)
    second = normed(nn.Conv2d(e, e, 3, 1, 1, bias=False), e)
    shortcut = PaddedShortcut() if padded and stride == 2 else projection(c, e, stride)
    return Residual(nn.Sequential(first, nn.ReLU(inplace=True), second), shortcut)


def bottleneck(c: int, e: int, stride: int) -> nn.Module:
    middle = e // 4
    narrow = normed(nn.Conv2d(c, middle, 1, bias=False), middle)
    spread = normed(nn.Conv2d(middle, middle, 3, stride, 1, bias=False), middle)
    wide = normed(nn.Conv2d(middle, e, 1, bias=False), e)
    body = nn.Sequential(narrow, nn.ReLU(inplace=True), spread, nn.ReLU(inplace=True), wide)
    return Residual(body, projection(c, e, stride))


def residual_network(stem: nn.Module, c: int, widths: list[int], depths: list[int], block: Callable) -> nn.Module:
    blocks = []
    for stage, (e, depth) in enumerate(zip(widths, depths, strict=True)):
        for i in range(depth):
            blocks.append(block(c, e, 2 if stage and not i else 1))
            c = e
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 5))


class OfImages(nn.Module):
    """A network with one argument, named as in the batches of images."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


def image_classifier(network: nn.Module, size: int, channels: int = 3) -> RealModel:
    return RealModel(stirred(OfImages(network)), images(size, channels=channels), of_output)


def resnet20(*, padded: bool = False) -> RealModel:
    """Returns ResNet-20 for CIFAR: three stages of three blocks; ``padded`` is the network of GEP (Yu et al. 2021)."""
    stem = nn.Sequential(normed(nn.Conv2d(3, 4, 3, 1, 1, bias=False), 4), nn.ReLU(inplace=True))
    return image_classifier(
        residual_network(stem, 4, [4, 8, 16], [3, 3, 3], partial(basic_block, padded=padded)), size=8
    )


def large_resnet(widths: list[int], depths: list[int], block: Callable, size: int) -> RealModel:
    convolution = normed(nn.Conv2d(3, 8, 7, 2, 3, bias=False), 8)
    stem = nn.Sequential(convolution, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return image_classifier(residual_network(stem, 8, widths, depths, block), size)


def double_convolution(c: int, e: int) -> nn.Sequential:
    first, second = (normed(nn.Conv2d(d, e, 3, 1, 1), e) for d in (c, e))
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))


class UNet(nn.Module):
    """A U-Net of two levels, which concatenates the features of both paths."""

    def __init__(self, width: int = 4):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(double_convolution(c, e) for c, e in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * e, e, 2, 2) for e in widths[1::-1])
        self.join = nn.ModuleList(double_convolution(2 * e, e) for e in widths[1::-1])
        self.out = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, level in enumerate(self.down):
            x = level(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.out(x).movedim(1, -1)


def u_net() -> RealModel:
    labels = torch.randint(0, 5, (4, 8, 8)).masked_fill(torch.rand(4, 8, 8) < 0.3, NO_LABEL)
    return RealModel(stirred(UNet()), {"x": torch.randn(4, 3, 8, 8), "labels": labels}, of_output)


def discriminator(*, norms: bool) -> RealModel:
    """A network of DCGAN (Radford et al. 2016), with group norms or no norms in place of batch norms."""
    layers: list[nn.Module] = []
    for c, e in [(3, 4), (4, 8), (8, 16)]:
        convolution = nn.Conv2d(c, e, 4, 2, 1, bias=not norms)
        layers += [normed(convolution, e) if norms and c != 3 else convolution, nn.LeakyReLU(0.2, inplace=True)]
    network = nn.Sequential(*layers, nn.Conv2d(16, 1, 4, 1, 0), nn.Flatten(0))

    def losses(module: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(module(batch["x"]), batch["real"], reduction="none")

    batch = {"x": torch.randn(4, 3, 32, 32), "real": torch.tensor([0.0, 1.0, 1.0, 0.0])}
    return RealModel(stirred(network), batch, losses)


CONVOLUTIONS: dict[str, Callable[[], RealModel]] = {
    "ResNet-20": resnet20,
    "ResNet-18": lambda: large_resnet([8, 12, 16, 20], [2, 2, 2, 2], basic_block, size=32),
    # On smaller images the norms of the last stage average only a few numbers, which is inaccurate in float32.
    "ResNet-50": lambda: large_resnet([16, 24, 32, 40], [3, 4, 6, 3], bottleneck, size=64),
    "U-Net": u_net,
    "DCGAN discriminator": lambda: discriminator(norms=True),
    "DCGAN discriminator without norms": lambda: discriminator(norms=False),
}


# Attention of torch.nn ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """``nn.MultiheadAttention`` of x on itself, or on ``memory`` if given."""

    def __init__(self, *, causal: bool = False, need_weights: bool = False, **options: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, **options)
        self.causal, self.need_weights = causal, need_weights

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        arguments = [x, x if memory is None else memory, x if value is None else value]
        if not self.attention.batch_first:
            arguments = [argument.transpose(0, 1) for argument in arguments]
        t = x.shape[1]
        later = torch.ones(t, t, dtype=torch.bool).triu(1) if self.causal else None
        y, _ = self.attention(*arguments, key_padding_mask=~mask, need_weights=self.need_weights, attn_mask=later)
        return y if self.attention.batch_first else y.transpose(0, 1)


def self_attention(**options: Any) -> RealModel:
    batch = {"x": torch.randn(3, 7, 12), "mask": padding_mask().bool()}
    return RealModel(stirred(Attention(**options)), batch, of_every_entry)


def cross_attention(**options: Any) -> RealModel:
    """Attention with different widths of queries, keys and values."""
    arguments = {"x": torch.randn(3, 5, 12), "memory": torch.randn(3, 7, 10), "value": torch.randn(3, 7, 8)}
    batch = {**arguments, "mask": padding_mask().bool()}
    return RealModel(stirred(Attention(kdim=10, vdim=8, **options)), batch, of_every_entry)


LAYER = {"d_model": 12, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0}


class TorchTransformer(nn.Module):
    """Maps tokens to logits by one of the stacks of ``torch.nn``; ``stack(m, x, memory, padded)`` calls it."""

    def __init__(self, transformer: nn.Module, stack: Callable[..., Tensor], *, batch_first: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12, padding_idx=0)
        self.transformer, self.head = transformer, nn.Linear(12, VOCABULARY)
        self._stack, self._batch_first = stack, batch_first

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, memory = self.embedding(input_ids), self.embedding(input_ids.flip(1))
        if not self._batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        y = self._stack(self.transformer, x, memory, attention_mask == 0)
        return self.head(y if self._batch_first else y.transpose(0, 1))


def later_positions(padded: Tensor) -> Tensor:
    """Returns a mask (t, t): True if the key comes after the query."""
    return torch.ones(padded.shape[1], padded.shape[1], dtype=torch.bool).triu(1)


def encode(m: nn.Module, x: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
    return m(x, src_key_padding_mask=padded)


def decode(m: nn.Module, x: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
    masks = {"tgt_key_padding_mask": padded, "memory_key_padding_mask": padded.flip(1)}
    return m(x, memory, tgt_mask=later_positions(padded), **masks)


def translate(m: nn.Module, x: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
    masks = {"src_key_padding_mask": padded.flip(1), "tgt_key_padding_mask": padded}
    return m(memory, x, tgt_mask=later_positions(padded), memory_key_padding_mask=padded.flip(1), **masks)


def torch_encoder(**options: Any) -> RealModel:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER, **options), 2, enable_nested_tensor=False)
    module = TorchTransformer(stack, encode, batch_first=options["batch_first"])
    return RealModel(stirred(module), next_token_batch(), of_output)


def torch_decoder(**options: Any) -> RealModel:
    stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER, **options), 2)
    module = TorchTransformer(stack, decode, batch_first=options["batch_first"])
    return RealModel(stirred(module), next_token_batch(), of_output)


def torch_transformer(**options: Any) -> RealModel:
    stack = nn.Transformer(**LAYER, num_encoder_layers=1, num_decoder_layers=1, **options)
    module = TorchTransformer(stack, translate, batch_first=options["batch_first"])
    return RealModel(stirred(module), next_token_batch(), of_output)


def both_orders(name: str, make: Callable[..., RealModel]) -> dict[str, Callable[[], RealModel]]:
    """Returns variants: batch first or time first, norm first or last."""
    return {
        f"{name}, {first} first, norm {place}": partial(make, batch_first=first == "batch", norm_first=place == "first")
        for first in ("batch", "time")
        for place in ("first", "last")
    }


ATTENTION: dict[str, Callable[[], RealModel]] = {
    "nn.MultiheadAttention": partial(self_attention, batch_first=True),
    "nn.MultiheadAttention, time first": self_attention,
    "nn.MultiheadAttention with its weights": partial(self_attention, batch_first=True, need_weights=True),
    "nn.MultiheadAttention, causal": partial(self_attention, batch_first=True, causal=True),
    "nn.MultiheadAttention, no bias": partial(self_attention, batch_first=True, bias=False),
    "nn.MultiheadAttention, add_bias_kv": partial(self_attention, add_bias_kv=True),
    "nn.MultiheadAttention, add_bias_kv, with its weights": partial(
        self_attention, batch_first=True, add_bias_kv=True, need_weights=True
    ),
    "nn.MultiheadAttention, add_zero_attn": partial(self_attention, batch_first=True, add_zero_attn=True),
    "nn.MultiheadAttention, cross": partial(cross_attention, batch_first=True),
    "nn.MultiheadAttention, cross, time first, everything": partial(
        cross_attention, add_bias_kv=True, add_zero_attn=True, need_weights=True
    ),
    **both_orders("nn.TransformerEncoder", torch_encoder),
    **both_orders("nn.TransformerDecoder", torch_decoder),
    **both_orders("nn.Transformer", torch_transformer),
}


# Networks of the papers --------------------------------------------------------------------------------------------


class Sentiment(nn.Module):
    """A recurrent network over tokens: dense layers on the last state of one direction or both."""

    def __init__(self, *, bidirectional: bool, packed: bool = False, vocabulary: int = VOCABULARY, width: int = 6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, batch_first=True, bidirectional=bidirectional)
        states = (2 if bidirectional else 1) * width
        self.dense = nn.Sequential(nn.Linear(states, width), nn.ReLU(), nn.Linear(width, 2))
        self.packed = packed

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if self.packed:
            lengths = attention_mask.sum(1)
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.recurrent(x)
        return self.dense(h.transpose(0, 1).flatten(1))


def sentiment(**options: bool) -> RealModel:
    mask = padding_mask()
    batch = {"input_ids": tokens(mask), "attention_mask": mask, "labels": torch.tensor([0, 1, 1])}
    return RealModel(stirred(Sentiment(**options)), batch, of_output)


def averaged_words() -> RealModel:
    batch = {"words": torch.randint(0, VOCABULARY, (3, 7)), "labels": torch.tensor([0, 1, 1])}
    return RealModel(stirred(AveragedWords(VOCABULARY)), batch, of_output)


def recommender() -> RealModel:
    """Returns ratings, two of which are of one film."""
    pairs = torch.tensor([[3, 2], [7, 2], [0, 12], [10, 5]])
    batch = {"pairs": pairs, "labels": torch.tensor([4, 0, 2, 3])}
    return RealModel(stirred(Recommender(users=11, movies=13)), batch, of_output)


def table_classifier(*widths: int) -> RealModel:
    layers = [layer for d, e in pairwise(widths) for layer in (nn.Linear(d, e), nn.ReLU())]
    batch = {"x": torch.randn(4, widths[0]), "labels": torch.randint(0, widths[-1], (4,))}
    return RealModel(stirred(OfImages(nn.Sequential(*layers[:-1]))), batch, of_output)


PAPERS: dict[str, Callable[[], RealModel]] = {
    "MNIST CNN": lambda: image_classifier(mnist_cnn(width=4), size=28, channels=1),
    "MNIST on principal components": lambda: table_classifier(60, 40, 10),
    "Papernot's CIFAR CNN": lambda: image_classifier(cifar_cnn(width=4, size=16), size=16),
    "GEP's ResNet-20": lambda: resnet20(padded=True),
    "IMDb by averaged words": averaged_words,
    "IMDb LSTM": lambda: sentiment(bidirectional=False),
    "IMDb BiLSTM": lambda: sentiment(bidirectional=True),
    "IMDb BiLSTM, packed": lambda: sentiment(bidirectional=True, packed=True),
    "Adult MLP": lambda: table_classifier(123, 16, 2),
    "MovieLens recommender": recommender,
}


MODELS: dict[str, Callable[[], RealModel]] = {**TRANSFORMERS, **CONVOLUTIONS, **ATTENTION, **PAPERS}

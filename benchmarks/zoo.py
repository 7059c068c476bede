# SPDX-License-Identifier: Apache-2.0
"""Tests which architectures train: Hugging Face's transformers, adapters of peft, and some networks of torch.

    OMP_NUM_THREADS=1 python benchmarks/zoo.py                         # all of them, once: about three minutes
    OMP_NUM_THREADS=1 python benchmarks/zoo.py --only 'llama|mamba'    # those with matching names
    OMP_NUM_THREADS=1 python benchmarks/zoo.py --seed 7 --seeds 3      # seeds 7, 8 and 9, each another configuration
    OMP_NUM_THREADS=1 python benchmarks/zoo.py --json zoo.json         # the printed results and the drawn sizes

Every model is small, random and in float32; its sizes, its kind of attention, its data and the form of its loss are
drawn from the seed and the model's name. Nothing is downloaded. First it trains eight private steps, with dropout if
its configuration has any. Then, without dropout and in float64 if the model supports it, the squared norms and one
weighted sum of ``tp.record`` are compared with one backward per example, each example alone in its batch; if the record
is refused but the training was not, the clipped sum of a training with minimal noise is compared instead.

A line states the result of the training: ``trained``; ``refused``, with the message; ``crashed``, another exception
although an ordinary forward and backward work; ``failed``, an exception of transformers or of this file. Then follow
the largest relative error of a squared norm and the relative error of the sum (in brackets if in float32), or
``no record`` and the error of the clipped sum. Parameters that the loss never reaches are frozen first, as a user would
do. Expected refusals have a reason: either the model couples examples, or the documentation lists it as unsupported,
and then it may train as well. The exit code is 1 if a line begins with an exclamation mark.
"""

import argparse
import importlib
import json
import math
import random
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import torch_privacy as tp

EXAMPLES, STEPS, CLASSES, POSITIONS = 40, 8, 3, 40
NO_LABEL = -100
ALONE = 7  # examples with a separate backward; a prime, so that no size of a model is a multiple of it
EXACT = {"float64": 1e-5, "float32": 1e-2}  # largest error; many models always compute norms or scans in float32
CLIPPED_SUM = 1e-3  # largest error of a clipped sum with minimal noise
Batch = dict[str, Tensor]
Losses = Callable[[nn.Module, Batch], Tensor]
Options = dict[str, Any]


class Sizes:
    """The random sizes of one model, a function of seed and name."""

    def __init__(self, name: str, seed: int, dropout: float):
        self.draw = random.Random(f"{seed} {name}")
        self.dropout = dropout
        self.drawn: Options = {}
        self.heads, self.head = self.choice("heads x width", (2, 8), (4, 4), (4, 8), (2, 16), (2, 12))
        self.hidden = self.heads * self.head
        self.kv_heads = self.choice("kv_heads", self.heads, self.heads // 2)
        self.inner = self.choice("inner", 20, 32, 48)
        self.vocabulary = self.choice("vocabulary", 41, 50, 64)
        self.length = self.choice("length", 8, 11, 12, 16)
        self.attention = self.choice("attention", "eager", "sdpa")
        self.stirred = self.choice("weights", "fresh", "stirred") == "stirred"
        self.crop = self.choice("padding", "all as long", "as long as the longest") == "as long as the longest"

    def choice(self, name: str, *values: Any) -> Any:
        value = self.draw.choice(values)
        self.drawn[name] = value
        return value

    def flip(self, name: str) -> bool:
        return self.choice(name, True, False)


@dataclass
class Problem:
    """A model, its examples (the first dimension of every tensor), and ``losses(model, batch)``, (n,)."""

    model: nn.Module
    data: Batch
    losses: Losses
    crop: bool = False  # whether batches are cropped to their longest text


@dataclass(frozen=True)
class Entry:
    name: str
    make: Callable[[Sizes], Problem]
    coupled: str = ""  # reason why it must be refused
    unsupported: str = ""  # reason why it may be refused
    trains: bool = False  # whether exactness is checked in training mode, with all dropout at zero
    rough: str = ""  # reason why it is not exact in float64


# Models ------------------------------------------------------------------------------------------------------------


def hf(name: str) -> Any:
    """Imports transformers, and returns the object with this name."""
    return getattr(importlib.import_module("transformers"), name)


NO_DROPOUT = {("DiffLlamaConfig", "attention_dropout")}  # refused by the model itself
CONFIGURATIONS = {"Gemma3": "Gemma3TextConfig"}


def set_dropout(s: Sizes, config: Any) -> None:
    """Enables every kind of dropout; layer dropout only in some runs, with its default probability."""
    for name, value in vars(config).items():
        if "drop" not in name or (type(config).__name__, name) in NO_DROPOUT:
            continue
        if "layerdrop" in name and isinstance(value, float):
            drops = value > 0 and s.flip(name) and s.dropout > 0
            setattr(config, name, value if drops else 0.0)
        elif isinstance(value, float):
            setattr(config, name, s.dropout)
        elif isinstance(value, list) and all(isinstance(v, float) for v in value):
            setattr(config, name, [s.dropout] * len(value))


def transformer(s: Sizes, prefix: str, head: str, **options: Any) -> nn.Module:
    """Returns a model of transformers; with eager attention if it supports no other."""
    attentions = {"attn_implementation": s.attention}, {"attn_implementation": "eager"}, {}
    for attention in attentions:
        config = hf(CONFIGURATIONS.get(prefix, f"{prefix}Config"))(**options, **attention)
        set_dropout(s, config)
        try:
            return hf(f"{prefix}{head}")(config)
        except (ValueError, KeyError) as error:
            if ("attention" not in str(error) and "attn" not in str(error)) or not attention:
                raise
    raise AssertionError


def special(s: Sizes) -> Options:
    return {"vocab_size": s.vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def stir(model: nn.Module) -> None:
    """Perturbs the special values of a fresh model: bias 0, scale 1, adapter 0."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))


# Losses ------------------------------------------------------------------------------------------------------------


def inputs(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if not name.startswith("label")}


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**inputs(batch))
    return output if isinstance(output, Tensor) else output.logits


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns (n,): the mean over each example's labeled tokens."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=NO_LABEL, reduction="none")
    return losses.sum(1) / (labels != NO_LABEL).sum(1)


def masked_token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the same, written with a mask and log-probabilities."""
    mask = (labels != NO_LABEL).to(logits.dtype)
    chosen = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[:, :, None]).squeeze(2)
    return -(chosen * mask).sum(-1) / mask.sum(-1)


def flat_token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the same, with all tokens flattened for the cross-entropy."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="none")
    return losses.view_as(labels).sum(1) / (labels != NO_LABEL).sum(1)


def of_tokens(s: Sizes) -> Losses:
    loss = s.choice("loss", token_losses, masked_token_losses, flat_token_losses)
    s.drawn["loss"] = loss.__name__
    return lambda model, batch: loss(logits_of(model, batch), batch["labels"])


def of_classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(logits_of(model, batch), batch["labels"], reduction="none")


def of_transcripts(model: Any, batch: Batch) -> Tensor:
    """Returns the CTC loss; token 0 is the blank and the padding of the labels."""
    log_probs = logits_of(model, batch).log_softmax(-1).transpose(0, 1)
    times = model._get_feat_extract_output_lengths(batch["attention_mask"].sum(1))
    targets = (batch["labels"] > 0).sum(1)
    return F.ctc_loss(log_probs, batch["labels"], times, targets, reduction="none") / targets


# Data --------------------------------------------------------------------------------------------------------------


def padding_mask(longest: int, shortest: int = 3) -> Tensor:
    """Returns an integer mask (n, longest): 1 at the tokens, 0 at the padding after them."""
    lengths = torch.randint(shortest, longest + 1, (EXAMPLES, 1))
    lengths[0] = longest
    return (torch.arange(longest) < lengths).long()


def tokens(s: Sizes, mask: Tensor) -> Tensor:
    """Returns random tokens; the first three of the vocabulary are padding, beginning and end."""
    return torch.randint(3, s.vocabulary, mask.shape).masked_fill(mask == 0, 0)


def texts(s: Sizes) -> Batch:
    mask = padding_mask(s.length)
    return {"input_ids": tokens(s, mask), "attention_mask": mask}


def next_tokens(s: Sizes) -> Batch:
    batch = texts(s)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = torch.full_like(ids, NO_LABEL)
    labels[:, :-1] = ids[:, 1:].masked_fill(mask[:, 1:] == 0, NO_LABEL)
    return {**batch, "labels": labels}


def hidden_tokens(s: Sizes) -> Batch:
    """Masks some tokens of each text by token 2; the originals are the labels."""
    batch = texts(s)
    hidden = (torch.rand(batch["input_ids"].shape) < 0.3) & (batch["attention_mask"] == 1)
    hidden[:, 1] = True
    labels = batch["input_ids"].masked_fill(~hidden, NO_LABEL)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 2), "labels": labels}


def text_classes(s: Sizes) -> Batch:
    return {**texts(s), "labels": torch.randint(CLASSES, (EXAMPLES,))}


def answers(s: Sizes) -> Batch:
    """Returns texts of other lengths for the decoder, shifted by the beginning token."""
    mask = padding_mask(s.choice("length of the answer", 7, 9, s.length))
    ids = tokens(s, mask)
    begun = torch.cat([torch.ones(EXAMPLES, 1, dtype=torch.long), ids[:, :-1]], 1)
    labels = ids.masked_fill(mask == 0, NO_LABEL)
    return {"decoder_input_ids": begun, "decoder_attention_mask": mask, "labels": labels}


def images(size: int, *shape: int) -> Batch:
    return {"pixel_values": torch.randn(EXAMPLES, *shape, 3, size, size), "labels": torch.randint(CLASSES, (EXAMPLES,))}


class Examples(Dataset):
    def __init__(self, data: Batch):
        self.data = data

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def __getitem__(self, i: int) -> Batch:
        return {name: value[i] for name, value in self.data.items()}


def up_to_the_longest(examples: list[Batch]) -> Batch:
    """Collates, and crops what is padding in every example of the batch."""
    batch = default_collate(examples)
    seq2seq = "decoder_attention_mask" in batch
    for side in ("decoder_", "") if seq2seq else ("",):
        longest = int(batch[f"{side}attention_mask"].sum(1).max())
        names = [f"{side}input_ids", f"{side}attention_mask"]
        if batch["labels"].dim() > 1 and bool(side) == seq2seq:
            names.append("labels")
        batch.update({name: batch[name][:, :longest] for name in names})
    return batch


# Language models ---------------------------------------------------------------------------------------------------


def gpt2_like(s: Sizes) -> Options:
    return {"n_positions": POSITIONS, "n_embd": s.hidden, "n_layer": 2, "n_head": s.heads}


def llama_like(s: Sizes) -> Options:
    sizes = {"hidden_size": s.hidden, "intermediate_size": s.inner, "num_hidden_layers": 2}
    heads = {"num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads}
    return {**sizes, **heads, "max_position_embeddings": POSITIONS}


def with_heads(s: Sizes) -> Options:
    """Draws the width of a head independently of the model's width."""
    return {**llama_like(s), "head_dim": s.choice("head_dim", 4, 8, s.head)}


def experts(s: Sizes, number: str = "num_local_experts") -> Options:
    how = s.choice("experts", "eager", "batched_mm", "grouped_mm")
    return {number: s.choice("number of experts", 3, 4), "num_experts_per_tok": 2, "experts_implementation": how}


def partial_rope(s: Sizes) -> Options:
    """Applies rotary embeddings to half of each head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


def two_kinds(first: str) -> Options:
    return {"layer_types": [first, "full_attention"]}


def window(s: Sizes) -> int | None:
    return s.choice("window", None, 4)


def mamba_like(s: Sizes) -> Options:
    return {"hidden_size": s.hidden, "state_size": s.choice("state", 4, 8), "num_hidden_layers": 2}


def mamba2_like(s: Sizes) -> Options:
    heads = {"num_heads": 4, "head_dim": s.hidden // 2, "n_groups": s.choice("groups", 1, 2)}
    return {**mamba_like(s), **heads, "chunk_size": s.choice("chunk", 4, 8)}


def hybrid_mamba(s: Sizes) -> Options:
    return {"mamba_d_state": 4, "mamba_dt_rank": 3, "attn_layer_period": 2, "attn_layer_offset": 1}


def deepseek_like(s: Sizes) -> Options:
    """Uses low-rank keys and values, and grouped experts in the second block."""
    narrow = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
    routes = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    same = {"num_key_value_heads": s.heads, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
    return {**llama_like(s), **narrow, **routes, **same, "experts_implementation": experts(s)["experts_implementation"]}


def gpt_neo_like(s: Sizes) -> Options:
    kinds = {"attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": POSITIONS}
    return {"hidden_size": s.hidden, "num_layers": 2, "num_heads": s.heads, **kinds}


def opt_like(s: Sizes) -> Options:
    sizes = {"hidden_size": s.hidden, "num_hidden_layers": 2, "ffn_dim": s.inner, "num_attention_heads": s.heads}
    kinds = {"do_layer_norm_before": s.flip("norm before"), "max_position_embeddings": POSITIONS}
    return {**sizes, **kinds, "word_embed_proj_dim": s.choice("width of the embedding", s.hidden, 12)}


def mpt_like(s: Sizes) -> Options:
    sizes = {"d_model": s.hidden, "n_heads": s.heads, "n_layers": 2}
    return {**sizes, "expansion_ratio": 2, "max_seq_len": POSITIONS}


def xglm_like(s: Sizes) -> Options:
    sizes = {"d_model": s.hidden, "ffn_dim": s.inner, "num_layers": 2, "attention_heads": s.heads}
    return {**sizes, "max_position_embeddings": POSITIONS}


def rwkv_like(s: Sizes) -> Options:
    sizes = {"hidden_size": s.hidden, "attention_hidden_size": s.hidden, "intermediate_size": s.inner}
    return {**sizes, "num_hidden_layers": 2, "context_length": POSITIONS}


def falcon_like(s: Sizes) -> Options:
    new, multi_query = s.flip("new_decoder_architecture"), s.flip("multi_query")
    kinds = {"parallel_attn": new or s.flip("parallel_attn"), "bias": s.flip("bias"), "alibi": s.flip("alibi")}
    heads = {"num_attention_heads": s.heads, "num_kv_heads": s.kv_heads if new else s.heads}
    sizes = {"hidden_size": s.hidden, "num_hidden_layers": 2, "ffn_hidden_size": s.inner}
    return {**sizes, **kinds, **heads, "new_decoder_architecture": new, "multi_query": multi_query}


def recurrent_gemma_like(s: Sizes) -> Options:
    kinds = {"block_types": ["recurrent", "attention"], "lru_width": s.hidden, "attention_window_size": 8}
    return {**llama_like(s), **kinds}


def qwen_moe_like(s: Sizes, number: str = "num_experts") -> Options:
    return {**llama_like(s), **experts(s, number), "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}


def qwen_next_like(s: Sizes) -> Options:
    keys = {"linear_key_head_dim": 4, "linear_num_key_heads": 2}
    values = {"linear_value_head_dim": 4, "linear_num_value_heads": 4}
    kinds = {**two_kinds("linear_attention"), "head_dim": 8, **partial_rope(s)}
    return {**qwen_moe_like(s), **keys, **values, **kinds}


def gemma2_like(s: Sizes) -> Options:
    return {**with_heads(s), "query_pre_attn_scalar": 8, "sliding_window": 4, **two_kinds("sliding_attention")}


def gpt_oss_like(s: Sizes) -> Options:
    s.attention = "eager"
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return {**llama_like(s), **experts(s), **rope, "head_dim": 8, "sliding_window": 4, **two_kinds("sliding_attention")}


def minimax_like(s: Sizes) -> Options:
    return {**llama_like(s), **experts(s), "head_dim": s.head, "block_size": 4, **two_kinds("linear_attention")}


def bamba_like(s: Sizes) -> Options:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": s.hidden // 2, "mamba_d_state": 4, "mamba_chunk_size": 4}
    return {**llama_like(s), **partial_rope(s), **mamba, "attn_layer_indices": [1]}


def olmo_like(s: Sizes) -> Options:
    return {**llama_like(s), "clip_qkv": s.choice("clip", None, 1.0)}


DECODERS: dict[str, tuple[str, Callable[[Sizes], Options]]] = {
    "GPT-2": ("GPT2", gpt2_like),
    "GPT-Neo": ("GPTNeo", gpt_neo_like),
    "GPT-NeoX": (
        "GPTNeoX",
        lambda s: {**llama_like(s), **partial_rope(s), "use_parallel_residual": s.flip("parallel")},
    ),
    "GPT-J": ("GPTJ", lambda s: {**gpt2_like(s), "rotary_dim": 4}),
    "CodeGen": ("CodeGen", lambda s: {**gpt2_like(s), "n_head": 4, "n_ctx": POSITIONS, "rotary_dim": 4}),
    "GPT-BigCode": ("GPTBigCode", lambda s: {**gpt2_like(s), "multi_query": s.flip("multi_query")}),
    "GPT": ("OpenAIGPT", gpt2_like),
    "CTRL": ("CTRL", lambda s: {**gpt2_like(s), "dff": s.inner}),
    "OPT": ("OPT", opt_like),
    "BLOOM": ("Bloom", lambda s: {"hidden_size": s.hidden, "n_layer": 2, "n_head": s.heads}),
    "Llama": ("Llama", lambda s: {**llama_like(s), "attention_bias": s.flip("bias")}),
    "Mistral": ("Mistral", lambda s: {**with_heads(s), "sliding_window": window(s)}),
    "Mixtral": ("Mixtral", lambda s: {**llama_like(s), **experts(s)}),
    "Qwen2": ("Qwen2", llama_like),
    "Qwen3": ("Qwen3", with_heads),
    "Qwen2-MoE": ("Qwen2Moe", qwen_moe_like),
    "Qwen3-MoE": ("Qwen3Moe", lambda s: {**qwen_moe_like(s, "num_local_experts"), "head_dim": 8}),
    "Qwen3-Next": ("Qwen3Next", qwen_next_like),
    "Gemma": ("Gemma", with_heads),
    "Gemma2": ("Gemma2", gemma2_like),
    "Gemma3": ("Gemma3", gemma2_like),
    "Phi": ("Phi", lambda s: {**llama_like(s), **partial_rope(s)}),
    "Phi3": ("Phi3", llama_like),
    "Falcon": ("Falcon", falcon_like),
    "StableLM": ("StableLm", lambda s: {**llama_like(s), **partial_rope(s), "qk_layernorm": s.flip("qk_layernorm")}),
    "OLMo": ("Olmo", olmo_like),
    "OLMo2": ("Olmo2", llama_like),
    "OLMoE": ("Olmoe", lambda s: {**olmo_like(s), **experts(s, "num_experts")}),
    "Mamba": ("Mamba", mamba_like),
    "Mamba2": ("Mamba2", mamba2_like),
    "FalconMamba": ("FalconMamba", mamba_like),
    "RecurrentGemma": ("RecurrentGemma", recurrent_gemma_like),
    "Jamba": ("Jamba", lambda s: {**llama_like(s), **hybrid_mamba(s), **experts(s, "num_experts")}),
    "Bamba": ("Bamba", bamba_like),
    "MPT": ("Mpt", mpt_like),
    "XGLM": ("XGLM", xglm_like),
    "StarCoder2": ("Starcoder2", lambda s: {**llama_like(s), "sliding_window": window(s)}),
    "Cohere": ("Cohere", lambda s: {**llama_like(s), "use_qk_norm": s.flip("q")}),
    "Granite": ("Granite", lambda s: {**llama_like(s), "residual_multiplier": 0.5}),
    "GLM": ("Glm", lambda s: {**llama_like(s), "head_dim": 8}),
    "Nemotron": ("Nemotron", lambda s: {**llama_like(s), "head_dim": s.head, **partial_rope(s)}),
    "Persimmon": ("Persimmon", lambda s: {**llama_like(s), **partial_rope(s)}),
    "BioGPT": ("BioGpt", llama_like),
    "DeepSeek-V3": ("DeepseekV3", deepseek_like),
    "GPT-OSS": ("GptOss", gpt_oss_like),
    "MiniMax": ("MiniMax", minimax_like),
    "LFM2": ("Lfm2", lambda s: {**llama_like(s), **two_kinds("conv"), "block_auto_adjust_ff_dim": False}),
    "DiffLlama": ("DiffLlama", lambda s: {**llama_like(s), "num_key_value_heads": s.heads, "head_dim": s.head}),
    "BitNet": ("BitNet", llama_like),
    "RWKV": ("Rwkv", rwkv_like),
}
NO_CACHE = {"Rwkv"}  # the cache breaks an ordinary backward in eval mode
HEADS_OF_DECODERS = {"GPT2": "LMHeadModel", "OpenAIGPT": "LMHeadModel", "CTRL": "LMHeadModel"}


def decoder(prefix: str, options: Callable[[Sizes], Options]) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        head = HEADS_OF_DECODERS.get(prefix, "ForCausalLM")
        sizes = {**special(s), **options(s), "use_cache": prefix not in NO_CACHE and s.flip("cache")}
        return Problem(transformer(s, prefix, head, **sizes), next_tokens(s), of_tokens(s), s.crop)

    return make


# Encoders ----------------------------------------------------------------------------------------------------------


def bert_like(s: Sizes) -> Options:
    sizes = {"hidden_size": s.hidden, "num_hidden_layers": 2, "num_attention_heads": s.heads}
    return {**sizes, "intermediate_size": s.inner, "max_position_embeddings": POSITIONS}


def deberta_like(s: Sizes) -> Options:
    kinds = s.choice("positions", [], ["c2p"], ["p2c"], ["c2p", "p2c"])
    relative = {"relative_attention": bool(kinds), "pos_att_type": kinds, "max_relative_positions": 8}
    return {**bert_like(s), **relative, "position_biased_input": s.flip("biased input")}


def deberta2_like(s: Sizes) -> Options:
    options = deberta_like(s)
    more = {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": s.flip("shared key")}
    convolution = {"conv_kernel_size": 3} if s.flip("convolution") else {}
    return {**options, **(more | convolution if options["relative_attention"] else {})}


def xlm_like(s: Sizes) -> Options:
    return {"emb_dim": s.hidden, "n_layers": 2, "n_heads": s.heads, "max_position_embeddings": POSITIONS}


def nystromformer_like(s: Sizes) -> Options:
    s.length, s.stirred = 16, True  # in a fresh model the coupling is below the rounding
    landmarks = {"segment_means_seq_len": 16, "num_landmarks": s.choice("landmarks", 4, 8)}
    return {**bert_like(s), **landmarks, "conv_kernel_size": 3}


def canine_like(s: Sizes) -> Options:
    s.length = 16
    local = {"local_transformer_stride": 8, "downsampling_rate": 4, "upsampling_kernel_size": 4}
    return {**bert_like(s), **local, "num_hash_buckets": 20, "num_hash_functions": s.heads}


def big_bird_like(s: Sizes) -> Options:
    """Uses blocks of two tokens that attend to some others, one of them at random."""
    s.length = 20
    sparse = s.choice("sparse", "block_sparse", "original_full")
    return {**bert_like(s), "attention_type": sparse, "block_size": 2, "num_random_blocks": 1}


def reformer_like(s: Sizes) -> Options:
    s.length = 16
    axes = {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [4, s.hidden - 4]}
    chunks = {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2, "hash_seed": 0}
    sizes = {"hidden_size": s.hidden, "num_attention_heads": s.heads, "attention_head_size": s.head}
    return {**sizes, **axes, **chunks, "feed_forward_size": s.inner, "attn_layers": ["local", "lsh"]}


def mobilebert_like(s: Sizes) -> Options:
    narrow = {"intra_bottleneck_size": 2 * s.heads, "embedding_size": 12, "num_feedforward_networks": 2}
    return {**bert_like(s), **narrow, "normalization_type": s.choice("norm", "no_norm", "layer_norm")}


def perceiver_like(s: Sizes) -> Options:
    latents = {"num_latents": 5, "d_latents": s.hidden, "num_self_attends_per_block": 2}
    heads = {"num_self_attention_heads": s.heads, "num_cross_attention_heads": s.heads}
    return {**latents, **heads, "d_model": 16, "max_position_embeddings": s.length}


def modernbert_like(s: Sizes) -> Options:
    kinds = {"local_attention": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return {**bert_like(s), **kinds, "cls_token_id": 1, "sep_token_id": 2}


def distilbert_like(s: Sizes) -> Options:
    sizes = {"dim": s.hidden, "n_layers": 2, "n_heads": s.heads, "hidden_dim": s.inner}
    return {**sizes, "max_position_embeddings": POSITIONS}


def funnel_like(s: Sizes) -> Options:
    sizes = {"d_model": s.hidden, "n_head": s.heads, "d_head": s.head, "d_inner": s.inner}
    blocks = {"block_sizes": s.choice("blocks", [1, 1], [2, 1]), "num_decoder_layers": 1}
    return {**sizes, **blocks, "attention_type": s.choice("relative", "relative_shift", "factorized")}


def xlnet_like(s: Sizes) -> Options:
    return {"d_model": s.hidden, "n_layer": 2, "n_head": s.heads, "d_inner": s.inner}


def squeezebert_like(s: Sizes) -> Options:
    groups = dict.fromkeys(("q_groups", "k_groups", "v_groups"), 2)
    return {**bert_like(s), **groups, "embedding_size": s.hidden}


def esm_like(s: Sizes) -> Options:
    kinds = {"position_embedding_type": s.choice("positions", "absolute", "rotary"), "mask_token_id": 2}
    return {**bert_like(s), **kinds, "token_dropout": s.flip("token dropout")}


def narrow_bert(s: Sizes) -> Options:
    return {**bert_like(s), "embedding_size": 12}


ENCODERS: dict[str, tuple[str, Callable[[Sizes], Options]]] = {
    "BERT": ("Bert", bert_like),
    "RoBERTa": ("Roberta", bert_like),
    "RoBERTa, norm before": ("RobertaPreLayerNorm", bert_like),
    "XLM-RoBERTa": ("XLMRoberta", bert_like),
    "ALBERT": ("Albert", narrow_bert),
    "ELECTRA": ("Electra", narrow_bert),
    "DistilBERT": ("DistilBert", distilbert_like),
    "DeBERTa": ("Deberta", deberta_like),
    "DeBERTa-v2": ("DebertaV2", deberta2_like),
    "MPNet": ("MPNet", bert_like),
    "Funnel": ("Funnel", funnel_like),
    "XLNet": ("XLNet", xlnet_like),
    "BigBird": ("BigBird", big_bird_like),
    "Longformer": ("Longformer", lambda s: {**bert_like(s), "attention_window": 4}),
    "Nystromformer": ("Nystromformer", nystromformer_like),
    "Nystromformer, all landmarks": ("Nystromformer", lambda s: {**nystromformer_like(s), "num_landmarks": 16}),
    "YOSO": ("Yoso", bert_like),
    "FNet": ("FNet", bert_like),
    "I-BERT": ("IBert", bert_like),
    "I-BERT, quantized": ("IBert", lambda s: {**bert_like(s), "quant_mode": True}),
    "ConvBERT": ("ConvBert", lambda s: {**narrow_bert(s), "conv_kernel_size": 3}),
    "SqueezeBERT": ("SqueezeBert", squeezebert_like),
    "RoFormer": ("RoFormer", lambda s: {**narrow_bert(s), "rotary_value": s.flip("rotary value")}),
    "CANINE": ("Canine", canine_like),
    "MobileBERT": ("MobileBert", mobilebert_like),
    "RemBERT": ("RemBert", lambda s: {**bert_like(s), "input_embedding_size": 12, "output_embedding_size": 20}),
    "XLM": ("XLM", xlm_like),
    "FlauBERT": ("Flaubert", xlm_like),
    "MegatronBERT": ("MegatronBert", bert_like),
    "ERNIE": ("Ernie", bert_like),
    "data2vec text": ("Data2VecText", bert_like),
    "ESM": ("Esm", esm_like),
    "ModernBERT": ("ModernBert", modernbert_like),
    "MRA": ("Mra", bert_like),
    "LayoutLM": ("LayoutLM", bert_like),
    "Perceiver": ("Perceiver", perceiver_like),
    "Reformer": ("Reformer", reformer_like),
}
MASKED, CLASSIFIER = "ForMaskedLM", "ForSequenceClassification"
HEADS_OF_ENCODERS = {"Canine": None, "Reformer": None, "XLNet": "LMHeadModel"}
HEADS_OF_ENCODERS |= dict.fromkeys(("XLM", "Flaubert"), "WithLMHeadModel")
NO_MASK = {
    "FNet",
    "Nystromformer",
}  # FNet mixes all positions; Nystromformer's mask must have the shape of its landmarks
NEVER_CROPPED = {
    "Nystromformer",
    "Nystromformer, all landmarks",
    "FNet",
    "CANINE",
    "BigBird",
    "Perceiver",
    "Reformer",
    "MRA",
}
"""Models that need equal lengths, or have losses that depend on the padding, so on the batch's longest text."""


def encoder(name: str, prefix: str, options: Callable[[Sizes], Options]) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        masked = HEADS_OF_ENCODERS.get(prefix, MASKED)
        head = s.choice("head", masked, CLASSIFIER) if masked else CLASSIFIER
        model = transformer(s, prefix, head, **{**special(s), "num_labels": CLASSES, **options(s)})
        classes = head == CLASSIFIER
        data = text_classes(s) if classes else hidden_tokens(s)
        if name in NO_MASK:
            del data["attention_mask"]
        return Problem(model, data, of_classes if classes else of_tokens(s), s.crop and name not in NEVER_CROPPED)

    return make


# From text to text -------------------------------------------------------------------------------------------------


def t5_like(s: Sizes) -> Options:
    sizes = {"d_model": s.hidden, "d_kv": s.head, "d_ff": s.inner, "num_layers": 2, "num_heads": s.heads}
    positions = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
    return {**sizes, **positions, "feed_forward_proj": s.choice("layers", "relu", "gated-gelu")}


def bart_like(s: Sizes) -> Options:
    layers = {"encoder_layers": 2, "decoder_layers": s.choice("decoder layers", 1, 2)}
    inner = {"encoder_ffn_dim": s.inner, "decoder_ffn_dim": s.inner}
    heads = {"encoder_attention_heads": s.heads, "decoder_attention_heads": s.heads}
    return {**layers, **inner, **heads, "d_model": s.hidden, "max_position_embeddings": POSITIONS}


def begun(s: Sizes) -> Options:
    return {"decoder_start_token_id": 1, "forced_eos_token_id": 2}


def switch_like(s: Sizes) -> Options:
    """Uses experts with a small or large capacity in the second of two blocks."""
    options = {k: v for k, v in t5_like(s).items() if k != "feed_forward_proj"}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 3}
    return {**options, "num_decoder_layers": 2, **sparse, "expert_capacity": s.choice("capacity", 4, 64)}


def prophet_like(s: Sizes) -> Options:
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "hidden_size": s.hidden}
    heads = {"num_encoder_attention_heads": s.heads, "num_decoder_attention_heads": s.heads}
    inner = {"encoder_ffn_dim": s.inner, "decoder_ffn_dim": s.inner, "max_position_embeddings": POSITIONS}
    return {**layers, **heads, **inner, "num_buckets": 8, "relative_max_distance": 10, "ngram": s.choice("n", 1, 2)}


def big_bird_pegasus_like(s: Sizes) -> Options:
    s.length = 20
    sparse = s.choice("sparse", "block_sparse", "original_full")
    return {**bart_like(s), "attention_type": sparse, "block_size": 2, "num_random_blocks": 1}


def led_like(s: Sizes) -> Options:
    positions = {"max_encoder_position_embeddings": POSITIONS, "max_decoder_position_embeddings": POSITIONS}
    return {**bart_like(s), **positions, "attention_window": 4}


def fsmt_like(s: Sizes) -> Options:
    vocabularies = {"src_vocab_size": s.vocabulary, "tgt_vocab_size": s.vocabulary, "langs": ["en", "de"]}
    return {**bart_like(s), **vocabularies}


def longt5_like(s: Sizes) -> Options:
    attention = s.choice("encoder", "local", "transient-global")
    return {**t5_like(s), "local_radius": 4, "global_block_size": 4, "encoder_attention_type": attention}


def nllb_moe_like(s: Sizes) -> Options:
    steps = {"encoder_sparse_step": 2, "decoder_sparse_step": 2}
    return {**bart_like(s), "decoder_layers": 2, **steps, "num_experts": 3, "expert_capacity": 64}


SEQ2SEQ: dict[str, tuple[str, Callable[[Sizes], Options]]] = {
    "T5": ("T5", t5_like),
    "mT5": ("MT5", t5_like),
    "UMT5": ("UMT5", t5_like),
    "LongT5": ("LongT5", longt5_like),
    "Switch": ("SwitchTransformers", switch_like),
    "BART": ("Bart", bart_like),
    "mBART": ("MBart", bart_like),
    "PLBart": ("PLBart", bart_like),
    "MVP": ("Mvp", bart_like),
    "Pegasus": ("Pegasus", bart_like),
    "Pegasus-X": ("PegasusX", lambda s: {**bart_like(s), "num_global_tokens": 2, "block_size": 4}),
    "M2M100": ("M2M100", bart_like),
    "Marian": ("Marian", bart_like),
    "Blenderbot": ("Blenderbot", bart_like),
    "Blenderbot small": ("BlenderbotSmall", bart_like),
    "LED": ("LED", led_like),
    "BigBird-Pegasus": ("BigBirdPegasus", big_bird_pegasus_like),
    "ProphetNet": ("ProphetNet", prophet_like),
    "FSMT": ("FSMT", fsmt_like),
    "NLLB-MoE": ("NllbMoe", nllb_moe_like),
}
HEADS_OF_SEQ2SEQ = {"Marian": "MTModel"}
SEQ2SEQ_NEVER_CROPPED = {"BigBird-Pegasus"}


def seq2seq(name: str, prefix: str, options: Callable[[Sizes], Options]) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        head = HEADS_OF_SEQ2SEQ.get(prefix, "ForConditionalGeneration")
        sizes = {**special(s), **options(s), **begun(s), "use_cache": s.flip("cache")}
        if prefix == "Marian":
            sizes["decoder_vocab_size"] = s.vocabulary
        model = transformer(s, prefix, head, **sizes)
        crop = s.crop and name not in SEQ2SEQ_NEVER_CROPPED
        return Problem(model, {**texts(s), **answers(s)}, of_tokens(s), crop)

    return make


# Images ------------------------------------------------------------------------------------------------------------


def vit_like(s: Sizes) -> Options:
    sizes = {"hidden_size": s.hidden, "num_hidden_layers": 2, "num_attention_heads": s.heads}
    return {**sizes, "intermediate_size": s.inner, "image_size": 16, "patch_size": s.choice("patch", 4, 8)}


def beit_like(s: Sizes) -> Options:
    relative = {name: s.flip(name) for name in ("use_relative_position_bias", "use_mean_pooling")}
    absolute = {"use_absolute_position_embeddings": s.flip("use_absolute_position_embeddings")}
    return {**vit_like(s), **relative, **absolute, "out_indices": [1, 2]}


def swin_like(s: Sizes) -> Options:
    patch = s.choice("patch", 2, 4)
    heads = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 8 // patch}
    return {"image_size": 16, "patch_size": patch, **heads}


def stages(s: Sizes) -> Options:
    return {"num_stages": 2, "hidden_sizes": [8, s.hidden], "depths": [2, 1], "patch_size": s.choice("patch", 2, 4)}


def pyramid(s: Sizes) -> Options:
    """Uses two stages of attention on coarser and coarser grids."""
    sizes = {"num_encoder_blocks": 2, "depths": [1, 2], "hidden_sizes": [8, s.hidden], "strides": [4, 2]}
    heads = {"num_attention_heads": [1, s.heads], "mlp_ratios": [2, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3]}
    return {**sizes, **heads, "decoder_hidden_size": 16}


def pvt_like(s: Sizes) -> Options:
    options = {**pyramid(s), "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "image_size": 32}
    options = {**options, "depths": [1] * 4, "num_encoder_blocks": 4, "hidden_sizes": [8, 8, 16, s.hidden]}
    four = {"strides": [4, 2, 2, 1], "num_attention_heads": [1, 2, 2, s.heads], "mlp_ratios": [2] * 4}
    return {**options, **four, "sequence_reduction_ratios": [2, 2, 1, 1], "patch_sizes": [4, 2, 2, 1]}


def pvt2_like(s: Sizes) -> Options:
    return {**pyramid(s), "image_size": 32, "linear_attention": s.flip("linear_attention")}


def levit_like(s: Sizes) -> Options:
    sizes = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 4], "key_dim": [4, 4, 4], "depths": [1, 1, 1]}
    down = {"down_ops": [["Subsample", 4, 4, 2, 2, 2], ["Subsample", 4, 6, 2, 2, 2]]}
    return {"image_size": 64, "patch_size": 16, **sizes, **down, "mlp_ratio": [2] * 3, "attention_ratio": [2] * 3}


def mobilevit_like(s: Sizes) -> Options:
    sizes = {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 12, 12, 16, 16, 20], "num_attention_heads": 2}
    return {**sizes, "image_size": 32, "expand_ratio": 2.0}


def poolformer_like(s: Sizes) -> Options:
    sizes = {"num_encoder_blocks": 2, "depths": [1, 2], "hidden_sizes": [8, s.hidden], "mlp_ratio": 2.0}
    return {**sizes, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}


def resnet_like(s: Sizes) -> Options:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return {**sizes, "layer_type": s.choice("layer", "basic", "bottleneck")}


def bit_like(s: Sizes) -> Options:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2}
    return {**sizes, "layer_type": s.choice("layer", "preactivation", "bottleneck")}


def cvt_like(s: Sizes) -> Options:
    two = {"patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1]}
    more = {
        "embed_dim": [8, 16],
        "num_heads": [1, 2],
        "depth": [1, 2],
        "mlp_ratio": [2.0] * 2,
        "cls_token": [False, True],
        "qkv_bias": [True] * 2,
    }
    kernels = {"kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1], "stride_q": [1, 1]}
    drops = {name: [0.0, 0.0] for name in ("attention_drop_rate", "drop_rate", "drop_path_rate")}
    return {**two, **more, **kernels, **drops, "qkv_projection_method": ["dw_bn"] * 2}


def focal_like(s: Sizes) -> Options:
    sizes = {"embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]}
    kinds = {name: s.flip(name) for name in ("use_layerscale", "normalize_modulator")}
    return {"image_size": 16, "patch_size": 2, **sizes, **kinds, "mlp_ratio": 2.0}


def hiera_like(s: Sizes) -> Options:
    sizes = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": [16, 16], "patch_size": [3, 3]}
    units = {"patch_stride": [2, 2], "patch_padding": [1, 1], "masked_unit_size": [4, 4], "num_query_pool": 1}
    return {**sizes, **units, "masked_unit_attention": [True, False], "mlp_ratio": 2.0}


def efficientnet_like(s: Sizes) -> Options:
    two = {"kernel_sizes": [3, 3], "in_channels": [32, 8], "out_channels": [8, 16], "strides": [1, 2]}
    sizes = {"image_size": 32, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    return {**two, **sizes, "num_block_repeats": [1, 1], "expand_ratios": [1, 2]}


def regnet_like(s: Sizes) -> Options:
    return {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}


def swiftformer_like(s: Sizes) -> Options:
    return {"image_size": 32, "depths": [1, 1, 1, 1], "embed_dims": [8, 8, 12, 16], "mlp_ratio": 2}


PICTURES: dict[str, tuple[str, int, Callable[[Sizes], Options]]] = {
    "ViT": ("ViT", 16, vit_like),
    "DeiT": ("DeiT", 16, vit_like),
    "ViT-MSN": ("ViTMSN", 16, vit_like),
    "BEiT": ("Beit", 16, beit_like),
    "data2vec vision": ("Data2VecVision", 16, beit_like),
    "Swin": ("Swin", 16, swin_like),
    "SwinV2": ("Swinv2", 16, swin_like),
    "ConvNeXt": ("ConvNext", 16, stages),
    "ConvNeXt V2": ("ConvNextV2", 16, stages),
    "SegFormer": ("Segformer", 32, pyramid),
    "PVT": ("Pvt", 32, pvt_like),
    "PVT v2": ("PvtV2", 32, pvt2_like),
    "DINOv2": ("Dinov2", 16, lambda s: {**vit_like(s), "use_swiglu_ffn": s.flip("swiglu")}),
    "DINOv2 with registers": ("Dinov2WithRegisters", 16, lambda s: {**vit_like(s), "num_register_tokens": 2}),
    "I-JEPA": ("IJepa", 16, vit_like),
    "PoolFormer": ("PoolFormer", 32, poolformer_like),
    "BiT": ("Bit", 16, bit_like),
    "FocalNet": ("FocalNet", 16, focal_like),
    "Hiera": ("Hiera", 16, hiera_like),
    "LeViT": ("Levit", 64, levit_like),
    "MobileViT": ("MobileViT", 32, mobilevit_like),
    "CvT": ("Cvt", 32, cvt_like),
    "ResNet": ("ResNet", 32, resnet_like),
    "RegNet": ("RegNet", 32, regnet_like),
    "EfficientNet": ("EfficientNet", 32, efficientnet_like),
    "SwiftFormer": ("SwiftFormer", 32, swiftformer_like),
}
BATCH_NORM = {"LeViT", "MobileViT", "CvT", "ResNet", "RegNet", "EfficientNet", "SwiftFormer"}


def with_group_norm(module: nn.Module) -> nn.Module:
    """Replaces every batch normalization, as the refusal recommends."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            norm = nn.GroupNorm(math.gcd(2, child.num_features), child.num_features)
            setattr(module, name, nn.Sequential(norm, child.act) if hasattr(child, "act") else norm)  # of timm
        else:
            with_group_norm(child)
    return module


def pictures(prefix: str, size: int, options: Callable[[Sizes], Options], *, groups: bool = False):
    def make(s: Sizes) -> Problem:
        model = transformer(s, prefix, "ForImageClassification", num_labels=CLASSES, **options(s))
        return Problem(with_group_norm(model) if groups else model, images(size), of_classes)

    return make


def clip_vision(prefix: str) -> Callable[[Sizes], Problem]:
    """Returns only the image tower, with a classifier."""

    def make(s: Sizes) -> Problem:
        vision = {**vit_like(s), "projection_dim": 8}
        attention = {"attn_implementation": s.attention}
        config = hf(f"{prefix}Config")(vision_config=vision, text_config=special(s), num_labels=CLASSES, **attention)
        set_dropout(s, config.vision_config)
        return Problem(hf(f"{prefix}ForImageClassification")(config), images(16), of_classes)

    return make


class OfText(nn.Module):
    """Returns CLIP's text tower, with a classifier."""

    def __init__(self, tower: nn.Module, width: int):
        super().__init__()
        self.tower, self.head = tower, nn.Linear(width, CLASSES)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.head(self.tower(**batch).pooler_output)


def clip_text(prefix: str) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        tower = transformer(s, f"{prefix}Text", "Model", **bert_like(s), **special(s), projection_dim=8)
        data = text_classes(s)
        last = data["attention_mask"].sum(1, keepdim=True) - 1
        data["input_ids"] = data["input_ids"].scatter(1, last, 2)  # every text has one end token
        return Problem(OfText(tower, s.hidden), data, of_classes, s.crop and prefix == "CLIP")

    return make


def films(prefix: str, **more: Any) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        options = {**vit_like(s), **more, "num_frames": 4, "num_labels": CLASSES}
        return Problem(transformer(s, prefix, "ForVideoClassification", **options), images(16, 4), of_classes)

    return make


def image_gpt(s: Sizes) -> Problem:
    options = {**gpt2_like(s), "vocab_size": s.vocabulary, "num_labels": CLASSES, "pad_token_id": None}
    ids = torch.randint(s.vocabulary - 1, (EXAMPLES, s.length))
    data = {"input_ids": ids, "labels": torch.randint(CLASSES, (EXAMPLES,))}
    return Problem(transformer(s, "ImageGPT", "ForImageClassification", **options), data, of_classes)


# Sounds ------------------------------------------------------------------------------------------------------------


def wav2vec_like(s: Sizes) -> Options:
    sizes = {"hidden_size": s.hidden, "num_hidden_layers": 2, "num_attention_heads": s.heads}
    convolutions = {"conv_dim": [8, 6], "conv_kernel": [4, 3], "conv_stride": [2, 2], "conv_bias": s.flip("conv_bias")}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    masks = {"apply_spec_augment": s.flip("masked"), "mask_time_length": 2, "mask_time_prob": 0.2}
    return {**sizes, **convolutions, **positions, **masks, "intermediate_size": s.inner, "vocab_size": 12}


def wav2vec_norms(s: Sizes) -> Options:
    stable = s.flip("stable")
    return {**wav2vec_like(s), "feat_extract_norm": "layer" if stable else "group", "do_stable_layer_norm": stable}


def wavlm_like(s: Sizes) -> Options:
    return {**wav2vec_norms(s), "num_buckets": 8, "max_bucket_distance": 20}


def data2vec_like(s: Sizes) -> Options:
    return {**wav2vec_like(s), "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}


def sew_d_like(s: Sizes) -> Options:
    return {**wav2vec_like(s), "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "max_position_embeddings": 32}


SOUNDS: dict[str, tuple[str, Callable[[Sizes], Options]]] = {
    "wav2vec2": ("Wav2Vec2", wav2vec_norms),
    "HuBERT": ("Hubert", wav2vec_norms),
    "WavLM": ("WavLM", wavlm_like),
    "UniSpeech": ("UniSpeech", wav2vec_norms),
    "UniSpeech-SAT": ("UniSpeechSat", wav2vec_norms),
    "data2vec audio": ("Data2VecAudio", data2vec_like),
    "SEW": ("SEW", wav2vec_like),
    "SEW-D": ("SEWD", sew_d_like),
}


def sounds(prefix: str, options: Callable[[Sizes], Options]) -> Callable[[Sizes], Problem]:
    """Returns transcripts of two to four letters."""

    def make(s: Sizes) -> Problem:
        mask = padding_mask(80, shortest=60)
        letters = padding_mask(4, shortest=2)
        labels = torch.randint(1, 12, letters.shape) * letters
        data = {"input_values": torch.randn(mask.shape) * mask, "attention_mask": mask, "labels": labels}
        return Problem(transformer(s, prefix, "ForCTC", **options(s)), data, of_transcripts)

    return make


def whisper(s: Sizes) -> Problem:
    sources = {"num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": POSITIONS}
    options = {**special(s), **bart_like(s), **sources, "decoder_start_token_id": 1, "suppress_tokens": None}
    masks = {"apply_spec_augment": s.flip("masked"), "mask_time_length": 2, "mask_time_prob": 0.2}
    model = transformer(s, "Whisper", "ForConditionalGeneration", **options, **masks, begin_suppress_tokens=None)
    data = {"input_features": torch.randn(EXAMPLES, 6, 20), **answers(s)}
    return Problem(model, data, of_tokens(s))


def speech_to_text(s: Sizes) -> Problem:
    sources = {"input_feat_per_channel": 6, "max_source_positions": 40, "max_target_positions": POSITIONS}
    convolutions = {"conv_channels": 8, "conv_kernel_sizes": [3, 3]}
    options = {**special(s), **bart_like(s), **sources, **convolutions, "decoder_start_token_id": 1}
    mask = padding_mask(24, shortest=12)
    data = {"input_features": torch.randn(EXAMPLES, 24, 6) * mask[:, :, None], "attention_mask": mask, **answers(s)}
    return Problem(transformer(s, "Speech2Text", "ForConditionalGeneration", **options), data, of_tokens(s))


def ast(s: Sizes) -> Problem:
    sizes = {"patch_size": 4, "frequency_stride": 3, "time_stride": 3, "max_length": 16, "num_mel_bins": 8}
    options = {k: v for k, v in vit_like(s).items() if k != "image_size"}
    model = transformer(s, "AST", "ForAudioClassification", **{**options, **sizes}, num_labels=CLASSES)
    data = {"input_values": torch.randn(EXAMPLES, 16, 8), "labels": torch.randint(CLASSES, (EXAMPLES,))}
    return Problem(model, data, of_classes)


# Adapters ----------------------------------------------------------------------------------------------------------


GPT2_TARGETS, LLAMA_TARGETS = ["c_attn", "c_proj", "c_fc"], ["q_proj", "v_proj", "down_proj"]


def adapters(base: str, config: str, **options: Any) -> Callable[[Sizes], Problem]:
    """Trains only adapters of peft; those that do not support GPT-2's transposed layers, like OFT, adapt Llama."""

    def make(s: Sizes) -> Problem:
        import peft

        problem = decoder(*DECODERS[base])(s)
        chosen = {
            name: s.choice(name, *value) if isinstance(value, tuple) else value for name, value in options.items()
        }
        if hasattr(getattr(peft, config), "lora_dropout"):
            chosen["lora_dropout"] = s.dropout
        problem.model = peft.get_peft_model(problem.model, getattr(peft, config)(task_type="CAUSAL_LM", **chosen))
        return problem

    return make


def after_the_prompt(problem_of: Callable[[Sizes], Problem]) -> Callable[[Sizes], Problem]:
    """Prepends empty labels for the prompt's tokens, which precede the text's in the logits."""

    def make(s: Sizes) -> Problem:
        problem = problem_of(s)
        losses = problem.losses

        def of_text(model: Any, batch: Batch) -> Tensor:
            labels = batch["labels"]
            front = labels.new_full((len(labels), model.active_peft_config.num_virtual_tokens), NO_LABEL)
            return losses(model, {**batch, "labels": torch.cat([front, labels], 1)})

        problem.losses = of_text
        return problem

    return make


ON_GPT2: Options = {"target_modules": GPT2_TARGETS, "fan_in_fan_out": True}
ON_LLAMA: Options = {"target_modules": LLAMA_TARGETS}
ADAPTERS: dict[str, Callable[[Sizes], Problem]] = {
    "LoRA on GPT-2": adapters("GPT-2", "LoraConfig", r=(2, 4), lora_alpha=8, use_rslora=(True, False), **ON_GPT2),
    "DoRA on Llama": adapters("Llama", "LoraConfig", r=(2, 4), use_dora=True, **ON_LLAMA),
    "AdaLoRA on Llama": adapters("Llama", "AdaLoraConfig", init_r=3, target_r=2, total_step=100, **ON_LLAMA),
    "IA3 on GPT-2": adapters("GPT-2", "IA3Config", feedforward_modules=["c_fc"], **ON_GPT2),
    "OFT on Llama": adapters("Llama", "OFTConfig", oft_block_size=(2, 4), **ON_LLAMA),
    "BOFT on Llama": adapters("Llama", "BOFTConfig", boft_block_size=4, **ON_LLAMA),
    "LoHa on Llama": adapters("Llama", "LoHaConfig", r=2, **ON_LLAMA),
    "LoKr on Llama": adapters("Llama", "LoKrConfig", r=2, **ON_LLAMA),
    "VeRA on Llama": adapters("Llama", "VeraConfig", r=4, target_modules=["q_proj", "o_proj"]),
    "FourierFT on Llama": adapters("Llama", "FourierFTConfig", n_frequency=10, **ON_LLAMA),
    "prefix tuning of GPT-2": adapters("GPT-2", "PrefixTuningConfig", num_virtual_tokens=(3, 4, 10)),
    "prompt tuning of GPT-2": after_the_prompt(
        adapters("GPT-2", "PromptTuningConfig", num_virtual_tokens=(3, 4, 10)),
    ),
    "p-tuning of GPT-2": after_the_prompt(
        adapters("GPT-2", "PromptEncoderConfig", num_virtual_tokens=(3, 4, 10), encoder_hidden_size=8)
    ),
    "norm tuning of Llama": adapters("Llama", "LNTuningConfig", target_modules=["input_layernorm", "norm"]),
}


# torch -------------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Maps tokens by a recurrent network to a class, or to a token at each position."""

    def __init__(self, s: Sizes, kind: type[nn.RNNBase], *, packed: bool, classes: bool):
        super().__init__()
        both = classes and s.flip("both directions")
        options = {"num_layers": 2, "bidirectional": both, "batch_first": True, "dropout": s.dropout}
        self.embedding = nn.Embedding(s.vocabulary, s.hidden, padding_idx=0)
        self.recurrent = kind(s.hidden, s.inner, **options)
        self.head = nn.Linear((2 if both else 1) * s.inner, CLASSES if classes else s.vocabulary)
        self.packed, self.classes = packed, classes

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if self.packed:
            lengths = attention_mask.sum(1).cpu()
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, state = self.recurrent(x)
        if self.packed:
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=input_ids.shape[1])
        if not self.classes:
            return self.head(y)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(last[-2:].transpose(0, 1).flatten(1) if self.recurrent.bidirectional else last[-1])


def recurrent(kind: type[nn.RNNBase], *, packed: bool = False) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        classes = s.flip("head")
        model = Recurrent(s, kind, packed=packed, classes=classes)
        data, losses = (text_classes(s), of_classes) if classes else (next_tokens(s), of_tokens(s))
        return Problem(model, data, losses, s.crop and (packed or not classes))

    return make


class Translator(nn.Module):
    """``nn.Transformer`` between an embedding and a layer to the vocabulary."""

    def __init__(self, s: Sizes):
        super().__init__()
        first = {"batch_first": s.flip("batch first"), "norm_first": s.flip("norm first")}
        self.embedding = nn.Embedding(s.vocabulary, s.hidden)
        self.positions = nn.Parameter(0.1 * torch.randn(POSITIONS, s.hidden))
        self.transformer = nn.Transformer(s.hidden, s.heads, 2, 2, s.inner, s.dropout, **first)
        self.head = nn.Linear(s.hidden, s.vocabulary)
        self.batch_first = first["batch_first"]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor
    ):
        x, y = (self.embedding(ids) + self.positions[: ids.shape[1]] for ids in (input_ids, decoder_input_ids))
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        t = decoder_input_ids.shape[1]
        later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        hidden, hidden_too = attention_mask == 0, decoder_attention_mask == 0
        masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden, "tgt_key_padding_mask": hidden_too}
        z = self.transformer(x, y, tgt_mask=later, **masks)
        return self.head(z if self.batch_first else z.transpose(0, 1))


def translator(s: Sizes) -> Problem:
    return Problem(Translator(s), {**texts(s), **answers(s)}, of_tokens(s), s.crop)


class Block(nn.Module):
    def __init__(self, c: int, e: int, stride: int):
        super().__init__()
        first = nn.Conv2d(c, e, 3, stride, 1, bias=False), nn.GroupNorm(2, e), nn.ReLU(inplace=True)
        self.body = nn.Sequential(*first, nn.Conv2d(e, e, 3, 1, 1, bias=False), nn.GroupNorm(2, e))
        self.shortcut = nn.Identity() if (c, stride) == (e, 1) else nn.Conv2d(c, e, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class SmallResNet(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        widths = s.choice("widths", (4, 8), (8, 8, 12), (6, 12))
        blocks = [
            Block(c, e, 2 if i else 1) for i, (c, e) in enumerate(zip((widths[0], *widths), widths, strict=False))
        ]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks, self.dropout = nn.Sequential(*blocks), nn.Dropout(s.dropout)
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.dropout(self.blocks(self.stem(pixel_values)).mean((2, 3))))


def small_resnet(s: Sizes) -> Problem:
    return Problem(SmallResNet(s), images(16), of_classes)


# All ---------------------------------------------------------------------------------------------------------------


COUPLED = {
    **dict.fromkeys(("I-BERT", "I-BERT, quantized"), "computes the ranges of activations from the batch, in buffers"),
    "Nystromformer": "an inverse is scaled by the largest number of the whole batch",
    **dict.fromkeys(BATCH_NORM, "batch normalization"),
}
UNSUPPORTED = {  # or coupled only on some data
    "TimeSformer": "an example takes its class token from a frame of another one: `embeddings[:batch_size]`",
    "Funnel": "pooling over positions includes the padding, which depends on the longest text",
    "NLLB-MoE": "in training an expert has a capacity for the tokens of the whole batch",
    "LoHa on Llama": "a custom autograd.Function of parameters",
    "SEW-D": "dropout of a parameter by a custom autograd.Function",
    "Reformer": "reversible layers: a custom autograd.Function",
    "XLNet": "classes are read from the last place, which is padding as far as the longest text",
    "ProphetNet": "losses depend on the padding, and so on the longest text",
}
ROUGH = {"CvT": "torch's own backward of one example through batch normalization in eval mode is wrong"}


SMALL = re.compile("nano|atto|femto|pico|tiny|test|small|mini|micro|_xxs|_xs|_t|_s|_0|18|b0|050")
SHORTER = {"depth": 2, "embed_dim": 48, "num_heads": 3}, {"depth": 2, "embed_dim": 48}, {"depths": (1,) * 4}, {}
NO_BACKWARD_TWICE = {"efficientformer", "efficientformer_v2", "efficientvit_msra", "levit", "tiny_vit"}  # in eval mode
TIMM_COUPLED = {"csatv2": "its attention over the places of one channel is a product over the examples (timm 1.0.31)"}


def timm_zoo() -> list[Entry]:
    """Returns a small model of each family of timm, with group norm in place of batch norm."""
    timm = importlib.import_module("timm")
    families: dict[str, list[str]] = {}
    for name in timm.list_models():
        families.setdefault(timm.models.model_entrypoint(name).__module__.rsplit(".", 1)[1], []).append(name)
    return [
        Entry(f"timm {family}", of_timm(names), TIMM_COUPLED.get(family, ""), trains=family in NO_BACKWARD_TWICE)
        for family, names in sorted(families.items())
    ]


def of_timm(names: list[str]) -> Callable[[Sizes], Problem]:
    """Returns a maker of the smallest of these models, as short and narrow as it can be made, for the least images."""

    def make(s: Sizes) -> Problem:
        timm = importlib.import_module("timm")
        small = [name for name in names if SMALL.search(name)] or names
        with torch.device("meta"):
            name = min(small, key=lambda name: sum(p.numel() for p in timm.create_model(name).parameters()))
        for size, options in product((64, 96, 128, 224, 256), SHORTER):
            for sized in {"img_size": size}, {}:
                try:
                    model = timm.create_model(name, num_classes=CLASSES, **options, **sized)
                    assert model(torch.randn(2, 3, size, size)).shape == (2, CLASSES)
                except (TypeError, ValueError, RuntimeError, StopIteration, AssertionError):
                    continue
                s.drawn |= {"model": name, "size": size, **options}
                return Problem(with_group_norm(model), images(size), of_images)
        raise ValueError(f"{name} takes no images of at most 256 pixels")

    return make


def of_images(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"], reduction="none")


def zoo() -> list[Entry]:
    makers: dict[str, Callable[[Sizes], Problem]] = {}
    makers |= {name: decoder(*entry) for name, entry in DECODERS.items()}
    makers |= {name: encoder(name, *entry) for name, entry in ENCODERS.items()}
    makers |= {name: seq2seq(name, *entry) for name, entry in SEQ2SEQ.items()}
    makers |= {name: pictures(*entry) for name, entry in PICTURES.items()}
    makers |= {f"{name}, group norm": pictures(*PICTURES[name], groups=True) for name in PICTURES if name in BATCH_NORM}
    makers |= {"CLIP vision": clip_vision("CLIP"), "SigLIP vision": clip_vision("Siglip")}
    makers |= {"CLIP text": clip_text("CLIP"), "SigLIP text": clip_text("Siglip")}
    makers |= {"VideoMAE": films("VideoMAE"), "TimeSformer": films("Timesformer"), "ImageGPT": image_gpt}
    makers |= {"ViViT": films("Vivit", tubelet_size=[2, 8, 8])}
    makers |= {name: sounds(*entry) for name, entry in SOUNDS.items()}
    makers |= {"Whisper": whisper, "Speech2Text": speech_to_text, "AST": ast}
    makers |= ADAPTERS
    makers |= {"nn.LSTM": recurrent(nn.LSTM), "nn.GRU": recurrent(nn.GRU), "nn.RNN": recurrent(nn.RNN)}
    makers |= {"nn.LSTM, packed": recurrent(nn.LSTM, packed=True), "nn.GRU, packed": recurrent(nn.GRU, packed=True)}
    makers |= {"nn.Transformer": translator, "small ResNet": small_resnet}
    training = {"LeViT", "LeViT, group norm", "Reformer", "RWKV"}  # no backward in eval mode, or one with other weights
    reasons = {name: (COUPLED.get(name, ""), UNSUPPORTED.get(name, "")) for name in makers}
    return [Entry(name, make, *reasons[name], name in training, ROUGH.get(name, "")) for name, make in makers.items()]


# Training and comparing --------------------------------------------------------------------------------------------


@dataclass
class Result:
    entry: Entry
    seed: int
    drawn: Options = field(default_factory=dict)
    status: str = "failed"
    message: str = ""
    trace: str = ""
    frozen: list[str] = field(default_factory=list)
    record: str = ""  # reason why there is none
    errors: tuple[float, ...] = ()  # errors of squared norms and sum, or of the clipped sum
    dtype: str = "float64"
    seconds: float = 0.0

    @property
    def expected(self) -> str:
        return self.entry.coupled or self.entry.unsupported

    @property
    def exact(self) -> bool:
        if self.entry.rough:
            return True
        return bool(self.errors) and all(e <= (CLIPPED_SUM if self.record else EXACT[self.dtype]) for e in self.errors)

    @property
    def as_wished(self) -> bool:
        if self.status == "refused":
            return bool(self.expected)
        return self.status == "trained" and self.exact and not self.entry.coupled

    def line(self) -> str:
        digits = " ".join(f"{e:.0e}" for e in self.errors)
        errors = ("no record " if self.record else "") + (
            f"({digits})" if digits and self.dtype == "float32" else digits
        )
        text = (
            f"{' ' if self.as_wished else '!'} {self.entry.name:28} {self.status:8} {errors:17} {self.seconds:5.1f} s"
        )
        reason = self.expected or self.entry.rough
        return f"{text}  {(self.message or self.record)[:150]}{f' [{reason}]' if reason else ''}".rstrip()

    def as_json(self) -> Options:
        fields = {name: value for name, value in vars(self).items() if name != "entry"}
        judged = {"expected": self.expected, "exact": self.exact, "as_wished": self.as_wished}
        return {"name": self.entry.name, **fields, **judged}


def set_seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def made(entry: Entry, seed: int, dropout: float) -> tuple[Problem, Options]:
    set_seed(seed)
    s = Sizes(entry.name, seed, dropout)
    problem = entry.make(s)
    problem.model.train()
    if s.stirred:
        stir(problem.model)
    return problem, s.drawn


def freeze_unreached(entry: Entry, problem: Problem) -> list[str]:
    """Returns the names of parameters without a gradient after an ordinary backward, in training and eval mode."""
    reached: set[str] = set()
    for training in (True, True, True) if entry.trains else (True, True, True, False):
        problem.model.train(training)
        problem.losses(problem.model, dict(problem.data)).sum().backward()
        reached |= {name for name, p in problem.model.named_parameters() if p.grad is not None}
        problem.model.zero_grad(set_to_none=True)
    problem.model.train()
    frozen = [name for name, p in problem.model.named_parameters() if p.requires_grad and name not in reached]
    for name in frozen:
        problem.model.get_parameter(name).requires_grad_(False)
    return frozen


def train(name: str, problem: Problem, seed: int) -> None:
    model = problem.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD(parameters, lr=1e-3),
        tp.Examples(Examples(problem.data), collate_fn=up_to_the_longest if problem.crop else None),
        expected_batch_size=5 + seed % 2,
        num_steps=STEPS,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        delta=1e-3,
        test_seed=random.Random(f"{seed} {name} batches").randrange(2**31),  # other batch sizes for every model
    )
    for batch in training:
        training.step(problem.losses(model, batch))
    if training.step_count != STEPS:
        raise AssertionError(f"{training.step_count} steps instead of {STEPS}")
    if not all(torch.isfinite(p).all() for p in parameters):
        raise AssertionError("a parameter is not finite")
    if any(torch.equal(p, b) for p, b in zip(parameters, before, strict=True)):
        raise AssertionError("a parameter did not move")
    if training.num_non_finite:
        raise AssertionError(f"{training.num_non_finite} examples were left out as not finite")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def prepared(entry: Entry, seed: int, frozen: list[str], dtype: torch.dtype) -> Problem:
    """Returns the untrained problem, without dropout, with only its first examples."""
    problem, _ = made(entry, seed, dropout=0.0)
    for name in frozen:
        problem.model.get_parameter(name).requires_grad_(False)
    problem.model.train(entry.trains)
    problem.model.to(dtype)
    floating = {k: v.to(dtype) if v.is_floating_point() else v for k, v in problem.data.items()}
    problem.data = {name: value[:ALONE] for name, value in floating.items()}
    return problem


def rows_alone(problem: Problem) -> Tensor:
    """Returns rows (n, p) by one backward per example, alone in its batch, for all parameters that the losses reach."""
    problem.losses(problem.model, problem.data).sum().backward()
    for p in problem.model.parameters():
        p.requires_grad_(
            p.grad is not None
        )  # excludes parameters reached only in training, such as the embedding of masked times
    problem.model.zero_grad(set_to_none=True)
    parameters = [p for p in problem.model.parameters() if p.requires_grad]
    rows = []
    for i in range(ALONE):
        part = {name: value[i : i + 1] for name, value in problem.data.items()}
        (loss,) = problem.losses(problem.model, part)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).double()


def in_a_type(entry: Entry, seed: int, frozen: list[str]) -> tuple[Problem, Tensor, torch.dtype]:
    """Returns the prepared problem and its rows in float64, or in float32 if one of its ops lacks float64."""
    with default_dtype(torch.float64):
        try:
            problem = prepared(entry, seed, frozen, torch.float64)
            rows = rows_alone(problem)
            if rows.isfinite().all():
                return problem, rows, torch.float64
        except (RuntimeError, TypeError):
            pass
    problem = prepared(entry, seed, frozen, torch.float32)
    return problem, rows_alone(problem), torch.float32


def sum_error(ours: dict[str, Tensor], expected: Tensor) -> float:
    flat = torch.cat([value.flatten().double() for value in ours.values()])
    return float((flat - expected).norm() / expected.norm().clamp(min=1e-30))


def record_errors(problem: Problem, rows: Tensor) -> tuple[float, float]:
    """Returns the largest relative error of a squared norm, and the relative error of a weighted sum."""
    with tp.record(problem.model) as tape:
        losses = problem.losses(problem.model, problem.data)
    jacobian = tape.jacobian(losses)
    norms, c = jacobian.squared_norms().double(), torch.linspace(0.5, 1.5, ALONE, dtype=torch.float64)
    names = [name for name, p in problem.model.named_parameters() if p.requires_grad]
    sums = jacobian.weighted_sum(c.to(losses.dtype))
    expected = rows.square().sum(1)
    error = float(((norms - expected).abs() / expected.clamp(min=1e-30)).max())
    return error, sum_error({name: sums[name] for name in names}, c @ rows)


def clipped_sum_error(problem: Problem, rows: Tensor, seed: int) -> float:
    """Returns the largest error in three steps with all examples, minimal noise and learning rate zero."""
    named = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
    norms = rows.norm(dim=1)
    clip_norm = float(norms.median())
    optimizer = torch.optim.SGD(named.values(), lr=0.0)
    grads: list[dict[str, Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: grads.append({k: ALONE * p.grad for k, p in named.items()}))
    sampling = {"expected_batch_size": ALONE, "num_steps": 3, "test_seed": seed}
    noise = {"clipping": tp.Flat(clip_norm), "noise_multiplier": 1e-6, "delta": 1e-3}
    training = tp.PrivateTraining(problem.model, optimizer, Examples(problem.data), **sampling, **noise)
    for batch in training:
        training.step(problem.losses(problem.model, batch))
    expected = (clip_norm / norms.clamp(min=1e-30)).clamp(max=1) @ rows
    return max(sum_error(grad, expected) for grad in grads)


def shown(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class TooLong(Exception):
    pass


def compare(result: Result, trained: bool) -> None:
    """Stores the errors of the record, or of the clipped sum if only the record is refused."""
    problem, rows, dtype = in_a_type(result.entry, result.seed, result.frozen)
    result.dtype = str(dtype).removeprefix("torch.")
    with default_dtype(dtype):
        try:
            set_seed(result.seed)
            result.errors = record_errors(problem, rows)
        except Exception as error:
            result.record = shown(error)
            if not isinstance(error, tp.Refused):
                result.trace = result.trace or traceback.format_exc()
        if result.record and trained:
            try:
                result.errors = (clipped_sum_error(problem, rows, result.seed),)
            except Exception as error:
                result.record += f" And without dropout: {shown(error)}"


def study(entry: Entry, seed: int, limit: int) -> Result:
    result = Result(entry, seed)

    def stop(*_: object) -> None:
        raise TooLong(f"more than {limit} s")

    start = time.perf_counter()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        problem, result.drawn = made(entry, seed, dropout=0.1)
        result.frozen = freeze_unreached(entry, problem)
        set_seed(seed)
        result.status = "crashed"
        try:
            train(entry.name, problem, seed)
            result.status = "trained"
        except tp.Refused as error:
            result.status, result.message = "refused", " ".join(str(error).split())
        except Exception as error:
            result.message, result.trace = shown(error), traceback.format_exc()
        if not (entry.trains and entry.coupled):  # a coupled model may have no loss for a single example
            compare(result, result.status == "trained")
    except Exception as error:
        result.message, result.trace = shown(error), traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    result.seconds = time.perf_counter() - start
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Which architectures train with privacy.")
    parser.add_argument("--only", default="", help="regular expression for the names, case-insensitive")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="that many, from --seed on")
    parser.add_argument("--timm", action="store_true", help="families of timm")
    parser.add_argument("--limit", type=int, default=60, help="seconds for one model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", action="store_true", help="where exceptions came from")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    importlib.import_module("transformers").logging.set_verbosity_error()
    entries = [
        entry for entry in (timm_zoo() if chosen.timm else zoo()) if re.search(chosen.only, entry.name, re.IGNORECASE)
    ]
    results: list[Result] = []
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        print(f"seed {seed}, {len(entries)} models, {tp.__file__}", flush=True)
        for entry in entries:
            result = study(entry, seed, chosen.limit)
            results.append(result)
            print(result.line(), flush=True)
            if chosen.trace and result.trace:
                print(result.trace, flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps([r.as_json() for r in results], indent=1, default=str))
    for status in ("trained", "refused", "crashed", "failed"):
        of_status = [r for r in results if r.status == status]
        fine = {"trained": lambda r: not r.entry.coupled, "refused": lambda r: r.expected}.get(status, lambda r: False)
        other = [r.entry.name for r in of_status if not fine(r)]
        print(f"{len(of_status):4} {status}" + (f", not expected: {'; '.join(other)}" if other else ""))
    inexact = [r.entry.name for r in results if r.status == "trained" and not r.exact]
    no_record = [r.entry.name for r in results if r.status == "trained" and r.record]
    print(f"{len(inexact):4} trained and not exact{': ' * bool(inexact)}{'; '.join(inexact)}")
    print(f"{len(no_record):4} trained, but tp.record refuses{': ' * bool(no_record)}{'; '.join(no_record)}")
    print(f"{sum(r.seconds for r in results):.0f} s")
    raise SystemExit(0 if all(r.as_wished for r in results) else 1)


if __name__ == "__main__":
    main()

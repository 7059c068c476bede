# SPDX-License-Identifier: Apache-2.0
"""Tests transformers with adapters on few bits, checkpointing, answers only, and several sequences in a row."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hugging import encoded, gpt2, tokenizer, trainer_of
from oracle import assert_jacobian_equals_rows, one_backward_per_example
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import DataCollatorForLanguageModeling
from transformers.pytorch_utils import Conv1D

import torch_privacy as tp
from torch_privacy.huggingface import per_example_loss

N, T = 4, 9
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")  # by PEFT


class Quantized(nn.Module):
    """A frozen layer of GPT-2 with weights of few bits and a scale for each output, multiplied in the forward."""

    def __init__(self, layer: Conv1D, bits: int):
        super().__init__()
        weight, most = layer.weight.detach(), 2 ** (bits - 1) - 1
        self.register_buffer("scale", weight.abs().amax(0) / most)
        self.register_buffer("levels", (weight / self.scale).round().to(torch.int8))
        self.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.levels.to(x.dtype) * self.scale.to(x.dtype)) + self.bias


class WithAdapter(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def on_few_bits(bits: int) -> Any:
    """Returns GPT-2 with adapters on attention layers of few bits."""
    model = gpt2(n_layer=2).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = WithAdapter(Quantized(block.attn.c_attn, bits), 16, 48)
    return model


def with_lora() -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    config.init_lora_weights = False
    return get_peft_model(gpt2(n_layer=2), config)


def checkpointed(model: Any) -> Any:
    """Returns the model as people train it: checkpointing, and embeddings that need a gradient for it."""
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


MODELS = {
    "8 bits": lambda: on_few_bits(8),
    "4 bits": lambda: on_few_bits(4),
    "8 bits, checkpointed": lambda: checkpointed(on_few_bits(8)),
    "LoRA": with_lora,
    "LoRA, checkpointed": lambda: checkpointed(with_lora()),
    "all weights, checkpointed": lambda: checkpointed(gpt2(n_layer=2)),
}


def answers() -> dict[str, Tensor]:
    """Returns a batch with labels on a part of the tokens only, and on none of example 2."""
    ids, mask = torch.randint(4, 40, (N, T)), torch.ones(N, T, dtype=torch.long)
    mask[1, 6:] = 0
    labels = ids.masked_fill((torch.rand(N, T) < 0.5) | (mask == 0), -100)
    labels[2], labels[3, -1] = -100, ids[3, -1]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def several_in_a_row() -> dict[str, Tensor]:
    """Returns rows of one to three sequences; attention stays within each, and positions begin anew."""
    batch = answers()
    segments = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 3 + [2] * 4, [0] * T, [0] * 8 + [1]])
    together = (segments[:, :, None] == segments[:, None]) & torch.ones(T, T).tril().bool()
    starts = torch.tensor([[(row[:t] != row[t]).sum() for t in range(T)] for row in segments])
    first = torch.cat([torch.zeros(N, 1, dtype=torch.bool), segments[:, 1:] != segments[:, :-1]], 1)
    labels = batch["labels"].masked_fill(first, -100)
    mask = torch.where(together, 0.0, torch.finfo(torch.float64).min)[:, None]
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "position_ids": torch.arange(T) - starts} | {
        "labels": labels
    }


def mean_over_answers(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns each example's mean over its answers, written without the package."""
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    logits, labels = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.mT, labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


def without_dropout(model: Any) -> Any:
    """Returns the model in float64; in train mode, without which transformers do not checkpoint."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double().train()


@pytest.mark.parametrize("batch_of", [answers, several_in_a_row])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_answers_match_one_backward_per_example(name, batch_of):
    model, batch = without_dropout(MODELS[name]()), batch_of()
    parts = [{key: t[i : i + 1] for key, t in batch.items()} for i in range(N)]
    rows = one_backward_per_example(model, batch["input_ids"].double(), mean_over_answers, parts)
    with tp.record(model) as tape:
        losses = per_example_loss(model, batch) if batch_of is answers else mean_over_answers(model, batch)
    jacobian = tape.jacobian(losses, verify=True)
    assert rows[2].abs().max() == 0
    assert {*jacobian.shapes} == {key for key, p in model.named_parameters() if p.requires_grad}
    assert_jacobian_equals_rows(jacobian, rows)


@pytest.mark.parametrize("name", ["8 bits", "4 bits", "8 bits, checkpointed"])
def test_trainer_changes_adapters_on_a_base_of_few_bits_and_nothing_else(name, tmp_path):
    torch.set_default_dtype(torch.float32)
    model = MODELS[name]()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    quick = {"assume_independent": "rows are compared above"}
    trainer = trainer_of(tmp_path, model, encoded(labels=False), collate, quick)
    trainer.train()
    assert trainer.state.global_step == 3
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert {key for key, t in model.state_dict().items() if not torch.equal(t, before[key])} == trained

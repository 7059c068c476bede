# SPDX-License-Identifier: Apache-2.0
"""Tests adapters on frozen bases in 4 and 8 bits, packed sequences, and what Opacus cannot train."""

import copy

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from oracle import assert_jacobian_equals_rows, one_backward_per_example
from parts import own_batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from trainings import N, training_of

import torch_privacy as tp


class Quantized(nn.Module):
    """A frozen linear layer with weights of few bits and a scale for each output, multiplied in the forward."""

    def __init__(self, layer: nn.Linear, bits: int):
        super().__init__()
        most = 2 ** (bits - 1) - 1
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / most
        self.register_buffer("scale", scale)
        self.register_buffer("levels", (layer.weight.detach() / scale).round().to(torch.int8))
        self.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.levels.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def quantized_by_torchao(layer: nn.Linear) -> nn.Module:
    model = nn.Sequential(layer)
    quantize_(model, Int8WeightOnlyConfig())
    return model.requires_grad_(False)


def quantized_by_bitsandbytes(layer: nn.Linear, bits: int) -> nn.Module:
    if bits == 4:
        new = bnb.nn.Linear4bit(layer.in_features, layer.out_features, compute_dtype=torch.float32, quant_type="nf4")
    else:
        new = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False)
    new.load_state_dict(layer.state_dict())
    return new.to("cpu").requires_grad_(False)


BASES = {
    "8 bits": lambda layer: Quantized(layer, 8),
    "4 bits": lambda layer: Quantized(layer, 4),
    "torchao, 8 bits": quantized_by_torchao,
    "bitsandbytes, 4 bits": lambda layer: quantized_by_bitsandbytes(layer, 4),
    "bitsandbytes, 8 bits": lambda layer: quantized_by_bitsandbytes(layer, 8),
}


def adapted_model(base: str) -> nn.Module:
    torch.set_default_dtype(torch.float32)
    first, second = (BASES[base](nn.Linear(64, 64).requires_grad_(False)) for _ in range(2))
    return nn.Sequential(Adapted(first, 64, 64), nn.Tanh(), Adapted(second, 64, 64))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean((1, 2))


@pytest.mark.parametrize("base", BASES)
def test_rows_of_adapters_on_a_quantized_base_are_exact_and_nothing_frozen_has_any(base):
    model, x = adapted_model(base), torch.randn(4, 5, 64)
    with tp.record(model) as tape:
        losses = squares(model, x)
    jacobian = tape.jacobian(losses, verify=True)
    assert [*jacobian.shapes] == ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"]
    assert_jacobian_equals_rows(jacobian, one_backward_per_example(model, x, squares), rtol=1e-4)
    ours = jacobian.weighted_sum(torch.ones(4))
    native = torch.autograd.grad(squares(model, x).sum(), [p for p in model.parameters() if p.requires_grad])
    for total, expected in zip(ours.values(), native, strict=True):
        torch.testing.assert_close(total, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_training_of_adapters_on_a_quantized_base(base):
    model = adapted_model(base)
    if base == "bitsandbytes, 8 bits":  # its layers are set up in their first forward
        model(torch.zeros(1, 1, 64))
    before = copy.deepcopy([p.detach() for p in model.parameters() if p.requires_grad])
    training = training_of(model, TensorDataset(torch.randn(N, 5, 64)), num_steps=3)
    for (x,) in own_batches(training, lambda model, x, *_: squares(model, x)):
        training.step(squares(model, x))
    assert training.step_count == 3
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))


def test_training_on_a_base_that_is_set_up_in_the_forward_is_refused():
    model = adapted_model("bitsandbytes, 8 bits")
    training = training_of(model, TensorDataset(torch.randn(N, 5, 64)), num_steps=3)

    def train():
        for (x,) in training:
            training.step(squares(model, x))

    with pytest.raises(tp.Refused, match=r"SCB.*run the model on made-up inputs once"):
        train()
    assert len(training.ledger) == 0


class Reader(nn.Module):
    """Reads token ids; attention stays within a sequence of a row, and positions begin anew in each."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(13, 8), nn.Embedding(16, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 13)

    def forward(self, ids: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(self.tokens(ids) + self.positions(positions)).chunk(3, 2)
        together = (segments[:, :, None] == segments[:, None]) & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=together))


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns each example's mean over its own tokens with a label other than -100."""
    losses = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)


def batch_of_answers() -> dict[str, Tensor]:
    ids = torch.randint(13, (4, 9))
    segments = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 3 + [2] * 4, [0] * 9, [0] * 8 + [1]])
    starts = torch.tensor([[(row[:t] != row[t]).sum() for t in range(9)] for row in segments])
    labels = torch.where(torch.rand(4, 9) < 0.5, ids, -100)
    labels[:, 1:][segments[:, 1:] != segments[:, :-1]] = -100  # the first token of a sequence has no predecessor
    labels[2] = -100  # an example without any answer
    return {"ids": ids, "segments": segments, "positions": torch.arange(9) - starts, "labels": labels}


def losses_of_answers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return answer_loss(model(batch["ids"], batch["segments"], batch["positions"]), batch["labels"])


def test_rows_of_losses_over_answers_in_rows_of_several_sequences_are_exact():
    model, batch = Reader(), batch_of_answers()
    parts = [{name: t[i : i + 1] for name, t in batch.items()} for i in range(4)]
    rows = one_backward_per_example(model, batch["ids"].double(), lambda m, part: losses_of_answers(m, part), parts)
    with tp.record(model) as tape:
        losses = losses_of_answers(model, batch)
    assert rows[2].abs().max() == 0
    assert_jacobian_equals_rows(tape.jacobian(losses, verify=True), rows)


def test_packing_several_sequences_of_an_example_leaves_its_row_as_it_is():
    """The row of a packed example is that of its sequences one by one, weighted by their numbers of answers."""
    model, batch = Reader(), batch_of_answers()
    with tp.record(model) as tape:
        losses = losses_of_answers(model, batch)
    packed = tape.jacobian(losses).rows()
    total = (batch["labels"][0, 1:] != -100).sum()
    alone = [{name: t[:1, part] for name, t in batch.items()} for part in (slice(4), slice(4, 9))]
    counts = [(part["labels"][0, 1:] != -100).sum() / total.clamp(min=1) for part in alone]
    loss = sum(count * losses_of_answers(model, part)[0] for count, part in zip(counts, alone, strict=True))
    for row, expected in zip(packed.values(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        torch.testing.assert_close(row[0], expected, rtol=1e-9, atol=1e-12)


class AllAtOnce(nn.Module):
    """Tied embedding and output, a layer used twice, parameters used directly, and activation checkpointing."""

    def __init__(self):
        super().__init__()
        self.tokens, self.shared = nn.Embedding(13, 8), nn.Linear(8, 8)
        self.scale, self.shift = nn.Parameter(torch.rand(8)), nn.Parameter(torch.randn(1, 1, 8))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = checkpoint(lambda x: self.shared(x * self.scale).tanh(), self.tokens(ids), use_reentrant=False)
        h = checkpoint(lambda x: self.shared(x).tanh() + self.shift, h, use_reentrant=False)
        return self.head(h)


@pytest.mark.parametrize("budget", [1e-9, 1.2])
def test_tied_shared_custom_and_checkpointed_at_once(budget):
    model, ids = AllAtOnce(), torch.randint(13, (N, 6))
    rows = one_backward_per_example(model, ids, squares)
    with tp.record(model) as tape:
        losses = squares(model, ids)
    assert_jacobian_equals_rows(tape.jacobian(losses, verify=True), rows)
    training = training_of(model, TensorDataset(ids), num_steps=4, performance=tp.Performance(memory_budget=budget))
    for (x,) in own_batches(training, lambda model, x, *_: squares(model, x)):
        training.step(squares(model, x))
    assert training.step_count == 4

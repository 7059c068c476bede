# SPDX-License-Identifier: Apache-2.0
"""Per-example losses equal each model's own ``.loss`` of a batch of one example, for every kind of head."""

from typing import Any

import pytest
import torch
import transformers
from hugging import WORDS, bert, gpt2, t5
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BartConfig, LlamaConfig, MixtralConfig, ViTConfig, XLNetConfig

import torch_privacy as tp
from torch_privacy import huggingface
from torch_privacy.huggingface import per_example_loss

N, T = 4, 8
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")  # by PEFT


def tokens(high: int = WORDS) -> Tensor:
    return torch.randint(4, high, (N, T))


def masked(labels: Tensor) -> Tensor:
    """Hides a part of the labels: all of example 0, none of example 1, some of the others."""
    hidden = torch.rand(labels.shape) < 0.5
    hidden[0], hidden[1], hidden[:, -1] = True, False, False
    hidden[0] = True
    return labels.masked_fill(hidden, -100)


def text(**labels: Any) -> dict[str, Any]:
    mask = torch.ones(N, T, dtype=torch.long)
    mask[2, 5:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, **labels}


def classes(count: int = 3) -> Tensor:
    return torch.randint(count, (N,))


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


def bart(kind: str, **settings: Any) -> Any:
    ends = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "max_position_embeddings": 16,
    }
    sizes = {name: 1 if "layers" in name else 2 for name in ("encoder_layers", "decoder_layers")}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    config = BartConfig(vocab_size=WORDS, d_model=16, **sizes, **heads, **ends, **settings)
    return getattr(transformers, kind)(config)


def of_bert(kind: str, **settings: Any) -> Any:
    return bert(getattr(transformers, kind), **settings)


def vit() -> Any:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    config.num_labels = 3
    return transformers.ViTForImageClassification(config)


def prompted() -> Any:
    return get_peft_model(gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def adapted() -> Any:
    return get_peft_model(
        gpt2(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )


CASES = {  # name -> (model, batch)
    "gpt2": lambda: (gpt2(), text(labels=masked(tokens()))),
    "llama": lambda: (llama(), text(labels=masked(tokens()))),
    "gpt2 with LoRA": lambda: (adapted(), text(labels=masked(tokens()))),
    "gpt2 with a learned prompt": lambda: (prompted(), text(labels=masked(tokens()))),
    "bert as decoder": lambda: (of_bert("BertLMHeadModel", is_decoder=True), text(labels=masked(tokens()))),
    "xlnet": lambda: (
        transformers.XLNetLMHeadModel(XLNetConfig(vocab_size=WORDS, d_model=16, n_layer=1, n_head=2, d_inner=8)),
        text(labels=masked(tokens())),
    ),
    "masked bert": lambda: (of_bert("BertForMaskedLM"), text(labels=masked(tokens()))),
    "t5": lambda: (t5(), text(labels=masked(tokens()))),
    "t5 with decoder inputs": lambda: (t5(), text(labels=masked(tokens()), decoder_input_ids=tokens())),
    "bart": lambda: (bart("BartForConditionalGeneration"), text(labels=masked(tokens()))),
    "one label": lambda: (of_bert("BertForSequenceClassification", num_labels=3), text(labels=classes())),
    "two labels, from the data": lambda: (of_bert("BertForSequenceClassification"), text(labels=classes(2))),
    "several labels": lambda: (
        of_bert("BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        text(labels=torch.randint(2, (N, 3)).double()),
    ),
    "a number": lambda: (of_bert("BertForSequenceClassification", num_labels=1), text(labels=torch.rand(N))),
    "three numbers": lambda: (
        of_bert("BertForSequenceClassification", num_labels=3, problem_type="regression"),
        text(labels=torch.rand(N, 3)),
    ),
    "gpt2 for sequences": lambda: (
        transformers.GPT2ForSequenceClassification(gpt2(num_labels=3).config),
        text(labels=classes()),
    ),
    "tokens": lambda: (of_bert("BertForTokenClassification", num_labels=3), text(labels=masked(tokens(7) % 3))),
    "multiple choice": lambda: (
        of_bert("BertForMultipleChoice"),
        {"input_ids": torch.randint(4, WORDS, (N, 3, T)), "labels": classes()},
    ),
    "next sentence": lambda: (of_bert("BertForNextSentencePrediction"), text(labels=classes(2))),
    "answers": lambda: (
        of_bert("BertForQuestionAnswering"),
        text(start_positions=torch.tensor([0, 3, 2, 1]), end_positions=torch.tensor([7, 4, 2, 1])),
    ),
    "images": lambda: (vit(), {"pixel_values": torch.randn(N, 3, 8, 8), "labels": classes()}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_is_the_models_own_of_a_batch_of_one_example(case):
    torch.manual_seed(1)
    model, batch = CASES[case]()
    model = model.double().eval()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    for _ in range(2):  # the first batch with the model's own loss besides, the second without
        losses = per_example_loss(model, batch)
    own = [model(**{name: x[i : i + 1] for name, x in batch.items()}).loss for i in range(N)]
    expected = torch.stack([torch.zeros(()) if loss.isnan() else loss for loss in own])  # no label: 0 / 0
    assert losses.shape == (N,)
    assert losses.grad_fn is not None
    torch.testing.assert_close(losses, expected.to(losses), rtol=1e-6, atol=1e-6)  # own logits are rounded to float32


def test_second_batch_does_without_the_models_own_loss(monkeypatch):
    model = gpt2().eval()
    batch = text(labels=tokens())
    per_example_loss(model, batch)
    monkeypatch.setattr(type(model), "loss_function", None)
    assert per_example_loss(model, batch).shape == (N,)


def test_positions_beyond_the_text_have_no_loss():
    model = of_bert("BertForQuestionAnswering").eval()
    positions = {"start_positions": torch.tensor([T, 3, 2, 1]), "end_positions": torch.tensor([T + 5, 4, 2, 1])}
    losses = per_example_loss(model, text(**positions))
    assert losses[0] == 0
    assert (losses[1:] > 0).all()


def mixture() -> Any:
    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).float()


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


REFUSED = {
    "experts are balanced over the batch": (mixture, {"labels": True}, "on this batch .* times its own .loss"),
    "unknown head": (lambda: of_bert("BertForPreTraining"), {"labels": True}, "override losses"),
    "no model of transformers": (Plain, {"labels": True}, "Plain has no head"),
    "no labels": (gpt2, {}, "has no labels, but input_ids, attention_mask"),
    "packed rows": (gpt2, {"labels": True, "shift_labels": True}, "one example in each row"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_losses_are_refused(case):
    model, labels, message = REFUSED[case]
    with pytest.raises(tp.Refused, match=message):
        per_example_loss(model(), text(**{name: tokens() for name in labels}))


def train_by_its_own_loss(model: Any, training: tp.PrivateTraining) -> None:
    for batch in training:
        training.step(model(**batch).loss)


def test_loss_of_the_model_is_refused_with_the_name_of_the_function():
    model = gpt2()
    data = [{"input_ids": row, "labels": row} for row in tokens()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"expected_batch_size": 2, "num_steps": 1, "clipping": tp.Flat(1.0), "noise_multiplier": 1.0}
    training = tp.PrivateTraining(model, optimizer, data, **settings, test_seed=1)
    with pytest.raises(
        tp.Refused, match=r"huggingface\.per_example_loss\(model, batch\) instead of model\(\*\*batch\)"
    ):
        train_by_its_own_loss(model, training)
    assert training.step_count == 0
    assert huggingface.per_example_loss is per_example_loss

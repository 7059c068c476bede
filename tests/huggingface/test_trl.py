# SPDX-License-Identifier: Apache-2.0
"""The programs that docs/huggingface.md has in place of TRL's trainers have TRL's losses, example by example."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from hugging import PRIVACY, arguments, gpt2, tokenizer

import torch_privacy as tp
from torch_privacy.huggingface import PrivateTrainer, per_example_loss

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
PAIRS = [
    {"prompt": "the film is", "chosen": " a movie of he", "rejected": " not it"},
    {"prompt": "this", "chosen": " was with film as", "rejected": " for you be the a"},
    {"prompt": "i have", "chosen": " his", "rejected": " that was of"},
] * 8


def dpo_of_the_page():
    (code,) = re.findall(r"```python\n(def log_probabilities.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"torch": torch, "PrivateTrainer": PrivateTrainer}
    exec(code, names)
    return names["PrivateDPO"], names["log_probabilities"]


def encoded_pair(row, longest=12):
    """Returns ids and labels of both answers, padded, with the end of the text that TRL adds."""
    prompt, found = tokenizer()(row["prompt"])["input_ids"], {}
    for kind in ("chosen", "rejected"):
        answer = [*tokenizer()(row[kind])["input_ids"], tokenizer().eos_token_id]
        padding = longest - len(prompt) - len(answer)
        found[f"{kind}_ids"] = prompt + answer + [0] * padding
        found[f"{kind}_labels"] = [-100] * len(prompt) + answer + [-100] * padding
    return found


def data_for_dpo(reference, log_probabilities):
    rows = [encoded_pair(row) for row in PAIRS]
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        for kind in ("chosen", "rejected"):
            for row, value in zip(rows, log_probabilities(reference, batch, kind), strict=True):
                row[f"{kind}_reference"] = value.item()
    return rows


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def other_model():
    torch.manual_seed(3)
    model = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


@pytest.mark.thorough
def test_dpo_of_the_page_trains(tmp_path):
    kind, log_probabilities = dpo_of_the_page()
    data = data_for_dpo(other_model(), log_probabilities)
    trainer = kind(
        gpt2(),
        arguments(tmp_path, remove_unused_columns=False),
        data_collator=collate,
        train_dataset=data,
        privacy=PRIVACY | {"clipping": tp.Flat(1.0)},
    )
    trainer.train()
    assert trainer.training.step_count == 3
    assert trainer.privacy_statement()["private"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # by TRL
def test_losses_are_those_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    quiet = {
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 1,
    }
    model, reference = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).eval(), other_model().eval()
    _, log_probabilities = dpo_of_the_page()
    theirs = trl.DPOTrainer(
        model, reference, args=trl.DPOConfig(**quiet, beta=0.1), train_dataset=Dataset.from_list(PAIRS[:3]),
        processing_class=tokenizer(),
    )  # fmt: skip
    batch = collate(data_for_dpo(reference, log_probabilities)[:3])
    inputs = {"model": model, "inputs": batch}
    with torch.no_grad():
        margins = [log_probabilities(**inputs, kind=k) - batch[f"{k}_reference"] for k in ("chosen", "rejected")]
        ours = -torch.nn.functional.logsigmoid(0.1 * (margins[0] - margins[1]))
        found = [theirs.compute_loss(model, theirs.data_collator([theirs.train_dataset[i]])).item() for i in range(3)]
    assert ours.tolist() == pytest.approx(found, rel=1e-4)

    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS[:3]]
    sft = trl.SFTTrainer(
        model, args=trl.SFTConfig(**quiet), train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    answers = {"input_ids": batch["chosen_ids"], "labels": batch["chosen_labels"]}
    with torch.no_grad():
        ours = per_example_loss(model, answers)
        found = [sft.compute_loss(model, sft.data_collator([sft.train_dataset[i]])).item() for i in range(3)]
    assert ours.tolist() == pytest.approx(found, rel=1e-4)

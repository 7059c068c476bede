# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft have exact rows on every kind of layer that peft allows them for."""

import pytest
import torch
from oracle import assert_jacobian_equals_rows, rows_of_one_graph
from parts import losses_of
from torch import Tensor, nn

import torch_privacy as tp

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of peft about the layers
D = 8


class Net(nn.Module):
    """One layer of the given kind, ``mid``, between an embedding and a head."""

    def __init__(self, kind: str):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        kinds = {
            "linear": lambda: nn.Linear(D, D),
            "conv1d": lambda: Conv1D(D, D),
            "conv2d": lambda: nn.Conv2d(2, 2, 3),
        }
        self.first, self.norm, self.head = nn.Embedding(11, D), nn.LayerNorm(D), nn.Linear(D, 3)
        self.mid = kinds.get(kind, lambda: nn.Embedding(11, D))()
        self.kind = kind

    def forward(self, ids: Tensor) -> Tensor:
        h = self.first(ids)
        if self.kind == "conv2d":
            padded = nn.functional.pad(h.unflatten(2, (2, 4)).transpose(1, 2), (1, 1, 1, 1))
            h = self.mid(padded).transpose(1, 2).flatten(2)
        else:
            h = h + self.mid(ids if self.kind == "embedding" else h)
        return self.head(self.norm(h).tanh().mean(1))


LINEAR, CONV1D = ("linear",), ("linear", "conv1d")
DENSE, LOOKED_UP = ("linear", "conv2d"), ("linear", "conv2d", "embedding")
THREE, FOUR = ("linear", "conv1d", "conv2d"), ("linear", "conv1d", "conv2d", "embedding")
BLOCKS = {"oft_block_size": 2, "r": 0}
ADAPTERS = {  # name -> configuration, its arguments, the layers that peft allows
    "LoRA": (peft.LoraConfig, {"r": 2}, FOUR),
    "LoRA with bias": (peft.LoraConfig, {"r": 2, "lora_bias": True}, THREE),
    "LoRA, all biases": (peft.LoraConfig, {"r": 2, "bias": "all"}, FOUR),
    "LoRA and a trained head": (peft.LoraConfig, {"r": 2, "modules_to_save": ["head"]}, FOUR),
    "LoRA and tokens": (peft.LoraConfig, {"r": 2, "trainable_token_indices": {"first": [1, 2, 5]}}, FOUR),
    "rsLoRA": (peft.LoraConfig, {"r": 2, "use_rslora": True}, FOUR),
    "DoRA": (peft.LoraConfig, {"r": 2, "use_dora": True}, FOUR),
    "DoRA with dropout": (peft.LoraConfig, {"r": 2, "use_dora": True, "lora_dropout": 0.2}, FOUR),
    "LoRA of a parameter": (
        peft.LoraConfig,
        {"r": 2, "target_modules": [], "target_parameters": ["mid.weight"]},
        LINEAR,
    ),
    "AdaLoRA": (peft.AdaLoraConfig, {"init_r": 3, "total_step": 10, "tinit": 1, "tfinal": 2}, THREE),
    "LoHa": (peft.LoHaConfig, {"r": 2}, DENSE),
    "LoHa, effective": (peft.LoHaConfig, {"r": 2, "use_effective_conv2d": True}, DENSE),
    "LoKr": (peft.LoKrConfig, {"r": 2, "decompose_both": True}, DENSE),
    "IA3": (peft.IA3Config, {"feedforward_modules": []}, THREE),
    "OFT": (peft.OFTConfig, BLOCKS, LOOKED_UP),
    "OFT, shared": (peft.OFTConfig, {**BLOCKS, "block_share": True, "use_cayley_neumann": False}, LOOKED_UP),
    "BOFT": (peft.BOFTConfig, {"boft_block_size": 2, "boft_n_butterfly_factor": 2}, DENSE),
    "VeRA": (peft.VeraConfig, {"r": 2}, CONV1D),
    "VBLoRA": (peft.VBLoRAConfig, {"r": 2, "num_vectors": 4, "vector_length": 2, "topk": 2}, CONV1D),
    "RandLoRA": (peft.RandLoraConfig, {"r": 2}, CONV1D),
    "FourierFT": (peft.FourierFTConfig, {"n_frequency": 7}, CONV1D),
    "HRA": (peft.HRAConfig, {"r": 2, "apply_GS": True}, DENSE),
    "MiSS": (peft.MissConfig, {"r": 2}, LINEAR),
    "BONE": (peft.MissConfig, {"r": 2, "init_weights": "bat"}, LINEAR),
    "SHiRA": (peft.ShiraConfig, {"r": 2}, LINEAR),
    "LN tuning": (peft.LNTuningConfig, {"target_modules": ["norm"]}, LINEAR),
    "trained tokens": (peft.TrainableTokensConfig, {"target_modules": ["first"], "token_indices": [1, 2]}, LINEAR),
    **{
        name: (getattr(peft, config), arguments, layers)
        for name, config, arguments, layers in [  # of later versions of peft
            ("PVeRA", "PveraConfig", {"r": 2}, CONV1D),
            ("DeLoRA", "DeloraConfig", {"r": 2}, LINEAR),
            ("C3A", "C3AConfig", {"block_size": 4}, LINEAR),
            ("GraLoRA", "GraloraConfig", {"r": 4, "gralora_k": 2, "hybrid_r": 2}, CONV1D),
            ("GLoRA", "GloraConfig", {"r": 2}, LINEAR),
            ("HiRA", "HiraConfig", {"r": 2}, FOUR),
            ("RoAd", "RoadConfig", {"variant": "road_4", "group_size": 4}, LINEAR),
            ("WaveFT", "WaveFTConfig", {"n_frequency": 5}, CONV1D),
            ("FRoD", "FrodConfig", {}, CONV1D),
        ]
        if hasattr(peft, config)
    },
}
PAIRS = [(name, layer) for name, (_, _, layers) in ADAPTERS.items() for layer in layers]
IN_FLOAT32 = {"FourierFT"}  # which peft itself computes


@pytest.mark.every_case
@pytest.mark.parametrize(("adapter", "layer"), PAIRS)
def test_adapter_matches_the_gradient_of_each_loss(adapter, layer):
    config, arguments, _ = ADAPTERS[adapter]
    if adapter in IN_FLOAT32:
        torch.set_default_dtype(torch.float32)
    named = {"target_modules": ["mid"], **arguments}
    model = peft.get_peft_model(Net(layer), config(**named))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # many begin at zero
                p.add_(0.3 * torch.randn_like(p))
    with tp.record(model) as tape:
        losses = losses_of(model, torch.randint(11, (5, 4)))
    rows = rows_of_one_graph(losses, model)
    tolerance = 1e-4 if adapter in IN_FLOAT32 else 1e-6 if adapter == "C3A" else 1e-9  # C3A casts to float32
    assert_jacobian_equals_rows(tape.jacobian(losses, verify=True), rows, tolerance)

# SPDX-License-Identifier: Apache-2.0
"""Programs built like Opacus' examples: with either library they are the same text, but for the import."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from types import ModuleType
from unittest.mock import patch

import pytest

from torch_privacy import Refused

COMMON = """
import numpy as np
import torch
from torch import nn, optim
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator

torch.manual_seed(0)


def train(model, train_loader, optimizer, engine, epoch, delta):
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses, accuracies = [], []
    for _index, (data, target) in enumerate(tqdm(train_loader, disable=True)):
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        accuracies.append((output.argmax(1) == target).float().mean().item())
    epsilon = engine.get_epsilon(delta)
    print(f"epoch {epoch} epsilon {epsilon:.2f}", 0 < np.mean(losses) < 5, 0 <= np.mean(accuracies) <= 1)


def test(model, loader):
    model.eval()
    correct, criterion, loss = 0, nn.CrossEntropyLoss(), 0.0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += criterion(output, target).item()
            correct += output.argmax(1).eq(target).sum().item()
    print("test", 0 <= correct <= len(loader.dataset), loss > 0)
"""

MNIST = (
    COMMON
    + """
class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, 2, padding=2), nn.Conv2d(4, 6, 3, 2)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2, 1)
        return self.fc(F.max_pool2d(F.relu(self.conv2(x)), 2, 1).flatten(1))


data = TensorDataset(torch.randn(80, 1, 12, 12), torch.randint(3, (80,)))
train_loader = DataLoader(data, batch_size=20)
test_loader = DataLoader(data, batch_size=64, shuffle=True)
model = ModuleValidator.fix(ConvNet())
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0)
engine = PrivacyEngine(secure_mode=False)
model, optimizer, train_loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.5, max_grad_norm=1.0)
for epoch in range(1, 3):
    with BatchMemoryManager(data_loader=train_loader, max_physical_batch_size=16, optimizer=optimizer) as small:
        train(model, small, optimizer, engine, epoch, 1e-3)
    test(model, test_loader)
"""
)

TEXT = (
    COMMON
    + """
class Sentiment(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embedding, self.fc1, self.fc2 = nn.Embedding(vocabulary, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x):
        x = self.pool(self.embedding(x).transpose(1, 2)).squeeze(2)
        return self.fc2(F.relu(self.fc1(x)))


def padded(batch, longest=LONGEST):
    x = pad_sequence([tokens for tokens, _ in batch], batch_first=True)
    if longest:
        x = F.pad(x, (0, longest - x.shape[1]))
    return x, torch.stack([label for _, label in batch])


data = [(torch.randint(1, 9, (int(n),)), torch.tensor(int(n) % 2)) for n in torch.randint(2, 7, (60,))]
loader = DataLoader(data, batch_size=15, collate_fn=padded, shuffle=True)
model = Sentiment(9)
optimizer = optim.Adam(model.parameters(), lr=0.02)
engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, target_epsilon=4.0, target_delta=1e-3, epochs=2,
    max_grad_norm=1.0)
for epoch in range(1, 3):
    train(model, train_loader, optimizer, engine, epoch, 1e-3)
    test(model, DataLoader(data, batch_size=30, collate_fn=padded))
"""
)

CHARACTERS = (
    COMMON
    + """
class Names(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 6), nn.Linear(7, 3)
        self.rnn = DPLSTM(6, 7, num_layers=1, batch_first=True)

    def forward(self, x, hidden=None):
        x, _ = self.rnn(self.embedding(x), hidden)
        return self.out(x[:, -1, :])


data = TensorDataset(torch.randint(9, (60, 5)), torch.randint(3, (60,)))
model = Names()
optimizer = optim.SGD(model.parameters(), lr=2.0)
scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=15), noise_multiplier=1.0,
    max_grad_norm=1.5)
for epoch in range(1, 3):
    train(model, train_loader, optimizer, engine, epoch, 1e-3)
    scheduler.step()
    engine.save_checkpoint(path=PATH, module=model, optimizer=optimizer)
test(model, DataLoader(data, batch_size=30))
engine.load_checkpoint(path=PATH, module=model, optimizer=optimizer)
print("lr", optimizer.param_groups[0]["lr"], len(train_loader))
"""
)


CIFAR = (
    COMMON
    + """
import numpy as np
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.grad_sample.functorch import make_functional

data = TensorDataset(torch.randn(80, 3, 8, 8), torch.randint(3, (80,)))
model = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(start_dim=1), nn.Linear(4, 3))
before = sorted(model.state_dict())
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
count = len([p for p in model.parameters() if p.requires_grad])
engine = PrivacyEngine(secure_mode=False)
model, optimizer, train_loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=20, generator=torch.Generator()),
    noise_multiplier=1.5, max_grad_norm=[1.0 / np.sqrt(count)] * count, clipping="per_layer", grad_sample_mode=MODE)
for epoch in range(1, 3):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * epoch / 3))
    train(model, train_loader, optimizer, engine, epoch, 1e-3)
    test(model, DataLoader(data, batch_size=30))
torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, PATH)
print(sorted(model._module.state_dict()) == before)
"""
)

GENERATED = (
    COMMON
    + """
real, netG = TensorDataset(torch.randn(60, 6)), nn.Linear(3, 6)
netD = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0))
criterion = nn.BCELoss()
engine = PrivacyEngine()
netD, optimizer, loader = engine.make_private(
    module=netD, optimizer=optim.Adam(netD.parameters()), data_loader=DataLoader(real, batch_size=15),
    noise_multiplier=1.0, max_grad_norm=1.0)
for (x,) in loader:
    fake = netG(torch.randn(len(x), 3))
    loss = criterion(netD(x), torch.ones(len(x))) + criterion(netD(fake.detach()), torch.zeros(len(x)))
    loss.backward()
    optimizer.step()
"""
)


def output_of(program: str, **names: object) -> list[str]:
    printed, module = io.StringIO(), ModuleType("migrated_program")
    vars(module).update(names)
    with (
        patch.dict(sys.modules, {module.__name__: module}),  # Opacus pickles the model
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        exec(compile(program, "program", "exec"), vars(module))
    return printed.getvalue().splitlines()


def with_ours(program: str) -> str:
    changed = program.replace("from opacus", "from torch_privacy.opacus")
    assert "import opacus" not in changed
    return changed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "names"), [(MNIST, {}), (CIFAR, {"MODE": "hooks"}), (TEXT, {"LONGEST": 6}), (CHARACTERS, {})]
)
def test_a_program_runs_when_only_its_imports_change(program: str, names: dict, tmp_path) -> None:
    names = names | {"PATH": tmp_path / "checkpoint.pt"}
    theirs, ours = output_of(program, **names), output_of(with_ours(program), **names)
    number = re.compile(r"epsilon (\S+)")
    assert [number.sub("", line) for line in ours] == [number.sub("", line) for line in theirs]
    for mine, other in zip(number.findall("\n".join(ours)), number.findall("\n".join(theirs)), strict=True):
        assert 0 < float(mine) <= (4.0 if program is TEXT else float(other) + 0.01)


def test_padding_to_the_longest_of_a_batch_is_refused() -> None:  # as in Opacus' imdb.py and char-lstm
    with pytest.raises(Refused, match=r"examples of a batch depend on each other.*mask the padding"):
        output_of(with_ours(TEXT), LONGEST=0)


def test_gradients_of_the_loops_own_are_refused(tmp_path) -> None:  # as by cifar10.py --grad_sample_mode no_op
    with pytest.raises(Refused, match=r"make_functional: .*grad_sample_mode='no_op'.*functional_call"):
        output_of(with_ours(CIFAR), MODE="no_op", PATH=tmp_path / "checkpoint.pt")


def test_two_losses_that_are_added_are_refused() -> None:  # as in Opacus' dcgan.py
    with pytest.raises(Refused, match="loss"):
        output_of(with_ours(GENERATED))

# SPDX-License-Identifier: Apache-2.0
"""``torch-privacy from-opacus``: translated programs run, and what is not certain becomes a comment."""

from __future__ import annotations

import ast
import contextlib
import io
import warnings
from textwrap import dedent

import pytest

from torch_privacy import privacy
from torch_privacy.cli import run
from torch_privacy.opacus.translation import translated

FLAT = '''
import torch
from torch import nn
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator

data = torch.utils.data.TensorDataset(torch.randn(200, 5), torch.randint(2, (200,)))
loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
model = ModuleValidator.fix(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
EPOCHS = 2

engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.1,
    max_grad_norm=1.0,
)

for epoch in range(EPOCHS):
    losses = []
    with BatchMemoryManager(data_loader=train_loader, max_physical_batch_size=8, optimizer=optimizer) as small:
        for i, (x, y) in enumerate(small):
            optimizer.zero_grad()
            loss = criterion(model(x), y)  # mean
            text = """
            stays"""
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    print(f"{epoch}: epsilon {engine.get_epsilon(delta=1e-3):.2f}")
'''

FUNCTIONS = """
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine


def train(model, train_loader, optimizer, engine):
    model.train()
    losses = []
    for x, y in train_loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    print(len(train_loader), f"epsilon {engine.accountant.get_epsilon(1e-3):.2f}")


def test(model, loader):
    with torch.no_grad():
        return sum(F.cross_entropy(model(x), y).item() for x, y in loader)


def main(epochs=2):
    data = torch.utils.data.TensorDataset(torch.randn(90, 5), torch.randint(2, (90,)))
    train_loader = torch.utils.data.DataLoader(data, batch_size=30)
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.Adam(model.parameters())
    engine = PrivacyEngine()
    model, optimizer, train_loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=train_loader, target_epsilon=2.0, target_delta=1e-3,
        epochs=epochs, max_grad_norm=1.2)
    for _ in range(1, epochs + 1):
        train(model=model, train_loader=train_loader, optimizer=optimizer, engine=engine)
        test(model, torch.utils.data.DataLoader(data, batch_size=30))


main()
"""

CLASS = """
import torch
from opacus import PrivacyEngine


class Trainer:
    def __init__(self, epochs):
        data = torch.utils.data.TensorDataset(torch.randn(90, 5), torch.randint(2, (90,)))
        self.model = torch.nn.Linear(5, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.epochs = epochs
        self.engine = PrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.model, optimizer=self.optimizer, data_loader=torch.utils.data.DataLoader(data, batch_size=30),
            noise_multiplier=1.3, max_grad_norm=1.2, poisson_sampling=True)

    def fit(self):
        for epoch in range(self.epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = torch.nn.BCEWithLogitsLoss()(self.model(x)[:, 0], y.float())
                loss.backward()
                self.optimizer.step()
            print(f"epsilon {self.engine.get_epsilon(1e-3):.2f}")


Trainer(2).fit()
"""


def output_of(program: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def epsilon(noise: float, q: float, steps: int) -> str:
    high = privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]).epsilon(1e-3).high
    return f"epsilon {high:.2f}"


CALIBRATED = privacy.calibrate(2.0, 1e-3, sampling_probability=1 / 3, num_steps=6)
PROGRAMS = {  # the program -> what it prints
    "flat": (FLAT, [f"{epoch}: {epsilon(1.1, 0.1, 10 + 10 * epoch)}" for epoch in range(2)]),
    "functions": (FUNCTIONS, [f"3 {epsilon(CALIBRATED, 1 / 3, steps)}" for steps in (3, 6)]),
    "class": (CLASS, [epsilon(1.3, 1 / 3, steps) for steps in (3, 6)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_translated_program_runs(name: str) -> None:
    source, printed = PROGRAMS[name]
    program = translated(source)
    assert "opacus" not in program.replace("torch_privacy.opacus.validators", "")
    assert output_of(program).splitlines() == printed
    assert "backward" not in program
    assert "zero_grad" not in program


def test_what_changes_is_what_must() -> None:
    program = translated(FLAT)
    assert 'nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")' in program
    assert "microbatch_size=8," in program
    assert "        loss = criterion(model(x), y)  # mean\n" in program
    assert '"""\n            stays"""' in program
    assert "clip_grad_norm_" not in program
    assert "if released:  # once per step\n            scheduler.step()" in program
    assert "# torch_privacy: the loop also gets rehearsals" in program
    changed = set(program.splitlines()) ^ set(FLAT.splitlines())
    assert not any("TensorDataset" in line for line in changed)


HINTS = {
    "by hand": ("loss = (model(x) - y).square().mean()", "losses of shape (n,), one per example"),
    "two losses": ("loss = criterion(model(x), y)\n    loss.backward()", "losses of shape (n,), one per example"),
    "class weights": ("loss = F.cross_entropy(model(x), y, weight=w)", "losses of shape (n,), one per example"),
    "wrapped": ("loss = F.cross_entropy(model._module(x), y)", "leave ._module out"),
    "alpha": ("loss = F.mse_loss(model(x), y); engine.accountant.get_privacy_spent(delta=1e-5)", "no order alpha"),
    "checkpoint": ("loss = F.mse_loss(model(x), y); engine.save_checkpoint(path='a')", "training.state_dict()"),
}


@pytest.mark.parametrize("name", HINTS)
def test_what_is_not_certain_is_a_comment_at_its_line(name: str) -> None:
    lines, hint = HINTS[name]
    source = dedent("""
        from opacus import PrivacyEngine
        from opacus.schedulers import ExponentialNoise
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False, clipping="per_layer")
        for x, y in loader:
            LINES
            loss.backward()
            optimizer.step()
        """).replace("LINES", lines)
    program = translated(source)
    ast.parse(program)
    assert hint in program
    assert "# torch_privacy: poisson_sampling=False was left out" in program
    assert '# torch_privacy: clipping="per_layer" was left out: see tp.EachLayer' in program
    assert "# torch_privacy: num_steps= needs the number of epochs" in program
    assert "# torch_privacy: from opacus.schedulers import ExponentialNoise has no counterpart" in program


def test_the_command_prints_and_changes_nothing(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "program.py"
    script.write_text(FUNCTIONS)
    assert run(["from-opacus", str(script)]) == 0
    assert capsys.readouterr().out == translated(FUNCTIONS)
    assert script.read_text() == FUNCTIONS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = ", "is no Python 3: line 1"),
        (b"print(1)\n", "never calls make_private"),
        (b"\xff\xfe", "is no text in UTF-8"),
        (None, "No such file"),
    ],
)
def test_the_command_refuses_other_files(tmp_path, capsys: pytest.CaptureFixture[str], content, message: str) -> None:
    script = tmp_path / "program.py"
    if content is not None:
        script.write_bytes(content)
    assert run(["from-opacus", str(script)]) == 2
    assert message in capsys.readouterr().err

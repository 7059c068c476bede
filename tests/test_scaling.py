# SPDX-License-Identifier: Apache-2.0
"""Tests the model of docs/scaling.md: figures computed by hand or counted, limits, and that the page shows it."""

import math
import re
import sys
import weakref
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.training.placement import base

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/scaling.md"
GIB = 2**30


def module_at(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


scaling = module_at(ROOT / "benchmarks/scaling.py")
MACHINE = scaling.Machine()


def tables() -> dict[str, str]:
    return {title: make(MACHINE) for title, make in scaling.TABLES.items()}


def cells(table: str, *first: str) -> list[str]:
    """The cells of the only row that begins with these, without them."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    (row,) = (row for row in rows if row[: len(first)] == list(first))
    return row[len(first) :]


BYTES = {  # GiB at N = 8, 64, 1024 of FSDP2's schedule; of two backwards at N = 64
    "1.5 B": (["9.78", "11.00", "11.16"], "19.25"),
    "8 B": (["52.15", "58.67", "59.55"], "102.68"),
    "70 B": (["456.35", "513.39", "521.03"], "898.44"),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_the_specification(name):
    once, twice = BYTES[name]
    table = tables()["Bytes"]
    assert cells(table, name, scaling.FSDP2.name) == once
    assert cells(table, name, scaling.DDP) == once
    assert cells(table, name, scaling.TWO_BACKWARDS.name)[1] == twice
    assert cells(table, name, scaling.OURS.name) == [f"{0.75 * gib:.2f}" for gib in exact(name)]


def exact(name: str) -> list[float]:
    (params,) = (network.params for network in scaling.NETWORKS if network.name == name)
    return [(n - 1) / n * 8 * params / GIB for n in (8, 64, 1024)]


def test_each_part_scatters_once_and_the_weights_of_ours_are_gathered_once():
    """4 parts at N = 2, which sends half: 2 + 4·4 bytes, 4·8 with FSDP2, 4·14 with two backwards, 4·4 + 4 with DDP."""
    for schedule, count in ((scaling.OURS, 18), (scaling.FSDP2, 32), (scaling.TWO_BACKWARDS, 56)):
        assert scaling.sent_bytes(schedule, 1000, 2, 4) == 500 * count
    assert scaling.ddp_bytes(1000, 2, 4) == 500 * 20
    assert cells(tables()["Bytes of a step in parts"], scaling.OURS.name) == ["44.0", "73.3", "132.0", "484.1"]
    assert cells(tables()["Bytes of a step in parts"], scaling.DDP)[1] == "88.0"


def test_seconds_are_those_of_the_specification():
    """1.97 s for an ordinary step, 2.56 to 2.61 s for one private backward, 3.47 s for two, at 8 B.

    Ours gathers before the forward begins: 2 bytes at 45 GB/s take 0.31 to 0.36 s.
    """
    table = tables()["Time"]
    assert cells(table, "ordinary step, FSDP2") == ["1.97 (1.00)"] * 3
    private = ["2.56 (1.30)", "2.60 (1.32)", "2.61 (1.33)"]
    assert cells(table, "one private backward in FSDP2's schedule, hidden") == private
    assert cells(table, "ours, if the gather hid, too") == private
    assert cells(table, "ours") == ["2.87 (1.46)", "2.95 (1.50)", "2.97 (1.51)"]
    assert cells(table, "two backwards, hidden") == ["3.47 (1.77)"] * 3


def test_seconds_of_ours_add_up_by_hand():
    """N = 2 sends half: 1 s for a gather and 2 s for a scatter; 3 s of computation, of which the forward is 1 s."""
    machine = scaling.Machine(tflops=0.6, tokens=100, gb_per_s=3, norms=0.5)
    params = 3e9
    assert scaling.compute_seconds(params, machine) == pytest.approx(3)
    assert scaling.our_seconds(params, 2, machine) == pytest.approx(4.5 + 1 + 1)
    assert scaling.our_seconds(params, 2, machine, gather_hidden=True) == pytest.approx(4.5 + 0 + 1)
    assert scaling.our_seconds(params, 2, machine, scatter_hidden=False) == pytest.approx(4.5 + 1 + 2)
    assert scaling.ordinary_seconds(params, 2, machine) == pytest.approx(4)  # waits for the network
    assert scaling.ordinary_seconds(params, 2, machine, hidden=False) == pytest.approx(7)
    assert scaling.fsdp2_seconds(params, 2, machine) == pytest.approx(3 + 1.5 + 1)
    assert scaling.two_backwards_seconds(params, 2, machine) == pytest.approx(7 + 0.3)


def test_parts_leave_less_to_hide_behind():
    machine = scaling.Machine(tflops=0.6, tokens=100, gb_per_s=3, norms=0.5, parts=2)
    assert scaling.our_seconds(3e9, 2, machine) == pytest.approx(4.5 + 1 + 2 * 1.5)
    assert scaling.our_seconds(3e9, 2, machine, gather_hidden=True) == pytest.approx(4.5 + 0.5 + 2 * 1.5)
    assert scaling.our_seconds(3e9, 2, machine, scatter_hidden=False) == pytest.approx(4.5 + 1 + 2 * 2)
    assert scaling.ordinary_seconds(3e9, 2, machine) == pytest.approx(8)
    assert scaling.fsdp2_seconds(3e9, 2, machine) == pytest.approx(4 + 1.5 + 3)
    assert scaling.two_backwards_seconds(3e9, 2, machine) == pytest.approx(14 + 0.3)


@pytest.mark.parametrize("hidden", [True, False])
def test_ratios_of_times_do_not_depend_on_the_number_of_parameters(hidden):
    ratios = [
        scaling.our_seconds(p, 64, MACHINE, gather_hidden=hidden, scatter_hidden=hidden)
        / scaling.ordinary_seconds(p, 64, MACHINE)
        for p in (1.5e9, 70e9)
    ]
    assert ratios[0] == pytest.approx(ratios[1])


@pytest.mark.parametrize("where", ["GPU", "all cores of a host"])
def test_seconds_of_noise_are_those_of_the_specification(where):
    """10 s if one rank draws all, 1.2 s at N = 8, 0.15 s at N = 64, at 8 B."""
    assert cells(tables()["Noise"], "8 B", where)[:3] == ["10", "1.2", "0.15"]


def test_memory_of_ours_is_weights_two_layers_sums_and_the_shards():
    for network in scaling.NETWORKS:
        p, layers = network.params, network.layers
        assert scaling.our_memory(network, 8) == pytest.approx(2 * p + 2 * 4 * p / layers + 16 * p / 8)
        assert scaling.our_memory(network, 8, parts=2) == pytest.approx(2 * p + 8 * p / layers + 20 * p / 8)
        assert scaling.fsdp2_memory(network, 8) == 12 * p / layers + 2 * p
    table = tables()["Memory"]
    assert [cells(table, "70 B", n)[2] for n in ("8", "64", "1,024")] == ["does not fit"] * 3
    assert "does not fit" not in cells(table, "8 B", "8")
    _, _, left, _, _, example = cells(table, "33 B", "64")
    assert 0 < float(left) < float(example), "as the page says, it fits only without activations"


def test_the_largest_network_leaves_nothing():
    params = scaling.largest_params(64, 79.6)
    network = scaling.Network("", params, scaling.DEPTH, 0, 0)
    assert math.isclose(scaling.our_memory(network, 64), 79.6 * GIB)


LAYERS, WIDTH = 6, 16
SQUARE = WIDTH * WIDTH


class Counted(TorchDispatchMode):
    """Counts bytes: those that collectives send over a ring, and the most that are there at a time in large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = {}
        self.peak, self._now, self._known = 0, 0, set()
        self.watches = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            whole = max(t.nbytes for t in tensors)
            self.sent[name] = self.sent.get(name, 0) + whole * (dist.get_world_size() - 1) / dist.get_world_size()
        for leaf in tree_leaves(out) if self.watches else []:
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        return out

    def _watch(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size >= 4 * SQUARE and key not in self._known:
            self._known.add(key)
            self._now += size
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def counted_step(rank: int, parts: int, how: str) -> tuple[float, float, int]:
    """Returns the bytes of gathers and of scatters that one step sends, and the most that a layer's sums take."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float32) for _ in range(LAYERS)])
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in [*model, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    x = torch.randn(8, WIDTH, dtype=torch.float32)
    count = Counted()
    collect = base.Ranked.collect

    def watched(self: Any, *args: Any) -> None:
        count.watches = True
        collect(self, *args)
        count.watches = False

    with mock.patch.object(base, "DEFERRED_BYTES", 0), mock.patch.object(base.Ranked, "collect", watched), count:
        training = tp.PrivateTraining(
            model,
            torch.optim.Adam(model.parameters()),
            TensorDataset(x),
            expected_batch_size=8,
            num_steps=1,
            clipping=tp.Flat(1.0),
            noise_multiplier=1.0,
            delta=1e-5,
            performance=tp.Performance(microbatch_size=4 // parts),
            test_seed=1,
        )
        for (batch,) in training:
            training.step(model(batch).square().mean(1).float())
    return count.sent["c10d::_allgather_base_"], count.sent["c10d::_reduce_scatter_base_"], count.peak


@pytest.mark.thorough
@pytest.mark.parametrize("parts", [1, 2])
def test_counted_bytes_and_sums_of_a_sharded_step_are_those_of_the_model(ranks2, parts):
    network = scaling.Network("", LAYERS * SQUARE, LAYERS, 0, 0)
    for gathered, scattered, peak in ranks2.run(counted_step, parts, "layers"):
        assert gathered + scattered == scaling.sent_bytes(scaling.OURS, network.params, 2, parts)
        assert scattered == parts * 4 * network.params / 2
        held = scaling.our_memory(network, 2) - scaling.state_bytes(network.params, 2) - 2 * network.params
        assert held <= peak <= held + 4 * SQUARE  # gloo may keep the last bucket a little longer than it needs it


@pytest.mark.thorough
@pytest.mark.parametrize("parts", [1, 2])
def test_counted_bytes_of_a_step_with_ddp_are_those_of_the_model(ranks2, parts):
    for gathered, scattered, _ in ranks2.run(counted_step, parts, "ddp"):
        assert gathered + scattered == scaling.ddp_bytes(LAYERS * SQUARE, 2, parts)


def test_widths_of_the_networks_give_their_parameters():
    """Products of an input's and an output's width, summed over a layer of Llama 3 with 8 B parameters."""
    d, kv, ff = 4096, 1024, 14336
    llama = scaling.NETWORKS[1]
    assert llama.inputs == 32 * (d + d + d + ff) + d
    assert llama.outputs == 32 * (d + 2 * kv + d + 2 * ff + d) + 128256
    assert 32 * (2 * d * d + 2 * d * kv + 3 * d * ff) + 2 * 128256 * d == pytest.approx(llama.params, rel=0.01)


@pytest.mark.parametrize("title", scaling.TABLES)
def test_the_page_shows_what_the_script_prints(title):
    assert f"\n{tables()[title]}\n" in PAGE.read_text(), "run python benchmarks/scaling.py docs/scaling.svg"


def test_the_picture_is_the_one_that_the_script_draws(tmp_path):
    scaling.draw(MACHINE, tmp_path / "scaling.svg")
    drawn, shown = (path.read_text() for path in (tmp_path / "scaling.svg", ROOT / "docs/scaling.svg"))
    assert "A model, not measured" in shown
    assert len(places(shown)) > 300
    assert places(drawn) == pytest.approx(places(shown), abs=1), "run python benchmarks/scaling.py docs/scaling.svg"


def places(svg: str) -> list[float]:
    """The coordinates of all lines."""
    lines = re.findall(r'<path d="(M[^"]*)" clip-path', svg)
    return [float(number) for line in lines for number in re.findall(r"-?\d+(?:\.\d+)?", line)]


def test_says_that_nothing_was_measured(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--tokens", "4096"])
    scaling.main()
    printed = capsys.readouterr().out
    assert printed.startswith("A MODEL, NOT MEASURED: no GPU was used.")
    assert "| `--tokens` | 4096 |" in printed
    assert "Nothing on it was measured on a GPU" in PAGE.read_text()


@pytest.mark.parametrize(("option", "value"), [("--gb-per-s", "0"), ("--tflops", "-1"), ("--parts", "0")])
def test_refuses_constants_that_make_no_sense(option, value, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling.py", option, value])
    with pytest.raises(SystemExit):
        scaling.main()
    assert "must be positive" in capsys.readouterr().err

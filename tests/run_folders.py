# SPDX-License-Identifier: Apache-2.0
"""Writes small run folders for tests of what reads them, and collects the links of a page."""

from html import escape
from html.parser import HTMLParser

from torch_privacy import privacy
from torch_privacy.privacy.summary import equal_releases, releases_from_json, summarize
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Metrics

EVENTS = 1.1, 0.01, 100
ROWS = [
    Metrics("private", 1.0, 50, 0.6, 0.7, 0.71, 0.9, 1.0),
    Metrics("private", 2.0, 100, 0.5, 0.8, 0.81, 1.2, 1.3),
    Metrics("non-private", 1.0, 50, 0.4, 0.85, 0.84),
    Metrics("non-private", 2.0, 100, 0.3, 0.9, 0.86),
]

STATEMENT = {
    **{name: "" for name in ("sampler", "unit", "noise")},
    **{name: 1 for name in ("num_examples", "expected_batch_size", "sampling_probability", "num_steps_planned")},
    "format": 2,
    "private": True,
    "neighboring_relation": "add_or_remove_one",
    "clipping": {"rule": "Flat"},
    "sensitivity": 1.0,
    "noise_multiplier": 1.1,
    "target_epsilon": None,
    "delta": 1e-5,
    "epsilon": None,
    "releases": [],
    "treated_as_public": [],
    "not_covered": ["what <nobody> promised"],
    "versions": dict.fromkeys(("torch_privacy", "torch", "numpy", "python"), "0"),
}


class Links(HTMLParser):
    """Collects every address that a browser would fetch or follow, and the text."""

    def __init__(self):
        super().__init__()
        self.addresses, self.tags, self.text = [], set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]

    def handle_data(self, data):
        self.text += data


def write_run(folder, **statement):
    results = {
        "experiment": "<tiny>",
        "num_examples": 1000,
        "num_test_examples": 100,
        "score": {"name": "accuracy", "percent": True},
        "test_score": 0.81,
        "baseline_test_score": 0.86,
        "privacy": summarize(equal_releases(*EVENTS), 1e-5).as_json(),
    }
    folder.write_json(folder.results, results)
    folder.write_json(folder.privacy, {**STATEMENT, **statement})
    folder.write_json(folder.settings, {"experiment": "<tiny>", "target_epsilon": None, "baseline": True})
    folder.write_metrics(ROWS)
    return folder


OWN_ROWS = [
    Metrics("private", 0.5, 50, 0.6, None, None, 0.9, 1.0),
    Metrics("private", 1.0, 100, 0.5, None, None, 1.2, 1.3),
]
DATA = {"method": "m", "num_examples": 1000, "num_items": 10, "key_id": "ab" * 8, "fingerprint": "cd" * 32}


def write_ledger(path, releases):
    ledger = privacy.Ledger(path)
    for event, count in releases:
        for _ in range(count):
            ledger.record(event, len(ledger), "")
    ledger.close()


def write_own(path, rows=OWN_ROWS, statement=None, settings=None, **results):
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    releases = [{"event": privacy.event_to_dict(event), "count": count} for event, count in equal_releases(*EVENTS)]
    stated = {**STATEMENT, "releases": releases, "data": DATA, **(statement or {})}
    folder.write_json(folder.privacy, stated)
    fixed = {"model": "Net<b>", "num_trained_parameters": 5, "optimizer": "SGD", "dataset": "D", "fixed": {}}
    folder.write_json(folder.settings, fixed | (settings or {}))
    folder.ledger.unlink(missing_ok=True)
    write_ledger(folder.ledger, releases_from_json(stated))
    folder.write_metrics(rows)
    folder.write_model(b"weights")
    content = {
        "model": "Net<b>",
        "num_examples": 1000,
        "num_steps": 100,
        "num_steps_made": 100,
        "scores": {},
        "baseline_scores": {},
        "diverged": False,
        "privacy": summarize(equal_releases(*EVENTS), 1e-5).as_json(),
    }
    files = (folder.settings, folder.ledger, folder.metrics, folder.model, folder.privacy)
    folder.write_checked(folder.results, content | results, *files)
    return folder


def drawn_quickly(figure):
    """Returns the texts of a figure in an empty drawing; to draw all figures of a page takes a second."""
    texts = [text for axes in figure.axes for text in (axes.get_title(loc="left"), *(t.get_text() for t in axes.texts))]
    return f"<svg >{escape(' '.join(texts))}</svg>"

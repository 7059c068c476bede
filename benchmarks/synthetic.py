# SPDX-License-Identifier: Apache-2.0
"""Judges generators of synthetic rows on tables that are treated as public: Adult, digits and a made one.

``python benchmarks/synthetic.py --log FILE.jsonl`` adds a line for each table, epsilon, seed and generator that the
file lacks; a line has the distances, the test scores and the seconds. There is no schema: all is learnt privately. The
audit is made for seed 0. ``--show`` prints the table of docs/synthetic.md. One thread. What was made of Adult is in
docs/results/synthetic.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pandas as pd
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from tables_tuning import adult, digits, made

from torch_privacy import tables
from torch_privacy.tables.synthesis import GeneratorRun, SynthesisSettings
from torch_privacy.tables.synthesis.judge import audit, judge

TABLES = {"Adult": (adult, "income"), "made": (made, "target"), "digits": (digits, "digit")}
CANARIES = 1000
KINDS = "synthetic", "real"  # rows that gradient boosting learns from
KEYS = "table", "epsilon", "seed", "generator"
SCORES = "synthetic rows", "real rows, with the same epsilon", "real rows, without privacy"


def boosted(train: pd.DataFrame, test: pd.DataFrame, target: str) -> tuple[float, float]:
    """Returns test accuracy and area under the ROC curve of gradient boosting; texts are numbered, numbers stay."""
    test = test[test[target].notna()]
    train = train[train[target].astype(str).isin(test[target].astype(str))]  # without a class of rare values
    parts = []
    for name in [column for column in train if column != target]:
        both = pd.concat([train[name], test[name]]).astype(str)
        numbers = pd.to_numeric(both, errors="coerce")
        parts.append(numbers if numbers.notna().mean() > 0.5 else pd.Series(pd.factorize(both)[0], both.index))
    features = np.stack([part.to_numpy(float) for part in parts], 1)
    model = HistGradientBoostingClassifier(random_state=0).fit(features[: len(train)], train[target].astype(str))
    found, labels = model.predict_proba(features[len(train) :]), test[target].astype(str)
    accuracy = (model.classes_[found.argmax(1)] == labels).mean()
    scores = found[:, 1] if len(model.classes_) == 2 else found
    return float(accuracy), float(roc_auc_score(labels, scores, multi_class="ovr", labels=model.classes_))


def one(
    path: Path, name: str, target: str, epsilon: float, seed: int, generator: str, audits: bool
) -> dict[str, object]:
    """Makes one generator; returns what is known of it."""
    frame = tables.read_table(path)
    train_rows, test_rows = tables.split(len(frame), seed=seed, share=0.1)
    train, test = frame.iloc[train_rows], frame.iloc[test_rows]
    schema = tables.Schema.template(path, target)
    settings = SynthesisSettings(
        generator=generator, epsilon=epsilon, delta=tables.defaults(len(train), epsilon).delta, seed=seed
    )
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = GeneratorRun(Path(folder) / "run", train, schema, settings)
        for _ in run.steps():
            pass
        synthesizer = run.synthesizer()
        seconds = time.perf_counter() - start
        found = judge(synthesizer, train, test, private=run if generator == "aim" else None, seed=seed)
        rows = synthesizer.draw(len(train), seed)
        used = [column for column in train if column in rows]
        synthetic, real = boosted(rows, test[used], target), boosted(train, test, target)
        line: dict[str, object] = {
            **dict(zip(KEYS, (name, epsilon, seed, generator), strict=True)),
            "certified": run.profile().epsilon_high(settings.delta),
            "seconds": round(seconds, 1),
            "one_way": float(np.mean(list(found.one_way.values()))),
            "two_way": float(np.mean(list(found.two_way.values()))),
            "largest_two_way": max(found.two_way.values()),
            "sampling": found.sampling,
            "num_lost": sum(map(len, found.lost.values())),
            "scores": dict(found.scores),
            "boosted": {"synthetic": synthetic[0], "real": real[0]},
            "area": {"synthetic": synthetic[1], "real": real[1]},
            "columns": len(used),
        }
        if seed == 0 and audits:
            line["audit"] = {
                key: value
                for key, value in audit(run, CANARIES).as_json().items()
                if isinstance(value, (int, float, bool))
            }
        run.finish()
    return line


def shown(lines: Sequence[dict]) -> list[str]:
    """Returns the table of docs/synthetic.md: means and their standard errors."""
    head = (
        "table",
        "epsilon",
        "generator",
        "seeds",
        "distance, columns",
        "distance, pairs",
        *SCORES,
        "boosted",
        "boosted, AUC",
        "seconds",
    )
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        groups.setdefault((line["table"], line["epsilon"], line["generator"]), []).append(line)
    for (name, epsilon, generator), group in sorted(groups.items()):
        scores = [[line["scores"][key] for line in group if key in line["scores"]] for key in SCORES]
        boosted = [_percent([line["boosted"][key] for line in group], 1) for key in KINDS]
        areas = [_of_ones([line["area"][key] for line in group]) for key in KINDS if all("area" in x for x in group)]
        seconds = [line["seconds"] for line in group]
        cells = [
            f"{name} | {epsilon:g} | {generator} | {len(group)}",
            *(_percent([line[key] for line in group], 2) for key in ("one_way", "two_way")),
            *(_percent(found, 1) if found else "" for found in scores),
            " / ".join(boosted),
            " / ".join(areas),
            f"{min(seconds):.0f} to {max(seconds):.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _percent(shares: Sequence[float], digits: int) -> str:
    error = 100 * stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else float("nan")
    return f"{100 * mean(shares):.{digits}f} ± {error:.{digits}f} %"


def _of_ones(numbers: Sequence[float]) -> str:
    error = stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else float("nan")
    return f"{mean(numbers):.3f} ± {error:.3f}"


def main() -> None:
    """Makes what is missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0, 8.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--generators", nargs="+", default=["aim", "mst", "network"])
    parser.add_argument("--no-audit", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in given.log.read_text().splitlines()] if given.log.exists() else []
    if given.show:
        print("\n".join(shown(lines)))
        return
    done = {tuple(line[key] for key in KEYS) for line in lines}
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for seed in range(given.seeds):
            for name in given.tables:
                make, target = TABLES[name]
                if name not in paths:
                    paths[name] = Path(folder) / f"{name}.csv"
                    make().to_csv(paths[name], index=False)
                for epsilon in given.epsilons:
                    for generator in given.generators:
                        if (name, epsilon, seed, generator) in done:
                            continue
                        line = one(paths[name], name, target, epsilon, seed, generator, not given.no_audit)
                        with given.log.open("a") as file:
                            file.write(json.dumps(line) + "\n")
                        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

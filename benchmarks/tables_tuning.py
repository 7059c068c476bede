# SPDX-License-Identifier: Apache-2.0
"""Trains on tables with the defaults of ``torch_privacy.tables``, beside two models without privacy.

``python benchmarks/tables_tuning.py`` prints, for each table, the test score of logistic (or ridge) regression and
gradient boosting without privacy, then of the private perceptron at epsilon 1, 2 and 8, with everything learnt
privately: no schema is given. Some seconds each, on one core.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from tables import trained

from torch_privacy import tables
from torch_privacy.data import load_adult
from torch_privacy.data.adult_csv import STARTS

EPSILONS = (1.0, 2.0, 8.0)
ADULT = {  # of each attribute, the first name of its categories; of a binned number, the middle of each bin
    "age": (21, 29, 36, 45, 60),
    "workclass": None,
    "weight": (70_000, 130_000, 178_000, 225_000, 350_000),
    "education": None,
    "years": (6, 9, 10, 11, 14),
    "marital": None,
    "occupation": None,
    "relationship": None,
    "race": None,
    "sex": None,
    "gain": (0, 5000),
    "loss": (0, 1900),
    "hours": (25, 37, 40, 44, 55),
    "country": None,
}


def adult() -> pd.DataFrame:
    """Returns Adult with its 14 attributes, binned as in LIBSVM's a9a; ``?`` where one is unknown."""
    data = load_adult()
    features, labels = (torch.cat([part.tensors[i] for part in (data.train, data.test)]).numpy() for i in (0, 1))
    frame = {}
    for (name, middles), start, end in zip(ADULT.items(), STARTS[:-1], STARTS[1:], strict=True):
        part = features[:, start:end]
        texts = np.array([f"{name} {i}" for i in range(end - start)] if middles is None else list(map(str, middles)))
        frame[name] = np.where(part.any(1), texts[part.argmax(1)], "?")
    return pd.DataFrame({**frame, "income": np.where(labels, ">50K", "<=50K")})


def digits() -> pd.DataFrame:
    """Returns scikit-learn's digits: 1,797 images of 64 pixels."""
    images, labels = load_digits(return_X_y=True)
    return pd.DataFrame({**{f"pixel {i}": images[:, i].astype(int) for i in range(64)}, "digit": labels})


def digits_column(name: str) -> tables.Column:
    """Returns what is public of a column of the digits: pixels are 0 to 16, and digits 0 to 9."""
    if name == "digit":
        return tables.Column(name, "category", categories=tuple(map(str, range(10))))
    return tables.Column(name, "number", (0, 16))


def made(n: int = 20_000, regression: bool = False) -> pd.DataFrame:
    """Returns a table with numbers, dates, categories (one with 2,000 values) and 30 % of its cells missing."""
    rng = np.random.default_rng(0)
    age, income, days = rng.normal(45, 15, n), rng.lognormal(10, 1, n), rng.integers(0, 3000, n)
    city = rng.choice(40, n, p=(p := 0.9 ** np.arange(40)) / p.sum())
    effect = rng.normal(0, 1, 40)[city]
    score = 0.06 * (age - 45) + 0.8 * (np.log(income) - 10) + effect + 0.5 * np.sin(days / 365 * 2 * np.pi)
    score += np.where(age > 60, -1.5, 0) + rng.normal(0, 0.5, n)
    frame = pd.DataFrame(
        {
            "age": age.round().astype(int).astype(str),
            "income": [f"${value:,.2f}" for value in income],
            "joined": (pd.Timestamp("2014-01-01") + pd.to_timedelta(days, unit="D")).strftime("%d.%m.%Y"),
            "city": [f"city {i}" for i in city],
            "street": rng.choice([f"street {i}" for i in range(2000)], n),
            "id": [f"{i:08x}-x" for i in rng.integers(0, 2**32, n)],
        }
    )
    frame = frame.where(rng.random(frame.shape) > 0.3, "NA")
    frame["target"] = score.round(3) if regression else np.select([score < -1, score < 1], ["low", "middle"], "high")
    return frame


TABLES = {  # name -> (table, target, what its owner declares public of a column; None to learn all of it)
    "Adult": (adult, "income", None),
    "digits": (digits, "digit", digits_column),
    "made, classes": (made, "target", None),
    "made, a number": (lambda: made(regression=True), "target", None),
}


def without_privacy(frame: pd.DataFrame, target: str, train, test) -> dict[str, float]:
    """Returns test scores (accuracy or R²) of two models of scikit-learn, on all that the data show."""
    is_number = frame[target].nunique() > 100
    features = frame.drop(columns=target).replace({"?": None, "NA": None})
    read = {}
    for name in features:
        text = (
            features[name].astype(object).str.replace("[$,]", "", regex=True)
            if features[name].dtype != int
            else features[name]
        )
        values = pd.to_numeric(text, errors="coerce")
        if values.notna().sum() < 0.5 * features[name].notna().sum():
            days = pd.to_datetime(features[name], format="%d.%m.%Y", errors="coerce")
            values = (days - pd.Timestamp(0)).dt.days if days.notna().mean() > 0.3 else None
        read[name] = features[name].fillna("?") if values is None else values
    x, y = pd.DataFrame(read), frame[target].astype(float if is_number else str)
    few = [name for name in x if x[name].dtype.kind not in "if" and x[name].nunique() < 5000]
    numeric = [name for name in x if x[name].dtype.kind in "if"]
    encode = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore", min_frequency=10), few),
        (make_pipeline(SimpleImputer(add_indicator=True), StandardScaler()), numeric),
    )
    ordinal = x[numeric + [name for name in few if x[name].nunique() < 250]].copy()
    for name in set(ordinal) - set(numeric):
        ordinal[name] = ordinal[name].astype("category")
    boosting = HistGradientBoostingRegressor if is_number else HistGradientBoostingClassifier
    linear = make_pipeline(encode, Ridge() if is_number else LogisticRegression(max_iter=300))
    trees = boosting(categorical_features="from_dtype", random_state=0)
    return {
        "linear model": linear.fit(x.iloc[train], y.iloc[train]).score(x.iloc[test], y.iloc[test]),
        "gradient boosting": trees.fit(ordinal.iloc[train], y.iloc[train]).score(ordinal.iloc[test], y.iloc[test]),
    }


def private(frame: pd.DataFrame, target: str, declared, train, test, epsilon: float) -> tuple[float, str]:
    """Returns the test score (accuracy or R²) of a private training, and what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        frame.to_csv(path, index=False)
        table, schema = tables.read_table(path), tables.Schema.template(path, target)
    choice, releases = tables.defaults(len(train), epsilon), ()
    if declared is None:
        share = choice.learning_share
        learnt = tables.learn(table.iloc[train], schema, epsilon=share * epsilon, delta=share * choice.delta)
        schema, releases = learnt.schema, learnt.releases
    else:
        schema = tables.Schema(tuple(map(declared, table)), target, "classification")
    choice = tables.defaults(len(train), epsilon, classes=len(schema.classes) or math.inf)
    encoder = tables.Encoder(schema)
    data, held_out = encoder.encode(table.iloc[train]), encoder.encode(table.iloc[test])
    outputs, training = trained(data, held_out, schema, choice, epsilon, releases)
    known = held_out.has_target
    if schema.task == "regression":
        predicted = encoder.predictions(outputs)["prediction"].to_numpy()
        truth = table[target].iloc[test].astype(float).to_numpy()
        score = 1 - ((predicted - truth) ** 2).mean() / truth.var()
    else:
        score = (outputs.argmax(1) == held_out.targets)[known].float().mean().item() * known.float().mean().item()
    return score, f"{training.settings.noise_multiplier:.2f} noise, {choice.num_steps} steps"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names or TABLES:
        make, target, declared = TABLES[name]
        frame = make()
        train, test = tables.split(len(frame))
        print(f"{name}: {len(train)} training rows, {frame.shape[1] - 1} features, score of {len(test)} test rows")
        start = time.perf_counter()
        for model, score in without_privacy(frame, target, train, test).items():
            print(f"  {model:22} {score:6.3f}   without privacy")
        for epsilon in EPSILONS:
            start = time.perf_counter()
            score, how = private(frame, target, declared, train, test, epsilon)
            print(f"  {'epsilon ' + format(epsilon, 'g'):22} {score:6.3f}   {time.perf_counter() - start:.0f} s, {how}")


if __name__ == "__main__":
    main(sys.argv[1:])

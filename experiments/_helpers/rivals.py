# SPDX-License-Identifier: Apache-2.0
"""Other methods that give predictive densities or class probabilities for rows of a table.

Each is fitted on one core by its package's default settings where it has such, and the settings of
the others are for all tables alike. A Gaussian process, NGBoost and bde learn from some rows of a
large table, drawn at random. A tenth of the training rows, ten at least, is held out where a method
needs it: for a standard deviation, a conformal interval, or the end of a training.
"""

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

import pyro_bbb as bbb

Array: TypeAlias = NDArray[Any]
Interval: TypeAlias = Callable[[float], tuple[Any, Any]]
LEVELS = (0.9, 0.95)  # of intervals


class Split(NamedTuple):
    """Rows to learn from and rows to predict: inputs ``[n, d]``, targets or classes ``[n]``."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


# --- methods of regression: a mixture of Normals, and intervals if they are not the mixture's ---


class Answer(NamedTuple):
    """Predictive densities ``[n, 1]`` of the test rows, and a method's own intervals ``[n]``."""

    prediction: Any
    interval: Interval | None = None


def mixture(loc: Any, scale: Any) -> bbb.RegressionPrediction:
    """Return the equally weighted mixture of Normals ``[n]`` or ``[draws, n]``."""
    loc, scale = np.broadcast_arrays(np.atleast_2d(loc), np.atleast_2d(scale))
    tensors = (torch.tensor(values, dtype=torch.float64).unsqueeze(-1) for values in (loc, scale))
    return bbb.RegressionPrediction(torch.distributions.Normal(*tensors, validate_args=False))


def fit_normal(model: Any, split: Split) -> Answer:
    """Fit a method that predicts a mean and a standard deviation."""
    model.fit(split.x, split.y)
    return Answer(mixture(*model.predict(split.x_test, return_std=True)))


def fit_ridge(split: Split, seed: int) -> Answer:
    """Linear, with learned noise and shrinkage."""
    return fit_normal(make_pipeline(StandardScaler(), BayesianRidge()), split)


def fit_process(split: Split, seed: int, rows: int = 1000) -> Answer:
    """Return a Gaussian process by its evidence, on some rows of a large table."""
    lengths = RBF(np.ones(split.x.shape[1]), (1e-2, 1e4))
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * lengths + WhiteKernel(0.1, (1e-6, 10.0))
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    return fit_normal(make_pipeline(StandardScaler(), process), some_rows(split, rows, seed))


def some_rows(split: Split, rows: int, seed: int) -> Split:
    """Return the split with so many random training rows at most."""
    order = np.random.default_rng(seed).permutation(len(split.y))[:rows]
    return split._replace(x=split.x[order], y=split.y[order])


def held_out(split: Split, seed: int) -> tuple[Array, Array]:
    """Return the rows to fit and a tenth of the training rows, at least ten, to calibrate by."""
    order = np.random.default_rng(seed).permutation(len(split.y))
    number = max(10, len(order) // 10)
    return order[number:], order[:number]


def residual_normal(model: Any, split: Split, seed: int) -> Any:
    """Fit a model of the mean to all rows; the sd is the RMSE on a tenth held out from another."""
    fitted, held = held_out(split, seed)
    residuals = split.y[held] - model.fit(split.x[fitted], split.y[fitted]).predict(split.x[held])
    mean = model.fit(split.x, split.y).predict(split.x_test)
    return mixture(mean, np.sqrt(np.mean(residuals**2)))


def fit_mlp(split: Split, seed: int) -> Answer:
    """Return the plain network, standard deviation by a held-out tenth."""
    network = MLPRegressor(max_iter=1000, random_state=seed)
    pipeline = make_pipeline(StandardScaler(), network)
    scaled = TransformedTargetRegressor(pipeline, transformer=StandardScaler())
    return Answer(residual_normal(scaled, split, seed))


def fit_forest(split: Split, seed: int) -> Answer:
    """Return a forest as it comes; its sd and its intervals are those of out-of-bag residuals."""
    forest = RandomForestRegressor(oob_score=True, random_state=seed).fit(split.x, split.y)
    residuals = split.y - forest.oob_prediction_
    mean = forest.predict(split.x_test)

    def interval(level: float) -> tuple[Any, Any]:
        low, high = np.quantile(residuals, [0.5 * (1 - level), 0.5 * (1 + level)])
        return mean + low, mean + high

    return Answer(mixture(mean, np.sqrt(np.mean(residuals**2))), interval)


def fit_boosting(split: Split, seed: int) -> Answer:
    """Boosted trees: sd by a held-out tenth, intervals by models of four quantiles."""
    options = {"random_state": seed}
    normal = residual_normal(HistGradientBoostingRegressor(**options), split, seed)
    ends = {
        level: tuple(
            HistGradientBoostingRegressor(
                loss="quantile", quantile=0.5 * (1 + k * level), **options
            )
            .fit(split.x, split.y)
            .predict(split.x_test)
            for k in (-1, 1)
        )
        for level in LEVELS
    }
    return Answer(normal, ends.__getitem__)


def fit_ngboost(split: Split, seed: int, rows: int = 10_000) -> Answer:
    """Natural gradient boosting of a Normal, as it comes (Duan et al. 2020)."""
    from ngboost import NGBRegressor

    split = some_rows(split, rows, seed)
    model = NGBRegressor(random_state=seed, verbose=False).fit(split.x, split.y)
    normal = model.pred_dist(split.x_test)
    return Answer(mixture(normal.loc, normal.scale))


def fit_catboost(split: Split, seed: int, **options: Any) -> Answer:
    """Return CatBoost's mean and variance by input, as it comes."""
    from catboost import CatBoostRegressor

    options |= {"loss_function": "RMSEWithUncertainty", "random_seed": seed}
    model = CatBoostRegressor(thread_count=1, verbose=0, allow_writing_files=False, **options)
    mean, variance = model.fit(split.x, split.y).predict(split.x_test).T
    return Answer(mixture(mean, np.sqrt(variance)))


def fit_xgboost(split: Split, seed: int) -> Answer:
    """XGBoost as it comes on nine tenths, sd and split-conformal intervals by the last tenth."""
    from xgboost import XGBRegressor

    fitted, held = held_out(split, seed)
    model = XGBRegressor(n_jobs=1, random_state=seed).fit(split.x[fitted], split.y[fitted])
    sizes = np.sort(np.abs(split.y[held] - model.predict(split.x[held])))
    mean = model.predict(split.x_test).astype(float)

    def interval(level: float) -> tuple[Any, Any]:
        rank = min(math.ceil((len(sizes) + 1) * level), len(sizes))  # the largest where too few
        return mean - sizes[rank - 1], mean + sizes[rank - 1]

    return Answer(mixture(mean, np.sqrt(np.mean(sizes**2))), interval)


def fit_bde(split: Split, seed: int, rows: int = 2000) -> Answer:
    """Return chains by MILE (Sommer et al. 2025), short ones: compilation takes half a minute."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("XLA_FLAGS", flags)  # read at the first operation
    from bde import BdeRegressor

    x, y, x_test, of_y = standardised(some_rows(split, rows, seed))
    model = BdeRegressor(
        n_members=4,
        hidden_layers=[16, 16],
        seed=seed,
        epochs=500,
        patience=20,
        lr=5e-3,
        warmup_steps=2000,
        n_samples=1000,
        n_thinning=20,
    ).fit(x.numpy(), y.numpy())
    raw = np.asarray(model.predict(x_test.numpy(), raw=True), dtype=float)
    loc, raw_scale = raw.reshape(-1, *raw.shape[2:]).transpose(2, 0, 1)  # each [draws, n]
    prediction = mixture(loc, np.logaddexp(0, raw_scale) + 1e-6)
    return Answer(prediction.rescaled(of_y.mean, of_y.scale))


# --- networks in plain torch ---


def standardised(split: Split) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return inputs, targets and test inputs in single precision, and the targets' scaling."""
    inputs, of_x = bbb.data.standardize(torch.from_numpy(split.x))
    targets, of_y = bbb.data.standardize(torch.from_numpy(split.y)[:, None])
    x_test = of_x(torch.from_numpy(split.x_test))
    return inputs.float(), targets[:, 0].float(), x_test.float(), of_y


class Members(nn.Module):
    """Networks of one shape side by side: ``[n, inputs]`` to ``[members, n, outputs]``."""

    def __init__(self, sizes: list[int], members: int, dropout: float = 0.0) -> None:
        super().__init__()
        pairs = list(zip(sizes, sizes[1:], strict=False))
        self.members, self.dropout = members, dropout
        self.weights = nn.ParameterList(
            torch.randn(members, n, m) * math.sqrt((2 if i else 1) / n)
            for i, (n, m) in enumerate(pairs)
        )
        self.biases = nn.ParameterList(torch.zeros(members, 1, m) for _, m in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all members."""
        h = x.expand(self.members, *x.shape)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if i:
                h = F.dropout(h.relu(), self.dropout, self.training)
            h = torch.baddbmm(bias, h, weight)
        return h


def gaussian_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return each member's mean NLL, up to a constant, of a Normal by two outputs, added up."""
    loc, raw = outputs.unbind(-1)
    scale = F.softplus(raw) + 1e-3
    return (scale.log() + 0.5 * ((y - loc) / scale) ** 2).mean(-1).sum()


def squared_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the members' mean squared error, added up."""
    return (outputs[..., 0] - y).square().mean(-1).sum()


def class_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the members' cross-entropy, added up."""
    return F.cross_entropy(outputs.flatten(0, 1), y.repeat(len(outputs))) * len(outputs)


def train(
    network: Callable[[Tensor], Tensor],
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    data: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor],
    *,
    lr: float,
    steps: int,
    patience: int = 20,
) -> None:
    """AdamW; the parameters are those of the lowest loss on the held-out tenth.

    That is computed after each epoch, of 25 steps at least; training ends after ``patience``
    without a lower one.
    """
    x, y = data
    batch = min(256, max(32, len(x) // 16))
    every, best, waited = max(25, len(x) // batch), math.inf, 0
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=1e-4, fused=True)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    order = torch.randperm(len(x))
    for step in range(1, steps + 1):
        if len(order) < batch:
            order = torch.randperm(len(x))
        rows, order = order[:batch], order[batch:]
        optimizer.zero_grad()
        loss(network(x[rows]), y[rows]).backward()
        optimizer.step()
        if step % every == 0:
            module.eval()
            with torch.no_grad():
                value = float(loss(network(held[0]), held[1]))
            module.train()
            waited += 1
            if value < best:
                best, waited = value, 0
                state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            if waited == patience:
                break
    module.load_state_dict(state)


def parts(split: Split, x: Tensor, y: Tensor, seed: int) -> Any:
    """Return training and held-out data, and set the seed."""
    torch.manual_seed(seed)
    fitted, held = map(torch.from_numpy, held_out(split, seed))
    return (x[fitted], y[fitted]), (x[held], y[held])


def fit_members(
    split: Split, seed: int, members: int = 5, dropout: float = 0.0, steps: int = 8000
) -> Answer:
    """Return a deep ensemble with noise by input (Lakshminarayanan et al. 2017), or MC dropout.

    With dropout (Gal and Ghahramani 2016) it is one network, and 100 masks predict.
    """
    x, y, x_test, of_y = standardised(split)
    data, held = parts(split, x, y, seed)
    network = Members([x.shape[1], 64, 64, 2], members, dropout)
    train(network, network, gaussian_loss, data, held, lr=3e-3, steps=steps)
    network.train(dropout > 0)
    with torch.no_grad():
        outputs = torch.cat([network(x_test) for _ in range(100 if dropout else 1)])
    loc, raw = outputs.double().unbind(-1)  # [draws, n]
    prediction = mixture(loc.numpy(), (F.softplus(raw) + 1e-3).numpy())
    return Answer(prediction.rescaled(of_y.mean, of_y.scale))


def tabm_network(x: Tensor, outputs: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return TabM with piecewise linear embeddings (Gorishniy et al. 2025), 32 narrow members."""
    from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins
    from tabm import TabM

    varies = (x != x[0]).any(0)
    bins = compute_bins(x[:, varies], n_bins=min(48, len(x) // 4))
    embeddings = PiecewiseLinearEmbeddings(bins, 8, activation=False, version="B")
    sizes = {"k": 32, "d_block": 64, "n_blocks": 2}
    network = TabM.make(
        n_num_features=int(varies.sum()), d_out=outputs, num_embeddings=embeddings, **sizes
    )
    return network, lambda rows: network(rows[:, varies]).transpose(0, 1)  # [members, n, outputs]


def fit_tabm(split: Split, seed: int, steps: int = 1500) -> Answer:
    """Return TabM, the sd by the tenth that also ends its training."""
    x, y, x_test, of_y = standardised(split)
    data, held = parts(split, x, y, seed)
    module, network = tabm_network(data[0], 1)
    train(network, module, squared_loss, data, held, lr=2e-3, steps=steps)
    module.eval()
    with torch.no_grad():
        mean, residuals = network(x_test).mean(0), network(held[0]).mean(0)[:, 0] - held[1]
    std = residuals.square().mean().sqrt()
    return Answer(mixture(mean[:, 0].numpy(), float(std)).rescaled(of_y.mean, of_y.scale))


# --- methods of classification: probabilities of the test rows ---


def fit_classifier(make: Callable[[int], Any], split: Split, seed: int) -> Array:
    """Fit a classifier that ``make`` returns for a seed."""
    return np.asarray(make(seed).fit(split.x, split.y).predict_proba(split.x_test))


def fit_process_of_classes(split: Split, seed: int, rows: int = 500) -> Array:
    """Return a Gaussian process by Laplace's approximation, on some rows of a large table."""
    kernel = 1.0 * RBF(math.sqrt(split.x.shape[1]), (1e-1, 1e3))
    process = GaussianProcessClassifier(kernel, random_state=seed)
    split = some_rows(split, rows, seed)
    return fit_classifier(lambda _: make_pipeline(StandardScaler(), process), split, seed)


def catboost_classifier(seed: int, **options: Any) -> Any:
    """Return CatBoost as it comes."""
    from catboost import CatBoostClassifier

    fixed = {"thread_count": 1, "verbose": 0, "allow_writing_files": False}
    return CatBoostClassifier(random_seed=seed, **fixed | options)


def xgboost_classifier(seed: int) -> Any:
    """Return XGBoost as it comes."""
    from xgboost import XGBClassifier

    return XGBClassifier(n_jobs=1, random_state=seed)


def fit_network_of_classes(split: Split, seed: int, tabm: bool, steps: int = 1500) -> Array:
    """Return TabM, or a deep ensemble of five."""
    x, _, x_test, _ = standardised(split)
    data, held = parts(split, x, torch.from_numpy(split.y), seed)
    outputs = int(split.y.max()) + 1
    members = Members([x.shape[1], 64, 64, outputs], 5)
    module, network = tabm_network(data[0], outputs) if tabm else (members, members)
    train(network, module, class_loss, data, held, lr=2e-3, steps=steps)
    module.eval()
    with torch.no_grad():
        return network(x_test).double().softmax(-1).mean(0).numpy()


class Method(NamedTuple):
    """A method, what it needs installed, and options that make it brief in a smoke test."""

    fit: Callable[..., Any]
    packages: Mapping[str, str] = {}  # distribution by the module's name
    brief: dict[str, Any] | None = {}  # None: it is left out there
    splits: int | None = None


NGBOOST, CATBOOST, XGBOOST = (
    {"ngboost": "ngboost"},
    {"catboost": "catboost"},
    {"xgboost": "xgboost"},
)
TABM = {"tabm": "tabm", "rtdl_num_embeddings": "rtdl_num_embeddings"}
FEW: dict[str, Any] = {"steps": 50}
TREES: dict[str, Any] = {"iterations": 20}
REGRESSORS: dict[str, Method] = {
    "random forest": Method(fit_forest),
    "boosting": Method(fit_boosting),
    "Gaussian process": Method(fit_process),
    "MLP": Method(fit_mlp),
    "BayesianRidge": Method(fit_ridge),
    "NGBoost": Method(fit_ngboost, NGBOOST),
    "CatBoost": Method(fit_catboost, CATBOOST, TREES),
    "XGBoost": Method(fit_xgboost, XGBOOST),
    "bde": Method(fit_bde, {"bde": "sklearn-contrib-bde"}, None, splits=1),
    "TabM": Method(fit_tabm, TABM, FEW),
    "deep ensemble": Method(fit_members, brief=FEW),
    "MC dropout": Method(partial(fit_members, members=1, dropout=0.05), brief=FEW),
}
SKLEARN: dict[str, Callable[[int], Any]] = {
    "random forest": lambda seed: RandomForestClassifier(random_state=seed),
    "boosting": lambda seed: HistGradientBoostingClassifier(random_state=seed),
    "logistic regression": lambda _: make_pipeline(
        StandardScaler(), LogisticRegression(max_iter=1000)
    ),
    "MLP": lambda seed: make_pipeline(
        StandardScaler(), MLPClassifier(max_iter=1000, random_state=seed)
    ),
}
CLASSIFIERS: dict[str, Method] = {
    **{label: Method(partial(fit_classifier, make)) for label, make in SKLEARN.items()},
    "Gaussian process": Method(fit_process_of_classes),
    "CatBoost": Method(partial(fit_classifier, catboost_classifier), CATBOOST),
    "XGBoost": Method(partial(fit_classifier, xgboost_classifier), XGBOOST),
    "TabM": Method(partial(fit_network_of_classes, tabm=True), TABM, FEW),
    "deep ensemble": Method(partial(fit_network_of_classes, tabm=False), brief=FEW),
}

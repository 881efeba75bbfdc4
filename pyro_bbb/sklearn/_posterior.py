# SPDX-License-Identifier: Apache-2.0
r"""The posterior of a table: learned from rows, updated by further rows, and queried.

`learn` integrates an infinitely wide network (``_wide_posterior.py``), samples the weights by
chains, or trains a guide, as the estimator's ``inference`` says.
`learn_on` applies Bayes' rule again (Nguyen et al. 2018): the posterior after n rows is the prior
of m further rows, and a Gaussian's learned noise becomes its running estimate
$\sigma^2 \leftarrow (n \sigma^2 + \sum_i E_q[(y_i - f(x_i))^2]) / (n + m)$. `Plateau` ends the
training of a guide.

All is in double precision, as networks for tables are small and the prediction of a row is then the
same to the last digits among any other rows. Only the chains run in single precision.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_bbb import guides
from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.threads import ONE_THREAD, use_threads
from pyro_bbb.guides import Guide
from pyro_bbb.likelihoods import Categorical, Gaussian, Likelihood, align
from pyro_bbb.mcmc import Chains, sample, spread_rows
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianMLP, Offset
from pyro_bbb.persistence import save
from pyro_bbb.prediction import ClassificationPrediction, Prediction, leave_one_out_weights, predict
from pyro_bbb.priors import FanInNormal, Prior, from_guide
from pyro_bbb.sklearn._choices import (
    ACTIVATIONS,
    constant_outputs,
    hidden_layers,
    make_prior,
    named,
    with_priors,
)
from pyro_bbb.sklearn._wide_posterior import WidePosterior, learn_wide
from pyro_bbb.training import EpochEnd, KLSchedule, UndertrainedWarning, fit
from pyro_bbb.training.history import History

if TYPE_CHECKING:
    from pyro_bbb.sklearn._estimator import BayesianEstimator

_MOST = 5000  # weights, and rows, up to which inference="auto" samples
_GAIN = 2.5  # of the chains' prior: a gain of sqrt(2) is too smooth for gaps of some curves
_CHAIN_STEPS = 1500  # default limit of the gradients of each chain
_CLASS_STEPS, _POWER_STEPS = 1000, 400  # of classes, and where the likelihood is raised
_STEPS, _LEAST_EPOCHS = 4000, 5  # default limit of the steps of training, and its least epochs
_WINDOW = 200  # steps over which the ELBO is averaged by default
_SMALLEST, _LARGEST, _BATCHES = 64, 1024, 100  # default batch: rows / 100, in [64, 1024]
_SHARPENED, _SHARPENING_DRAWS = 1000, 100  # rows and draws that choose the sharpness
_LARGE_GAIN = 0.1  # fraction of the loss left out, beyond which the likelihood is raised
_SHARPNESSES = [2 ** (i / 6) for i in range(-12, 13)]  # from 1/4 to 4
_DRAWN = 10  # times that a held-out row is drawn on average, where rows have weights
_NOISE_DRAWS = 100  # networks drawn for the noise of further rows
_DECAY = 1.0  # epochs of the falling rate, for each epoch before


@dataclass(frozen=True)
class Rows:
    """Rows to learn from: scaled inputs ``[n, d]``, targets ``[n, ...]``, weights ``[n]``."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    @property
    def total(self) -> float:
        """The number of rows, or the sum of their weights."""
        return len(self.x) if self.weight is None else float(self.weight.sum())


@dataclass(frozen=True)
class FittedPosterior:
    """A model with its trained guide or its chains, and the record of the training."""

    model: BayesianModel
    guide: Any  # or Chains, whose record is empty
    history: History
    num_seen: float  # rows, or their weights, that it was learned from, over all calls
    sharpness: float = 1.0  # factor of each draw's log-probabilities of classes

    corrected_by_rows_left_out = False

    @property
    def learns_on(self) -> bool:
        """True if it may be the prior of further rows."""
        return not isinstance(self.guide, Chains)

    @property
    def num_passes(self) -> int:
        """Passes over the rows in the latest training; of chains those of the longest."""
        if isinstance(self.guide, Chains):
            return int(self.guide.num_gradients.sum(1).max())
        return len(self.history)

    @property
    def num_weights(self) -> int:
        """Number of the network's weights."""
        shapes = self.model.latent_shapes().items()
        return sum(shape.numel() for name, shape in shapes if name.startswith("network."))

    def __str__(self) -> str:
        if not isinstance(self.guide, Chains):
            return f"posterior by variational inference ({type(self.guide).__name__})"
        chains, draws = self.guide.diverging.shape
        r_hat = self.guide.r_hat_of_functions or math.nan
        ess = self.guide.ess_of_functions or math.nan
        words = f"posterior by {chains} chains of {draws} draws"
        return f"{words} (R-hat {r_hat:.3f}, ESS {ess:.0f} of its function)"

    def save(self, path: str | PathLike[str], metadata: Mapping[str, Any]) -> None:
        """Write a folder that `pyro_bbb.load` reads."""
        save(path, self.model, self.guide, metadata=metadata)

    @property
    def has_unit(self) -> bool:
        """True if targets are standardised."""
        return self.model.likelihood.has_unit

    def predict(
        self, x: Tensor, num_samples: int, seed: int, n_jobs: int | None = None
    ) -> Prediction:
        """Return the posterior predictive, by the same networks in each call with one seed."""
        array = x.numpy()  # which is moved to the guide's device
        if isinstance(self.guide, Chains):  # evenly over all chains from a random start
            with seeded(seed):
                start, order = torch.rand((), dtype=torch.float64), torch.randperm(num_samples)
            at = ((order + start) * self.guide.diverging.numel() / num_samples).long()
            draws = {name: values[at] for name, values in self.guide.items()}
            with _threads_for(self.model, n_jobs or torch.get_num_threads()):
                prediction = predict(self.model, draws, array, num_samples=num_samples)
            if not isinstance(prediction, ClassificationPrediction) or self.sharpness == 1:
                return prediction
            log_probs = (self.sharpness * prediction.sample_log_probs).log_softmax(-1)
            return replace(prediction, sample_log_probs=log_probs)
        options: Any = {"num_samples": num_samples, "seed": seed, "estimator": "reparam"}
        with _threads_for(self.model, n_jobs):
            return predict(self.model, self.guide, array, **options)

    def __getstate__(self) -> dict[str, Any]:  # a guide leaves its model out of its state
        if not isinstance(self.guide, Guide | Chains):
            raise TypeError(f"guide must be one of pyro_bbb's to be kept, got {self.guide!r}")
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["guide"], Guide):
            state["guide"]._model = (state["model"],)
        vars(self).update(state)


# --- learning ---


def learn(
    estimator: BayesianEstimator[Any],
    likelihood: Likelihood,
    rows: Rows,
    outputs: int,
    seed: int,
    *,
    by_guide: bool = False,
) -> FittedPosterior | WidePosterior:
    """Learn the posterior of a new network, by a guide if ``by_guide`` and "auto" say so."""
    sizes = [rows.x.shape[1], *hidden_layers(estimator.hidden_sizes), outputs]
    inference = chosen_inference(estimator, sizes, len(rows.x))
    if by_guide and estimator.inference == "auto":
        inference = "variational"
    if inference == "wide":
        return learn_wide(rows.x, rows.y, rows.weight, seed, estimator.n_jobs)
    offset = constant_outputs(likelihood, rows.y, outputs, rows.weight)
    if inference == "chains":
        prior = FanInNormal(_GAIN) if estimator.prior is None else estimator.prior
        with seeded(seed):
            network = _network(estimator, sizes, make_prior(prior, torch.float32), offset)
        model = BayesianModel(network, with_priors(likelihood), num_data=len(rows.x))
        learned = [name for name, x in model.named_parameters() if x.requires_grad]
        if not learned:
            if estimator.inference == "auto" and type(likelihood) is Categorical:
                return _learn_classes(estimator, model, rows, seed)
            return _sample_chains(estimator, model, rows, seed, _CHAIN_STEPS)
        if estimator.inference == "chains":
            raise ValueError(
                f"inference='chains' samples, and the model has the trained parameter "
                f"{learned[0]!r}: take a prior without, or inference='variational'"
            )
    with seeded(seed):
        network = _network(estimator, sizes, make_prior(estimator.prior, torch.float64), offset)
        model, guide = _model_and_guide(estimator, network, likelihood, rows)
    return _train_guide(estimator, model, guide, rows, seed)


def learn_on(
    estimator: BayesianEstimator[Any], before: FittedPosterior, rows: Rows, seed: int
) -> FittedPosterior:
    """Learn from further rows, with the posterior as their prior."""
    try:
        prior = from_guide(before.guide)
    except TypeError as error:
        got = type(before.guide).__name__
        raise TypeError(f"guide must have Normal marginals to be learned on, got {got}") from error
    # a learned noise is held while the weights are trained
    likelihood = copy.deepcopy(before.model.likelihood).requires_grad_(False)
    old: Any = before.model.network
    offset = old.offset.values if hasattr(old, "offset") else torch.zeros(old.sizes[-1])
    with seeded(seed):
        network = _network(estimator, old.sizes, prior, offset)
        model, guide = _model_and_guide(estimator, network, likelihood, rows)
    if isinstance(guide, nn.Module):  # start where both have a parameter
        own, values = guide.state_dict(), before.guide.state_dict().items()
        shared = {name: x for name, x in values if name in own and own[name].shape == x.shape}
        guide.load_state_dict(own | shared)
    after = _train_guide(estimator, model, guide, rows, seed)
    after = replace(after, num_seen=before.num_seen + rows.total)
    _update_noise(after, before.num_seen, rows, seed)
    return after


def chosen_inference(estimator: BayesianEstimator[Any], sizes: list[int], rows: int) -> str:
    """Return the inference of a network of these layers' sizes from this number of rows."""
    if estimator.inference != "auto":
        return str(estimator.inference)
    if not estimator.changed_for_wide():
        return "wide"
    weights = sum((inputs + 1) * units for inputs, units in pairwise(sizes))
    small = max(weights, rows) <= _MOST and on_cpu(estimator)
    return "chains" if small and not estimator.changed_training_options() else "variational"


def on_cpu(estimator: BayesianEstimator[Any]) -> bool:
    """Return whether the estimator works on the processor."""
    return str(estimator.device or "cpu").startswith("cpu")


def _network(
    estimator: BayesianEstimator[Any], sizes: list[int], prior: Prior, offset: Tensor
) -> BayesianMLP:
    """Return a network whose outputs vary around an offset; an offset of 0 needs no layer."""
    make_activation = named("activation", estimator.activation, ACTIVATIONS)
    network = BayesianMLP(sizes, activation=make_activation, prior=prior)
    if offset.any():
        network.offset = Offset(len(offset))
        network.offset.values.data = offset.detach().clone()
    return network


def _model_and_guide(
    estimator: BayesianEstimator[Any], network: BayesianMLP, likelihood: Likelihood, rows: Rows
) -> tuple[BayesianModel, Any]:
    model = BayesianModel(network, likelihood, num_data=len(rows.x)).double()
    guide = named("guide", estimator.guide, guides.GUIDES)(model)
    return model, guide.double() if isinstance(guide, nn.Module) else guide


def _sample_chains(
    estimator: BayesianEstimator[Any],
    model: BayesianModel,
    rows: Rows,
    seed: int,
    steps: int,
    share: float = 1.0,
) -> FittedPosterior:
    """Sample the posterior in single precision, in a share of the time, and keep it in double."""
    with _threads_for(model, estimator.n_jobs):
        chains = sample(
            model.float(),
            (rows.x.float(), rows.y.float() if rows.y.is_floating_point() else rows.y),
            seconds=estimator.seconds and share * estimator.seconds,
            batch_size=estimator.batch_size,
            device=estimator.device,
            seed=seed,
            progress=bool(estimator.progress),
            sample_weight=rows.weight,
            max_steps=estimator.max_epochs or steps,
        )
    chains = chains.to(dtype=torch.float64)
    return FittedPosterior(model.double(), chains, History(), rows.total)


def _learn_classes(
    estimator: BayesianEstimator[Any], model: BayesianModel, rows: Rows, seed: int
) -> FittedPosterior:
    r"""Sample the posterior of classes, and correct it by rows left out.

    A factor t of the log-probabilities that raises the log-likelihood of all rows left out by more
    than a nat (Akaike 1974) becomes the posterior's sharpness. If it takes away more than a tenth
    of their loss, the labels have less noise than the model assumes, as those of curated data
    (Aitchison 2021, arXiv:2008.05912): the chains are run again with the likelihood raised to
    $t^2$, and t is 1.
    """
    posterior = _sample_chains(estimator, model, rows, seed, _CLASS_STEPS, 0.7)
    log_likelihood = _log_likelihood_left_out(posterior, rows, seed)
    sharpness = max(_SHARPNESSES, key=log_likelihood)
    before = log_likelihood(1.0)
    gain = log_likelihood(sharpness) - before
    if gain <= 1:
        return posterior
    if sharpness < 1 or gain <= _LARGE_GAIN * -before:  # the loss is -before
        return replace(posterior, sharpness=sharpness)
    weight = torch.ones_like(rows.x[:, 0]) if rows.weight is None else rows.weight
    raised = replace(rows, weight=sharpness**2 * weight)
    posterior = _sample_chains(estimator, model, raised, seed, _POWER_STEPS, 0.3)
    return replace(posterior, num_seen=rows.total)


def _log_likelihood_left_out(
    posterior: FittedPosterior, rows: Rows, seed: int
) -> Callable[[float], float]:
    """Return the log-likelihood of rows left out, as a function of the sharpness."""
    few = spread_rows(len(rows.x), _SHARPENED)
    share = len(rows.x) / len(few)
    prediction: Any = posterior.predict(rows.x[few], _SHARPENING_DRAWS, seed)
    log_probs, y = prediction.sample_log_probs, rows.y[few]  # [S, n, C]

    def at_label(log_probs: Tensor) -> Tensor:
        """Return each draw's log-probability of the labels, ``[S, n]``."""
        return log_probs.gather(-1, y.expand(len(log_probs), -1)[..., None])[..., 0]

    log_weight = leave_one_out_weights(at_label(log_probs))

    def log_likelihood(sharpness: float) -> float:
        scaled = (sharpness * log_probs).log_softmax(-1)
        per_row = (log_weight + at_label(scaled)).logsumexp(0)
        return share * float(per_row.sum() if rows.weight is None else rows.weight[few] @ per_row)

    return log_likelihood


def _train_guide(
    estimator: BayesianEstimator[Any], model: BayesianModel, guide: Any, rows: Rows, seed: int
) -> FittedPosterior:
    factorised = getattr(guide, "is_factorised", False)
    method = estimator.estimator
    if method == "auto":
        method = "local_reparam" if factorised else "reparam"
    length = training_length(estimator, guide, len(rows.x), _constant_nll(model, rows, seed))
    train = rows
    if estimator.early_stopping:
        train, length = _held_out(estimator, rows, length, seed)
        model.num_data = len(train.x)
    with _threads_for(model, estimator.n_jobs), warnings.catch_warnings():
        if estimator.early_stopping:  # which is meant to end before the ELBO is at its best
            warnings.simplefilter("ignore", UndertrainedWarning)
        history = fit(
            model,
            guide,
            (train.x, train.y),
            lr=estimator.lr,
            device=estimator.device,
            progress=bool(estimator.progress),
            seed=seed,
            engine="compiled",
            sample_weight=train.weight,
            estimator=method,
            loss="mean_field" if factorised else "trace",
            kl_schedule=KLSchedule(temperature=estimator.temperature),
            **length,
        )
    return FittedPosterior(model, guide, history, train.total)


def _held_out(
    estimator: BayesianEstimator[Any], rows: Rows, length: dict[str, Any], seed: int
) -> tuple[Rows, dict[str, Any]]:
    """Return the rows of training, and options of `fit` that stop early by the others."""
    held_out = max(1, round(estimator.validation_fraction * len(rows.x)))
    if held_out >= len(rows.x):
        raise ValueError(
            f"validation_fraction must leave rows to train on, got "
            f"{estimator.validation_fraction} of {len(rows.x)} rows"
        )
    order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))
    out, kept = order[:held_out], order[held_out:]
    weight = None if rows.weight is None else rows.weight[kept]
    if rows.weight is not None:  # validation has no weights: draw its rows by them
        shares = rows.weight[out] / rows.weight[out].sum()
        with seeded(seed):
            out = out[torch.multinomial(shares, _DRAWN * held_out, replacement=True)]
    options = {name: length[name] for name in ("epochs", "batch_size")} | {
        "lr_schedule": "constant",
        "validation": (rows.x[out], rows.y[out]),
        "patience": estimator.n_iter_no_change or _window(len(kept), length["batch_size"]),
    }
    return Rows(rows.x[kept], rows.y[kept], weight), options


def _window(num_rows: int, batch_size: int) -> int:
    """Return the passes of about 200 steps."""
    return max(1, round(_WINDOW / math.ceil(num_rows / batch_size)))


def training_length(
    estimator: BayesianEstimator[Any], guide: Any, num_rows: int, constant_nll: float = math.inf
) -> dict[str, Any]:
    """Return the options of `fit` that set its batch size and its epochs."""
    size = estimator.batch_size or min(max(_SMALLEST, num_rows // _BATCHES), _LARGEST)
    if estimator.epochs:
        return {"epochs": estimator.epochs, "batch_size": size}
    steps_per_epoch = math.ceil(num_rows / size)
    most = estimator.max_epochs or max(_LEAST_EPOCHS, round(_STEPS / steps_per_epoch))
    if guides.collected(guide):  # its iterates begin at the plateau
        return {"epochs": most, "batch_size": size}
    window = estimator.n_iter_no_change or _window(num_rows, size)
    plateau = Plateau(most, window, estimator.tol, constant_nll)
    schedule = {"lr_schedule": plateau, "callbacks": [plateau.callback]}
    return {"epochs": most, "batch_size": size, **schedule}


class Plateau:
    """Learning-rate schedule and callback of `fit` that end training at a plateau.

    The rate stays until the negative ELBO, averaged over ``n_iter_no_change`` epochs, is lower than
    the lowest average before by less than a fraction ``tol`` of the total decrease since the first
    one. The negative log-likelihood of the first average is capped at ``constant_nll``, that of
    constant outputs, so that a bad start does not make every later decrease look small. Then the
    rate falls to 0 along a cosine, in as many epochs as have passed; ``max_epochs`` is the limit.
    """

    def __init__(
        self, max_epochs: int, n_iter_no_change: int, tol: float, constant_nll: float = math.inf
    ) -> None:
        self.max_epochs, self.window, self.tol = max_epochs, n_iter_no_change, tol
        self.constant_nll = constant_nll
        self.means: list[float] = []  # of the negative ELBO, in each window
        self.last = max_epochs  # epochs in total, those of the falling rate included
        self.first = math.ceil(max_epochs / (1 + _DECAY))  # epoch from which on the rate falls

    def __call__(self, progress: float) -> float:
        """Return the factor of the learning rate after a fraction of ``max_epochs``."""
        epochs = progress * self.max_epochs
        falling = (epochs - self.first) / max(1, self.last - self.first)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, falling))))

    def callback(self, end: EpochEnd) -> bool:
        """Return whether training ends after an epoch."""
        done = end.epoch + 1
        if done < self.first and done % self.window == 0 and not self._improves(end):
            self.first, self.last = done, done + math.ceil(_DECAY * done)
        return done >= self.last

    def _improves(self, end: EpochEnd) -> bool:
        self.means.append(fmean(end.history.loss[-self.window :]))
        *before, mean = self.means
        if not before:
            self.first_mean = mean
            if self.constant_nll < math.inf:
                nll = fmean(end.history.nll[-self.window :])
                self.first_mean -= max(0.0, nll - self.constant_nll)
            return True
        least = min(before)
        return least - mean > self.tol * (self.first_mean - least)


@torch.no_grad()
def _constant_nll(model: BayesianModel, rows: Rows, seed: int) -> float:
    """Return the negative log-likelihood of the network that ignores its inputs, in nats."""
    network: Any = model.network
    outputs = torch.zeros(len(rows.y), network.sizes[-1], dtype=torch.double)
    if hasattr(network, "offset"):
        outputs = network.offset(outputs)
    with seeded(seed), poutine.block(), own_store(model):  # a latent scale is drawn
        observation = model.likelihood(outputs)
        y = align(model.likelihood.prepare(rows.y, outputs), observation.event_shape)
        log_prob = observation.log_prob(y)
        return -float((log_prob if rows.weight is None else rows.weight * log_prob).sum())


def _update_noise(after: FittedPosterior, num_before: float, rows: Rows, seed: int) -> None:
    """Update the running estimate of a Gaussian's learned noise."""
    log_scale = getattr(after.model.likelihood, "scale_unconstrained", None)
    if type(after.model.likelihood) is not Gaussian or not isinstance(log_scale, nn.Parameter):
        return
    means: Any = after.predict(rows.x, _NOISE_DRAWS, seed)
    means = means.sample_means  # [s, n, targets]
    # E_q[(y - f(x))^2] per row and target
    squares = (rows.y.to(means.device) - means).square().mean(0)
    weight = 1 if rows.weight is None else rows.weight.to(squares).unsqueeze(1)
    variance = num_before * (2 * log_scale.detach()).exp() + (weight * squares).sum(0)
    log_scale.detach().copy_(0.5 * (variance / after.num_seen).log())


def _threads_for(model: BayesianModel, n_jobs: int | None) -> AbstractContextManager[None]:
    """Use ``n_jobs`` processor threads; by default one for a small network, else torch's."""
    weights = sum(shape.numel() for shape in model.latent_shapes().values())
    return use_threads(n_jobs, 1 if weights < ONE_THREAD else None)

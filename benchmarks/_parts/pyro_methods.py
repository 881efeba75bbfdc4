# SPDX-License-Identifier: Apache-2.0
"""Methods on Pyro: `pyro_bbb.fit`, and Pyro's own autoguide and optimiser."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import pyro
from pyro import poutine
from pyro.distributions import Normal
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

import pyro_bbb as bbb
from _parts.baselines import PI, SIGMA1, SIGMA2
from _parts.tasks import NUM_DATA, Trainer, Work
from _parts.timing import Meter, repeated
from pyro_bbb.training._captured import has_few_parameters
from pyro_bbb.training._step import NonFiniteRollback

PRIORS: dict[str, Callable[[], Any]] = {
    "mixture": lambda: bbb.ScaleMixtureNormal(pi=PI, sigma1=SIGMA1, sigma2=SIGMA2),
    "Gaussian": lambda: Normal(0.0, 1.0),
}
_numbers = count()


def model_of(work: Work, prior: str, num_data: int) -> bbb.BayesianModel:
    """The work's network with random weights."""
    if work.architecture == "lenet5":
        network: Any = bbb.BayesianLeNet5(prior=PRIORS[prior]())
    else:
        network = bbb.BayesianMLP(work.sizes, prior=PRIORS[prior]())
    return bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data).to(work.device)


def guided(work: Work, prior: str = "mixture", num_data: int = NUM_DATA) -> tuple[Any, Any]:
    """A model and its guide."""
    model = model_of(work, prior, num_data)
    return model, bbb.AutoSoftplusNormal(model).to(work.device)


def ours(
    prior: str = "mixture", estimator: str = "reparam", loss: str = "trace"
) -> Callable[[Work], Trainer]:
    """Train as `pyro_bbb.fit` does with these options."""

    def train(work: Work) -> Trainer:
        model, guide = guided(work, prior, num_data=work.batch)
        options = {"estimator": estimator, "loss": loss, "num_particles": work.draws}
        return fit_steps(model, guide, work, **options)

    return train


@contextmanager
def metered_steps(meter: Meter) -> Iterator[None]:
    """Pass every step of `fit` to the meter.

    The name of its step is all that this knows of what `fit` is made of.
    """
    real = NonFiniteRollback.step

    def metered(*args: Any, **kwargs: Any) -> Any:
        return meter(lambda: real(*args, **kwargs))

    with mock.patch.object(NonFiniteRollback, "step", metered):
        yield


def fit_steps(model: Any, guide: Any, work: Work, **options: Any) -> Trainer:
    """The steps of real calls of `fit`, whose set-up is not measured.

    They are run as `fit` runs those of longer trainings by itself.
    """
    x, y = work.data()
    few = has_few_parameters(guide, model)
    fixed: dict[str, Any] = {"batch_size": len(x), "lr": work.lr, "progress": False}
    fixed["engine"] = "compiled" if few and work.device == "cpu" else "eager"

    def take(count: int, meter: Meter) -> None:
        with metered_steps(meter):
            bbb.fit(model, guide, (x, y), epochs=count, **fixed, **options)  # a step per epoch

    return Trainer(take, guide)


def stock(prior: str) -> Callable[[Work], Trainer]:
    """`AutoNormal`, `Trace_ELBO` and Pyro's Adam on the same model."""

    def train(work: Work) -> Trainer:
        model, (x, y) = model_of(work, prior, NUM_DATA), work.data()
        guide = AutoNormal(model, init_scale=0.01)
        guide._pyro_name = f"AutoNormal{next(_numbers)}"  # else all have one set of parameters

        def with_kl_weight(x: Tensor, y: Tensor, kl_weight: float) -> Any:
            with poutine.scale(scale=kl_weight):
                return guide(x, y, kl_weight)

        with_kl_weight(x, y, 1.0)  # AutoNormal has no parameters before its first call
        guide.to(work.device)
        elbo = Trace_ELBO(num_particles=work.draws)
        svi = SVI(model, with_kl_weight, pyro.optim.Adam({"lr": work.lr}), elbo)
        return Trainer(repeated(lambda: svi.step(x, y, len(x) / NUM_DATA)), guide)

    return train

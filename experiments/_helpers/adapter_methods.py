# SPDX-License-Identifier: Apache-2.0
"""Methods of `adapters`: what of a network's adapters is random, and how it is trained."""

import pyro_bbb as bbb
from _helpers.adapter_tasks import ADAPTATIONS
from _helpers.posterior_training import (
    POINT_PRIOR,
    Method,
    by_fit,
    dropout_draws,
    dropout_map,
    ensemble_of,
    laplace,
)

DRAWS = 10
FAN_IN = bbb.priors.FanInNormal(1.0)
POINT_LR = {"images": 1e-2, "characters": 3e-2}  # of a training without a posterior
IMAGES = {"temperature": 0.03, "lr": 3e-2}
CHARACTERS = {"temperature": 0.1, "lr": 3e-2, "batch_size": 16}
BAYES = {  # options of `by_fit`
    "mnist": IMAGES | {"lr": 1e-2},
    "mnist_tenth": IMAGES | {"estimator": "local_reparam"},
    "mnist_hundredth": IMAGES,
    "decimal": CHARACTERS,
    "decimal_tenth": CHARACTERS,
}


def methods(name: str) -> dict[str, Method]:
    """Methods for an adaptation, by name.

    The transformer's last layer is its embedding, which stays frozen and has no Laplace posterior.
    """
    family = ADAPTATIONS[name].family
    lr = POINT_LR[family]
    by_map = by_fit("delta", POINT_PRIOR, lr=lr)
    by_dropout = dropout_map(0.1, POINT_PRIOR, times=1, lr=lr)
    by_bayes = by_fit("softplus_normal", FAN_IN, **BAYES[name])
    by_short = by_fit("softplus_normal", FAN_IN, times=0.5, **BAYES[name])
    found = {
        "map": Method(label="MAP", draws=0, train=by_map),
        "dropout": Method(label="MC dropout", draws=DRAWS, train=by_dropout, predict=dropout_draws),
        "ensemble": Method(label="ensemble of 5", draws=5, train=ensemble_of(5, by_map)),
        "bayes": Method(label="Bayesian adapters", draws=DRAWS, train=by_bayes),
        "bayes_short": Method(
            label="Bayesian adapters, 3 at half the epochs",
            draws=12,
            train=ensemble_of(3, by_short, draws=4),
        ),
    }
    if family == "images":
        found["laplace_last"] = Method(
            label="Laplace, last layer",
            draws=100,
            train=laplace("last.*", POINT_PRIOR, lr=lr, optimize_prior=True),
            options={"linearized": True},
        )
    return found

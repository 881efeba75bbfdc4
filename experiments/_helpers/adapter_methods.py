"""Methods of `adapters`: what of a network's adapters is random, and how it is trained."""

import pyro_bbb as bbb
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


def methods(family: str) -> dict[str, Method]:
    """Methods for a family of networks, by name.

    The transformer's last layer is its embedding, which stays frozen and has no Laplace posterior.
    """
    lr = POINT_LR[family]
    by_map = by_fit("delta", POINT_PRIOR, lr=lr)
    by_dropout = dropout_map(0.1, POINT_PRIOR, times=1, lr=lr)
    by_bayes = by_fit("softplus_normal", FAN_IN, temperature=0.03, lr=3e-2)
    found = {
        "map": Method(label="MAP", draws=0, train=by_map),
        "dropout": Method(label="MC dropout", draws=DRAWS, train=by_dropout, predict=dropout_draws),
        "ensemble": Method(label="ensemble of 5", draws=5, train=ensemble_of(5, by_map)),
        "bayes": Method(label="Bayesian adapters", draws=DRAWS, train=by_bayes),
    }
    if family == "images":
        found["laplace_last"] = Method(
            label="Laplace, last layer",
            draws=100,
            train=laplace("last.*", POINT_PRIOR, lr=lr, optimize_prior=True),
            options={"linearized": True},
        )
    return found

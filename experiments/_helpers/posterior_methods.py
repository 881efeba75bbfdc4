# SPDX-License-Identifier: Apache-2.0
"""Methods and problems of `posteriors`: a new method is an entry of `METHODS`.

What was tried for them, and on which images, is said in `posteriors`.
"""

from functools import partial

from pyro.distributions import Normal

import pyro_bbb as bbb
from _helpers.posterior_training import (
    POINT_PRIOR,
    Method,
    Problem,
    by_fit,
    cyclical,
    dropout_draws,
    dropout_map,
    ensemble_of,
    laplace,
    lenet5,
    mlp,
    scaled,
    with_temperature,
)

MIXTURE = bbb.ScaleMixtureNormal(0.5, 1.0, 0.0025)
NORMAL, FAN_IN = Normal(0.0, 1.0), bbb.priors.FanInNormal()
PRIORS = {"mixture": MIXTURE, "normal": NORMAL}
NORMAL_GUIDE = "softplus_normal"
IVON = bbb.optim.IVON(beta2=0.9995)
BY_MAP = by_fit("delta", POINT_PRIOR, lr=1e-3)
BY_IVON = partial(by_fit, NORMAL_GUIDE, FAN_IN, optimizer=IVON, lr=0.1)
DRAWS = 16  # of weights
OUTPUT_DRAWS = 100  # of outputs, which cost less

METHODS = {
    "map": Method(label="MAP", draws=0, train=BY_MAP),
    "temperature": Method(
        label="MAP, temperature scaled",
        draws=0,
        train=with_temperature(BY_MAP),
        predict=scaled,
    ),
    "dropout": Method(
        label="MC dropout",
        draws=DRAWS,
        train=dropout_map(0.1, POINT_PRIOR, times=2),
        predict=dropout_draws,
    ),
    "ensemble": Method(
        label="ensemble of 5",
        draws=5,
        train=by_fit("ensemble", POINT_PRIOR, guide_options={"size": 5}, lr=1e-3),
    ),
    "laplace_last": Method(
        label="Laplace, last layer",
        draws=OUTPUT_DRAWS,
        train=laplace("last.*", POINT_PRIOR, optimize_prior=True),
        options={"linearized": True},
    ),
    "laplace_kron": Method(
        label="Laplace, Kronecker",
        draws=OUTPUT_DRAWS,
        train=laplace("*", bbb.priors.FanInNormal(0.7)),
        options={"linearized": True},
    ),
    "swag": Method(
        label="SWAG", draws=DRAWS, train=by_fit("swag", POINT_PRIOR, times=1.5, lr=1e-3)
    ),
    "rank1": Method(
        label="rank-1 ensemble of 4",
        draws=DRAWS,
        train=by_fit("rank1_ensemble", NORMAL, times=2, guide_options={"size": 4}, lr=1e-3),
    ),
    "sghmc": Method(label="cyclical SGHMC", draws=DRAWS, train=cyclical(NORMAL, 0.1, times=2)),
    "vbll": Method(
        label="variational last layer",
        draws=OUTPUT_DRAWS,
        train=by_fit("vbll", NORMAL, where="last.*", lr=1e-3),
    ),
    "ivon": Method(
        label="IVON",
        draws=DRAWS,
        train=BY_IVON(times=2, temperature=0.1),
    ),
    "ivon_warm": Method(
        label="IVON, temperature 0.3",
        draws=5,
        train=BY_IVON(times=2, temperature=0.3),
    ),
    "ivon_warm3": Method(
        label="ensemble of 3 by IVON, temperature 0.3",
        draws=3,
        train=ensemble_of(3, BY_IVON(times=4 / 3, temperature=0.3, lr_schedule="warmup_cosine")),
    ),
    "ensemble10": Method(
        label="ensemble of 10",
        draws=10,
        train=ensemble_of(10, BY_MAP),
    ),
    "ivon4": Method(
        label="ensemble of 4 by IVON",
        draws=4,
        train=ensemble_of(4, BY_IVON(temperature=0.1)),
    ),
    "ivon10": Method(
        label="ensemble of 10 by IVON",
        draws=10,
        train=ensemble_of(10, BY_IVON(temperature=0.1)),
    ),
} | {
    f"bbb_{prior}_{estimator}": Method(
        label=f"BBB, {prior}, {estimator.replace('_', ' ')}",
        draws=DRAWS,
        train=by_fit(
            NORMAL_GUIDE, PRIORS[prior], times=1.5, temperature=0.1, estimator=estimator, lr=1e-3
        ),
    )
    for prior in PRIORS
    for estimator in ("reparam", "local_reparam")
}

BBB = tuple(name for name in METHODS if name.startswith("bbb_"))
AT_THE_MAP = ("laplace_last", "laplace_kron")
COMPARED = (
    *("map", "dropout", "ensemble", *BBB, "ivon", "vbll"),
    *AT_THE_MAP,
    *("swag", "rank1", "sghmc"),
)
TENS = ("map", "ensemble10", "ivon10")
UNDER_SHIFT = (
    *("map", "temperature", "dropout", "ensemble", "ensemble10"),
    *(*BBB, "ivon", "ivon_warm", "ivon_warm3", "ivon4", "vbll"),
    *COMPARED[COMPARED.index("vbll") + 1 :],
)

PROBLEMS = {
    "fashion_mlp": Problem(
        title="Fashion-MNIST, 784-400-400-10",
        dataset="fashion_mnist",
        network=mlp,
        epochs=10,
        methods=COMPARED,
    ),
    "mnist_lenet5": Problem(
        title="MNIST, LeNet-5", dataset="mnist", network=lenet5, epochs=6, methods=COMPARED
    ),
    "mnist_ensemble10": Problem(
        title="MNIST, ten LeNet-5",
        dataset="mnist",
        network=lenet5,
        epochs=16,
        methods=TENS,
        published={"published ensemble of 10": (0.994, 0.016, 0.005)},
    ),
    "fashion_ensemble10": Problem(
        title="Fashion-MNIST, ten LeNet-5",
        dataset="fashion_mnist",
        network=lenet5,
        epochs=16,
        methods=TENS,
        published={"published ensemble of 10": (0.932, 0.200, 0.010)},
    ),
}

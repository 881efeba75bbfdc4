# SPDX-License-Identifier: Apache-2.0
"""Training methods by the name shown."""

import _parts.baselines as plain
import _parts.other_libraries as peers
from _parts.pyro_methods import ours, stock
from _parts.tasks import Method, Trainer, Work
from _parts.timing import Take

FLOOR = "deterministic"
OURS = "pyro_bbb (mixture)"
OURS_GAUSSIAN = "pyro_bbb (Gaussian, closed KL)"
PLAIN = "plain PyTorch (mixture)"
TORCHBNN = "torchbnn (Gaussian, closed KL)"
TORCH_BLUE = "torch_blue (Gaussian, closed KL)"
BAYESIAN_TORCH, FLIPOUT = "bayesian-torch (Gaussian, closed KL)", "bayesian-torch, flipout"
BLITZ = "blitz (mixture)"
STOCK = "Pyro AutoNormal (mixture)"

_ALL = [
    Method(FLOOR, plain.deterministic),
    Method(OURS, ours()),
    Method(OURS_GAUSSIAN, ours("Gaussian", loss="mean_field")),
    Method(PLAIN, plain.plain),
    Method("plain PyTorch, default Adam", plain.plain_default_adam),
    Method(STOCK, stock("mixture")),
    Method("Pyro AutoNormal (Gaussian)", stock("Gaussian")),
    Method(TORCHBNN, peers.torchbnn, "torchbnn"),
    Method(BAYESIAN_TORCH, peers.bayesian_torch("Reparameterization"), "bayesian-torch"),
    Method(FLIPOUT, peers.bayesian_torch("Flipout"), "bayesian-torch"),
    Method(BLITZ, peers.blitz, "blitz-bayesian-pytorch"),
    Method(TORCH_BLUE, peers.torch_blue, "torch_blue"),
    Method("TyXe (Gaussian, closed KL)", peers.tyxe, "tyxe"),
    Method("pyro_bbb, local_reparam", ours(estimator="local_reparam")),
    Method("pyro_bbb, flipout", ours(estimator="flipout")),
    Method("pyro_bbb, stl", ours(estimator="stl")),
]
METHODS = {method.name: method for method in _ALL}
ESTIMATORS = [name for name in METHODS if name.startswith("pyro_bbb, ")]
LIBRARIES = [name for name in METHODS if name not in ESTIMATORS]
SEVERAL_DRAWS = [OURS, PLAIN, STOCK, BLITZ, TORCH_BLUE]
IMAGES = [FLOOR, OURS, OURS_GAUSSIAN, "pyro_bbb, flipout", BAYESIAN_TORCH, FLIPOUT]


def training(name: str, work: Work) -> Take | str:
    """Return a method's training steps, or the reason why it is unavailable."""
    trainer = METHODS[name].prepare(work)
    return trainer.take if isinstance(trainer, Trainer) else trainer

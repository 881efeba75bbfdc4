"""Who competes at training, by the name shown."""

import _parts.baselines as plain
import _parts.other_libraries as peers
from _parts.pyro_methods import ours, stock
from _parts.tasks import Contender, Trainer, Work
from _parts.timing import Take

FLOOR = "deterministic"
OURS = "pyro_bbb (mixture)"
OURS_GAUSSIAN = "pyro_bbb (Gaussian, closed KL)"
PLAIN = "plain PyTorch (mixture)"
TORCHBNN = "torchbnn (Gaussian, closed KL)"
TORCH_BLUE = "torch_blue (Gaussian, closed KL)"
BLITZ = "blitz (mixture)"
STOCK = "Pyro AutoNormal (mixture)"

_ALL = [
    Contender(FLOOR, plain.deterministic),
    Contender(OURS, ours()),
    Contender(OURS_GAUSSIAN, ours("Gaussian", loss="mean_field")),
    Contender(PLAIN, plain.plain),
    Contender("plain PyTorch, default Adam", plain.plain_default_adam),
    Contender(STOCK, stock("mixture")),
    Contender("Pyro AutoNormal (Gaussian)", stock("Gaussian")),
    Contender(TORCHBNN, peers.torchbnn, "torchbnn"),
    Contender(
        "bayesian-torch (Gaussian, closed KL)",
        peers.bayesian_torch("Reparameterization"),
        "bayesian-torch",
    ),
    Contender("bayesian-torch, flipout", peers.bayesian_torch("Flipout"), "bayesian-torch"),
    Contender(BLITZ, peers.blitz, "blitz-bayesian-pytorch"),
    Contender(TORCH_BLUE, peers.torch_blue, "torch_blue"),
    Contender("TyXe (Gaussian, closed KL)", peers.tyxe, "tyxe"),
    Contender("pyro_bbb, local_reparam", ours(estimator="local_reparam")),
    Contender("pyro_bbb, flipout", ours(estimator="flipout")),
    Contender("pyro_bbb, stl", ours(estimator="stl")),
]
CONTENDERS = {contender.name: contender for contender in _ALL}
ESTIMATORS = [name for name in CONTENDERS if name.startswith("pyro_bbb, ")]
LIBRARIES = [name for name in CONTENDERS if name not in ESTIMATORS]
SEVERAL_DRAWS = [OURS, PLAIN, STOCK, BLITZ, TORCH_BLUE]
IMAGES = [
    FLOOR,
    OURS,
    OURS_GAUSSIAN,
    "pyro_bbb, flipout",
    "bayesian-torch (Gaussian, closed KL)",
    "bayesian-torch, flipout",
]


def training(name: str, work: Work) -> Take | str:
    """A contender's training steps, or why there are none."""
    trainer = CONTENDERS[name].prepare(work)
    return trainer.take if isinstance(trainer, Trainer) else trainer

"""Bayesian neural networks by variational inference on Pyro.

Four nouns, each replaceable alone (network, prior, likelihood, guide); the verbs are functions.
"""

from pyro_bbb import bandits, data, guides, likelihoods, metrics, priors
from pyro_bbb import chains as chains  # old path
from pyro_bbb import conversion as conversion  # old path
from pyro_bbb import export as export  # old path
from pyro_bbb import history as history  # old path
from pyro_bbb import objectives as objectives  # old path
from pyro_bbb import optim as optim  # old path
from pyro_bbb import summaries as summaries  # old path
from pyro_bbb._utils.distributed import alone
from pyro_bbb._version import __version__ as __version__
from pyro_bbb.deployment import to_ensemble, to_module
from pyro_bbb.distributions import ScaleMixtureNormal
from pyro_bbb.estimators import flipout, local_reparameterization, sticking_the_landing
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.mcmc import Chains, run_nuts
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import (
    BayesianConv2d,
    BayesianLeNet5,
    BayesianLinear,
    BayesianMLP,
    bayesianize,
)
from pyro_bbb.persistence import LoadError, load, save
from pyro_bbb.prediction import (
    ClassificationPrediction,
    Prediction,
    RegressionPrediction,
    predict,
    predict_mean,
)
from pyro_bbb.pruning import prune, signal_to_noise
from pyro_bbb.training import CheckpointError, EpochEnd, KLSchedule, UndertrainedWarning, fit
from pyro_bbb.training.history import History
from pyro_bbb.training.objectives import NonFiniteError
from pyro_bbb.training.optim import JointOptim

__all__ = [
    "AutoSoftplusNormal",
    "BayesianConv2d",
    "BayesianLeNet5",
    "BayesianLinear",
    "BayesianMLP",
    "BayesianModel",
    "Chains",
    "CheckpointError",
    "ClassificationPrediction",
    "EpochEnd",
    "History",
    "JointOptim",
    "KLSchedule",
    "LoadError",
    "NonFiniteError",
    "Prediction",
    "RegressionPrediction",
    "ScaleMixtureNormal",
    "UndertrainedWarning",
    "alone",
    "bandits",
    "bayesianize",
    "data",
    "fit",
    "flipout",
    "guides",
    "likelihoods",
    "load",
    "local_reparameterization",
    "metrics",
    "predict",
    "predict_mean",
    "priors",
    "prune",
    "run_nuts",
    "save",
    "signal_to_noise",
    "sticking_the_landing",
    "to_ensemble",
    "to_module",
]

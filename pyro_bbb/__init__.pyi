from . import bandits as bandits
from . import chains as chains  # old path
from . import conversion as conversion  # old path
from . import data as data
from . import deployment as deployment
from . import distributions as distributions
from . import estimators as estimators
from . import evaluation as evaluation
from . import export as export  # old path
from . import guides as guides
from . import history as history  # old path
from . import likelihoods as likelihoods
from . import mcmc as mcmc
from . import metrics as metrics
from . import models as models
from . import networks as networks
from . import objectives as objectives  # old path
from . import optim as optim  # old path
from . import persistence as persistence
from . import plots as plots
from . import prediction as prediction
from . import priors as priors
from . import pruning as pruning
from . import summaries as summaries  # old path
from . import training as training
from ._utils.distributed import alone as alone
from ._utils.version import __version__ as __version__
from .deployment import to_ensemble as to_ensemble
from .deployment import to_module as to_module
from .distributions import ScaleMixtureNormal as ScaleMixtureNormal
from .estimators import flipout as flipout
from .estimators import local_reparameterization as local_reparameterization
from .estimators import sticking_the_landing as sticking_the_landing
from .evaluation import Comparison as Comparison
from .evaluation import Evaluation as Evaluation
from .evaluation import Verdict as Verdict
from .evaluation import check as check
from .evaluation import compare as compare
from .evaluation import evaluate as evaluate
from .guides import AutoSoftplusNormal as AutoSoftplusNormal
from .mcmc import Chains as Chains
from .mcmc import DivergedError as DivergedError
from .mcmc import run_nuts as run_nuts
from .mcmc import run_sgmcmc as run_sgmcmc
from .mcmc import sample as sample
from .models import BayesianModel as BayesianModel
from .networks import BayesianConv2d as BayesianConv2d
from .networks import BayesianLeNet5 as BayesianLeNet5
from .networks import BayesianLinear as BayesianLinear
from .networks import BayesianMLP as BayesianMLP
from .networks import adapt as adapt
from .networks import bayesianize as bayesianize
from .persistence import LoadError as LoadError
from .persistence import load as load
from .persistence import save as save
from .prediction import ClassificationPrediction as ClassificationPrediction
from .prediction import ConformalPredictor as ConformalPredictor
from .prediction import Prediction as Prediction
from .prediction import RegressionPrediction as RegressionPrediction
from .prediction import TemperatureScaled as TemperatureScaled
from .prediction import batch_bald as batch_bald
from .prediction import conformal as conformal
from .prediction import diverse_bald as diverse_bald
from .prediction import predict as predict
from .prediction import predict_mean as predict_mean
from .prediction import temperature_scaling as temperature_scaling
from .pruning import prune as prune
from .pruning import signal_to_noise as signal_to_noise
from .training import CheckpointError as CheckpointError
from .training import EpochEnd as EpochEnd
from .training import KLSchedule as KLSchedule
from .training import NegativeELBO as NegativeELBO
from .training import UndertrainedWarning as UndertrainedWarning
from .training import fit as fit
from .training import negative_elbo as negative_elbo
from .training.history import History as History
from .training.objectives import NonFiniteError as NonFiniteError
from .training.optim import JointOptim as JointOptim

# SPDX-License-Identifier: Apache-2.0
"""`predict`: the posterior predictive at new inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.distributed import Processes, processes
from pyro_bbb._utils.inputs import Rows, input_batches
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count, kind, one_of, require_numbers
from pyro_bbb.guides import LastLayer
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.prediction._classification import ClassificationPrediction, class_log_probs
from pyro_bbb.prediction._draws import given_draws, medians, split_draws
from pyro_bbb.prediction._inputs import checked, on_device, rows_of_pass
from pyro_bbb.prediction._linearized import (
    PROBIT,
    STDS,
    GaussianPrediction,
    is_gaussian,
    per_normal_output,
)
from pyro_bbb.prediction._output_samples import draws_of_each_input, per_input
from pyro_bbb.prediction._regression import Prediction, RegressionPrediction
from pyro_bbb.prediction._weight_samples import ALL, Part, default_rows, per_draw

Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"
Inputs: TypeAlias = "Array | Sequence[Array] | Mapping[str, Array] | Dataset[Any] | DataLoader[Any]"
ESTIMATORS = ("reparam", "local_reparam")


@dataclass(frozen=True)
class PredictConfig:
    """Options of one call of `predict`, checked."""

    num_samples: int
    rows: int  # inputs of one pass
    sampler: str  # "weights", "outputs" or "linearized"
    probit: bool = False


@locked
def predict(
    model: BayesianModel,
    guide: Any,
    x: Inputs,
    *,
    num_samples: int = 100,
    batch_size: int | None = None,
    seed: int | None = None,
    estimator: str | None = None,
    linearized: bool | str = False,
) -> Prediction:
    """Predict at new inputs by draws from the posterior.

    Two samplers do it, and the result says in ``sampler`` which one did. ``"weights"`` draws
    networks; ``"outputs"`` draws the outputs of each input by itself, exactly and without a weight,
    and is chosen for a single input of a plain dense network, and for a `LastLayer` guide. See
    ``estimator``.

    Processes that `torchrun` started together share the draws, and each gets the result: all of
    them must call it, with the same arguments; see `alone`.

    Networks run in evaluation mode. Beyond the result itself, memory holds a few draws of
    the weights (one, of a large network) and one pass, however many draws and inputs there are.

    Args:
        model: the model.
        guide: a trained guide; the `Chains` of `run_nuts`; a finished Pyro `MCMC`; or draws by
            site name, ``[S, ...]`` each. Of given draws at most ``num_samples`` are used, evenly
            spaced.
        x: inputs, ``[n, ...]``: a tensor, or a numpy array; or a map-style dataset or a
            `DataLoader`, whose targets are ignored. These two are predicted batch by batch with
            common draws, and the result is on the CPU. For a network of several inputs a tuple or
            list of them, its arguments by position, or a dict, its arguments by name.
        num_samples: number of draws S.
        batch_size: inputs per pass of drawn weights; by default 1024 on a CPU, else 8192.
        seed: makes the result a function of this number, and leaves torch's random state alone.
        estimator: ``"reparam"`` draws weights, common to all inputs: each draw is one function,
            also over several calls with one seed. ``"local_reparam"`` draws the outputs of linear
            layers instead, without a weight: fast for few inputs, and the predictive of each input
            is exact, but inputs are independent, and a draw is not one function of them. It needs
            an `AutoSoftplusNormal`, and a network that uses each random weight once, in a linear
            layer on one row per input. ``None`` is ``"local_reparam"`` where both have the same
            distribution: for a single input of a network that consists of linear layers,
            elementwise activations, dropout and LayerNorm; and for a `LastLayer` guide, whose
            outputs are Normal after one run of the trunk. Else it is ``"reparam"``.
        linearized: whether the network is replaced by its tangent at the guide's means, which must
            be a Normal one: its outputs are Normal then, in closed form (Immer et al. 2021). Meant
            for ``laplace``; a `LastLayer` guide changes nothing by it, as the network is its own
            tangent there. Drawn are the outputs of each input, or for classes nothing by
            ``"probit"``.

    Returns:
        A `ClassificationPrediction` for class likelihoods, else a `RegressionPrediction`: where
        outputs are Normal (``linearized``, a `LastLayer`), and so is noise of known or learned
        scale, a `GaussianPrediction` without sampling error.

    Raises:
        ValueError: inputs that do not fit, are empty or not finite, or overflow in the network (the
            message names the row), a number out of range, draws that lack a latent, an unknown
            estimator or one that is not exact here.
        TypeError: an argument of the wrong kind.
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    if isinstance(x, Dataset | DataLoader):
        seed = int(torch.randint(2**62, ())) if seed is None else seed  # common draws
        usual = "local_reparam" if isinstance(guide, LastLayer) else "reparam"
        common = num_samples, None, seed, None if linearized else estimator or usual
        batches = on_device(guide, input_batches(x, batch_size))
        parts = [_predict(model, guide, each, *common, linearized) for each in batches]
        return _prediction(model, *_concatenated(parts))
    options = num_samples, batch_size, seed, estimator
    return _prediction(model, *_predict(model, guide, x, *options, linearized))


def _predict(
    model: BayesianModel,
    guide: Any,
    x: Any,
    num_samples: int,
    batch_size: int | None,
    seed: int | None,
    estimator: str | None,
    linearized: bool | str,
) -> tuple[dict[str, Tensor], str]:
    """The tensors of a prediction, and the sampler."""
    x = checked(model, guide, x)
    config = _configure(model, guide, x, num_samples, batch_size, estimator, linearized)
    cpu_only = x.device.type == "cpu" and not torch.cuda.is_initialized()
    group = processes(x.device)
    with (
        seeded(seed, cpu_only=cpu_only),
        own_store(model, guide),
        group.own_stream() as begin_stream,
    ):
        begin_stream()
        parts, counts = _parts(model, guide, x, config, group)
        outputs = _collect(parts, model, x, group.at_least_one(counts))
        joined = {name: group.join(y, counts) for name, y in outputs.items()}
        return joined, config.sampler


def _concatenated(parts: list[tuple[dict[str, Tensor], str]]) -> tuple[dict[str, Tensor], str]:
    """The tensors of several batches of inputs as one, on the CPU."""
    if not parts:
        raise ValueError("x must hold at least one input, got none")
    first, sampler = parts[0]
    columns = {name: [outputs[name].cpu() for outputs, _ in parts] for name in first}
    return {name: torch.cat(values, 1) for name, values in columns.items()}, sampler


def _configure(
    model: BayesianModel,
    guide: Any,
    x: Rows,
    num_samples: int,
    batch_size: int | None,
    estimator: str | None,
    linearized: bool | str,
) -> PredictConfig:
    num_samples, rows = count("num_samples", num_samples), rows_of_pass(batch_size, x)
    if linearized not in (False, True, PROBIT):
        raise ValueError(f"linearized must be False, True or {PROBIT!r}, got {linearized!r}")
    if linearized:
        if estimator is not None:
            raise ValueError(f"linearized draws no weights: estimator={estimator!r} must be None")
        return PredictConfig(num_samples, rows, "linearized", linearized == PROBIT)
    if estimator is None:
        single = len(x) == 1 and draws_of_each_input(model, guide, x)
        exact = single or isinstance(guide, LastLayer)
        return PredictConfig(num_samples, rows, "outputs" if exact else "weights")
    one_of("estimator", estimator, ESTIMATORS)
    return PredictConfig(num_samples, rows, "weights" if estimator == "reparam" else "outputs")


def _parts(
    model: BayesianModel, guide: Any, x: Rows, config: PredictConfig, group: Processes
) -> tuple[Iterable[Part], list[int]]:
    """Outputs of this process's draws in parts, and the number of draws of each process."""
    if config.sampler == "weights":
        posterior, counts = split_draws(model, guide, x, config.num_samples, group)
        return per_draw(model, posterior, x, config.rows), counts
    if config.sampler == "linearized" or isinstance(guide, LastLayer):
        return _normal_parts(model, guide, x, config, group)
    counts = group.split_counts(config.num_samples)
    return per_input(model, guide, x, group.at_least_one(counts), default_rows(x)), counts


def _normal_parts(
    model: BayesianModel, guide: Any, x: Rows, config: PredictConfig, group: Processes
) -> tuple[Iterable[Part], list[int]]:
    """As `_parts`, of outputs that are Normal."""
    drawn = not (config.probit or is_gaussian(model))
    counts = group.split_counts(config.num_samples if drawn else 1)
    options = group.at_least_one(counts), config.rows, config.probit
    return per_normal_output(model, guide, x, *options), counts


@locked
def predict_mean(
    model: BayesianModel, guide: Any, x: Inputs, *, batch_size: int | None = None
) -> Prediction:
    """Predict by one network, whose weights are the centre of the posterior.

    Args:
        model: the model.
        guide: as for `predict`; its medians (for `AutoSoftplusNormal` the means) are the weights,
            of given draws the mean.
        x: inputs, as for `predict`.
        batch_size: inputs per pass, as for `predict`.

    Returns:
        A prediction with a single draw.

    Raises:
        ValueError: as for `predict`.
        TypeError: as for `predict`.
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    if isinstance(x, Dataset | DataLoader):
        batches = on_device(guide, input_batches(x, batch_size))
        parts = [_predict_mean(model, guide, each, None) for each in batches]
        return _prediction(model, *_concatenated(parts))
    return _prediction(model, *_predict_mean(model, guide, x, batch_size))


def _predict_mean(
    model: BayesianModel, guide: Any, x: Any, batch_size: int | None
) -> tuple[dict[str, Tensor], str]:
    """The tensors of a prediction by the centre of the posterior."""
    x = checked(model, guide, x)
    rows = rows_of_pass(batch_size, x)
    with own_store(model, guide):
        given = given_draws(model, guide)
        if given is not None:
            centre = {name: values.mean(0) for name, values in given.items()}
        else:
            centre = medians(guide, x[:1])
        draws = {name: value.unsqueeze(0) for name, value in centre.items()}
        outputs = _collect(per_draw(model, [draws], x, rows), model, x, 1)
        return outputs, "weights"


def _collect(parts: Iterable[Part], model: BayesianModel, x: Rows, draws: int) -> dict[str, Tensor]:
    """The tensors of a prediction, from parts written at their draws and inputs."""
    collected = dict[str, Tensor]()
    with torch.no_grad(), pyro.validation_enabled(False), evaluating(model):
        try:
            for which, inputs, part in parts:
                for name, value in finished(model, part).items():
                    if name not in collected:
                        n = value.shape[1] if inputs == ALL else len(x)
                        collected[name] = value.new_empty(draws, n, *value.shape[2:])
                    collected[name][which, inputs] = value
        except RuntimeError:
            model.check(x)  # says so if the inputs do not fit
            raise
    return collected


def _prediction(model: BayesianModel, outputs: dict[str, Tensor], sampler: str) -> Prediction:
    require_numbers(outputs)
    common: dict[str, Any] = {"sampler": sampler, "ignored": model.likelihood.ignored}
    if "sample_log_probs" in outputs:
        return ClassificationPrediction(outputs["sample_log_probs"], **common)
    stds: dict[str, Any] = {n: outputs.pop(n)[0] for n in STDS if n in outputs}
    components = model.observed(outputs)
    if stds:
        return GaussianPrediction(components=components, **common, **stds)
    return RegressionPrediction(components, **common)


def finished(model: BayesianModel, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a prediction from `predictive` of s draws, ``[s, n, ...]``."""
    if STDS[0] in arguments:
        return arguments
    log_probs = class_log_probs(model.observed(arguments))
    return arguments if log_probs is None else {"sample_log_probs": log_probs}

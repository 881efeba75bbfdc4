# SPDX-License-Identifier: Apache-2.0
r"""`predict`: the posterior predictive at new inputs.

$$p(y \mid x, D) \approx \frac1S \sum_s p(y \mid f(x, w_s)), \qquad w_s \sim q(w)$$

Three samplers give the likelihood's arguments for the draws: ``"weights"`` runs the network for
each $w_s$ (``_draws.py``), ``"outputs"`` draws the outputs of each input without a weight
(``_output_samples.py``), ``"linearized"`` has Normal outputs in closed form
(``_normal_outputs.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.distributed import processes
from pyro_bbb._utils.inputs import Rows, input_batches, parts_of, require_inputs, to_precision
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.pages import read_on
from pyro_bbb._utils.validation import all_finite, count, kind, one_of, require_numbers
from pyro_bbb.guides import batchnorms
from pyro_bbb.latents import sample_names
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.prediction._classification import ClassificationPrediction, class_log_probs
from pyro_bbb.prediction._draws import (
    ALL,
    Draws,
    Part,
    default_rows,
    given_draws,
    per_draw,
    split_draws,
)
from pyro_bbb.prediction._normal_outputs import PROBIT, STDS, is_gaussian, per_normal_output
from pyro_bbb.prediction._output_samples import layers_in_order, per_input
from pyro_bbb.prediction._regression import GaussianPrediction, Prediction, RegressionPrediction

Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"
Inputs: TypeAlias = "Array | Sequence[Array] | Mapping[str, Array] | Dataset[Any] | DataLoader[Any]"
ESTIMATORS = ("reparam", "local_reparam")


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

    Networks run in evaluation mode. Beyond the result, memory holds a few draws of the weights (one
    of a large network) and one pass. Processes that `torchrun` started together share the draws and
    each get the result: all must call it with the same arguments; see `alone`.

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
        estimator: ``"reparam"`` draws weights, common to all inputs: each draw is one function.
            ``"local_reparam"`` draws the outputs of linear layers instead, without a weight: fast
            for few inputs, and exact for each, but inputs are independent. It needs an
            `AutoSoftplusNormal`, and from the first random layer on a network that uses each weight
            once, in a linear layer on one row per input. ``None`` is ``"local_reparam"`` where both
            have the same distribution: for a single input of linear layers, elementwise
            activations, dropout and LayerNorm; and for a `LastLayer` guide, whose outputs are
            Normal. Else it is ``"reparam"``. The result's ``sampler`` is its name.
        linearized: whether the network is replaced by its tangent at the means of a Normal guide:
            its outputs are Normal then, in closed form (Immer et al. 2021). Meant for ``laplace``.
            Drawn are the outputs of each input, or for classes nothing by ``"probit"``.

    Returns:
        A `ClassificationPrediction` for class likelihoods, else a `RegressionPrediction`: where
        outputs are Normal (``linearized``, a `LastLayer`), and so is noise of known or learned
        scale, a `GaussianPrediction` without sampling error.

    Raises:
        ValueError: inputs that do not fit, are empty or not finite, or overflow in the network (the
            message names the row), a number out of range, draws that lack a latent, an unknown
            estimator or one that is not exact here.
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    num_samples = count("num_samples", num_samples)
    if linearized not in (False, True, PROBIT):
        raise ValueError(f"linearized must be False, True or {PROBIT!r}, got {linearized!r}")
    if estimator is not None:
        one_of("estimator", estimator, ESTIMATORS)
        if linearized:
            raise ValueError(f"linearized draws no weights: estimator={estimator!r} must be None")
    of_dataset = isinstance(x, Dataset | DataLoader)
    if of_dataset and seed is None:
        seed = int(torch.randint(2**62, ()))  # batches have common draws
    has_normal_outputs = getattr(guide, "has_normal_outputs", False)  # without linearisation
    sampler, results = "weights", []
    for inputs, rows in _passes(model, guide, x, batch_size):
        if linearized:
            sampler = "linearized"
        elif has_normal_outputs:
            sampler = "weights" if estimator == "reparam" else "outputs"
        elif estimator == "local_reparam" or (
            estimator is None and not of_dataset and len(inputs) == 1
        ):
            layers, reason, same_law = layers_in_order(model, guide, inputs)
            if estimator and reason:
                wrong = "estimator 'local_reparam' is not exact here, use 'reparam'"
                raise ValueError(f"{wrong}: {reason}")
            sampler = "outputs" if estimator or same_law else "weights"
        group = processes(inputs.device)
        cpu_only = inputs.device.type == "cpu" and not torch.cuda.is_initialized()
        with (
            seeded(seed, cpu_only=cpu_only),
            own_store(model, guide),
            group.own_stream() as begin_stream,
        ):
            begin_stream()
            if sampler == "weights":
                _warn_of_shared_statistics(model, guide)
                draws, counts = split_draws(model, guide, inputs, num_samples, group)
                chunks = per_draw(model, draws, inputs, rows)
            elif linearized or has_normal_outputs:
                drawn = not (linearized == PROBIT or is_gaussian(model))
                counts = group.split_counts(num_samples if drawn else 1)
                own = group.at_least_one(counts)
                chunks = per_normal_output(model, guide, inputs, own, rows, linearized == PROBIT)
            else:
                counts = group.split_counts(num_samples)
                chunks = per_input(model, guide, layers, inputs, group.at_least_one(counts))
            outputs = _collected(chunks, model, inputs, group.at_least_one(counts))
            results.append({name: group.join(y, counts) for name, y in outputs.items()})
    return _prediction(model, results, sampler, of_dataset)


def _warn_of_shared_statistics(model: BayesianModel, guide: Any) -> None:
    """Warn where members of an ensemble would be normalised by averages over all of them."""
    if len(getattr(guide, "members", ())) < 2 or not (norms := batchnorms(model)):
        return
    modules = dict(model.named_modules())
    first_random = next(path for path in modules if sample_names(modules[path]))
    order = list(modules)
    if order.index(first_random) < max(order.index(path) for path in norms):
        warnings.warn(
            "BatchNorm's running statistics are averages over the ensemble's members, and fit none "
            "of them; predict by bbb.batchnorm_draws(model, guide, x_train) in place of the guide. "
            + read_on("guide/residual_networks"),
            stacklevel=4,
        )


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
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    results = []
    for inputs, rows in _passes(model, guide, x, batch_size):
        with own_store(model, guide):
            draws = given_draws(model, guide)
            if draws is not None:
                centre = {name: values.mean(0) for name, values in draws.items()}
            elif hasattr(guide, "median"):
                centre = guide.median(inputs[:1])
            else:
                raise TypeError(f"guide must have a method median, got {type(guide).__name__}")
            single = {name: value.unsqueeze(0) for name, value in centre.items()}
            results.append(_collected(per_draw(model, [single], inputs, rows), model, inputs, 1))
    return _prediction(model, results, "weights", isinstance(x, Dataset | DataLoader))


def drawn_arguments(model: BayesianModel, draws: Draws, x: Rows) -> dict[str, Tensor]:
    """Return what given draws of the latents predict at inputs, ``[S, n, ...]`` by name.

    For classes these are ``sample_log_probs``, else the arguments of the likelihood's family.
    """
    chunks = per_draw(model, [draws], x, default_rows(x))
    return _collected(chunks, model, x, len(next(iter(draws.values()))))


def _passes(
    model: BayesianModel, guide: Any, x: Any, batch_size: int | None
) -> Iterator[tuple[Rows, int]]:
    """Yield checked inputs with the rows of one pass: all, or batch by batch of a dataset."""
    if batch_size is not None:
        batch_size = count("batch_size", batch_size)
    if isinstance(x, Dataset | DataLoader):
        for batch in input_batches(x, batch_size):
            yield checked_inputs(model, guide, batch, move=True), default_rows(batch)
    else:
        inputs = checked_inputs(model, guide, x, move=not isinstance(x, Tensor))
        yield inputs, batch_size or default_rows(inputs)


def checked_inputs(model: nn.Module, guide: Any, x: Any, *, move: bool) -> Rows:
    """Return the inputs as finite tensors of the model's precision, on the guide's device."""
    inputs: Rows = to_precision(require_inputs(x), guide, model)
    if isinstance(guide, nn.Module):
        values: Iterable[Any] = guide.parameters()
    else:
        values = guide.values() if isinstance(guide, Mapping) else ()
    device = next((value.device for value in values if isinstance(value, Tensor)), inputs.device)
    if move:
        inputs = inputs.to(device)
    for name, tensor in parts_of(inputs).items():
        if device != tensor.device:
            own = f"got a tensor on {tensor.device}"
            raise ValueError(f"{name} must be on {device} as the guide is, {own}")
        if not all_finite(tensor):
            row = (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0].item()
            raise ValueError(f"{name} must be finite, got NaN or infinity in row {row}")
    return inputs


def _collected(
    chunks: Iterable[Part], model: BayesianModel, x: Rows, num_samples: int
) -> dict[str, Tensor]:
    """Return the tensors of a prediction ``[s, n, ...]``, each chunk written in its place.

    For classes these are ``sample_log_probs``, else the arguments of the likelihood's family.
    """
    collected = dict[str, Tensor]()
    with torch.no_grad(), pyro.validation_enabled(False), evaluating(model):
        try:
            for draws, inputs, arguments in chunks:
                if STDS[0] not in arguments:
                    log_probs = class_log_probs(model.observed(arguments))
                    if log_probs is not None:
                        arguments = {"sample_log_probs": log_probs}
                for name, value in arguments.items():
                    if name not in collected:
                        n = value.shape[1] if inputs == ALL else len(x)
                        collected[name] = value.new_empty(num_samples, n, *value.shape[2:])
                    collected[name][draws, inputs] = value
        except RuntimeError:
            model.check(x)  # explains inputs that do not fit
            raise
    return collected


def _prediction(
    model: BayesianModel, results: list[dict[str, Tensor]], sampler: str, of_dataset: bool
) -> Prediction:
    """Return the prediction with the tensors of one batch of inputs, or of several on the CPU."""
    if not results:
        raise ValueError("x must hold at least one input, got none")
    outputs = results[0]
    if of_dataset:
        outputs = {name: torch.cat([y[name].cpu() for y in results], 1) for name in outputs}
    require_numbers(outputs)
    common: dict[str, Any] = {"sampler": sampler, "ignored": model.likelihood.ignored}
    if "sample_log_probs" in outputs:
        return ClassificationPrediction(outputs["sample_log_probs"], **common)
    stds: dict[str, Any] = {name: outputs.pop(name)[0] for name in STDS if name in outputs}
    components = model.observed(outputs)
    if stds:
        return GaussianPrediction(components=components, **common, **stds)
    return RegressionPrediction(components, **common)

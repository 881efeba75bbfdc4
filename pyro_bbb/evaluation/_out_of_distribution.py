# SPDX-License-Identifier: Apache-2.0
r"""Out-of-distribution scores of any network, and a detector that refuses inputs by them.

A score $s(x)$ is high where x resembles the training data. $\phi$ are the features of x, the input
of the network's last linear layer, or means and standard deviations of the channels of several
layers (Lee et al. 2018, section 2.2, average them); f are its outputs, one for each class c.

``"mahalanobis"``: $-\min_c (\phi - \mu_c)^\top \Sigma^{-1} (\phi - \mu_c)$ (Lee et al. 2018,
eq. 2), $\mu_c$ the mean of class c in the training data, $\Sigma$ the covariance within classes.

``"relative_mahalanobis"``: that, plus $(\phi - \mu)^\top \Sigma_0^{-1} (\phi - \mu)$ with mean and
covariance of all features (Ren et al. 2021, arXiv:2106.09022).

``"ddu"``: $\log \sum_c \pi_c N(\phi \mid \mu_c, \Sigma_c)$, with frequency and covariance of each
class (Mukhoti et al. 2023, arXiv:2102.11582).

``"knn"``: $-\lVert z - z_{(k)} \rVert$, $z = \phi / \lVert \phi \rVert$, for the k-th nearest of n
training features, k = n / 1000 (Sun et al. 2022, arXiv:2204.06507).

``"energy"``: $\log \sum_c e^{f_c}$ (Liu et al. 2020, eq. 4, T = 1). ``"max_logit"``: $\max_c f_c$
(Hendrycks et al. 2022). ``"entropy"``, ``"mutual_information"``: minus those of the prediction.

Features, Gaussians and neighbours differ between draws of the weights; s is the mean over draws.
Without classes (regression) all rows are one class. Covariances are shrunk by `ledoit_wolf`, which
makes them regular for any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from os import PathLike
from typing import Any, TypeAlias

import pyro
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.files import LoadError, as_path, loading, require_form
from pyro_bbb._utils.inputs import Rows, at_least_single, call_arguments, tensor_of
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count, kind, one_of, probability, require_numbers
from pyro_bbb.data import as_tensors, split
from pyro_bbb.likelihoods import Bernoulli, Categorical
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.persistence.archive import read, write
from pyro_bbb.persistence.json_codec import decode, encode
from pyro_bbb.persistence.state import cpu_copy, digest
from pyro_bbb.prediction import (
    ClassificationPrediction,
    checked_inputs,
    default_rows,
    posterior_draws,
)

Fitted: TypeAlias = dict[str, Tensor]  # what a score keeps of the training features of one draw

# --- scores: fitted to training features [n, d] and labels [n], evaluated at new features ---


def ledoit_wolf(x: Tensor) -> Tensor:
    r"""Return the shrunk covariance ``[d, d]`` of rows ``[n, d]`` with mean 0.

    $$\hat\Sigma = (1 - \delta) S + \delta m I,\quad m = \mathrm{tr}(S) / d,\quad
      \delta = \min\Big(1, \frac{\sum_i \lVert x_i x_i^\top - S \rVert^2 / n^2}
                               {\lVert S - m I \rVert^2}\Big)$$

    (Ledoit and Wolf 2004, "A well-conditioned estimator for large-dimensional covariance
    matrices", section 3.3; Frobenius norms).
    """
    n, d = x.shape
    s = x.mT @ x / n
    target = s.diagonal().mean() * torch.eye(d, dtype=s.dtype, device=s.device)
    # sum_i |x_i x_i' - S|^2 / n^2 = (mean |x_i|^4 - |S|^2) / n
    error = (x.square().sum(1).square().mean() - s.square().sum()) / n
    delta = error / (s - target).square().sum()
    return torch.lerp(s, target, delta.nan_to_num(0.0).clamp(max=1.0))  # 0 / 0 where S is m I


def _fit_gaussians(features: Tensor, labels: Tensor, shared: bool = False) -> Fitted:
    """Return means, Cholesky factors of the covariances and log-frequencies of the classes."""
    x, counts = features.double(), labels.bincount().double()
    means = x.new_zeros(len(counts), x.shape[1]).index_add(0, labels, x) / counts.unsqueeze(1)
    residuals = x - means[labels]
    rows = {"a class": residuals} if shared else {}
    rows = rows or {f"class {c}": residuals[labels == c] for c in range(len(means))}
    factors, failed = torch.linalg.cholesky_ex(torch.stack([*map(ledoit_wolf, rows.values())]))
    for name, wrong in zip(rows, failed, strict=True):
        if wrong:
            raise ValueError(f"train must have features that vary within {name}, got equal ones")
    return {"means": means, "factors": factors, "log_pi": (counts / len(labels)).log()}


def _distances(features: Tensor, fitted: Fitted) -> Tensor:
    """Return squared Mahalanobis distances to the classes, ``[C, n]``."""
    x, means, factors = features.double(), fitted["means"], fitted["factors"]
    pairs = zip(means, factors.expand(len(means), -1, -1), strict=True)
    # |L^{-1} (x - mu)|^2 with Sigma = L L'
    white = (torch.linalg.solve_triangular(L, (x - mean).mT, upper=False) for mean, L in pairs)
    return torch.stack([z.square().sum(0) for z in white])


def _mahalanobis(features: Tensor, fitted: Fitted) -> Tensor:
    return -_distances(features, fitted).amin(0)


def _fit_relative(features: Tensor, labels: Tensor) -> Fitted:
    overall = _fit_gaussians(features, torch.zeros_like(labels))
    fitted = _fit_gaussians(features, labels, shared=True)
    return fitted | {f"overall_{name}": x for name, x in overall.items()}


def _relative(features: Tensor, fitted: Fitted) -> Tensor:
    overall = {name: fitted[f"overall_{name}"] for name in ("means", "factors")}
    return _mahalanobis(features, fitted) + _distances(features, overall)[0]


def _ddu(features: Tensor, fitted: Fitted) -> Tensor:
    log_det = 2 * fitted["factors"].diagonal(dim1=1, dim2=2).log().sum(1)
    constant = log_det + features.shape[1] * math.log(2 * math.pi)
    log_density = -0.5 * (_distances(features, fitted) + constant.unsqueeze(1))  # log N, [C, n]
    return (fitted["log_pi"].unsqueeze(1) + log_density).logsumexp(0)


def _fit_knn(features: Tensor, labels: Tensor) -> Fitted:
    return {"neighbours": normalize(features)}


def _knn(features: Tensor, fitted: Fitted) -> Tensor:
    neighbours = fitted["neighbours"]
    k = max(1, round(len(neighbours) / 1000))  # the paper's ratio, 50 of 50,000
    cosines = [(z @ neighbours.mT).topk(k).values[:, -1] for z in normalize(features).split(1024)]
    return -(2 - 2 * torch.cat(cosines)).clamp(min=0).sqrt()  # |z - z'|^2 of unit vectors


_OF_FEATURES: dict[str, tuple[Callable[..., Fitted], Callable[..., Tensor]]] = {
    "mahalanobis": (partial(_fit_gaussians, shared=True), _mahalanobis),
    "relative_mahalanobis": (_fit_relative, _relative),
    "ddu": (_fit_gaussians, _ddu),
    "knn": (_fit_knn, _knn),
}
_WITHOUT_CLASSES = ["mahalanobis", "ddu", "knn"]
_OF_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "energy": lambda f: f.logsumexp(1),
    "max_logit": lambda f: f.amax(1),
}
_OF_PREDICTION = {"entropy": "entropy", "mutual_information": "epistemic"}  # its attributes
SCORES = (*_OF_FEATURES, *_OF_OUTPUTS, *_OF_PREDICTION)


# --- the detector ---


@locked
def ood(
    model: nn.Module,
    posterior: Any,
    train: Any,
    *,
    score: str = "ddu",
    layer: str | Sequence[str] | None = None,
    num_samples: int = 5,
    fraction: float = 0.05,
    held_out: float = 0.1,
    batch_size: int | None = None,
    seed: int = 0,
) -> Detector:
    """Fit a detector of inputs unlike the training data, to a trained model.

        detector = bbb.ood(model, guide, (x, y))
        detector.predict(x_new)  # 1: like the training data, -1: refused

    Args:
        model: a `BayesianModel`; or with ``posterior=None`` any network, such as the one of
            `to_module`, which takes one pass.
        posterior: what `predict` takes: a guide, chains, or draws by site name.
        train: training data ``(x, y)``, or a map-style ``Dataset`` of such pairs. Labels ``[n]``
            are classes; rows of other targets are all of one class.
        score: ``"ddu"``, ``"mahalanobis"``, ``"relative_mahalanobis"``, ``"knn"``, ``"energy"``,
            ``"max_logit"``, ``"entropy"`` or ``"mutual_information"``; see
            `docs/guide/out_of_domain.md`.
        layer: path in the network of the layer whose input, flattened, is the features. By default
            the linear layer that runs last; ``""`` is the whole network, whose input is x. Of
            several paths the features are the channels of the outputs ``[n, channels, ...]``, by
            mean and standard deviation over positions: all BatchNorm layers separate images of
            other sets best.
        num_samples: number of draws, each of which takes a pass.
        fraction: fraction of inputs like the training data that may be refused.
        held_out: fraction of the training rows that the score is not fitted to. Of their n scores
            the k-th smallest is the threshold, k = floor(fraction (n + 1)).
        batch_size: inputs per pass, as for `predict`.
        seed: seed of the choice of those rows, and of the draws; the global random state is left
            alone.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: data, a name or a number do not fit, a score of classes is taken for other
            targets, or features do not vary.
    """
    kind("model", model, nn.Module)
    one_of("score", score, SCORES)
    if not isinstance(layer, str | Sequence | None):
        raise TypeError(f"layer must be a path, several paths or None, got {layer!r}")
    probability("fraction", fraction)
    x, y = as_tensors(train, missing=True)
    labels = _labels(model, y)
    if labels is None and score not in _WITHOUT_CLASSES:
        raise ValueError(f"score must be one of {_WITHOUT_CLASSES} without classes, got {score}")
    labels = torch.zeros(len(x), dtype=torch.long) if labels is None else labels
    if score == "relative_mahalanobis" and not labels.any():  # it is 0 everywhere
        raise ValueError(f"train must have two classes or more for score {score!r}, got one")
    held_out = probability("held_out", held_out)
    (x, labels), (x_held, _) = split(x, labels, fraction=held_out, seed=seed)
    exact = Fraction(repr(float(fraction)))  # the decimal number that was written
    rank = math.floor((len(x_held) + 1) * exact)
    if rank < 1:
        least, got = math.ceil(1 / exact) - 1, f"held_out leaves {len(x_held)} rows of train"
        raise ValueError(f"fraction {fraction} needs {least} held-out rows or more, {got}")
    num_samples, draws = count("num_samples", num_samples), dict[str, Tensor]()
    if isinstance(model, BayesianModel) == (posterior is None):
        got = f"got {type(posterior).__name__} for a {type(model).__name__}"
        raise TypeError(f"posterior must be None for all but a BayesianModel, {got}")
    if isinstance(model, BayesianModel):
        require_guide(posterior)
        rows = checked_inputs(model, posterior, x, move=False)
        with seeded(seed), own_store(model, posterior):
            chunks = list(posterior_draws(model, posterior, rows, num_samples))
        draws = {name: torch.cat([chunk[name] for chunk in chunks]).detach() for name in chunks[0]}
    layer = layer if layer is None or isinstance(layer, str) else list(layer)
    detector = Detector(model, draws, score, layer, [], -math.inf)
    if score in _OF_FEATURES:
        fit, _ = _OF_FEATURES[score]
        runs = detector._runs(x, batch_size)
        detector = replace(detector, fitted=[fit(phi, labels.to(phi.device)) for phi, _ in runs])
    scores = detector.score_samples(x_held, batch_size=batch_size)
    return replace(detector, threshold=scores.kthvalue(rank).values.item())


_STATE = {  # fields that are saved
    "draws": dict[str, Tensor],
    "score": str,
    "layer": str | list[str] | None,
    "fitted": list[dict[str, Tensor]],
    "threshold": float,
}


@dataclass(frozen=True, eq=False)
class Detector:
    """Scores of inputs, and refusal of those unlike the training data; made by `ood`.

    Args:
        model: the model or network; further training invalidates the detector.
        draws: draws of the latents by site name, ``[S, ...]``; none for a network.
        score: name of the score.
        layer: path of the layer whose input is the features; ``None`` is the last linear one;
            several are those whose outputs' channels are.
        fitted: what the score keeps of the training features, for each draw.
        threshold: inputs of a lower score are refused.
    """

    model: nn.Module = field(repr=False)
    draws: dict[str, Tensor] = field(repr=False)
    score: str
    layer: str | list[str] | None
    fitted: list[Fitted] = field(repr=False)
    threshold: float

    @locked
    def score_samples(self, x: Any, *, batch_size: int | None = None) -> Tensor:
        """Return the scores of inputs, ``[n]``: the higher, the more like the training data.

        Args:
            x: inputs, ``[n, ...]``, a tensor or array, or several of them as for `predict`.
            batch_size: inputs per pass, as for `predict`.

        Raises:
            ValueError: inputs do not fit, are empty or not finite, or overflow in the network.
        """
        runs = self._runs(x, batch_size)
        if attribute := _OF_PREDICTION.get(self.score):
            log_probs = torch.stack([_logits(outputs).log_softmax(1) for _, outputs in runs])
            uncertainty: Tensor = getattr(ClassificationPrediction(log_probs), attribute)
            return -uncertainty
        if of_outputs := _OF_OUTPUTS.get(self.score):
            return torch.stack([of_outputs(_logits(outputs)) for _, outputs in runs]).mean(0)
        _, of_features = _OF_FEATURES[self.score]
        pairs = zip(runs, self.fitted, strict=True)
        return torch.stack([of_features(phi, fitted) for (phi, _), fitted in pairs]).mean(0)

    def predict(self, x: Any, *, batch_size: int | None = None) -> Tensor:
        """Return 1 for inputs like the training data and -1 for others, int64 ``[n]``.

        Arguments and errors are those of `score_samples`.
        """
        return (self.score_samples(x, batch_size=batch_size) >= self.threshold).long() * 2 - 1

    def save(self, path: str | PathLike[str]) -> None:
        """Save all but the model in a folder, replacing an earlier save in one step.

        Raises:
            OSError: the folder cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        state = {name: encode(getattr(self, name), name, tensors) for name in _STATE}
        spec = {"model": digest(self.model.state_dict().values()), **state}
        tensors = {name: cpu_copy(value) for name, value in tensors.items()}
        write(as_path(path), "detector", spec, tensors)

    @classmethod
    def load(cls, path: str | PathLike[str], model: nn.Module) -> Detector:
        """Read what `save` wrote, for the model of the detector; nothing is executed.

        Raises:
            FileNotFoundError: there is no such folder.
            LoadError: a file is damaged, or of something else; or the model has other parameters,
                or random weights of other names or shapes.
        """
        kind("model", model, nn.Module)
        spec, tensors = read(as_path(path), "detector")
        device = next((x.device for x in model.parameters()), None)
        tensors = {name: value.to(device) for name, value in tensors.items()}
        with loading(path):
            if spec.pop("model") != digest(model.state_dict().values()):
                raise LoadError(
                    "model must have the parameters of the saved detector's, got others"
                )
            state = {name: decode(value, tensors) for name, value in spec.items()}
            require_form(state, _STATE)
            one_of("score", state["score"], SCORES)
            shapes = model.latent_shapes() if isinstance(model, BayesianModel) else {}
            if any(shapes.get(name) != values.shape[1:] for name, values in state["draws"].items()):
                raise LoadError("model must have the weights of the saved detector's, got others")
            return cls(model, **state)

    def _runs(self, x: Any, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features ``[n, d]`` and outputs ``[n, ...]`` of each draw."""
        x = checked_inputs(self.model, self.draws or self.model, x, move=not isinstance(x, Tensor))
        rows = default_rows(x) if batch_size is None else count("batch_size", batch_size)
        size = len(next(iter(self.draws.values()))) if self.draws else 1
        for s in range(size):
            draw = {name: values[s] for name, values in self.draws.items()}
            passes = [self._pass(batch, draw) for batch in x.split(rows)]
            features, outputs = map(torch.cat, zip(*passes, strict=True))
            expected = [x.shape[-1] for x in self.fitted[s].values()] if self.fitted else []
            if expected and features.shape[1] != (d := expected[0]):
                raise ValueError(
                    f"x must have {d} features as in training, got {features.shape[1]}"
                )
            require_numbers({"features": features.unsqueeze(0), "outputs": outputs.unsqueeze(0)})
            yield features, outputs

    @torch.no_grad()
    def _pass(self, x: Rows, draw: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return features and outputs by one draw; or the outputs twice if it needs none."""
        model: Any = self.model
        network = model.network if isinstance(model, BayesianModel) else model
        features, outputs = list[Tensor](), list[Tensor]()

        def keep_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:  # as no layer changes it
            features[:] = [inputs[0].flatten(1).clone()]

        def keep_channels(_: nn.Module, inputs: Any, output: Any) -> None:
            y = tensor_of(output).unsqueeze(-1).flatten(2)  # [n, channels, positions]
            features.extend([y.mean(2), y.std(2, correction=0)][: min(2, y.shape[2])])

        def keep_outputs(_: nn.Module, inputs: Any, output: Any) -> None:
            outputs[:] = [at_least_single(tensor_of(output))]

        layers = _layers(network, self.layer) if self.score in _OF_FEATURES else []
        with pyro.validation_enabled(False), evaluating(model), ExitStack() as hooks:
            for layer in layers:
                if isinstance(self.layer, list):
                    hooks.enter_context(layer.register_forward_hook(keep_channels))
                else:
                    hooks.enter_context(layer.register_forward_pre_hook(keep_input))
            hooks.enter_context(network.register_forward_hook(keep_outputs))
            try:
                if draw:
                    model.predictive(x, draw)
                else:
                    args, kwargs = call_arguments(x)
                    model(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                shape = list(x.shape)
                raise ValueError(f"x of shape {shape} does not fit the network: {error}") from error
        if self.score in _OF_FEATURES and not features:
            raise ValueError(f"layer must be one that the network runs, got {self.layer!r}")
        return at_least_single(torch.cat(features, 1)) if features else outputs[0], outputs[0]


def _layers(network: nn.Module, layer: str | list[str] | None) -> list[nn.Module]:
    """Return the layers of these paths, or all linear layers."""
    if layer is None:
        linear: list[nn.Module] = [m for m in network.modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise ValueError(
                "layer must be a path, '' of the input, for a network without linear layers"
            )
        return linear
    names = dict(network.named_modules())
    paths = layer if isinstance(layer, list) else [layer]
    if not paths or not all(path in names for path in paths):
        raise ValueError(f"layer must be one of {list(names)}, or several, got {layer!r}")
    return [names[path] for path in paths]


def _logits(outputs: Tensor) -> Tensor:
    """Return logits ``[n, C]`` of the classes; of one output f those are -f/2 and f/2."""
    if outputs.dim() != 2:
        raise ValueError(f"model must have outputs [n, C], got shape {list(outputs.shape)}")
    return outputs if outputs.shape[1] > 1 else torch.cat([-outputs / 2, outputs / 2], 1)


def _labels(model: nn.Module, y: Tensor) -> Tensor | None:
    """Return the class of each row, int64 ``[n]``; None for other targets."""
    of_classes = not y.is_floating_point()
    if isinstance(model, BayesianModel):
        likelihood = model.likelihood
        of_classes = isinstance(likelihood, Categorical | Bernoulli) and likelihood.is_standard
    if not of_classes or y.numel() > len(y):
        return None
    return y.flatten().unique(return_inverse=True)[1]

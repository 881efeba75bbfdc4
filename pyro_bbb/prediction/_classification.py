# SPDX-License-Identifier: Apache-2.0
r"""Predicted classes: probabilities, and the split of their entropy.

The predictive is the mean probability $\bar p_c = \frac1S\sum_s p_c(w_s)$. The law of total entropy
splits its uncertainty,

$$H(\bar p) = \underbrace{E_w H(p(w))}_{\text{aleatoric}}
  + \underbrace{E_w \mathrm{KL}[p(w) \,\|\, \bar p]}_{\text{epistemic}}$$

aleatoric remains for known weights, epistemic is due to the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.nn.functional import logsigmoid

from pyro_bbb._utils.locking import cached_property
from pyro_bbb._utils.tables import first_rows
from pyro_bbb._utils.validation import fraction, holds_labels, tensor
from pyro_bbb.distributions.observation import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def class_log_probs(distribution: Any) -> Tensor | None:
    """Return the classes' log-probabilities ``[S, n, C]``; ``None`` for other targets."""
    first = getattr(distribution, "parts", [distribution])[0]  # of stacked ones
    if not isinstance(first, (Categorical, Bernoulli)):
        return None
    logits: Tensor = distribution.logits
    if isinstance(first, Categorical):
        return logits
    log_probs = torch.stack([logsigmoid(-logits), logsigmoid(logits)], dim=-1)
    # an infinite logit is an overflow: NaN, as from a softmax
    log_probs = log_probs + (logits - logits).unsqueeze(-1)
    single = log_probs.dim() == 4 and log_probs.shape[2] == 1
    return log_probs.squeeze(2) if single else log_probs


@dataclass(frozen=True, repr=False)
class ClassificationPrediction:
    """Predicted classes of n examples by S draws of the weights.

    Targets of several parts (``[n, T]``), such as the labels of a `Bernoulli` of several outputs,
    add their dimensions after n everywhere: ``probs[..., 1]`` is then ``[n, T]``, each label's
    probability of being 1. For one output ``probs`` is ``[n, 2]``.

    Args:
        sample_log_probs: log-probabilities of each draw, ``[S, n, C]``, nats.
        sampler: what `predict` drew: ``"weights"``, common to all inputs, or the ``"outputs"`` of
            each input.
        ignored: entries of targets that do not count in `log_prob`: those of a label, or "nan".
    """

    sample_log_probs: Tensor
    sampler: str = "weights"
    ignored: int | str | None = None

    def __repr__(self) -> str:
        samples, *inputs, classes = self.sample_log_probs.shape
        drawn = f"{samples:,} samples of {self.sampler}"
        return f"ClassificationPrediction(inputs {inputs}, {classes:,} classes, {drawn})"

    def _repr_markdown_(self) -> str:
        names = ("label", "confidence", "entropy", "epistemic")
        return f"`{self!r}`\n\n{first_rows({name: getattr(self, name) for name in names})}"

    def plot(self, index: int = 0, ax: Axes | None = None) -> Axes:
        """Draw every draw's class probabilities for one input, by `plots.class_probabilities`."""
        from pyro_bbb import plots

        return plots.class_probabilities(plots.axes(ax), self, index)

    @cached_property
    def sample_probs(self) -> Tensor:
        """Class probabilities of each draw, ``[S, n, C]``."""
        return self.sample_log_probs.exp()

    @cached_property
    def log_probs(self) -> Tensor:
        """Logarithm of the mean probabilities, ``[n, C]``, nats."""
        return self.sample_log_probs.logsumexp(0) - math.log(len(self.sample_log_probs))

    @cached_property
    def probs(self) -> Tensor:
        """Return the posterior predictive: mean probabilities, ``[n, C]``."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """The most probable class, int64 ``[n]``."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of `label`, ``[n]``."""
        return self.probs.amax(-1)

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty: entropy of `probs`, ``[n]``, nats; `aleatoric` + `epistemic`."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def aleatoric(self) -> Tensor:
        """Expected entropy of one draw's probabilities, ``[n]``, nats."""
        return torch.special.entr(self.sample_probs).sum(-1).mean(0)

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of class and weights, ``[n]``, nats (Houlsby et al. 2011, BALD).

        Computed as the mean KL from the predictive to the draws, which is 0 for one draw.
        """
        gain = self.sample_probs * (self.sample_log_probs - self.log_probs)
        return gain.where(self.sample_probs != 0, torch.zeros_like(gain)).sum(-1).mean(0)

    def refuse(self, threshold: float) -> Tensor:
        """Return the inputs to abstain on, bool ``[n]``: no class exceeds the threshold.

        Rare classes are refused most; `metrics.recall` and `metrics.refusal_p_value` measure that.

        Raises:
            ValueError: the threshold is outside [0, 1].
        """
        return ~(self.confidence > fraction("threshold", threshold))  # NaN is refused

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the true labels under the predictive, ``[n]``, nats.

        Raises:
            ValueError: the labels are not integers in [0, C) of the predictions' shape, or on
                another device. Of two classes they may be bools or floats 0 and 1, and ``[n, 1]``.
        """
        which = counted(tensor("y", y), self.ignored)
        labels = self.labels(y if which is None else y.masked_fill(~which, 0))
        log_prob = self.log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return log_prob if which is None else log_prob.where(which.view_as(log_prob), 0.0)

    def labels(self, y: Tensor) -> Tensor:
        """Return targets as int64 labels of the predictions' shape ``[n]``; raise as `log_prob`."""
        *shape, classes = self.log_probs.shape
        y = tensor("y", y)
        if y.device != self.log_probs.device:
            raise ValueError(f"y must be on {self.log_probs.device}, got one on {y.device}")
        if classes == 2 and list(y.shape) == [*shape, 1]:  # as fit takes them for one output
            y = y.squeeze(-1)
        if list(y.shape) != shape or not holds_labels(y, classes):
            raise ValueError(
                f"expected y of integer type (or 0 and 1 in two classes) and shape {shape}, "
                f"got {y.dtype} {list(y.shape)}"
            )
        if y.numel() and not (0 <= y.min() and y.max() < classes):
            bounds = f"{y.min()} to {y.max()}"
            raise ValueError(f"y must hold labels in [0, {classes - 1}], got {bounds}")
        return y.long()

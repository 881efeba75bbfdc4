# SPDX-License-Identifier: Apache-2.0
r"""Early stopping: validation after each epoch, and the parameters of the best one.

The score is the negative log predictive density of the validation data, in nats per example,

$$-\frac1n \sum_{i=1}^n \log \frac1S \sum_{s=1}^S p(y_i|x_i, w_s), \qquad w_s \sim q(w),$$

with random numbers that are the same in all epochs, and none of the training's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.inputs import parts_of, to_precision
from pyro_bbb.data import as_tensors
from pyro_bbb.guides import Guide
from pyro_bbb.persistence.state import digest
from pyro_bbb.prediction import predict
from pyro_bbb.training._checkpoint import TrainingState

DRAWS = 10  # of the weights; as many of each member of an ensemble, rounded up


class EarlyStopping:
    """Validation of a run, whose `TrainingState` has the scores and the best epoch."""

    def __init__(self, state: TrainingState, data: Any, patience: int | None) -> None:
        self.state, self.patience = state, patience
        missing = state.batches.model.likelihood.ignored is not None
        self.read = partial(as_tensors, device=state.device, missing=missing)
        self.batches: Iterable[Any] = data if isinstance(data, DataLoader) else [self.read(data)]
        with seeded(0):  # a loader draws
            first = next(self._pairs(), None)
        if first is None:
            raise ValueError("validation must hold at least one minibatch, got none")
        state.batches.model.check(*first)
        content = digest([*parts_of(first[0]).values(), first[1]])[:16]
        self.definition = {"validation": f"{type(data).__name__} {content}"}

    def after_epoch(self) -> bool:
        """Score the epoch that has ended; return whether training ends."""
        at, losses = self.state.progress, self.state.history.validation_loss
        losses.append(self._loss())
        if self.patience is None:
            return False
        best = math.inf if at.best_epoch is None else losses[at.best_epoch]
        if losses[-1] < best:
            at.best_epoch = len(losses) - 1
            self.state.best.update({name: x.clone() for name, x in self._trained()})
        since = len(losses) if at.best_epoch is None else len(losses) - 1 - at.best_epoch
        return since >= self.patience

    def restore(self) -> None:
        """Give model and guide the parameters and buffers of the best epoch."""
        for name, x in self._trained():
            if name in self.state.best:
                x.copy_(self.state.best[name])

    def _loss(self) -> float:
        model, guide, total, rows = self.state.batches.model, self.state.guide, 0.0, 0
        size = getattr(guide, "size", 1)
        draws = size * math.ceil(DRAWS / size)
        with seeded(0):
            for x, y in self._pairs():
                prediction = predict(model, _points(guide, x), x, num_samples=draws, seed=0)
                total += float(prediction.log_prob(y).double().sum())
                rows += len(y)
        return max(self.state.batches.processes.gather(-total / rows))

    def _pairs(self) -> Iterator[tuple[Any, Tensor]]:
        for x, y in map(self.read, self.batches):
            yield to_precision(x, self.state.guide, self.state.batches.model), y

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors that training changes, by name."""
        for prefix, module in (("model", self.state.model), ("guide", self.state.guide)):
            for name, x in chain(module.named_parameters(), module.named_buffers()):
                if x.requires_grad or not isinstance(x, nn.Parameter):
                    yield f"{prefix}.{name}", x.detach()


def _points(guide: Any, x: Any) -> Any:
    """Return the points of guides that are not a distribution in training, or else the guide."""
    members = guide.members if isinstance(guide, Guide) else []
    if not members or not all(member.is_point for member in members):
        return guide
    points = [member.median(x[:1]) for member in members]
    return {name: torch.stack([point[name] for point in points]) for name in points[0]}

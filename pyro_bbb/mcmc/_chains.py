# SPDX-License-Identifier: Apache-2.0
"""Draws of Markov chains: by site for prediction, by chain for diagnosis."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_bbb import metrics
from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.extras import extra
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import as_device, count, floating, kind
from pyro_bbb.data import as_tensors
from pyro_bbb.latents import one_by_one
from pyro_bbb.models import BayesianModel


@dataclass(frozen=True, eq=False)
class Chains(Mapping[str, Tensor]):
    """Posterior draws of several chains of equal length.

    As a mapping it has, by site name, the draws of all chains one after the other,
    ``[chains * draws, ...]``: what `predict` takes.
    """

    by_chain: Mapping[str, Tensor]
    """Draws by site name, ``[chains, draws, ...]``."""
    log_density: Tensor
    """Log-density of latents (in unconstrained space) and data, ``[chains, draws]``."""
    diverging: Tensor
    """Whether the trajectory to the draw left its energy by more than 1000, ``[chains, draws]``."""
    acceptance: Tensor
    """Mean acceptance probability along the trajectory to the draw, ``[chains, draws]``."""
    num_gradients: Tensor
    """Gradients that the draw took, ``[chains, draws]``."""
    step_size: Tensor
    """Leapfrog step after warm-up, ``[chains]``."""
    seconds: float
    """Wall time of the whole run, with warm-up."""
    restarts: Tensor | None = None
    """Times that `sample` returned a diverged chain with a smaller step, ``[chains]``."""
    r_hat_of_functions: float | None = None
    """R-hat at which `sample` stopped: 95 % of the compared outputs have at most this."""
    ess_of_functions: float | None = None
    """Effective sample size at which `sample` stopped: 95 % have at least this."""

    def __getitem__(self, name: str) -> Tensor:
        return self.by_chain[name].flatten(0, 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_chain)

    def __len__(self) -> int:
        return len(self.by_chain)

    def __eq__(self, other: object) -> bool:  # a mapping's own would compare tensors
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        chains, draws = self.diverging.shape
        return (
            f"Chains({chains} chains of {draws} draws of {list(self)}, "
            f"{int(self.diverging.sum())} diverging, {self.seconds:.1f} s)"
        )

    def thin(self, num_samples: int) -> Chains:
        """Keep some of the draws, evenly spaced in each chain, such as for a smaller save.

        Args:
            num_samples: draws to keep at most, of all chains together; each keeps at least its
                last one.

        Raises:
            ValueError: the number is not positive.
        """
        chains, draws = self.diverging.shape
        left = min(draws, max(1, count("num_samples", num_samples) // chains))
        rows = torch.arange(1, left + 1) * draws // left - 1
        thinned = self._map(lambda values: values[:, rows] if values.dim() > 1 else values)
        # a draw took the gradients of those left out before it, too
        total = self.num_gradients.cumsum(1)[:, rows]
        num_gradients = total.diff(dim=1, prepend=torch.zeros_like(total[:, :1]))
        return replace(thinned, num_gradients=num_gradients)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Chains:
        """Return the chains on a device, and floating-point numbers in a type, as torch's `to`."""
        device, dtype = None if device is None else as_device(device), floating(dtype)
        return self._map(
            lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None)
        )

    def r_hat(self) -> dict[str, Tensor]:
        r"""Rank-normalised split $\hat R$ by site name, an entry for each of the latent's.

        Near 1 where the chains agree; above 1.01 they do not yet. See `metrics.r_hat`.

        Raises:
            ValueError: there is only one chain, or fewer than four draws.
        """
        return {name: metrics.r_hat(values) for name, values in self.by_chain.items()}

    def ess(self, kind: str = "bulk") -> dict[str, Tensor]:
        """Effective number of independent draws by site name, an entry for each of the latent's.

        Args:
            kind: ``"bulk"`` for estimates of location, ``"tail"`` for the 5 % and 95 % quantiles
                (both Vehtari et al. 2021), ``"mean"`` or ``"sd"`` for the standard error of these.

        Raises:
            ValueError: an unknown kind, or fewer than four draws.
        """
        return {name: metrics.ess(values, kind) for name, values in self.by_chain.items()}

    def to_arviz(self, model: BayesianModel | None = None, data: Any = None) -> Any:
        """Return the chains as ArviZ holds them: `InferenceData`, or a `DataTree` from ArviZ 1 on.

        Groups ``posterior`` and ``sample_stats``; with model and data also ``log_likelihood`` of
        each example and ``observed_data``, which comparing models by `arviz.loo` needs.

        Args:
            model: the model of the chains.
            data: the ``(x, y)`` that the chains were conditioned on.

        Raises:
            ValueError: only one of model and data is given.
            TypeError: the model or the data are of another kind.
            ImportError: ArviZ is not installed.
        """
        if (model is None) != (data is None):
            raise ValueError("model and data must be given together")
        groups = {
            "posterior": {name: values.numpy(force=True) for name, values in self.by_chain.items()},
            "sample_stats": {
                "lp": self.log_density.numpy(force=True),
                "diverging": self.diverging.numpy(force=True),
                "acceptance_rate": self.acceptance.numpy(force=True),
                "n_steps": self.num_gradients.numpy(force=True),
                "step_size": self.step_size[:, None].expand(self.diverging.shape).numpy(force=True),
            },
        }
        if model is not None:
            kind("model", model, BayesianModel)
            x, y = as_tensors(data)
            pointwise = _log_likelihood(model, dict(self), x, y).unflatten(0, self.diverging.shape)
            groups["log_likelihood"] = {"obs": pointwise.numpy(force=True)}
            groups["observed_data"] = {"obs": y.numpy(force=True)}
        arviz = _arviz()
        if int(arviz.__version__.split(".")[0]) == 0:
            return arviz.from_dict(**groups)
        return arviz.from_dict(groups)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Chains:
        """Apply a function to each tensor; those of two or more dimensions go by draw."""
        tensors: Any = {
            name: function(x) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        by_chain = {name: function(x) for name, x in self.by_chain.items()}
        return replace(self, by_chain=by_chain, **tensors)


@locked
def _arviz() -> Any:
    with extra("mcmc"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # announces version 1 on import
        import arviz
    return arviz


def _log_likelihood(
    model: BayesianModel, draws: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> Tensor:
    """Log-density of each example for each draw in nats, ``[draws, n]``."""

    def run(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        trace = poutine.trace(poutine.condition(model, data=draw)).get_trace(x, y)
        observed: Any = trace.nodes["obs"]
        return {"obs": observed["fn"].log_prob(observed["value"])}

    with own_store(model), torch.no_grad(), pyro.validation_enabled(False), evaluating(model):
        return one_by_one(run, draws)["obs"]

# SPDX-License-Identifier: Apache-2.0
"""Probabilistic model: random weights, a network, and a likelihood of its outputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from torch import Size, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import _get_current_function_mode_stack

from pyro_bbb._param_store import HandlersParams, own_param, own_store
from pyro_bbb._utils.context import autocast_network, evaluating
from pyro_bbb._utils.inputs import (
    Rows,
    as_inputs,
    at_least_single,
    call_arguments,
    parts_of,
    require_inputs,
    tensor_of,
    weight_of,
)
from pyro_bbb._utils.locking import GLOBAL_LOCK, locked
from pyro_bbb._utils.validation import count, tensor
from pyro_bbb.distributions.improper import Improper
from pyro_bbb.distributions.observation import Stacked, stack_draws
from pyro_bbb.distributions.summed_event import innermost
from pyro_bbb.guides.scale_kl import scale_kl, scale_rows
from pyro_bbb.latents import (
    Record,
    Run,
    declared_names,
    name_parts,
    one_by_one,
    over_draws,
    plate_shape,
    repr_unseen,
    sample_names,
    substituted,
    unseen,
)
from pyro_bbb.likelihoods import Categorical, Likelihood, align
from pyro_bbb.priors import Prior

__all__ = ["BayesianModel"]

_CHANNELS_FIRST = (_ConvNd, _BatchNorm, nn.Upsample)


class BayesianModel(PyroModule):
    r"""Network with random weights, and a likelihood of the observations given its outputs.

    With `Trace_ELBO` a minibatch $D_i$ costs $F_i = \pi_i\,\mathrm{KL}[q\|p] - \log p(D_i|w)$
    nats (Blundell et al. 2015, equations 8 and 9), $\pi_i$ being ``kl_weight``. It is an ordinary
    Pyro model: SVI, NUTS and every autoguide take it.

    Args:
        network: a `PyroModule` with `PyroSample` weights, or any module that holds such, as an
            ``nn.Sequential`` of Bayesian layers does.
        likelihood: from the network's outputs to the distribution of the observations.
        num_data: size of the full training set, N: the number of independent examples. With a
            random sampler, the rows it can draw; with a fixed subset, the subset's size.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: ``num_data`` is not a positive integer.
    """

    def __init__(self, network: nn.Module, likelihood: Likelihood, num_data: int) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a torch.nn.Module, got {type(network).__name__}")
        if not any(isinstance(m, PyroModule) for m in network.modules()):
            raise TypeError(
                f"network must have random weights, got an ordinary {type(network).__name__}: make "
                "them so by bayesianize(network)"
            )
        if not isinstance(likelihood, Likelihood):
            raise TypeError(f"likelihood must be a pyro_bbb.likelihoods one, got {likelihood!r}")
        for part in (network, likelihood):
            context = _Context()  # of a module that has run outside a model
            for module in part.modules():
                if isinstance(module, PyroModule):
                    module._pyro_context = context
        self.network = network
        self.likelihood = likelihood
        self.num_data: int = count("num_data", num_data)
        name_parts(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` with the model's own parameters, never another model's by name."""
        with own_store(self) as store, HandlersParams():
            result = super().__call__(*args, **kwargs)
            own = {id(parameter) for parameter in self.parameters()} if store else set()
            for name, parameter in store.items():
                if id(parameter) not in own:
                    raise ValueError(
                        f"pyro.param({name!r}) inside the network would not be part of the model: "
                        "declare it as an attribute instead, self.name = PyroParam(...)"
                    )
        return result

    def forward(self, x: Any, y: Tensor | None = None, kl_weight: float | Tensor = 1.0) -> Tensor:
        """Sample or score the observations.

        Inside a vectorised plate (of particles or samples) each entry has its own weights and
        outputs.

        Args:
            x: inputs, ``[batch, ...]``; a tuple or dict of them is the network's arguments by
                position or by name.
            y: targets, ``[batch, ...]``; ``None`` samples the observations.
            kl_weight: factor of the log-density of all latent variables, at least 0.

        Returns:
            The observations, given or sampled.

        Raises:
            ValueError: shapes do not fit, or the weight is negative.
            TypeError: an argument is of another kind.
        """
        x = require_inputs(x)
        with scale_kl(kl_weight):
            if plate_shape() != Size():  # in a plate
                with poutine.trace() as drawn:
                    self.draw_latents()
                observation, outputs = self._in_plates(x, drawn.trace)
            else:
                self.draw_latents()
                outputs = self._outputs_at(x)
                observation = self.likelihood(outputs)
        if not isinstance(observation, TorchDistributionMixin):  # torch's own
            observation = dist.Independent(observation, 0)
        if y is not None:
            y = align(self.likelihood.prepare(tensor("y", y), outputs), observation.event_shape)
            if len(y) != observation.batch_shape[-1]:  # else one row would be broadcast
                rows = observation.batch_shape[-1]
                raise ValueError(f"expected y of {rows} rows as x has, got {len(y)}")
            observation, y = self.likelihood.without_ignored(observation, y)
        plate = pyro.plate("data", observation.batch_shape[-1], dim=-1)
        weight = weight_of(x)
        with plate, scale_rows(None if weight is None else weight.to(outputs.dtype)):
            return pyro.sample("obs", observation, obs=y)

    @locked
    def draw_latents(self) -> None:
        """Sample all declared latents, and announce the ordinary parameters to SVI.

        Without data, so that a guide has its latents from the start.
        """
        with self._pyro_context:
            for module in self.modules():  # whatever path the forward pass takes
                if isinstance(module, PyroModule):
                    for name in sample_names(module):
                        getattr(module, name)
            for name, parameter in self.named_parameters():
                if parameter.requires_grad:
                    own_param(name, parameter)

    def log_prior(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the log-density of all declared latents at these values by site name, in nats."""
        with own_store(self):
            conditioned = poutine.condition(self.draw_latents, data=dict(values))
            trace: Any = poutine.trace(conditioned).get_trace()
        log_prior: Tensor = trace.log_prob_sum()
        return log_prior

    def log_likelihood(
        self, values: Mapping[str, Tensor], x: Any, y: Tensor, num_draws: int | None = None
    ) -> Tensor:
        """Return the log-likelihood of a minibatch at values of the latents, in nats.

        Args:
            values: latents by site name, ``[S, ...]`` for the sum over S draws.
            x: inputs, as for `forward`.
            y: targets.
            num_draws: S.
        """
        if num_draws is not None:
            rows = self._over_draws(lambda draw: {"": self.log_likelihood(draw, x, y)}, values)
            return rows[""].sum()
        with substituted(self, values), poutine.trace() as traced:
            self(x, y)
        trace: Any = traced.trace
        log_likelihood: Tensor = trace.log_prob_sum(lambda _, site: site["is_observed"])
        return log_likelihood

    def latent_sites(self) -> dict[str, Any]:
        """Sites of the latents that the model declares, at a draw from the prior, by name."""
        with own_store(self), unseen(self):
            return dict(poutine.trace(self.draw_latents).get_trace().iter_stochastic_nodes())

    @property
    def has_improper_prior(self) -> bool:
        """Return whether a declared latent has a prior without a finite integral."""
        priors = [innermost(site["fn"]) for site in self.latent_sites().values()]
        return any(isinstance(prior, Improper) for prior in priors)

    def latent_shapes(self) -> dict[str, Size]:
        """Shapes of the latents that the model declares, by site name."""
        return {name: site["value"].shape for name, site in self.latent_sites().items()}

    def _in_plates(self, x: Rows, drawn: Any) -> tuple[Any, Tensor]:
        """Return the observations' distribution in the plates around the model, and the outputs."""
        sites = {name: site for name, site in drawn.nodes.items() if site["type"] == "sample"}
        shapes = {site["fn"].batch_shape for site in sites.values()}
        plates = torch.broadcast_shapes(*shapes)[:-1]  # without the dimension of the data
        if not plates:
            outputs = self._outputs_at(x)
            return self.likelihood(outputs), outputs
        draws = {
            name: site["value"].reshape(-1, *site["fn"].event_shape) for name, site in sites.items()
        }

        def with_latents(draw: dict[str, Tensor]) -> dict[str, Tensor]:
            for name, value in draw.items():
                self._pyro_context.set(name, value)
            return self._arguments(self._outputs_at(x))

        arguments = self._over_draws(with_latents, draws)
        outputs = next(iter(arguments.values()))
        if not self.likelihood.is_standard:
            return Stacked(self._observations(arguments), plates), outputs
        arguments = {k: v.reshape(*plates, *v.shape[1:]) for k, v in arguments.items()}
        family = self.likelihood.family(**arguments)
        return dist.Independent(family, len(family.batch_shape) - len(plates) - 1), outputs

    def _over_draws(self, run: Run, draws: Mapping[str, Tensor]) -> Record:
        """Return the results of a function for all draws of the latents."""
        if self.training:
            # a failed attempt at all draws at once would count a batch twice
            priors = [m for m in self.network.modules() if isinstance(m, Prior)]
            constant = {id(buffer) for prior in priors for buffer in prior.buffers()}
            if any(id(buffer) not in constant for buffer in self.network.buffers()):
                return one_by_one(run, draws)
        return over_draws(run, draws)

    def _outputs_at(self, x: Rows) -> Tensor:
        """Return the outputs, at least in single precision."""
        args, kwargs = call_arguments(x)
        with autocast_network(next(iter(parts_of(x).values())).device):
            outputs: Tensor = tensor_of(self.network(*args, **kwargs))
        return at_least_single(outputs) if isinstance(outputs, Tensor) else outputs

    def _arguments(self, outputs: Tensor) -> dict[str, Tensor]:
        if self.likelihood.is_standard:
            return self.likelihood.arguments(outputs)
        own = declared_names(self.likelihood)
        latents = {name: attrgetter(name)(self.likelihood).unsqueeze(0) for name in own}
        return {"outputs": outputs, **latents}

    def _observations(self, arguments: dict[str, Tensor]) -> list[Any]:
        """Return the observations' distribution of each draw, from its outputs and latents."""
        predictions = []
        for outputs, *latents in zip(*(arguments.values()), strict=True):
            for name, value in zip(list(arguments)[1:], latents, strict=True):
                self._pyro_context.set(f"likelihood.{name}", value[0])
            predictions.append(self.likelihood(outputs))
        return predictions

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], ...]:
        """Contexts for gradient checkpointing: what is computed again has the same weights.

        The ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` in the
        network. Without it a random weight of such a part is an error in the backward pass.

        Returns:
            A context for the first run, and one for the second.
        """
        modes = list(_get_current_function_mode_stack())  # such as a gradient estimator
        noise = [mode.as_now() for mode in modes if hasattr(mode, "as_now")]
        values, thread = dict(self._pyro_context.cache), threading.get_ident()
        return nullcontext(), self._as_then(values, modes, noise, thread)

    @contextmanager
    def _as_then(
        self,
        values: dict[str, Any],
        modes: list[Any],
        noise: list[AbstractContextManager[None]],
        thread: int,
    ) -> Iterator[None]:
        """Give the running model the weights and noise of the first run, for the second."""
        active = _get_current_function_mode_stack()
        with ExitStack() as stack:
            for context in [*(mode for mode in modes if mode not in active), *noise]:
                stack.enter_context(context)
            # autograd's thread does not wait: the training holds the lock and waits for it
            if GLOBAL_LOCK.acquire(blocking=threading.get_ident() == thread):
                stack.callback(GLOBAL_LOCK.release)
                stack.enter_context(own_store(self))
            stack.enter_context(self._pyro_context)
            self._pyro_context.cache.update(values)
            yield

    __repr__ = repr_unseen

    def extra_repr(self) -> str:
        """Size of the data, and how many values are random."""
        shapes = self.latent_shapes().values()
        return f"num_data={self.num_data:,}, {sum(x.numel() for x in shapes):,} random values"

    def initial_locs(self) -> dict[str, Tensor]:
        """Values of weights before conversion, by site name: initial means of a guide."""
        return {
            f"{path}.{name}": value
            for path, m in self.named_modules()
            for name, value in getattr(m, "_pyro_bbb_initial", {}).items()
        }

    def predictive(self, x: Any, draw: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Arguments of the likelihood's family at ``x``.

        Args:
            x: inputs, ``[batch, ...]``, as for `forward`.
            draw: values of the latents by site name; by default those that handlers supply.

        Returns:
            Tensors by name, each of leading dimension ``batch``; for a user's likelihood the
            ``outputs``, and its latents with a leading dimension of 1.
        """
        latents = own_store(self) if draw is None else substituted(self, draw)
        with latents, self._pyro_context:
            return self._arguments(self._outputs_at(as_inputs(x)))

    def observed(self, arguments: dict[str, Tensor]) -> Any:
        """Return the distribution ``[S, batch, ...]`` by tensors of `predictive` for S draws."""
        if self.likelihood.is_standard:
            return self.likelihood.family(**arguments)
        with torch.no_grad(), own_store(self), self._pyro_context:
            return stack_draws([innermost(x) for x in self._observations(arguments)])

    @locked
    def check(self, x: Any, y: Tensor | None = None) -> None:
        """Check that data fit network and likelihood, by running the first two examples.

        Args:
            x: inputs, ``[n, ...]``, as for `forward`.
            y: targets, ``[n, ...]``.

        Raises:
            ValueError: the inputs do not fit the network, or the targets the likelihood.
            TypeError: an argument is not a tensor.
        """
        x = require_inputs(x)
        quiet = pyro.validation_enabled(False)  # outputs may be infinite
        with own_store(self), quiet, unseen(self):
            with evaluating(self), self._pyro_context:
                outputs, channels_first = self._outputs_of_two(x)
                if y is None:
                    return
                same_sizes = outputs.dim() > 2 and tensor("y", y).shape[1:] == outputs.shape[2:]
                if channels_first and same_sizes and isinstance(self.likelihood, Categorical):
                    raise ValueError(
                        "the classes must be the last dimension of the outputs, got outputs "
                        f"{[*outputs.shape[1:]]} of a layer with the channels first: return "
                        "outputs.movedim(1, -1)"
                    )
                self.likelihood.check(outputs, y)

    def _outputs_of_two(self, x: Rows) -> tuple[Tensor, bool]:
        """Return outputs of two examples, and whether a layer with channels first gave them."""
        made: list[Tensor] = []
        layers = [m for m in self.network.modules() if isinstance(m, _CHANNELS_FIRST)]
        hooks = [m.register_forward_hook(lambda *call: made.append(call[2])) for m in layers]
        args, kwargs = call_arguments(x[:2])
        try:
            outputs: Tensor = tensor_of(self.network(*args, **kwargs))
        except (RuntimeError, IndexError, NotImplementedError) as error:
            tensors = parts_of(x).items()
            got = ", ".join(f"{k} of shape {list(v.shape)} and {v.dtype}" for k, v in tensors)
            indices = [name for name, x in tensors if not x.is_floating_point()]
            hint = "".join(f"; if {name} are no indices, call {name}.float()" for name in indices)
            raise ValueError(f"{got} does not fit the network: {error}{hint}") from error
        finally:
            for hook in hooks:
                hook.remove()
        return outputs, any(channels is outputs for channels in made)


def require_guide(guide: Any) -> None:
    """Raise TypeError where a class, a model or a network stands for a guide."""
    if isinstance(guide, type | BayesianModel):
        is_class = isinstance(guide, type)
        got = f"the class {guide.__name__}" if is_class else "a BayesianModel"
        name = guide.__name__ if is_class else "AutoSoftplusNormal"
        raise TypeError(f"guide must be a guide, got {got}: did you mean {name}(model)?")

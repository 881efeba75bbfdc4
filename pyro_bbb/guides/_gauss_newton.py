# SPDX-License-Identifier: Apache-2.0
r"""Gauss-Newton curvature of one batch, $J^\top \Lambda J$ plus that of the prior.

J are the derivatives of an example's outputs by the latents, $\Lambda$ the Hessian of its negative
log-likelihood in the outputs (Immer et al. 2021, equation 6). A layer of inputs $a_t$ and gradients
$g_{kt}$ of output k at its own output, over positions t where its weights are used, has
$J_k = \sum_t g_{kt} a_t^\top$. Its block of the curvature is

| structure | sum over examples |
|---|---|
| full | $J^\top \Lambda J$ |
| diagonal | $\mathrm{diag}(J^\top \Lambda J)$, of one position: $(\Lambda g)^\top g\; a^2$ |
| Kronecker | $\big(\sum g g^\top\big) \otimes \frac{1}{\#}\sum a a^\top$, KFAC-expand |

(Martens and Grosse 2015; Eschenhagen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_bbb._handlers.layer_uses import LayerUse, LayerUses
from pyro_bbb._utils.inputs import Rows, weight_of
from pyro_bbb._utils.locking import cached_property
from pyro_bbb.guides.covariance import CovariancePart, Kronecker, PartsNormal
from pyro_bbb.guides.tangent import NetworkFunction, OutputMoments, root_of
from pyro_bbb.latents import Latents

_ROWS = 64  # examples in one graph of `moments_by_layer`


@dataclass
class Use:
    """One use of a weight in a linear or convolution layer."""

    weight: str
    bias: str | None
    inputs: Tensor  # a, [n, positions, in]
    output: Tensor

    def gradients(self, by_output: Tensor) -> Tensor:
        """Return gradients at the output as ``[n, positions, out]``."""
        channels_last = by_output.movedim(1, -1) if self.output.dim() == 4 else by_output
        return channels_last.reshape(len(by_output), -1, channels_last.shape[-1])


def uses_of(calls: Iterable[LayerUse]) -> list[Use]:
    """Return the calls whose input can be split into positions."""
    uses = []
    for call in calls:
        inputs = _positions(call.function, call.arguments)
        if inputs is not None:
            uses.append(Use(call.weight, call.bias, inputs.detach(), call.output))
    return uses


def _positions(function: Any, arguments: Mapping[str, Any]) -> Tensor | None:
    """Return inputs ``[n, positions, in]``: of a convolution the patches; none for groups."""
    x: Tensor = arguments["input"]
    if function is not F.conv2d:
        return x.reshape(len(x), -1, x.shape[-1])
    padding = arguments.get("padding", 0)
    if arguments.get("groups", 1) != 1 or isinstance(padding, str):
        return None
    size, options = arguments["weight"].shape[2:], (arguments.get("dilation", 1), padding)
    return F.unfold(x, size, *options, arguments.get("stride", 1)).mT


@dataclass
class Linearization:
    """The negative log joint of one batch, with the network cut off from the rest of the model.

    Args:
        model: the model, in double precision.
        guide: the guide at its point, in double precision.
        x: inputs.
        y: targets.
        fraction: factor of the prior.
        watched: whether to collect the `uses` of weights, for `kronecker_factors` and `diagonal`.
    """

    model: Any
    guide: Any
    x: Rows
    y: Tensor
    fraction: float
    watched: bool
    f: Tensor = field(init=False)  # outputs [n, K], as a function of the latents
    curvature: Tensor = field(init=False)  # Lambda, [n, K, K]
    uses: list[Use] = field(init=False)

    def __post_init__(self) -> None:
        args = (self.x, self.y, self.fraction)
        at_point = poutine.trace(self.guide).get_trace(*args)
        values = {name: at_point.nodes[name]["value"] for name in self.guide.site_names}
        watched = values if self.watched else {}
        with _cut(self.model.network) as outputs, LayerUses(watched) as layers:
            joint = poutine.trace(poutine.replay(self.model, trace=at_point)).get_trace(*args)
        neg_log_joint = at_point.log_prob_sum() - joint.log_prob_sum()
        f, cut_off = outputs
        targets = (cut_off, self.guide.loc)
        by_f, by_z = torch.autograd.grad(
            neg_log_joint, targets, create_graph=True, materialize_grads=True
        )
        self.f, self.uses = f.flatten(1), uses_of(layers.uses)
        rows = [by_f.flatten(1)[:, k].sum() for k in range(self.f.shape[1])]
        columns = [_gradient(row, cut_off).flatten(1) for row in rows]
        self.curvature = torch.stack(columns, dim=2)
        self.by_f, self.by_z = by_f, by_z

    @cached_property
    def weight(self) -> Tensor:
        """Weights of the examples, ``[n]``."""
        weight = weight_of(self.x)
        return self.f.new_ones(len(self.f)) if weight is None else weight

    def jacobians(self, where: slice) -> Iterator[tuple[Tensor, Tensor]]:
        r"""Yield J ``[n, K, d]`` by a range of latents and $\Lambda J$, for some examples each."""
        function = NetworkFunction(self.model, self.guide.latents, self.guide.loc.detach(), where)
        begin = 0
        for jacobian in function.jacobians(self.x):
            yield jacobian, self.curvature[begin : begin + len(jacobian)] @ jacobian
            begin += len(jacobian)

    def rest(self) -> tuple[Tensor, Tensor]:
        """Return gradient and Hessian's diagonal of all but the network, ``[D]`` each."""
        return self.by_z.detach(), self._rest_times(torch.ones_like(self.by_z))

    def is_separable(self) -> bool:
        """Return whether that Hessian is diagonal, by its product with random signs."""
        fixed = torch.Generator().manual_seed(0)
        signs = (torch.randint(2, self.by_z.shape, generator=fixed) * 2.0 - 1).to(self.by_z)
        product = self._rest_times(signs)
        return torch.allclose(product, signs * self._rest_times(torch.ones_like(signs)))

    def coupled(self) -> Tensor:
        r"""Return the Hessian ``[D, D]`` of all but the network, and its mixed terms with f.

        The network stands as its tangent; mixed terms come from latents of the likelihood.
        """
        slope = jacobian_of(self.f.flatten(), self.guide.loc)
        mixed = slope.T @ jacobian_of(self.by_f.flatten(), self.guide.loc)
        return mixed + mixed.T + jacobian_of(self.by_z, self.guide.loc)

    def _rest_times(self, vector: Tensor) -> Tensor:
        return _gradient((self.by_z * vector).sum(), self.guide.loc).detach()

    def pulled_back(self, vector: Tensor) -> Iterator[tuple[Use, Tensor]]:
        r"""Yield $J^\top v$ at each use's output, ``[n, positions, out]``, for v ``[n, K]``."""
        targets = [use.output for use in self.uses]
        grads = torch.autograd.grad((self.f * vector).sum(), targets, retain_graph=True)
        for use, by_output in zip(self.uses, grads, strict=True):
            yield use, use.gradients(by_output)

    def kronecker_factors(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        r"""Return $\sum g g^\top$ and the sum over examples of the mean $a a^\top$, by site name.

        Biases have only the first.
        """
        sums: dict[str, list[Any]] = {}
        for use in self.uses:
            inner = use.inputs.flatten(0, 1)
            repeated = self.weight.repeat_interleave(len(inner) // len(self.weight))
            sums[use.weight] = [0.0, (repeated * inner.T) @ inner / use.inputs.shape[1]]
        for column in root_of(self.curvature).unbind(-1):  # Lambda = sum of column column^T
            for use, gradients in self.pulled_back(column):
                g = gradients.flatten(0, 1)
                sums[use.weight][0] = sums[use.weight][0] + g.T @ g
        for use in self.uses:
            if use.bias is not None:
                sums[use.bias] = [sums[use.weight][0], None]
        return {name: (out, inner) for name, (out, inner) in sums.items()}

    def diagonal(self) -> dict[str, Tensor]:
        r"""Return the diagonal of $J^\top \Lambda J$ over all examples, by site name."""
        sums: dict[str, Any] = {}
        single: dict[str, Any] = {}  # of uses at one position, at the output, [n, out]
        values, vectors = torch.linalg.eigh(self.curvature)
        for value, vector in zip(values.unbind(-1), vectors.unbind(-1), strict=True):
            for use, g in self.pulled_back(vector):
                if use.bias is not None:
                    sums[use.bias] = sums.get(use.bias, 0.0) + value @ g.sum(1).square()
                if g.shape[1] == 1:
                    square = value[:, None] * g[:, 0].square()
                    single[use.weight] = single.get(use.weight, 0.0) + square
                else:
                    squares = torch.einsum("n,noi->oi", value, (g.mT @ use.inputs).square())
                    sums[use.weight] = sums.get(use.weight, 0.0) + squares
        for use in self.uses:
            if use.weight in single:  # the square of a product is the product of squares
                sums[use.weight] = single[use.weight].T @ use.inputs[:, 0].square()
        return sums

    def not_in_layers(self) -> list[str]:
        """Return names of the network's latents that are not once a weight or bias of a layer."""
        used = [name for use in self.uses for name in (use.weight, use.bias)]
        network = self.guide.latents.of_role("weight", "adapter", "prior")
        return [latent.name for latent in network if used.count(latent.name) != 1]


def moments_by_layer(model: Any, latents: Latents, normal: PartsNormal, x: Rows) -> OutputMoments:
    r"""Return moments of the tangent's outputs, for Kronecker parts in the order of the latents.

    Under $W = M + Q\,(S \circ E)\,P^\top$ the covariance of outputs k and l is the sum over layers

    $$\sum_{ij} S_{ij}^2\,(Q^\top J_k P)_{ij}\,(Q^\top J_l P)_{ij}, \qquad
      \sum_i (Q^\top g_k)_i\,(Q^\top g_l)_i \sum_j S_{ij}^2\,(P^\top a)_j^2$$

    with the second form for a single position, where no derivative by a weight is made.
    """
    parts = dict(zip(latents, normal.parts, strict=True))
    function = NetworkFunction(model, latents, normal.loc, slice(0, latents.size))
    point = {name: z.detach().requires_grad_() for name, z in latents.constrain(normal.loc).items()}
    means, covariances = [], []
    for rows in x.split(_ROWS):
        with torch.enable_grad(), LayerUses(point) as layers:
            f = function.run(point, rows)
            uses, outputs = uses_of(layers.uses), f.flatten(1).sum(0).unbind()
        targets = [use.output for use in uses]
        grads = [torch.autograd.grad(output, targets, retain_graph=True) for output in outputs]
        covariance = f.new_zeros(len(f), len(outputs), len(outputs))
        for use, by_output in zip(uses, zip(*grads, strict=True), strict=True):
            g = torch.stack([use.gradients(grad) for grad in by_output], dim=1)  # [n, K, t, out]
            covariance += _layer_covariance(parts[use.weight], use.inputs, g)
            if use.bias is not None:
                root = parts[use.bias].times_root(g.sum(2))
                covariance += root @ root.mT
        means.append(f.detach())
        covariances.append(covariance.detach())
    return OutputMoments.jointly(torch.cat(means), torch.cat(covariances))


def _layer_covariance(part: CovariancePart, a: Tensor, g: Tensor) -> Tensor:
    """Return a weight's share ``[n, K, K]``, for a ``[n, t, in]`` and g ``[n, K, t, out]``."""
    if a.shape[1] == 1 and isinstance(part, Kronecker):
        rotated = g.squeeze(2) @ part.out  # [n, K, out]
        squares = (a.squeeze(1) @ part.inner).square() @ part.scale.square().T  # [n, out]
        return (rotated * squares.unsqueeze(1)) @ rotated.mT
    jacobian = g.mT @ a.unsqueeze(1)  # [n, K, out, in]
    root = part.times_root(jacobian.flatten(2))
    return root @ root.mT


def jacobian_of(values: Tensor, at: Tensor, rows: int = 256) -> Tensor:
    """Return derivatives ``[m, d]`` of a vector ``[m]`` by another ``[d]``."""
    slope = torch.zeros(len(values), len(at), dtype=at.dtype, device=at.device)
    units = torch.eye(len(values), dtype=at.dtype, device=at.device)
    for begin in range(0, len(values), rows) if values.requires_grad else ():
        chunk = slice(begin, begin + rows)
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
        (grads,) = torch.autograd.grad(values, at, units[chunk], **options)
        if grads is not None:
            slope[chunk] = grads
    return slope


def _gradient(value: Tensor, at: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(at)
    return torch.autograd.grad(value, at, retain_graph=True, materialize_grads=True)[0]


@contextmanager
def _cut(network: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs, and what replaces them in the rest of the model."""
    outputs: list[Tensor] = []

    def cut(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        outputs.extend([output, output.detach().requires_grad_()])
        return outputs[1]

    handle = network.register_forward_hook(cut)
    try:
        yield outputs
    finally:
        handle.remove()

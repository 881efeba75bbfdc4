# SPDX-License-Identifier: Apache-2.0
r"""Gauss-Newton curvature of the negative log joint, $J^\top \Lambda J$ plus the prior's.

$\Lambda$ is the Hessian of the negative log-likelihood in the outputs of one example, J their
derivatives by the latents (Immer et al. 2021, equation 6). Kronecker factors are those of
KFAC-expand (Martens and Grosse 2015; Eschenhagen et al. 2023): for a layer of input a and gradient
g at its output, over all examples and positions where the weights are used,

$$J^\top \Lambda J \approx \Big(\sum g g^\top\Big) \otimes \tfrac{1}{\#}\sum a a^\top$$
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
from pyro_bbb.guides.tangent import NetworkFunction, root_of
from pyro_bbb.latents import Latents


@dataclass
class Use:
    """One use of a weight in a linear or convolution layer."""

    weight: str
    bias: str | None
    inputs: Tensor  # [n, positions, in]
    output: Tensor

    def gradients(self, by_output: Tensor) -> Tensor:
        """Gradients at the output as ``[n, positions, out]``."""
        moved = by_output.movedim(1, -1) if self.output.dim() == 4 else by_output
        return moved.reshape(len(moved), -1, moved.shape[-1])


def uses_of(calls: Iterable[LayerUse]) -> list[Use]:
    """Calls whose input can be taken apart into positions."""
    found = []
    for call in calls:
        inputs = _patches(call.arguments) if call.function is F.conv2d else _positions(call)
        if inputs is not None:
            found.append(Use(call.weight, call.bias, inputs.detach(), call.output))
    return found


def _positions(call: LayerUse) -> Tensor:
    x: Tensor = call.arguments["input"]
    return x.reshape(len(x), -1, x.shape[-1])


def _patches(given: Mapping[str, Any]) -> Tensor | None:
    """Patches under a convolution's kernel, ``[n, positions, in]``; none for groups."""
    padding = given.get("padding", 0)
    if given.get("groups", 1) != 1 or isinstance(padding, str):
        return None
    size, options = given["weight"].shape[2:], (given.get("dilation", 1), padding)
    return F.unfold(given["input"], size, *options, given.get("stride", 1)).mT


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
    f: Tensor = field(init=False)  # [n, K], as a function of the latents
    curvature: Tensor = field(init=False)  # [n, K, K], by the outputs
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

    @cached_property
    def root(self) -> Tensor:
        r"""L ``[n, K, K]`` with $L L^\top = \Lambda$."""
        return root_of(self.curvature)

    def jacobians(self, where: slice) -> Iterator[tuple[slice, Tensor]]:
        """Derivatives by a range of latents ``[n, K, d]``, some examples at a time."""
        latents, loc = self.guide.latents, self.guide.loc.detach()
        function, begin = NetworkFunction(self.model, latents, loc, where), 0
        for part in function.jacobians(self.x):
            yield slice(begin, begin + len(part)), part
            begin += len(part)

    def rest(self) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian's diagonal of all but the network, ``[D]`` each."""
        ones = torch.ones_like(self.by_z)
        return self.by_z.detach(), self._rest_times(ones)

    def is_separable(self) -> bool:
        """Tell whether that Hessian is diagonal, by its product with random signs."""
        fixed = torch.Generator().manual_seed(0)
        signs = (torch.randint(2, self.by_z.shape, generator=fixed) * 2.0 - 1).to(self.by_z)
        product = self._rest_times(signs)
        return torch.allclose(product, signs * self._rest_times(torch.ones_like(signs)))

    def coupled(self) -> Tensor:
        """Rest of the Hessian ``[D, D]`` where the network is replaced by its tangent.

        That of all but the network, and the mixed terms where the likelihood has latents.
        """
        slope = jacobian_of(self.f.flatten(), self.guide.loc)
        mixed = slope.T @ jacobian_of(self.by_f.flatten(), self.guide.loc)
        return mixed + mixed.T + jacobian_of(self.by_z, self.guide.loc)

    def _rest_times(self, vector: Tensor) -> Tensor:
        return _gradient((self.by_z * vector).sum(), self.guide.loc).detach()


def kronecker_factors(batch: Linearization) -> dict[str, tuple[Tensor, Tensor | None]]:
    r"""$\sum g g^\top$ and the sum over examples of the mean $a a^\top$, by site name.

    Biases have only the first.
    """
    sums: dict[str, list[Any]] = {}
    for use in batch.uses:
        inner = use.inputs.flatten(0, 1)
        repeated = batch.weight.repeat_interleave(len(inner) // len(batch.weight))
        sums[use.weight] = [0.0, (repeated * inner.T) @ inner / use.inputs.shape[1]]
    for column in batch.root.unbind(-1):
        for use, gradients in _pulled_back(batch, column):
            g = gradients.flatten(0, 1)
            sums[use.weight][0] = sums[use.weight][0] + g.T @ g
    for use in batch.uses:
        if use.bias is not None:
            sums[use.bias] = [sums[use.weight][0], None]
    return {name: (out, inner) for name, (out, inner) in sums.items()}


def diagonal(batch: Linearization) -> dict[str, Tensor]:
    r"""Diagonal of $J^\top \Lambda J$ over all examples, by site name, as ``[out, in]``."""
    sums: dict[str, Any] = {}
    single: dict[str, Any] = {}  # of uses at one position, at the output, [n, out]
    values, vectors = torch.linalg.eigh(batch.curvature)
    for value, vector in zip(values.unbind(-1), vectors.unbind(-1), strict=True):
        for use, g in _pulled_back(batch, vector):
            if use.bias is not None:
                sums[use.bias] = sums.get(use.bias, 0.0) + value @ g.sum(1).square()
            if g.shape[1] == 1:
                single[use.weight] = single.get(use.weight, 0.0) + value[:, None] * g[:, 0].square()
            else:
                squares = torch.einsum("n,noi->oi", value, (g.mT @ use.inputs).square())
                sums[use.weight] = sums.get(use.weight, 0.0) + squares
    for use in batch.uses:
        if use.weight in single:  # the square of a product is the product of squares
            sums[use.weight] = single[use.weight].T @ use.inputs[:, 0].square()
    return sums


def _pulled_back(batch: Linearization, vector: Tensor) -> Iterator[tuple[Use, Tensor]]:
    r"""$J^\top v$ at the output of each use, ``[n, positions, out]``, for a v of each example."""
    targets = [use.output for use in batch.uses]
    found = torch.autograd.grad((batch.f * vector).sum(), targets, retain_graph=True)
    for use, by_output in zip(batch.uses, found, strict=True):
        yield use, use.gradients(by_output)


def unserved(latents: Latents, uses: list[Use]) -> list[str]:
    """Names of the network's latents that are not once a weight or bias of such a layer."""
    used = [name for use in uses for name in (use.weight, use.bias)]
    network = [x.name for x in latents.values() if x.role != "likelihood"]
    return [name for name in network if used.count(name) != 1]


def jacobian_of(values: Tensor, at: Tensor, rows: int = 256) -> Tensor:
    """Derivatives ``[m, d]`` of a vector ``[m]`` by another ``[d]``."""
    slope = torch.zeros(len(values), len(at), dtype=at.dtype, device=at.device)
    units = torch.eye(len(values), dtype=at.dtype, device=at.device)
    for begin in range(0, len(values), rows) if values.requires_grad else ():
        chunk = slice(begin, begin + rows)
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
        (part,) = torch.autograd.grad(values, at, units[chunk], **options)
        if part is not None:
            slope[chunk] = part
    return slope


def _gradient(value: Tensor, at: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(at)
    return torch.autograd.grad(value, at, retain_graph=True, materialize_grads=True)[0]


@contextmanager
def _cut(network: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the outputs, and what stands for them in the rest of the model."""
    outputs: list[Tensor] = []

    def cut(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        outputs.extend([output, output.detach().requires_grad_()])
        return outputs[1]

    handle = network.register_forward_hook(cut)
    try:
        yield outputs
    finally:
        handle.remove()

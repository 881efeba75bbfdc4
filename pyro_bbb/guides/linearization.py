# SPDX-License-Identifier: Apache-2.0
r"""A network replaced by its tangent in the latents at a guide's centre m.

$$f(x, z) \approx f(x, m) + J(x)\,(z - m), \qquad
  z \sim N(m, \Sigma) \;\Rightarrow\; f(x, z) \sim N(f(x, m),\; J \Sigma J^\top)$$

(Immer et al. 2021, "Improving predictions of Bayesian neural nets via local linearization",
equation 8). With $\Sigma = R R^\top$ in parts, $J \Sigma J^\top = \sum (J R) (J R)^\top$.

A linear or convolution layer of inputs $a_t$ and gradients $g_{kt}$ of output k at its own output,
over positions t where its weights are used, has $J_k = \sum_t g_{kt} a_t^\top$.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pyro_bbb._utils.inputs import (
    Rows,
    at_least_single,
    call_arguments,
    input_tensors,
    tensor_of,
    with_tensors,
)
from pyro_bbb.guides.covariance import Dense, Kronecker, PartsNormal
from pyro_bbb.latents import Latents, substituted

_NUMBERS = 2**25  # of derivatives at once
_ROWS = 64  # examples in one graph of `moments_by_layer`
_HEAD_ROWS = 256  # examples of a last layer at once
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True)
class OutputMoments:
    """Moments of Normal outputs, for each input separately."""

    mean: Tensor  # [n, ...], of K outputs for each input
    variance: Tensor  # likewise
    covariance: Tensor | None = None  # [n, K, K]; None if the outputs of an input are independent

    @classmethod
    def jointly(cls, mean: Tensor, covariance: Tensor) -> OutputMoments:
        """Return moments of jointly Normal outputs, at least in single precision."""
        mean, covariance = at_least_single(mean.detach()), at_least_single(covariance.detach())
        variance = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
        return cls(mean, variance, covariance)

    def draw(self, num_samples: int) -> Tensor:
        """Return outputs ``[num_samples, n, ...]``."""
        mean = self.mean
        noise = torch.randn(num_samples, *mean.shape, dtype=mean.dtype, device=mean.device)
        if self.covariance is None:
            return torch.addcmul(mean, self.variance.sqrt(), noise, out=noise)
        root = root_of(self.covariance)
        return mean + torch.einsum("nij,snj->sni", root, noise.flatten(2)).view_as(noise)


def output_moments(model: Any, guide: Any, x: Rows) -> OutputMoments:
    """Return `Guide.output_moments`; other guides raise TypeError."""
    if not hasattr(guide, "output_moments"):
        raise not_normal(guide)
    moments: OutputMoments = guide.output_moments(model, x)
    return moments


def not_normal(guide: Any) -> TypeError:
    """Return the error for a guide that is not a Normal."""
    return TypeError(
        "linearized needs a Normal guide, one of softplus_normal, normal, low_rank, full_rank, "
        f"laplace, swag, vbll, got {type(guide).__name__}"
    )


def tangent_moments(model: Any, latents: Latents, normal: PartsNormal, x: Rows) -> OutputMoments:
    r"""Return means $f(x, m)$ and covariances $J \Sigma J^\top$ of the tangent's outputs."""
    by_layer = any(isinstance(block, Kronecker) for block in normal.parts)
    return (moments_by_layer if by_layer else moments_by_jacobian)(model, latents, normal, x)


@torch.no_grad()
def moments_by_jacobian(
    model: Any, latents: Latents, normal: PartsNormal, x: Rows
) -> OutputMoments:
    r"""Return `tangent_moments` by J itself, but for a last layer of dense covariance."""
    blocks, loc = normal.parts, normal.loc
    where = blocks[0].where if len(blocks) == 1 else slice(0, latents.size)
    f, head = outputs_and_head(model, latents, loc, where, x)
    if head and len(blocks) == 1 and isinstance(blocks[0], Dense):
        return OutputMoments.jointly(f, head.covariance(blocks[0].scale_tril))
    covariances = []
    for jacobian in jacobians(model, latents, loc, where, x):  # [rows, K, d]
        covariance = jacobian.new_zeros(())
        for block in blocks:
            columns = slice(block.where.start - where.start, block.where.stop - where.start)
            root = block.times_root(jacobian[..., columns])
            covariance = covariance + root @ root.mT
        covariances.append(covariance)
    return OutputMoments.jointly(f, torch.cat(covariances))


def moments_by_layer(model: Any, latents: Latents, normal: PartsNormal, x: Rows) -> OutputMoments:
    r"""Return `tangent_moments` for Kronecker parts in the order of the latents.

    Under $W = M + Q\,(S \circ E)\,P^\top$ the covariance of outputs k and l is the sum over layers

    $$\sum_{ij} S_{ij}^2\,(Q^\top J_k P)_{ij}\,(Q^\top J_l P)_{ij}, \qquad
      \sum_i (Q^\top g_k)_i\,(Q^\top g_l)_i \sum_j S_{ij}^2\,(P^\top a)_j^2$$

    with the second form for a single position, where no derivative by a weight is made.
    """
    blocks = {name: part for part in normal.parts for name in latents.within(part.where)}
    point = {name: z.detach() for name, z in latents.constrain(normal.loc).items()}
    watched = {name: point[name].requires_grad_() for name in blocks}
    means, covariances = [], []
    for rows in x.split(_ROWS):
        with torch.enable_grad(), LayerUses(watched) as layers:
            f = network_outputs(model, point, rows)
            outputs = f.flatten(1).sum(0).unbind()
        targets = [use.output for use in layers.uses]
        grads = [torch.autograd.grad(output, targets, retain_graph=True) for output in outputs]
        with torch.no_grad():
            covariance = f.new_zeros(len(f), len(outputs), len(outputs))
            for use, by_output in zip(layers.uses, zip(*grads, strict=True), strict=True):
                g = torch.stack([use.gradients(grad) for grad in by_output], dim=1)
                _add_layer(covariance, blocks[use.weight], use, g)  # g is [n, K, out, t]
                if use.bias is not None:
                    root = blocks[use.bias].times_root(g.sum(3))
                    covariance += root @ root.mT
        means.append(f.detach())
        covariances.append(covariance)
    return OutputMoments.jointly(torch.cat(means), torch.cat(covariances))


def _add_layer(covariance: Tensor, part: Any, use: LayerUse, g: Tensor) -> None:
    """Add a weight's share to ``covariance`` ``[n, K, K]``, for gradients ``[n, K, out, t]``."""
    _, outputs, out, positions = g.shape
    if positions == 1:
        rotated = g.squeeze(3) @ part.out  # [n, K, out]
        squares = use.times(part.inner)[:, 0].square() @ part.scale.square().T  # [n, out]
        covariance += (rotated * squares.unsqueeze(1)) @ rotated.mT
        return
    # P times the smaller of a [t, in] and J [K out, in]
    rotate_first = positions < outputs * out
    inputs = use.times(part.inner) if rotate_first else use.inputs
    # each example by itself, whose derivatives [K, out, in] stay in the processor's cache
    for total, a, gradients in zip(covariance, inputs, g, strict=True):
        jacobian = (part.out.T @ gradients).flatten(0, 1) @ a
        jacobian = jacobian if rotate_first else jacobian @ part.inner
        root = jacobian.view(outputs, *part.scale.shape).mul_(part.scale).flatten(1)
        total.addmm_(root, root.T)


# --- the network as a function of its latents ---


def network_outputs(model: Any, values: Mapping[str, Tensor], x: Rows) -> Tensor:
    """Return the network's outputs ``[n, ...]`` at values of all latents by site name."""
    with substituted(model, values):
        args, kwargs = call_arguments(x)
        outputs = model.network(*args, **kwargs)
    tensor: Tensor = tensor_of(outputs)
    return tensor


def jacobians(model: Any, latents: Latents, loc: Tensor, where: slice, x: Rows) -> Iterator[Tensor]:
    """Yield derivatives of the outputs by a range of the latents' vector, ``[rows, K, d]``.

    Each is of a bounded number of inputs; latents outside the range are constant.
    """
    z, varied = loc[where], latents.within(where)
    head = outputs_and_head(model, latents, loc, where, x)[1] if len(varied) <= 2 else None
    if head:
        yield head.jacobian()
        return

    def outputs_of(z: Tensor, *row: Tensor) -> Tensor:
        values = latents.constrain(loc) | varied.constrain(z)
        rows = with_tensors(x, [value[None] for value in row])
        return network_outputs(model, values, rows).flatten()

    tensors = input_tensors(x)
    outputs = outputs_of(z, *[value[0] for value in tensors]).numel()
    in_dims = (None, *[0] * len(tensors))
    derivatives: Any = torch.vmap(jacrev(outputs_of), in_dims=in_dims, randomness="different")
    for rows in x.split(max(1, _NUMBERS // (outputs * len(z)))):
        yield derivatives(z, *input_tensors(rows))


@dataclass(frozen=True)
class Head:
    """A last linear layer, in whose weights the network is linear."""

    inputs: Tensor  # [n, in]
    outputs: int
    bias: bool  # whether it has one

    def jacobian(self) -> Tensor:
        """Return derivatives of the outputs by weight and bias, ``[n, out, out (in + 1)]``."""
        unit = torch.eye(self.outputs, dtype=self.inputs.dtype, device=self.inputs.device)
        by_weight = torch.einsum("ko,ni->nkoi", unit, self.inputs).flatten(2)
        by_bias = unit.expand(len(self.inputs), -1, -1)
        return torch.cat([by_weight, by_bias], dim=2) if self.bias else by_weight

    def covariance(self, root: Tensor) -> Tensor:
        r"""Return $J L L^\top J^\top$ ``[n, out, out]`` for a lower-triangular L."""
        width, covariances = self.inputs.shape[1], []
        for inputs in self.inputs.split(_HEAD_ROWS):
            by_bias = root[-self.outputs :] if self.bias else torch.zeros_like(root[: self.outputs])
            rows = by_bias.repeat(len(inputs), 1, 1)  # J L
            for k in range(self.outputs):
                stop = (k + 1) * width  # L is 0 from there on in the rows of output k
                rows[:, k, :stop].addmm_(inputs, root[stop - width : stop, :stop])
            covariances.append(rows @ rows.mT)
        return torch.cat(covariances)

    def add_curvature(self, total: Tensor, curvature: Tensor) -> None:
        r"""Add $\sum J^\top \Lambda J$ to the lower triangle of ``total``.

        For weights of outputs k and l it is $\sum \Lambda_{kl}\, a a^\top$.
        """
        width = self.inputs.shape[1]
        for k in range(self.outputs):
            stop = (k + 1) * width
            weighted = curvature[:, k, : k + 1, None] * self.inputs.unsqueeze(1)
            total[stop - width : stop, :stop].addmm_(self.inputs.T, weighted.flatten(1))
        if self.bias:
            by_weight = torch.einsum("nkl,ni->kli", curvature, self.inputs).flatten(1)
            total[-self.outputs :] += torch.cat([by_weight, curvature.sum(0)], dim=1)


def outputs_and_head(
    model: Any, latents: Latents, loc: Tensor, where: slice, x: Rows
) -> tuple[Tensor, Head | None]:
    """Return outputs, and the last layer if a range of the latents is its weight and bias."""
    values, varied = latents.constrain(loc), latents.within(where)
    watched = {name: values[name] for name in varied} if len(varied) <= 2 else {}
    with LayerUses(watched) as layers:
        f = network_outputs(model, values, x)
    if len(layers.uses) == 1 and layers.uses[0].output is f and f.dim() == 2:
        (use,) = layers.uses
        names = [use.weight] if use.bias is None else [use.weight, use.bias]
        if names == list(varied):
            return f, Head(use.inputs.squeeze(1), f.shape[1], bias=len(names) == 2)
    return f, None


# --- layers ---


@dataclass(frozen=True)
class LayerUse:
    """One use of a weight in a linear or convolution layer."""

    weight: str
    bias: str | None  # None if it is not watched
    input: Tensor
    output: Tensor
    size: tuple[int, ...] | None = None  # of a convolution's kernel, [channels, height, width]
    options: Mapping[str, Any] = field(default_factory=dict)  # stride, padding, dilation

    @cached_property
    def inputs(self) -> Tensor:
        """Inputs a, ``[n, positions, in]``: of a convolution the patches."""
        if self.size is None:
            return self.input.reshape(len(self.input), -1, self.input.shape[-1])
        return F.unfold(self.input, self.size[1:], **self.options).mT

    def times(self, matrix: Tensor) -> Tensor:
        """Return `inputs` times a matrix ``[in, m]``, ``[n, positions, m]``."""
        if self.size is None:
            return self.inputs @ matrix
        kernel = matrix.T.unflatten(1, self.size)
        return F.conv2d(self.input, kernel, **self.options).flatten(2).mT

    def gradients(self, by_output: Tensor) -> Tensor:
        """Return gradients at the output as ``[n, out, positions]``."""
        if self.size is not None:
            return by_output.flatten(2)
        return by_output.reshape(len(by_output), -1, by_output.shape[-1]).mT


class LayerUses(TorchFunctionMode):
    """Collects the `uses` of watched tensors, given by name, in the order of the calls."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tensors: dict[int, str] = {id(value): name for name, value in tensors.items()}
        self.uses: list[LayerUse] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.tensors and func in (F.linear, F.conv2d):
            by_name = dict(zip(_ARGUMENTS, args, strict=False)) | (kwargs or {})
            weight, bias = (self.tensors.get(id(by_name.get(name))) for name in ("weight", "bias"))
            if weight is not None and by_name.get("groups", 1) == 1:
                self.uses.append(LayerUse(weight, bias, *_input(func, by_name, output)))
        return output


def _input(function: Any, arguments: Mapping[str, Any], output: Tensor) -> tuple[Any, ...]:
    """Return input and output of a layer, and of a convolution the kernel's size and options."""
    x: Tensor = arguments["input"].detach()
    if function is F.linear:
        return x, output
    size = arguments["weight"].shape[1:]
    default = {"stride": 1, "padding": 0, "dilation": 1}
    options = {name: arguments.get(name, value) for name, value in default.items()}
    if isinstance(options["padding"], str):
        dilation = torch.nn.modules.utils._pair(options["dilation"])
        extra = [d * (s - 1) for d, s in zip(dilation, size[1:], strict=True)]
        if options["padding"] == "same":  # with more on the right
            x = F.pad(x, [n for e in reversed(extra) for n in (e // 2, e - e // 2)])
        options["padding"] = 0
    return x, output, size, options


def root_of(matrices: Tensor) -> Tensor:
    r"""Return L ``[..., K, K]`` with $L L^\top$ the positive semidefinite matrices.

    The symmetric root, as eigenvectors have the signs that a machine's library gives them.
    """
    values, vectors = torch.linalg.eigh(matrices)
    roots = values.clamp(min=0).sqrt().unsqueeze(-2)  # rounding leaves negative ones
    return vectors * roots @ vectors.mT

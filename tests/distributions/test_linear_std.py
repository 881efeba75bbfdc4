# SPDX-License-Identifier: Apache-2.0
"""Gradients written by hand, of outputs' standard deviations and of a vector's parts."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pyro_bbb.estimators._linear_std import linear_std

DOUBLE = {"dtype": torch.float64, "requires_grad": True}


def plain(x, scale, bias_scale):
    of_bias = None if bias_scale is None else bias_scale**2
    return F.linear(x**2, scale**2, of_bias).sqrt()


def arguments(*, batch=5, n_in=4, n_out=3, bias=True, turned=False):
    torch.manual_seed(0)
    x = torch.randn(batch, n_in, **DOUBLE)
    shape = (n_in, n_out) if turned else (n_out, n_in)
    scale = torch.rand(shape, dtype=torch.float64).add_(0.1).requires_grad_()
    bias_scale = torch.rand(n_out, **DOUBLE) if bias else None
    return x, scale, bias_scale


def gradients(function, x, scale, bias_scale, *, turned):
    outputs = function(x, scale.t() if turned else scale, bias_scale)
    leaves = [leaf for leaf in (x, scale, bias_scale) if leaf is not None]
    weights = torch.linspace(-1, 2, outputs.numel(), dtype=torch.float64).view_as(outputs)
    return outputs, torch.autograd.grad((outputs * weights).sum(), leaves)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [{}, {"batch": 2, "n_in": 200, "n_out": 300}])
def test_it_is_what_autograd_makes_of_the_formula(bias, turned, size):
    given = arguments(bias=bias, turned=turned, **size)
    ours, of_ours = gradients(linear_std, *given, turned=turned)
    expected, of_expected = gradients(plain, *given, turned=turned)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    for mine, theirs in zip(of_ours, of_expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_its_derivatives_are_those_of_differences():
    assert torch.autograd.gradcheck(linear_std, arguments())
    assert torch.autograd.gradgradcheck(linear_std, arguments())
    x, *scales = arguments()
    assert torch.autograd.gradgradcheck(partial(linear_std, x.detach()), scales)


@pytest.mark.parametrize("single", [False, True])
def test_outputs_without_noise_pass_no_gradient_on(single):
    x, scale, _ = arguments(bias=False)
    scale = scale[0].detach().requires_grad_() if single else scale
    x = torch.cat([torch.zeros_like(x[:2]), x[2:]]).detach().requires_grad_()
    outputs = linear_std(x, scale, None)
    assert (outputs[:2] == 0).all()
    of_x, of_scale = torch.autograd.grad(outputs.sum(), (x, scale))
    assert (of_x[:2] == 0).all()
    rest = torch.autograd.grad(plain(x[2:], scale, None).sum(), scale)[0]
    torch.testing.assert_close(of_scale, rest, rtol=1e-11, atol=0)


def test_known_inputs_are_asked_no_gradient():
    x, scale, bias_scale = arguments()
    outputs = linear_std(x.detach(), scale, bias_scale)
    of_scale = torch.autograd.grad(outputs.sum(), scale, retain_graph=True)[0]
    expected = torch.autograd.grad(plain(x, scale, bias_scale).sum(), scale)[0]
    torch.testing.assert_close(of_scale, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("learned", range(3))
def test_what_is_frozen_is_asked_no_gradient_either(learned):
    given = [v.detach().requires_grad_(i == learned) for i, v in enumerate(arguments())]
    ours = torch.autograd.grad(linear_std(*given).sum(), given[learned])[0]
    expected = torch.autograd.grad(plain(*given).sum(), given[learned])[0]
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-13)


def test_under_autocast_it_is_that_of_rounded_products():
    x, scale, bias_scale = (v.detach().float().requires_grad_() for v in arguments(n_in=64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_std(x, scale, bias_scale)
    assert cast.dtype == torch.bfloat16
    expected = plain(x, scale, bias_scale)
    torch.testing.assert_close(cast.float(), expected, rtol=2**-7, atol=0)
    cast.sum().backward()
    of_scale = torch.autograd.grad(expected.sum(), scale)[0]
    torch.testing.assert_close(scale.grad, of_scale, rtol=2**-5, atol=2**-6)


def test_a_single_output_may_have_a_vector_of_weights():
    x, scale, _ = arguments(n_out=1, bias=False)
    flat = scale.detach().flatten().requires_grad_()
    outputs = linear_std(x, flat, None)
    torch.testing.assert_close(outputs, plain(x, scale, None).squeeze(-1), rtol=1e-12, atol=0)
    of_scale = torch.autograd.grad(outputs.sum(), flat)[0]
    expected = torch.autograd.grad(plain(x, scale, None).sum(), scale)[0]
    torch.testing.assert_close(of_scale, expected.flatten(), rtol=1e-11, atol=0)


def test_transforms_go_through_it():
    x, scale, bias_scale = (v.detach() for v in arguments())
    inputs = torch.stack([x, 2 * x])
    batched = torch.vmap(lambda each: linear_std(each, scale, bias_scale))(inputs)
    torch.testing.assert_close(batched, plain(inputs, scale, bias_scale), rtol=1e-12, atol=0)

    def loss(s):
        return linear_std(x, s, bias_scale).sum()

    twice = torch.func.jacrev(torch.func.jacrev(loss))
    theirs = torch.func.jacrev(torch.func.jacrev(lambda s: plain(x, s, bias_scale).sum()))(scale)
    torch.testing.assert_close(twice(scale), theirs, rtol=1e-10, atol=1e-13)

# SPDX-License-Identifier: Apache-2.0
"""Fused kernels on plain tensors, with hand-written derivatives; no distribution, no Pyro.

Imports no other room. A new kernel is one module: the naive formula in its docstring, the
`autograd.Function`, and a test in ``tests/ops`` that compares the two.
"""

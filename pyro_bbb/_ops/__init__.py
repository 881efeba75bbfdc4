# SPDX-License-Identifier: Apache-2.0
"""Recording of a training step as a list of tensor operations; no Pyro.

Imports no other package of the library. A new rule on operations goes into ``operations.py``.
"""

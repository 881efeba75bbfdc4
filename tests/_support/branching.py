# SPDX-License-Identifier: Apache-2.0
"""A network whose path depends on its weights."""

from pyro.nn import PyroModule

import pyro_bbb as bbb


class Branching(PyroModule):
    """Takes a path that depends on the weights, which neither a record nor a batch can hold."""

    def __init__(self):
        super().__init__()
        self.fc = bbb.BayesianLinear(2, 1)

    def forward(self, x):
        h = self.fc(x)
        return h if h.sum() > 0 else -2 * h

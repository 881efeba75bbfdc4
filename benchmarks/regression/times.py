# SPDX-License-Identifier: Apache-2.0
"""Times of a change beside those of the commit that it starts from, taken in turns by asv.

    asv continuous --config benchmarks/asv.conf.json --interleave-rounds --factor 1.25 main HEAD

It fails when a benchmark takes 1.25 times as long. ``pip install asv virtualenv`` brings asv.
"""

import torch

import pyro_bbb as bbb


class Network:
    """Training and prediction of one network by one thread."""

    rounds = 4

    def prepare(self, likelihood, sizes, x, y):
        """Make the model and its guide, and train one epoch to load what is imported late."""
        torch.set_num_threads(1)
        self.x, self.y = x, y
        network = bbb.BayesianMLP(sizes)
        self.model = bbb.BayesianModel(network, likelihood, num_data=len(x))
        self.guide = bbb.AutoSoftplusNormal(self.model)
        self.fit(1)

    def fit(self, epochs):
        """Train the guide."""
        bbb.fit(self.model, self.guide, (self.x, self.y), epochs=epochs, progress=False)


class Digits(Network):
    """The network of Blundell et al. with 400 units a layer."""

    def setup(self):
        """Make random images of MNIST's shape."""
        torch.manual_seed(0)
        x, y = torch.rand(640, 784), torch.randint(10, (640,))
        self.prepare(bbb.likelihoods.Categorical(), [784, 400, 400, 10], x, y)

    def time_five_steps(self):
        """Train an epoch."""
        self.fit(1)

    def time_hundred_draws(self):
        """Predict 100 inputs."""
        bbb.predict(self.model, self.guide, self.x[:100], num_samples=100)


class Curve(Network):
    """A regression of one input, whose steps are recorded once and replayed."""

    def setup(self):
        """Make a noisy sine."""
        torch.manual_seed(0)
        x = torch.linspace(-3, 3, 100)[:, None]
        self.prepare(bbb.likelihoods.Gaussian(0.1), [1, 20, 20, 1], x, x.sin())

    def time_thousand_steps(self):
        """Train a thousand epochs."""
        self.fit(1000)

    def time_one_input(self):
        """Predict one input."""
        bbb.predict(self.model, self.guide, self.x[:1], num_samples=100)


def timeraw_import():
    """Import the library and its first name in a new process."""
    return "import pyro_bbb; pyro_bbb.fit"

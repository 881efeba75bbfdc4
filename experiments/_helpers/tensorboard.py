# SPDX-License-Identifier: Apache-2.0
"""TensorBoard callback for loss parts and weights of a training."""

from pathlib import Path

import pyro_bbb as bbb


class TensorBoard:
    """A callback of `fit` that writes loss parts of every step and histograms of every epoch.

    Look at the folder with ``tensorboard --logdir``; without the package, SystemExit is raised.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SystemExit("--tensorboard needs its package: pip install tensorboard") from error
        self.writer = SummaryWriter(str(folder))
        self.written = 0

    def __call__(self, state: bbb.EpochEnd) -> None:
        """After an epoch: the loss parts of its steps, and means and scales of the weights."""
        steps = state.history.steps
        for step in range(self.written, len(steps)):
            for name in ("loss", "kl", "log_prior", "log_guide", "nll"):
                self.writer.add_scalar(name, getattr(steps, name)[step], step)
        self.written = len(steps)
        for name in state.guide.weight_names:
            self.writer.add_histogram(f"loc/{name}", state.guide.loc(name), state.epoch)
            self.writer.add_histogram(f"scale/{name}", state.guide.scale(name), state.epoch)
        self.writer.flush()

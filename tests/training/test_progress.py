# SPDX-License-Identifier: Apache-2.0
"""Progress bars, in a file and in a terminal."""

import io
import sys

import torch

import pyro_bbb as bbb


class Terminal(io.StringIO):
    def isatty(self):
        return True


def fit_two_epochs():
    torch.manual_seed(0)
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 2]), bbb.likelihoods.Categorical(), num_data=100)
    data = torch.randn(100, 3), torch.randint(2, (100,))
    guide = bbb.AutoSoftplusNormal(model)
    bbb.fit(model, guide, data, epochs=2, batch_size=10, progress=True)


def test_a_file_is_written_to_at_the_start_and_the_end(monkeypatch, tmp_path):
    with (tmp_path / "log").open("w+") as log:
        monkeypatch.setattr(sys, "stderr", log)
        fit_two_epochs()
        log.seek(0)
        text = log.read()
    assert text.count("step") < 5 and "20/20" in text


def test_a_terminal_is_drawn_over(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    fit_two_epochs()
    drawn = terminal.getvalue()
    assert "\r" in drawn
    assert drawn.count("\r") < 10  # 20 steps take milliseconds: first, last, and few between
    assert "20/20" in drawn

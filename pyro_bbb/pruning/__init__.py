# SPDX-License-Identifier: Apache-2.0
"""Pruning: weights that are removed, and whole units, which leave a narrower network.

``_weights.py`` fixes single weights at 0, and ``_units.py`` takes units out of their layers.

Imports the packages up to `latents`.
"""

from pyro_bbb.pruning._units import fit_widths as fit_widths
from pyro_bbb.pruning._weights import PrunableGuide, keeping, prune, signal_to_noise

__all__ = ["PrunableGuide", "keeping", "prune", "signal_to_noise"]

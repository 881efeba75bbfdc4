# SPDX-License-Identifier: Apache-2.0
"""Agents for contextual bandits: they act by draws of a posterior and learn from the rewards.

`ThompsonAgent` stands in ``_thompson.py``, by any model and guide; `LastLayerAgent` in
``_last_layer.py``, by exact linear regression on learned features. Imports the rooms up to
`models` and `estimators`; a new agent is a module here.
"""

from pyro_bbb.bandits._last_layer import LastLayerAgent
from pyro_bbb.bandits._thompson import ThompsonAgent

__all__ = ["LastLayerAgent", "ThompsonAgent"]

"""Ways to run one training step: eager, in several processes, as a CUDA graph.

Imports `training.objectives`, `optim` and `history`. ``engine.py`` chooses among them; a new one is
one module here and one line there.
"""

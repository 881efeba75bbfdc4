"""Moved to `pyro_bbb.deployment`; this name stays until the first release."""

from pyro_bbb.deployment import SparseLinear, to_module

__all__ = ["SparseLinear", "to_module"]

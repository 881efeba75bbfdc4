"""Save and load a model with its guide, without executing code.

Imports the rooms up to `models`. How a class is saved stands in ``_registry.py``; the files
themselves are written and checked by ``archive.py``.
"""

from pyro_bbb.persistence._save_load import Loaded, load, save
from pyro_bbb.persistence.archive import LoadError

__all__ = ["LoadError", "Loaded", "load", "save"]

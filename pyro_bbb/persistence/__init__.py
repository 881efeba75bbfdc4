# SPDX-License-Identifier: Apache-2.0
"""Save and load a model with its guide, without executing code.

Imports the packages up to `models`. A class registers itself by `pyro_bbb._utils.saving.saveable`;
``_blueprint.py`` lists torch's layers, and ``archive.py`` writes and checks the files.
"""

from pyro_bbb._utils.files import LoadError
from pyro_bbb.persistence._save_load import Loaded, load, save

__all__ = ["LoadError", "Loaded", "load", "save"]

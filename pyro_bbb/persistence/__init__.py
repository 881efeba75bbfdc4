# SPDX-License-Identifier: Apache-2.0
"""Save and load a model with its guide, without executing code.

Imports the rooms up to `models`. A class registers itself by `pyro_bbb._utils.saving.saveable`;
torch's layers are listed in ``_torch_layers.py``. ``archive.py`` writes and checks the files.
"""

from pyro_bbb._utils.files import LoadError
from pyro_bbb.persistence._save_load import Loaded, load, save

__all__ = ["LoadError", "Loaded", "load", "save"]

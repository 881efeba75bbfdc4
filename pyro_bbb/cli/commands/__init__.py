"""The commands of ``pyro-bbb``, one module each.

Imports the modules of `cli` and the rooms of the library. A new command is one module here, a
dataclass with ``run``, and its entry in ``cli/entry_point.py``.
"""

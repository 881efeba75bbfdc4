# SPDX-License-Identifier: Apache-2.0
"""The page of ``pyro-bbb play``: draw digits, place points of a regression, rotate digits.

Imports any room but `cli`, `plots` and `sklearn`; ``app.py``, ``elements.py`` and the tabs alone
import NiceGUI. A new tab is a module next to ``shift_tab.py`` and its lines in ``app.py``.
``train.py`` trains the networks of digits, in a process that ``loading.py`` starts while the page
is shown; ``regression.py`` trains that of the points; ``rasterize.py`` turns strokes into the
network's input, ``synthetic_digits.py`` draws what the training digits lack, ``render.py`` makes
the pictures.
"""

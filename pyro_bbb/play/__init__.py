"""The page of ``pyro-bbb play``: draw digits, place points of a regression, in a browser.

Imports any room but `cli`, `plots` and `sklearn`; ``app.py`` alone imports NiceGUI. A new tab is
one module that trains and answers, as ``classifier.py`` and ``regression.py`` do, and its part of
``app.py``; ``rasterize.py`` turns strokes into the network's input, ``synthetic_digits.py`` draws
what the training digits lack, ``render.py`` makes the pictures.
"""

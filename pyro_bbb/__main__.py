# SPDX-License-Identifier: Apache-2.0
"""``python -m pyro_bbb`` is the command line."""

import sys

from pyro_bbb.apps import main

if __name__ == "__main__":
    sys.exit(main())

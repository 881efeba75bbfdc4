# SPDX-License-Identifier: Apache-2.0
"""Names of guides for the tests that try every one."""

from pyro_bbb import guides

ANY_MODEL = [name for name in guides.GUIDES if name != "vbll"]  # which wants a deterministic trunk

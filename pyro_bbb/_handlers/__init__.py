# SPDX-License-Identifier: Apache-2.0
"""Effect handlers for Pyro, and workarounds for what Pyro lacks.

Imports `_utils` and `distributions`. A new handler is one module, a `Messenger` or a
function that wraps one, named after what it changes.
"""

# SPDX-License-Identifier: Apache-2.0
"""Helpers: code of several experiments, and tables and figures of long ones."""

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that CI compares between two commits."""

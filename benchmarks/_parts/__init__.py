# SPDX-License-Identifier: Apache-2.0
"""Methods, tasks, timing and reports of the benchmarks."""

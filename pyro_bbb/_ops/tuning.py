# SPDX-License-Identifier: Apache-2.0
"""Tuned constants of speed, each with its measurement; results depend on them by rounding alone.

Measured on two cores of an x86-64 server with AVX-512; docs/development/performance_log.md has the
circumstances.
"""

from __future__ import annotations

# Buffers: smaller blocks come from the C library's own free lists, larger ones from the system,
# whose cleared pages cost 3 us each. The pool takes 1/1.13 of a step's time at H = 400.
LEAST_BUFFER = 2**17  # bytes
# Small tensors: each operation costs more than the pass over memory. Those side by side are joined
# before it, and torch's own softplus is taken, whose speed is unsteady for large ones (30 against
# 60 us at 16,000 numbers; 4 against 17 us at 500).
SMALL = 2**15  # numbers
# Reductions: rows of several samples are processed in blocks that stay in the cache. Ten samples
# take 1/1.26 of the time at H = 200 and 1/1.35 at H = 400.
BLOCK = 2**19  # numbers
# Several samples of a step at once: at H = 1200 with ten samples, and for LeNet-5, nothing was
# gained, and memory grew with their number.
MOST_AT_ONCE = 2**24  # numbers in all samples
MOST_OF_CONVOLUTIONS = 2**18  # weights of a network with convolutions
# Prediction: `vmap` over samples pays for few inputs; from here on the passes of a single sample
# are large enough.
BATCHED_BELOW = 128  # inputs
# Prediction: samples drawn together, bounded by memory (64 MiB in single precision); large networks
# are drawn one by one, which takes least memory and no more time.
SAMPLE_CHUNK = 2**24  # numbers
ONE_BY_ONE = 2**18  # numbers of one sample

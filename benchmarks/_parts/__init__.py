"""Methods, tasks, timing and reports that the benchmarks are made of."""

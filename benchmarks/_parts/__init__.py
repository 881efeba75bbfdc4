"""Methods, tasks, timing and reports of the benchmarks."""

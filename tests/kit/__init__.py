"""Equipment of tests and benchmarks, which is not installed: engines that stand in for a served model."""

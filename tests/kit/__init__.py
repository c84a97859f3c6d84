"""Kit for tests and benchmarks, not installed: engines that stand in for a served model."""

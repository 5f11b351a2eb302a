"""Benchmarks. `python -m benchmarks.kernels` measures the kernels against their bars."""

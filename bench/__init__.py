"""Benchmarks: ``python3 -m bench.suite`` from the repository root. See docs/benchmarks.md."""

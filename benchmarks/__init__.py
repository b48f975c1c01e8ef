"""One script per figure of BENCHMARKS.md."""

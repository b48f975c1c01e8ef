"""One script per figure of docs/benchmarks.md."""

"""Tests of the benchmarks: their comparisons, verdicts and output."""

"""The benchmarks themselves: what they compare, judge and write."""

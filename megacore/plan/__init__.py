"""Estimates of a run's memory, time and processes before it starts, without importing torch."""

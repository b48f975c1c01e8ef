"""Reporting of training: events, log lines, rates and heartbeats."""

"""Rank layout, process mesh, collectives, and layout-independent random numbers."""

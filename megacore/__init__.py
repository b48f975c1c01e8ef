"""Parallel pretraining of large language models.

The package works without Prefect; the flows of this repository run it as stages.
"""

__version__ = "0.1.0"

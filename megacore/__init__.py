"""Parallel pretraining of large language models.

Usable alone, or through the Prefect flows of this repository.
"""

__version__ = "0.1.0"

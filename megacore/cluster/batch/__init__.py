"""Schedulers: a batch job is submitted to Slurm or Kubernetes, and followed to its end."""

from megacore.cluster.batch.start import check_batch, show_batch, start_batch

__all__ = ["check_batch", "show_batch", "start_batch"]

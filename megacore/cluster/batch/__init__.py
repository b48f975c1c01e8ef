"""Schedulers: a batch job is submitted to Slurm or Kubernetes, and followed to its end."""

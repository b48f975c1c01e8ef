"""Batch jobs of Slurm and Kubernetes: submitted and followed to their end."""

"""What a job reads on each machine: proven to be there, or copied, before its ranks start."""

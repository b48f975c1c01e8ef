"""Start, supervision and termination of the processes of a job."""

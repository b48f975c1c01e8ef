"""Doctor: an examination of a job's hosts before it starts, with advice for each problem."""

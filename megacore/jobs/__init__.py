"""The job files that cross the process boundary: one JSON for every process of a stage."""

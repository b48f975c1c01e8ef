"""Placement of a job's input files: checked or copied on each host before the ranks start."""

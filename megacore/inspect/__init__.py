"""What is in token files and index maps: statistics, checks, and the way back from a sample to its text."""

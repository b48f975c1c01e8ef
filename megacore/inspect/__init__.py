"""What is in token files and index maps: statistics, checks, and a sample's text."""

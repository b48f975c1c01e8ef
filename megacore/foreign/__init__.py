"""Settings files of other programs, read as claims about values of our configuration."""

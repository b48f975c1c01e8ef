"""Configurations of other programs, translated to a commented YAML of this project."""

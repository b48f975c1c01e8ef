"""Stages of consecutive layers.

Who holds which, in which order they work, and what they send each other.
"""

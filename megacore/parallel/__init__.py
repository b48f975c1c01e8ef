"""Which rank holds what.

Layout arithmetic, the process mesh, and random numbers that do not depend on either.
"""

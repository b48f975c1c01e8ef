"""Which rank holds what: layout arithmetic, the process mesh, and random numbers that do not depend on either."""

"""One file for each fused operation: a plain torch reference, what else computes it, and when which is used."""

"""Entry points of the ranks, and the stages that start them."""

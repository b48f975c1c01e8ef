"""Communication of gradients and weights among data-parallel ranks."""

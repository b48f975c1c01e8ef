"""What data-parallel ranks exchange."""

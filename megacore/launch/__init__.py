"""Starting processes, watching them, and ending every one of them."""

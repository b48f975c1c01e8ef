"""Sources of documents: source trees, JSON Lines, parquet, the hub, ready-made token files."""

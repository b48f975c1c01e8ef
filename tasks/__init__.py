"""One Prefect task per stage: its cache key, its retries, its supervision, and what MLflow is told."""

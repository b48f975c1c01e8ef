"""One Prefect task per stage: its cache key, retries, supervision and reports to MLflow."""

"""One Prefect task per stage.

Its cache key, its retries, its supervision, and what MLflow is told.
"""

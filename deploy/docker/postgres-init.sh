#!/usr/bin/env bash
# Run by PostgreSQL's image at its first start: Prefect's and MLflow's databases and users.
set -euo pipefail

PREFECT_DATABASE_PASSWORD=$(</run/secrets/prefect_database_password)
MLFLOW_DATABASE_PASSWORD=$(</run/secrets/mlflow_database_password)
export PREFECT_DATABASE_PASSWORD MLFLOW_DATABASE_PASSWORD
exec psql --no-psqlrc --no-password --username "$POSTGRES_USER" --dbname postgres --file /databases.sql

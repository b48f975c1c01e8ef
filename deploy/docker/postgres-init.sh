#!/usr/bin/env bash
# Creates Prefect's and MLflow's databases and users; PostgreSQL's image runs it at the first start.
set -euo pipefail

PREFECT_DATABASE_PASSWORD=$(</run/secrets/prefect_database_password)
MLFLOW_DATABASE_PASSWORD=$(</run/secrets/mlflow_database_password)
export PREFECT_DATABASE_PASSWORD MLFLOW_DATABASE_PASSWORD
exec psql --no-psqlrc --no-password --username "$POSTGRES_USER" --dbname postgres --file /databases.sql

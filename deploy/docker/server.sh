#!/usr/bin/env bash
# Entry point of the image `servers`: starts `prefect` or `mlflow` on PostgreSQL, with passwords mounted as files.
set -euo pipefail

mounted=${SECRETS:-/run/secrets}
database=${DATABASE_HOST:-postgres}:${DATABASE_PORT:-5432}
address=${SERVER_ADDRESS:-0.0.0.0}

case ${1:-} in
    prefect)
        PGPASSWORD=$(<"$mounted/prefect_database_password")
        PREFECT_SERVER_API_AUTH_STRING=$(<"$mounted/prefect_auth")
        export PGPASSWORD PREFECT_SERVER_API_AUTH_STRING
        export PREFECT_SERVER_DATABASE_CONNECTION_URL="postgresql+asyncpg://prefect@$database/prefect"
        exec prefect server start --host "$address" --port "${SERVER_PORT:-4200}"
        ;;
    mlflow)
        PGPASSWORD=$(<"$mounted/mlflow_database_password")
        MLFLOW_AUTH_ADMIN_PASSWORD=$(<"$mounted/mlflow_admin_password")
        MLFLOW_FLASK_SERVER_SECRET_KEY=$(<"$mounted/mlflow_secret_key")
        export PGPASSWORD MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY
        export MLFLOW_BACKEND_STORE_URI="postgresql+psycopg://mlflow@$database/mlflow"
        export MLFLOW_ARTIFACTS_DESTINATION=${MLFLOW_ARTIFACTS_DESTINATION:-/artifacts}
        export MLFLOW_AUTH_CONFIG_PATH=${RUNTIME:-/run/megacore}/mlflow_users.ini
        here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
        sed "s/@127.0.0.1:5432/@$database/" "${USERS:-$here/mlflow_users.ini}" >"$MLFLOW_AUTH_CONFIG_PATH"
        exec mlflow server --host "$address" --port "${SERVER_PORT:-5000}" --serve-artifacts --app-name basic-auth
        ;;
    *)
        echo "server.sh: give one argument, prefect or mlflow" >&2
        exit 2
        ;;
esac

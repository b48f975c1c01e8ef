#!/usr/bin/env bash
# Runs a command with the passwords of Prefect's and MLflow's servers, which are mounted as files:
#   deploy/docker/client.sh make pretrain
set -euo pipefail

mounted=${SECRETS:-/run/secrets}
PREFECT_API_AUTH_STRING=$(<"$mounted/prefect_auth")
MLFLOW_TRACKING_PASSWORD=$(<"$mounted/mlflow_admin_password")
export PREFECT_API_AUTH_STRING MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_USERNAME=admin
exec "$@"

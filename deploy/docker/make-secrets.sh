#!/usr/bin/env bash
# Creates the keys and passwords that docker-compose.yml mounts, in deploy/docker/secrets; existing files stay.
# Only the user can enter the directory. The files in it are readable for everyone, because containers read them with
# a different user id.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

umask 077
mkdir -p secrets
chmod 700 secrets

random() { head --bytes 24 /dev/urandom | od --address-radix n --format x1 | tr -d ' \n'; }

secret() {
    local name=$1 value=$2
    if [ ! -e "secrets/$name" ]; then
        printf '%s' "$value" >"secrets/$name.tmp"
        chmod 644 "secrets/$name.tmp"
        mv "secrets/$name.tmp" "secrets/$name"
        echo "make-secrets.sh: made secrets/$name"
    fi
}

for name in postgres_password prefect_database_password mlflow_database_password mlflow_admin_password mlflow_secret_key; do
    secret "$name" "$(random)"
done
secret prefect_auth "team:$(random)"

for name in ssh_host_key ssh_client_key; do
    if [ ! -e "secrets/$name.pub" ]; then
        rm -f "secrets/$name"
        ssh-keygen -q -t ed25519 -N '' -C "megacore $name" -f "secrets/$name"
        echo "make-secrets.sh: made secrets/$name"
    fi
    chmod 644 "secrets/$name" "secrets/$name.pub"
done

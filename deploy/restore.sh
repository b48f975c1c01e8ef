#!/usr/bin/env bash
# Restores a copy of deploy/backup.sh into empty databases, while the servers are stopped:
#   deploy/restore.sh DIRECTORY
# The variables of backup.sh set the destinations. Files of the copy replace existing files; other files stay.
set -euo pipefail

fail() {
    echo "restore.sh: $*" >&2
    exit 1
}

[ $# -eq 1 ] || fail "give one argument: a directory that backup.sh made"
copy=$1
[ -f "$copy/SHA256SUMS" ] || fail "$copy holds no SHA256SUMS: name a directory that backup.sh has finished"
(cd "$copy" && sha256sum --check --quiet SHA256SUMS) || fail "$copy is damaged (see above): take another copy"
artifacts=${MLFLOW_ARTIFACTS_DESTINATION:?restore.sh: set MLFLOW_ARTIFACTS_DESTINATION to where MLflow keeps files}
artifacts=${artifacts#file://}
case $artifacts in
    *://*) [ ! -d "$copy/artifacts" ] || fail "$copy holds artifacts, and MLFLOW_ARTIFACTS_DESTINATION is no path: name one" ;;
esac
[ ! -d "$copy/workspace" ] || [ -n "${MEGACORE_WORKSPACE:-}" ] ||
    fail "$copy holds a workspace: set MEGACORE_WORKSPACE to where it belongs"

for entry in prefect:prefect mlflow:mlflow mlflow_users:mlflow; do
    database=${entry%%:*}
    tables=$(psql --no-psqlrc --no-password --tuples-only --no-align --username "${entry##*:}" --dbname "$database" \
        --command "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") || fail "database $database cannot be reached"
    [ "$tables" -eq 0 ] || fail "database $database holds $tables tables: drop it and create it again (databases.sql)"
done
for entry in prefect:prefect mlflow:mlflow mlflow_users:mlflow; do
    database=${entry%%:*}
    # One transaction: a database is restored completely or stays empty.
    pg_restore --no-password --username "${entry##*:}" --dbname "$database" --exit-on-error --single-transaction \
        --no-owner --no-privileges "$copy/$database.dump" || fail "database $database was not restored (see above)"
done

if [ -d "$copy/artifacts" ]; then
    mkdir -p "$artifacts"
    rsync --archive "$copy/artifacts/" "$artifacts/"
fi
if [ -d "$copy/workspace" ]; then
    mkdir -p "$MEGACORE_WORKSPACE"
    rsync --archive "$copy/workspace/" "$MEGACORE_WORKSPACE/"
fi
echo "restore.sh: restored from $copy"

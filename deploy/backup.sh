#!/usr/bin/env bash
# Copies the data of a team's servers into a new directory, while they run:
#   deploy/backup.sh DIRECTORY             or, into a subdirectory named after the time:
#   deploy/backup.sh --dated DIRECTORY
# PGHOST, PGPORT and PGPASSFILE give access to the databases. MLFLOW_ARTIFACTS_DESTINATION is the directory of the
# artifacts, and MEGACORE_WORKSPACE, if set, the workspace with data and checkpoints.
# The databases are copied first. Files are written before their database entries and removed after them, so a later
# copy of the files contains all files that the copied databases refer to.
set -euo pipefail
umask 077

fail() {
    echo "backup.sh: $*" >&2
    exit 1
}

if [ "${1:-}" = --dated ]; then
    shift
    set -- "${1:?backup.sh: name a directory after --dated}/$(date --utc +%Y-%m-%dT%H%M%SZ)"
fi
[ $# -eq 1 ] || fail "give one argument: the new directory for the copy"
target=$1
while [ "${target%/}" != "$target" ]; do target=${target%/}; done
[ ! -e "$target" ] || fail "$target already exists: name a new directory"
artifacts=${MLFLOW_ARTIFACTS_DESTINATION:?backup.sh: set MLFLOW_ARTIFACTS_DESTINATION to where MLflow keeps files}
artifacts=${artifacts#file://}
partial=$target.partial
rm -rf "$partial"
# Remove an incomplete copy, so that failed nightly backups do not fill the disk.
trap 'rm -rf "$partial"' EXIT
mkdir -p "$partial"

# Servers and trainings keep running: a file that was removed during the copy (code 24) is no error.
copy() {
    local code=0
    rsync --archive "$@" || code=$?
    [ "$code" -eq 0 ] || [ "$code" -eq 24 ] || fail "${*: -2:1} was not copied (rsync ended with code $code, see above)"
}

for entry in prefect:prefect mlflow:mlflow mlflow_users:mlflow; do
    database=${entry%%:*}
    pg_dump --no-password --username "${entry##*:}" --format custom --no-owner --no-privileges \
        --file "$partial/$database.dump" "$database" || fail "database $database was not copied (see above)"
done

case $artifacts in
    *://*) echo "backup.sh: the artifacts at ${artifacts%%:*}:// are not copied: keep versions of the bucket itself" ;;
    *) copy "$artifacts/" "$partial/artifacts/" ;;
esac
if [ -n "${MEGACORE_WORKSPACE:-}" ]; then
    copy --exclude /servers.json --exclude /servers.password --exclude /servers/ --exclude '*.tmp-*' --exclude '*.lock' \
        "$MEGACORE_WORKSPACE/" "$partial/workspace/"
fi

(cd "$partial" && sha256sum -- *.dump >SHA256SUMS)
sync --file-system "$partial"
# Only a complete copy gets the requested name.
mv "$partial" "$target"
echo "backup.sh: $target"

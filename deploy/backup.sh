#!/usr/bin/env bash
# Copies what a team's servers know into a new directory, while they run:
#   deploy/backup.sh DIRECTORY             or, below a directory, with the time as its name:
#   deploy/backup.sh --dated DIRECTORY
# PGHOST, PGPORT and PGPASSFILE say how the databases are reached; MLFLOW_ARTIFACTS_DESTINATION names the artifacts,
# MEGACORE_WORKSPACE, where it is set, the workspace with data and checkpoints.
# The databases come first: files are written before, and removed after, what speaks of them, so that a copy of
# the files that is younger than the databases has all that they name.
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
[ $# -eq 1 ] || fail "give one argument: the directory that is to hold the copy"
target=$1
while [ "${target%/}" != "$target" ]; do target=${target%/}; done
[ ! -e "$target" ] || fail "$target is there already: name a new directory"
artifacts=${MLFLOW_ARTIFACTS_DESTINATION:?backup.sh: set MLFLOW_ARTIFACTS_DESTINATION to where MLflow keeps files}
artifacts=${artifacts#file://}
partial=$target.partial
rm -rf "$partial"
# What does not become whole is not left to fill the disk night after night.
trap 'rm -rf "$partial"' EXIT
mkdir -p "$partial"

# Servers and trainings go on meanwhile: a file that was removed before its turn (24) is none that is missing.
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
    copy --exclude /servers.json --exclude /servers/ --exclude '*.tmp-*' --exclude '*.lock' \
        "$MEGACORE_WORKSPACE/" "$partial/workspace/"
fi

(cd "$partial" && sha256sum -- *.dump >SHA256SUMS)
sync --file-system "$partial"
# Only what is whole has the name that was asked for.
mv "$partial" "$target"
echo "backup.sh: $target"

#!/usr/bin/env bash
# Entry point of a trainer: sshd on SSHD_ADDRESS, port SSHD_PORT, only for the user of the image, with mounted keys.
# ssh and sshd refuse keys that others can read, so the keys are copied to a directory in memory.
set -euo pipefail

mounted=${SECRETS:-/run/secrets}
state=${SSH_STATE:-/run/megacore}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

for name in ssh_host_key ssh_host_key.pub ssh_client_key ssh_client_key.pub; do
    if [ ! -r "$mounted/$name" ]; then
        echo "trainer.sh: $mounted/$name does not exist: run deploy/docker/make-secrets.sh and start again" >&2
        exit 1
    fi
done

install --mode 600 "$mounted/ssh_host_key" "$state/host_key"
install --mode 600 "$mounted/ssh_client_key" "$state/client_key"
install --mode 600 "$mounted/ssh_client_key.pub" "$state/authorized_keys"
# All trainers have the same host key, whatever their address.
read -r type key _ <"$mounted/ssh_host_key.pub"
echo "* $type $key" >"$state/known_hosts"

if [ $# -gt 0 ]; then
    exec "$@"
fi
exec /usr/sbin/sshd -D -e -f "${SSHD_CONFIG:-$here/sshd_config}" \
    -o "ListenAddress=${SSHD_ADDRESS:-127.0.0.1}:${SSHD_PORT:-2222}"

#!/bin/sh
# Starts the image's stage. Other containers reach this one by its host name, which also tells instances apart.
set -eu
host=$(hostname)
export HEADRACE_INSTANCE="${HEADRACE_INSTANCE:-$HEADRACE_STAGE-$host}"
export HEADRACE_ADVERTISE_HOST="${HEADRACE_ADVERTISE_HOST:-$host}"
if [ "$#" -gt 0 ]; then exec "$@"; fi
exec python -m "services.$HEADRACE_STAGE"

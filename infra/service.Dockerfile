# One image per stage, each with that stage's packages and code and nothing else:
#   docker build -f infra/service.Dockerfile --build-arg STAGE=gateway --build-arg EXTRAS=gateway .
#
# Without a way out of the build, collect wheels first (`make wheels`) and pass --build-arg PIP_OPTIONS=--no-index.
# A package index of your own: --build-arg PIP_OPTIONS="--index-url ...".

ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS packages
ARG EXTRAS
ARG PIP_OPTIONS=
WORKDIR /build
# The pattern matches nothing where no wheels were collected.
COPY pyproject.toml constraints.txt wheels* ./
# The project itself is empty here: only what it depends on is installed, and code changes do not repeat it.
RUN sed -i '/^readme/d; s/, "ziglang[^"]*"//' pyproject.toml \
 && python -m venv /venv \
 && /venv/bin/pip install --no-cache-dir --disable-pip-version-check --find-links . ${PIP_OPTIONS} \
    --constraint constraints.txt ".[${EXTRAS}]"

# The engine's CPU kernels, for the stages that compute.
FROM ${PYTHON_IMAGE} AS kernels
ARG EXTRAS
ARG PIP_OPTIONS=
WORKDIR /build
COPY constraints.txt wheels* ./
COPY shared/engine/kernels kernels
RUN mkdir /kernels \
 && case "${EXTRAS}" in *engine* | prefill | decode | draft) \
    pip install --no-cache-dir --disable-pip-version-check --find-links . ${PIP_OPTIONS} --constraint constraints.txt \
      --target /compiler ziglang \
    && PYTHONPATH=/compiler python kernels/build.py /kernels ;; esac

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --create-home headrace && install -d -o headrace /models
COPY --from=packages /venv /venv
WORKDIR /app
COPY infra/entrypoint.sh infra/healthcheck.py /usr/local/bin/
COPY shared shared
COPY --from=kernels /kernels shared/engine/kernels
ARG STAGE
COPY services/__init__.py services/
COPY services/${STAGE} services/${STAGE}
ENV PATH=/venv/bin:/usr/local/bin:/usr/bin:/bin \
    HEADRACE_STAGE=${STAGE} \
    HEADRACE_CACHE_DIR=/models \
    HF_HOME=/models/hub \
    HEADRACE_HOST=0.0.0.0 \
    HEADRACE_METRICS_PORT=9100 \
    HEADRACE_LOG_FORMAT=json \
    OMP_NUM_THREADS=1 \
    MKL_NUM_THREADS=1 \
    OPENBLAS_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER headrace
ENTRYPOINT ["sh", "/usr/local/bin/entrypoint.sh"]

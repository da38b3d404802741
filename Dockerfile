# The service as an image. `docker build .` makes the CPU image, `docker build --target cuda .` the one with torch and triton.
#   docker run --read-only --tmpfs /tmp --shm-size 1g --volume draftd-run:/run/draftd --volume draftd-cache:/var/cache/draftd draftd
# To keep the corpus: --volume draftd-data:/var/lib/draftd --env DRAFTD_DATA_DIR=/var/lib/draftd
# To pin the base by digest too: --build-arg PYTHON=python:3.12.11-slim-bookworm@sha256:..., as `docker buildx imagetools inspect` tells it.
ARG PYTHON=python:3.12.11-slim-bookworm

FROM ${PYTHON} AS wheel
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY requirements.lock requirements-cuda.lock ./
# The build backend at its pinned release, too.
RUN pip install --constraint requirements.lock setuptools
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY proto proto
COPY drafter drafter
COPY client client
COPY server server
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM wheel AS cpu-packages
RUN python -m venv --without-pip /opt/draftd \
    && pip --python /opt/draftd/bin/python install --constraint requirements.lock "$(ls /dist/draftd-*.whl)[server,nats,otel]"

FROM wheel AS cuda-packages
RUN python -m venv --without-pip /opt/draftd \
    && pip --python /opt/draftd/bin/python install --constraint requirements-cuda.lock "$(ls /dist/draftd-*.whl)[server,gpu,nats,otel]"

FROM ${PYTHON} AS runtime
ARG REVISION=unknown
LABEL org.opencontainers.image.title="draftd" \
      org.opencontainers.image.description="A drafter as a service for LLM speculative decoding" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# 65532 is the user of distroless images; engines must run as the same user to map the index.
RUN groupadd --gid 65532 draftd \
    && useradd --uid 65532 --gid draftd --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin draftd \
    && install --directory --owner draftd --group draftd --mode 0700 /run/draftd /var/cache/draftd /var/lib/draftd
COPY LICENSE /usr/share/doc/draftd/
# Kernels are compiled for the CPU and GPU at hand, so they cannot be shipped; the volume keeps them for the next start.
ENV PATH=/opt/draftd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/draftd \
    TRITON_CACHE_DIR=/var/cache/draftd/triton \
    DRAFTD_SOCKET=/run/draftd/draftd.sock \
    DRAFTD_HTTP=0.0.0.0:9464
VOLUME ["/run/draftd", "/var/cache/draftd"]
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/readyz', timeout=3)"]
ENTRYPOINT ["draftd"]
CMD ["serve"]

FROM runtime AS cuda
# triton compiles its launchers with a C compiler. Debian keeps one release of a package only, so that a pinned one cannot be had for long.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY requirements-cuda.lock /usr/share/doc/draftd/
COPY --from=cuda-packages /opt/draftd /opt/draftd
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532

FROM runtime AS cpu
COPY requirements.lock /usr/share/doc/draftd/
COPY --from=cpu-packages /opt/draftd /opt/draftd
USER 65532:65532

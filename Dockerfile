# The service as an image. Run it with a writable /tmp and enough /dev/shm for the index, everything else may be read-only:
#   docker run --read-only --tmpfs /tmp --shm-size 1g -v draftd-run:/run/draftd draftd
FROM python:3.12.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY requirements.lock ./
# The build backend at its pinned release, too.
RUN pip install --constraint requirements.lock setuptools
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY proto proto
COPY drafter drafter
COPY client client
COPY server server
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && python -m venv /opt/draftd \
    && /opt/draftd/bin/pip install --constraint requirements.lock "$(ls /dist/draftd-*.whl)[server]"

FROM python:3.12.11-slim-bookworm AS runtime
LABEL org.opencontainers.image.title="draftd" \
      org.opencontainers.image.description="A drafter as a service for LLM speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0"
# 65532 is the user of distroless images; engines must run as the same user to map the index.
RUN groupadd --gid 65532 draftd \
    && useradd --uid 65532 --gid draftd --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin draftd \
    && install --directory --owner draftd --group draftd --mode 0700 /run/draftd
COPY --from=build /opt/draftd /opt/draftd
# numba keeps what it compiled in NUMBA_CACHE_DIR, which must be writable.
ENV PATH=/opt/draftd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/tmp/numba \
    DRAFTD_SOCKET=/run/draftd/draftd.sock \
    DRAFTD_HTTP=0.0.0.0:9464
USER 65532:65532
WORKDIR /tmp
VOLUME /run/draftd
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/readyz', timeout=3)"]
ENTRYPOINT ["draftd"]
CMD ["serve"]

# The service: `serve` by default; `migrate`, `deliver` and `up` are the same image with another command.

# By digest: --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt ./
RUN pip install -c constraints.txt build hatchling mkdocs-material && python -m venv /opt/evalstop
COPY clients clients
COPY detectors detectors
COPY migrations migrations
COPY service service
COPY docs docs
COPY mkdocs.yml ./
RUN mkdocs --quiet build
RUN python -m build --no-isolation --wheel --outdir /wheels detectors \
 && python -m build --no-isolation --wheel --outdir /wheels clients \
 && python -m build --no-isolation --wheel --outdir /wheels service \
 && /opt/evalstop/bin/pip install -c constraints.txt /wheels/*.whl \
 && /opt/evalstop/bin/pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
ENV PATH=/opt/evalstop/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EVALSTOP_HOST=0.0.0.0 \
    EVALSTOP_PORT=8787 \
    EVALSTOP_DATA_FOLDER=/data
RUN groupadd --gid 10001 evalstop \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent evalstop \
 && install --directory --owner=10001 --group=10001 /data
COPY --from=build /opt/evalstop /opt/evalstop
USER 10001
EXPOSE 8787
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['EVALSTOP_PORT']), timeout=4); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["evalstop"]
CMD ["serve"]

# The receivers for Kubernetes, Slurm and commands, and the evaluator. Built from the top of the repository:
#
#   docker build -f deploy/receiver.Dockerfile -t evalstop-receiver:0.1.0 .

# By digest: --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt ./
RUN pip install -c constraints.txt build hatchling && python -m venv /opt/evalstop
COPY clients clients
RUN python -m build --no-isolation --wheel --outdir /wheels clients \
 && /opt/evalstop/bin/pip install -c constraints.txt /wheels/*.whl \
 && /opt/evalstop/bin/pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
ENV PATH=/opt/evalstop/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
COPY --from=build /opt/evalstop /opt/evalstop
USER 10001
EXPOSE 9000
ENTRYPOINT ["evalstop-receiver"]

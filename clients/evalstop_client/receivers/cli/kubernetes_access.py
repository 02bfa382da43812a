"""Options for the access to a Kubernetes API server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.kubernetes.access import Access, create_access, load_in_cluster_access
from evalstop_client.receivers.kubernetes.kubeconfig import find_kubeconfig, load_kubeconfig


def add_access_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of commands that use a cluster; inside one, none is needed."""
    add = parser.add_argument
    add(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="for use outside the cluster (default: $KUBECONFIG, ~/.kube/config)",
    )
    add("--context", metavar="NAME", help="context of the kubeconfig (default: its current one)")
    add("--api-server", metavar="URL", help="URL to use instead of a kubeconfig, such as http://127.0.0.1:8001")
    add("--token-file", type=Path, metavar="FILE", help="with --api-server: file with the token, read at every request")
    add("--ca-file", type=Path, metavar="FILE", help="with --api-server: certificates to trust (default: the system's)")


def load_access(options: argparse.Namespace, environment: Mapping[str, str]) -> Access:
    """The access from the options; `environment` is that of the kubeconfig's programs."""
    if options.api_server:
        if options.kubeconfig or options.context:
            raise ConfigurationError("api-server: it replaces a kubeconfig; set only one of them.")
        return create_access(options.api_server, options.token_file, options.ca_file)
    if options.token_file or options.ca_file:
        raise ConfigurationError("token-file and ca-file: they require --api-server.")
    inside = None if options.kubeconfig or options.context else load_in_cluster_access(os.environ)
    if inside is not None:
        return inside
    file = options.kubeconfig or find_kubeconfig(os.environ)
    return load_kubeconfig(file, options.context, environment)

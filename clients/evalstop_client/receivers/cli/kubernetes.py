"""`evalstop-receiver kubernetes`: ends workloads of a Kubernetes cluster."""

from __future__ import annotations

import argparse

from evalstop_client.receivers.kubernetes.access import add_access_options, load_access
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.job_control import KubernetesJobControl
from evalstop_client.receivers.kubernetes.suspension import FALLBACKS, STOP_METHODS
from evalstop_client.receivers.stop.options import add_receiver_options, add_service_options
from evalstop_client.receivers.stop.processes import copy_environment
from evalstop_client.receivers.stop.receiver import run_receiver

EXAMPLES = """\
examples:
  # in a pod, with its ServiceAccount, for workloads of two namespaces; the trainer's client identifies the workload
  evalstop-receiver kubernetes --listen 0.0.0.0:9000 --allow-namespace research --allow-namespace eval

  # on a host without inbound connections; with the kubeconfig's user
  evalstop-receiver kubernetes --pull 01a0... --kubeconfig ~/.kube/config --context lab --allow-namespace research

  # one of several clusters; through `kubectl proxy`
  evalstop-receiver kubernetes --cluster lab-1 --api-server http://127.0.0.1:8001 --allow-namespace research

It stops batch/v1 Jobs, JobSets, TrainJobs, PyTorchJobs, MPIJobs, RayJobs, RayClusters and jobs of Volcano: always the
topmost of them, with its own suspend flag, or Kueue's if Kueue manages it. It needs the verbs get and patch on them,
and get, list, watch and delete on pods; with --stop-by delete, delete instead of patch on the workloads.
"""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "kubernetes",
        help="end workloads of a Kubernetes cluster",
        description="Ends workloads of a Kubernetes cluster: suspends or deletes them, and reports once none of their "
        "pods holds resources.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--allow-namespace",
        action="append",
        metavar="NAME",
        help="namespace in which workloads may be stopped (default: the receiver's own)",
    )
    add("--allow-any-namespace", action="store_true", help="stop workloads in any namespace that Kubernetes permits")
    add("--cluster", metavar="NAME", help="handle only runs with this label kubernetes_cluster (default: any run)")
    add("--stop-by", choices=STOP_METHODS, default="suspend", help="suspend (can be undone) or delete")
    add(
        "--instead-of-suspend",
        choices=FALLBACKS,
        default="parallelism",
        help="for a Job on Kubernetes before 1.21, which cannot suspend it: parallelism 0 (can be undone), delete, or "
        "refuse (default: %(default)s)",
    )
    add(
        "--checkpoint-annotation",
        action="store_true",
        help="annotate pods with evalstop.io/save-checkpoint before they end, for runs without a label "
        "checkpoint_signal; needs the verb patch on pods (default: only runs with the label `annotation`)",
    )
    add_access_options(parser)
    add_service_options(parser)
    add_receiver_options(parser)
    parser.set_defaults(run=run_kubernetes_receiver)


def run_kubernetes_receiver(options: argparse.Namespace) -> int:
    access = load_access(options, copy_environment(options.secret_env, options.key_env))
    namespaces = frozenset(options.allow_namespace or [access.namespace])
    action = KubernetesJobControl(
        Api(access),
        namespaces=None if options.allow_any_namespace else namespaces,
        cluster=options.cluster,
        annotates=options.checkpoint_annotation,
        stop_by=options.stop_by,
        fallback=options.instead_of_suspend,
    )
    return run_receiver(action, options, "kubernetes")

"""The pages by which one connects a trainer or a scheduler, and what becomes of each of their code blocks in the tests.

A block is marked as a step of its page, or followed by a test that takes it from here, or stands among those that no
test runs, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.acceptance.docs.documents import ROOT, Block, blocks_of

PAGES = (
    "README",
    "docs/quickstart",
    "docs/ways-in",
    "docs/callbacks",
    "docs/mlflow",
    "docs/http",
    "docs/roles",
    "docs/evaluate-now",
    "docs/receivers",
    "docs/slurm",
    "docs/kubernetes",
    "docs/park",
)
"""Where one begins, and what stands in the site below Connect a trainer and Connect a scheduler."""


@dataclass(frozen=True)
class Followed:
    """A block that a test runs: `words` tell it from the others of its page, `test` is the file of that test."""

    page: str
    words: str
    test: str


HERE = "tests/acceptance/docs/test_connect_pages.py"
SLURM = "tests/clients/receivers/slurm/test_documented_commands.py"
KUBERNETES = "tests/clients/receivers/kubernetes/cluster.py"
STORY = "tests/clients/receivers/kubernetes/test_end_to_end.py"
DEPLOYMENT = "tests/acceptance/docs/test_deployment_pages.py"
RECEIVERS = "tests/clients/receivers/test_documented_receivers.py"

FOLLOWED = {
    "client tab": Followed("docs/ways-in", 'init("client-1"', HERE),
    "callbacks tab": Followed("docs/ways-in", "callbacks.transformers", HERE),
    "mlflow tab": Followed("docs/ways-in", "MLFLOW_TRACKING_URI=", HERE),
    "transformers": Followed("docs/callbacks", "callbacks.transformers", HERE),
    "many processes": Followed("docs/callbacks", "DistributedRun(", HERE),
    "tensorboard": Followed("docs/callbacks", "watch-tensorboard", HERE),
    "mlflow address": Followed("docs/mlflow", "MLFLOW_TRACKING_URI=", HERE),
    "mlflow slurm labels": Followed("docs/mlflow", "SLURM_JOB_ID", HERE),
    "mlflow pod labels": Followed("docs/mlflow", "$(EVALSTOP_KUBERNETES_NAME)", HERE),
    "mlflow should_stop": Followed("docs/mlflow", "def should_stop", HERE),
    "declared": Followed("docs/roles", '"reward": {"role": "proxy"}', HERE),
    "several evals": Followed("docs/roles", '"weight": 2', HERE),
    "any scheduler": Followed("docs/receivers", "evalstop-receiver command", HERE),
    "30 lines": Followed("docs/receivers", "import base64", HERE),
    "bash": Followed("docs/receivers", "pull/endpoints/$ENDPOINT/claim", HERE),
    "slurm": Followed("docs/slurm", "--name slurm-receiver", SLURM),
    "slurm pull": Followed("docs/receivers", "slurm --pull", SLURM),
    "batch script": Followed("docs/slurm", "trap ", RECEIVERS),
    "pods of jobs": Followed("docs/kubernetes", "metadata.labels['job-name']", KUBERNETES),
    "other pods": Followed("docs/kubernetes", "fieldPath: metadata.name}", KUBERNETES),
    "outside a cluster": Followed("docs/kubernetes", "--kubeconfig", STORY),
    "asked to save": Followed("docs/kubernetes", "def is_asked_to_save", HERE),
    "unit": Followed("docs/slurm", "[Service]", DEPLOYMENT),
    "kubectl secret": Followed("docs/kubernetes", "kubectl create namespace", DEPLOYMENT),
    "kubectl apply": Followed("docs/kubernetes", "kubectl apply", DEPLOYMENT),
    "helm receiver": Followed("docs/kubernetes", "--set receiver.enabled", DEPLOYMENT),
    "service in a cluster": Followed("docs/kubernetes", "--set service.database", DEPLOYMENT),
    "endpoint that parks": Followed("docs/park", "--event run.park_requested", HERE),
    "parks": Followed("docs/park", '"action": "park"', HERE),
}

EVALUATES = "needs a model; tests/clients/test_eval_requests.py answers by a loop and by an evaluator"
JOBS = "needs a cluster; tests/clients/receivers/kubernetes/test_evaluator.py has one"
NOT_RUN = {
    ("README", "make demo"): "takes minutes, and a browser to look at it",
    ("docs/quickstart", "make run"): "installs; the tests start `evalstop up`, which it calls",
    ("docs/quickstart", "source .venv"): "the tests set these variables, to another port",
    ("docs/ways-in", "KUBEFLOW_TRAINER"): "tests/acceptance/examples/kubeflow_reporter.py runs what reads it",
    ("docs/kubernetes", "volumes:"): "what the tests' cluster writes for its pods by itself",
    ("docs/http", '"error_count"'): "an answer, shown",
    ("docs/evaluate-now", "run.eval_requests()"): EVALUATES,
    ("docs/evaluate-now", "python eval.py {checkpoint} {n} {seed}"): EVALUATES,
    ("docs/evaluate-now", "--kubernetes-job"): JOBS,
    ("docs/evaluate-now", '"difference"'): "a body, shown",
}
"""By page and words: why no test runs the block as it stands."""


def find_blocks(page: str, words: str) -> list[Block]:
    """The blocks of a page in which these words are and that are no steps of it."""
    return [block for block in blocks_of(ROOT / f"{page}.md") if words in block.text and not block.is_step]


def read_block(name: str) -> str:
    """The text of a block that is followed."""
    followed = FOLLOWED[name]
    (block,) = find_blocks(followed.page, followed.words)
    return block.text

"""The pages on connecting trainers and schedulers, and which test runs each of their code blocks.

A block is a step of its page, or taken by a test from here, or listed with the reason why no test runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.acceptance.docs.documents import ROOT, Block, read_blocks

PAGES = (
    "README",
    "docs/quickstart",
    "docs/ways-in",
    "docs/callbacks",
    "docs/mlflow",
    "docs/http",
    "docs/roles",
    "docs/evaluate-now",
    "docs/sweeps",
    "docs/receivers",
    "docs/slurm",
    "docs/kubernetes",
    "docs/other-schedulers",
    "docs/park",
)
"""README, the quickstart, and the pages below Connect a trainer and Connect a scheduler in the site's menu."""


@dataclass(frozen=True)
class BlockUnderTest:
    """A code block that a test runs: `words` occur in no other block of the page; `test` is the test's file."""

    page: str
    words: str
    test: str


CONNECT_PAGES = "tests/acceptance/docs/test_connect_pages.py"
EXAMPLES = "tests/acceptance/examples/programs.py"
SLURM = "tests/clients/receivers/slurm/test_documented_commands.py"
KUBERNETES = "tests/clients/receivers/kubernetes/cluster.py"
KUBERNETES_END_TO_END = "tests/clients/receivers/kubernetes/test_receiver.py"
DEPLOYMENT = "tests/acceptance/docs/test_deployment_pages.py"
RECEIVERS = "tests/clients/receivers/test_documented_receivers.py"
OTHER_SCHEDULERS = "tests/clients/receivers/test_other_schedulers.py"

TESTED_BLOCKS = {
    "client tab": BlockUnderTest("docs/ways-in", 'init("client-1"', CONNECT_PAGES),
    "callbacks tab": BlockUnderTest("docs/ways-in", "callbacks.transformers", EXAMPLES),
    "mlflow tab": BlockUnderTest("docs/ways-in", "MLFLOW_TRACKING_URI=", CONNECT_PAGES),
    "transformers": BlockUnderTest("docs/callbacks", "callbacks.transformers", EXAMPLES),
    "many processes": BlockUnderTest("docs/callbacks", "DistributedRun(", EXAMPLES),
    "tensorboard": BlockUnderTest("docs/callbacks", "watch-tensorboard", CONNECT_PAGES),
    "mlflow address": BlockUnderTest("docs/mlflow", "MLFLOW_TRACKING_URI=", CONNECT_PAGES),
    "mlflow slurm labels": BlockUnderTest("docs/mlflow", "SLURM_JOB_ID", CONNECT_PAGES),
    "mlflow pod labels": BlockUnderTest("docs/mlflow", "$(EVALSTOP_KUBERNETES_NAME)", CONNECT_PAGES),
    "mlflow should_stop": BlockUnderTest("docs/mlflow", "def should_stop", CONNECT_PAGES),
    "declared": BlockUnderTest("docs/roles", '"reward": {"role": "proxy"}', CONNECT_PAGES),
    "several evals": BlockUnderTest("docs/roles", '"weight": 2', CONNECT_PAGES),
    "rule of a population": BlockUnderTest("docs/sweeps", '"ready_steps": 200', CONNECT_PAGES),
    "any scheduler": BlockUnderTest("docs/receivers", "evalstop-receiver command", CONNECT_PAGES),
    "30 lines": BlockUnderTest("docs/receivers", "import base64", RECEIVERS),
    "bash": BlockUnderTest("docs/receivers", "pull/endpoints/$ENDPOINT/claim", RECEIVERS),
    "slurm": BlockUnderTest("docs/slurm", "--name slurm-receiver", SLURM),
    "slurm pull": BlockUnderTest("docs/receivers", "slurm --pull", SLURM),
    "batch script": BlockUnderTest("docs/slurm", "trap ", RECEIVERS),
    "pods of jobs": BlockUnderTest("docs/kubernetes", "metadata.labels['job-name']", KUBERNETES),
    "other pods": BlockUnderTest("docs/kubernetes", "fieldPath: metadata.name}", KUBERNETES),
    "outside a cluster": BlockUnderTest("docs/kubernetes", "--api-server", KUBERNETES_END_TO_END),
    "unit": BlockUnderTest("docs/slurm", "[Service]", DEPLOYMENT),
    "clusterrole of waiting": BlockUnderTest(
        "docs/kubernetes", "kubectl create clusterrole", "tests/clients/receivers/kubernetes/test_idle_returns.py"
    ),
    "kubectl secret": BlockUnderTest("docs/kubernetes", "generic evalstop-receiver", DEPLOYMENT),
    "kubectl apply": BlockUnderTest("docs/kubernetes", "kubectl apply", DEPLOYMENT),
    "helm receiver": BlockUnderTest("docs/kubernetes", "--set receiver.enabled", DEPLOYMENT),
    "service in a cluster": BlockUnderTest("docs/kubernetes", "--set service.database", DEPLOYMENT),
    "ray jobs": BlockUnderTest("docs/other-schedulers", "# ray-job stop ID", OTHER_SCHEDULERS),
    "grid engine": BlockUnderTest("docs/other-schedulers", "# sge-check ID", OTHER_SCHEDULERS),
    "endpoint that parks": BlockUnderTest("docs/park", "--preset parking_receiver", CONNECT_PAGES),
    "parks": BlockUnderTest("docs/park", '"action": "park"', CONNECT_PAGES),
}

NOT_RUN = "no package of this scheduler is to be had; the page says that it was not run"
RECIPE = "tests/clients/receivers/test_other_schedulers.py starts the receiver by it"
NEEDS_MODEL = "needs a model; tests/clients/test_eval_requests.py answers by a loop and by an evaluator"
COPIES = "shows a part of a program; tests/acceptance/examples/test_sweeps.py runs whole ones"
UNTESTED_BLOCKS = {
    ("README", "make demo"): "takes minutes, and needs a browser",
    ("docs/quickstart", "make run"): "installs; the tests start `evalstop up`, which it calls",
    ("docs/quickstart", "source .venv"): "the tests set these variables, to another port",
    ("docs/other-schedulers", "ray job submit"): "the test submits the job by Ray's API, which this command calls",
    ("docs/other-schedulers", "export RAY_API_SERVER_ADDRESS"): RECIPE,
    ("docs/other-schedulers", "job_id=$JOB_ID"): "the test submits a job that sleeps, and knows its id",
    ("docs/other-schedulers", "--check 'sge-check"): RECIPE,
    **{
        ("docs/other-schedulers", words): NOT_RUN
        for name in ("condor", "flux", "pbs", "lsf", "nomad")
        for words in (f"# {name}-check ", f"--check '{name}-check ")
    },
    ("docs/evaluate-now", "run.eval_requests()"): NEEDS_MODEL,
    ("docs/evaluate-now", "python eval.py {checkpoint} {n} {seed}"): NEEDS_MODEL,
    ("docs/evaluate-now", '"difference"'): "an example of a request body",
    ("docs/sweeps", 'init("lr-3e-6"'): COPIES,
    ("docs/sweeps", "exploit.confirm()"): COPIES,
    ("docs/sweeps", "evalstop-receiver process"): COPIES,
    ("docs/sweeps", "evalstop groups rule"): "tests/clients/cli/test_commands.py calls these commands",
}
"""By page and words: the reason why no test runs the block."""


def find_blocks(page: str, words: str) -> list[Block]:
    """The blocks of a page that contain these words and are not steps of it."""
    return [block for block in read_blocks(ROOT / f"{page}.md") if words in block.text and not block.is_step]


def read_block(name: str) -> str:
    """The text of a tested block."""
    tested = TESTED_BLOCKS[name]
    (block,) = find_blocks(tested.page, tested.words)
    return block.text

"""`import evalstop`: the name that people type, a run in one line, and what a notebook shows of it."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import Any

import evalstop
import evalstop_client
import pytest
from evalstop_client.config import LONGEST_VALUE, MOST_PARAMS, flatten_config
from evalstop_client.presentation import ShownRun, draw_run, draw_sparkline
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.runs import FAST_LIMITS, logged_messages, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def init(server: FakeServer, *names: str, **arguments: Any) -> evalstop.Run:
    return evalstop.init(*names, **{"url": server.url, "key": KEY, "limits": FAST_LIMITS, **arguments})


def test_a_run_in_one_line_says_how_it_is_watched(
    server: FakeServer, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    """Roles are named by metric, the configuration goes along flat, and mode, policy and page are printed once."""
    config = argparse.Namespace(lr=1e-6, ppo={"clip": 0.2, "normalize": True})
    labels = {"gpus": 8, "final": False, "seed": "1"}
    named = {"eval": "eval/gsm8k", "proxy": "reward", "kl": "kl", "total_steps": 100}
    said = {"owner": "dana", "group": "seeds", "tags": ["baseline"], "notes": "n"}
    with init(server, "ppo-7b", config=config, labels=labels, mode="enforce", **said, **named) as run:
        page = f"{server.url}/runs/run-1"
        assert capsys.readouterr().out == f"evalstop: ppo-7b: enforce, policy default@1, verdict continue, {page}\n"
        assert (run.mode, run.policy, run.url) == ("enforce", "default@1", page)
    opening = service.find_run("ppo-7b").opening
    assert opening["metrics"] == {
        "eval/gsm8k": {"role": "eval"}, "reward": {"role": "proxy"}, "kl": {"role": "kl"}
    }  # fmt: skip
    assert opening["labels"] == {"gpus": "8", "final": "false", "seed": "1"}
    assert {name: opening[name] for name in said} == said
    assert opening["params"] == {"lr": "1e-06", "ppo.clip": "0.2", "ppo.normalize": "true"}


def test_without_roles_the_service_tells_them(server: FakeServer, service: FakeService) -> None:
    """A run that declares nothing is recognized by the names of its metrics."""
    with init(server, "a run"):
        pass
    assert service.find_run("a run").opening["metrics"] == "auto"


@pytest.mark.parametrize(
    "wrong",
    [
        {"eval": "score", "proxy": "score"},
        {"eval": "score", "metrics": {"score": {"role": "eval"}}},
        {"config": 7},
    ],
)
def test_what_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    """A metric has one role, roles are given in one way, a configuration has names."""
    with pytest.raises(evalstop.ConfigurationError):
        evalstop.init("a run", url="http://127.0.0.1:1", **wrong)


def test_on_stop_hears_of_the_decision_once(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """The hook is called in the trainer's thread, at the first sight of the stop; its error stops no training."""
    service.stop_at_step = 1
    seen: list[evalstop.Decision] = []

    def save(decision: evalstop.Decision) -> None:
        seen.append(decision)
        raise RuntimeError("the disk is full")

    with open_run(server, on_stop=save) as run:
        assert not run.should_stop
        run.log({"eval": 1.0}, step=1)
        assert run.flush()
        assert seen == []
        assert run.should_stop
        assert run.should_stop
    assert [decision.state for decision in seen] == ["requested"]
    assert logged_messages(caplog) == ["evalstop: on_stop failed"]


def test_a_notebook_shows_the_evals_and_the_page(server: FakeServer, service: FakeService) -> None:
    """Verdict, link and a curve of the declared eval; a name is text there, not HTML."""
    with open_run(server, name="<b>&'", metrics={"gold": {"role": "eval"}}) as run:
        for step, value in enumerate((0.0, 1.0, float("nan"), 0.5)):
            run.log({"gold": value, "other": 9.0}, step=step)
        assert run.flush()
        shown = run._repr_html_()
        assert repr(run) == f"<Run <b>&': shadow, policy default@1, verdict continue, {run.url}>"
    assert 'aria-label="3 evals"' in shown
    assert f'href="{run.url}"' in shown
    assert "&lt;b&gt;&amp;&#x27;" in shown


@given(st.lists(st.tuples(st.integers(0, 2**53), NUMBERS)))
def test_a_sparkline_stays_in_its_frame(points: list[tuple[int, float]]) -> None:
    """Whatever is logged, all corners of the curve are inside the picture, in order of their steps."""
    corners = re.findall(r"(-?[\d.]+),(-?[\d.]+)", draw_sparkline(points).partition("points=")[2].partition("fill")[0])
    across = [float(x) for x, _ in corners]
    assert across == sorted(across)
    assert all(0 <= float(x) <= 160 and 0 <= float(y) <= 36 for x, y in corners)


def test_no_link_but_to_a_page() -> None:
    """An address that is none of the web makes no link."""
    assert "href" not in draw_run(ShownRun("r", None, None, None, None, "", "javascript:alert(1)"), [])


KEYS = st.text(max_size=300)
CONFIGS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=50),
    lambda inner: st.dictionaries(KEYS, inner, max_size=5) | st.lists(inner, max_size=3),
    max_leaves=20,
)


@given(st.dictionaries(KEYS, CONFIGS, max_size=8))
def test_any_configuration_is_one_that_the_service_takes(config: dict[str, Any]) -> None:
    """Names and values are printable text within the API's bounds, whatever a trainer is configured with."""
    for name, value in flatten_config(config).items():
        assert 1 <= len(name) <= 256
        assert name.isprintable()
        assert value.isprintable()


def test_a_large_configuration_is_cut() -> None:
    """A thousand params are kept, and the first 2,000 letters of each; one that holds itself ends too."""
    config: dict[str, Any] = {str(number): "x" * 3000 for number in range(1500)}
    params = flatten_config(config)
    assert (len(params), {len(value) for value in params.values()}) == (MOST_PARAMS, {LONGEST_VALUE})
    loop: dict[str, Any] = {}
    loop["self"] = loop
    assert len(flatten_config(loop)) == 1


def test_the_short_name_has_what_the_long_one_has_for_trainers() -> None:
    """What both packages name is the same thing, and importing either brings no HTTP library and no framework."""
    shared = set(evalstop.__all__) & set(evalstop_client.__all__)
    assert {"Run", "Decision", "ConfigurationError", "__version__"} <= shared
    assert all(getattr(evalstop, name) is getattr(evalstop_client, name) for name in shared)
    script = "import evalstop, sys; print(sorted({'httpx', 'rich', 'pandas', 'argparse', 'html'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['html']"

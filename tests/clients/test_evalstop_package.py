"""`import evalstop`: a run in one call."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import evalstop
import evalstop_client
import pytest
from evalstop_client.config import LONGEST_VALUE, MOST_PARAMS, flatten_config
from evalstop_service.web.api.runs import RunIn
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.runs import FAST_LIMITS, list_messages, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


def init_run(server: FakeServer, *names: str, **arguments: Any) -> evalstop.Run:
    return evalstop.init(*names, **{"url": server.url, "key": KEY, "limits": FAST_LIMITS, **arguments})


def test_init_opens_a_run_and_prints_how_it_is_watched(
    server: FakeServer, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metrics get their roles, the config is flattened, and mode, policy and URL are printed once."""
    config = argparse.Namespace(lr=1e-6, ppo={"clip": 0.2, "normalize": True})
    labels = {"gpus": 8, "final": False, "seed": "1"}
    named = {"eval": "eval/gsm8k", "proxy": "reward", "kl": "kl", "total_steps": 100}
    fields = {"owner": "dana", "group": "seeds", "tags": ["baseline"], "notes": "n"}
    with init_run(server, "ppo-7b", config=config, labels=labels, mode="enforce", **fields, **named) as run:
        page = f"{server.url}/runs/run-1"
        assert capsys.readouterr().out == f"evalstop: ppo-7b: enforce, policy default@1, verdict continue, {page}\n"
        assert (run.mode, run.policy, run.url) == ("enforce", "default@1", page)
    opening = service.find_run("ppo-7b").opening
    assert opening["metrics"] == {
        "eval/gsm8k": {"role": "eval"}, "reward": {"role": "proxy"}, "kl": {"role": "kl"}
    }  # fmt: skip
    assert opening["labels"] == {"gpus": "8", "final": "false", "seed": "1"}
    assert {name: opening[name] for name in fields} == fields
    assert opening["params"] == {"lr": "1e-06", "ppo.clip": "0.2", "ppo.normalize": "true"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"eval": "score", "proxy": "score"},
        {"eval": "score", "metrics": {"score": {"role": "eval"}}},
        {"config": 7},
    ],
)
def test_contradictory_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """Two roles for a metric, roles given in two ways, and a config without names are ConfigurationErrors."""
    with pytest.raises(evalstop.ConfigurationError):
        evalstop.init("a run", url="http://127.0.0.1:1", **wrong)


def test_on_stop_is_called_once(server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    """on_stop is called at the first read of should_stop after a stop; an exception in it is only logged."""
    service.stop_at_step = 1
    decisions: list[evalstop.Decision] = []

    def save(decision: evalstop.Decision) -> None:
        decisions.append(decision)
        raise RuntimeError("the disk is full")

    with open_run(server, on_stop=save) as run:
        assert not run.should_stop
        run.log({"eval": 1.0}, step=1)
        assert run.flush()
        assert decisions == []
        assert run.should_stop
        assert run.should_stop
    assert [decision.state for decision in decisions] == ["requested"]
    assert list_messages(caplog)[1:] == ["evalstop: on_stop failed"]  # after that the stop is requested


KEYS = st.text(max_size=300)
CONFIGS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=50),
    lambda inner: st.dictionaries(KEYS, inner, max_size=5) | st.lists(inner, max_size=3),
    max_leaves=20,
)


@given(st.dictionaries(KEYS, CONFIGS, max_size=8))
def test_any_config_gives_valid_params(config: dict[str, Any]) -> None:
    """The service takes the params of any config."""
    params = flatten_config(config)
    assert RunIn.model_validate_json(json.dumps({"name": "a run", "params": params})).params == params


def test_large_config_is_truncated() -> None:
    """1,000 params of 2,000 characters are kept; a config that contains itself is flattened too."""
    config: dict[str, Any] = {str(number): "x" * 3000 for number in range(1500)}
    params = flatten_config(config)
    assert (len(params), {len(value) for value in params.values()}) == (MOST_PARAMS, {LONGEST_VALUE})
    loop: dict[str, Any] = {}
    loop["self"] = loop
    assert len(flatten_config(loop)) == 1


def test_both_packages_export_the_same_objects() -> None:
    """Shared names are the same objects, and the import loads no HTTP library and no framework."""
    shared = set(evalstop.__all__) & set(evalstop_client.__all__)
    assert {"Run", "Decision", "ConfigurationError", "__version__"} <= shared
    assert all(getattr(evalstop, name) is getattr(evalstop_client, name) for name in shared)
    script = "import evalstop, sys; print(sorted({'httpx', 'pandas', 'argparse', 'html'} & set(sys.modules)))"
    completed = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"

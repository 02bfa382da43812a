"""Uses of MLflow other than metrics: artifacts, models, inputs and searches; prints the id of its run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import mlflow
import pandas as pd
from accelerate import Accelerator
from mlflow.data.pandas_dataset import from_pandas

folder = Path(tempfile.mkdtemp())
accelerator = Accelerator(log_with="mlflow", cpu=True)
accelerator.init_trackers("scripts", config={"lr": 1e-6}, init_kwargs={"mlflow": {"run_name": "ppo"}})
run = mlflow.active_run()
assert run is not None
accelerator.log({"eval_accuracy": 0.5}, step=1)

mlflow.log_params({f"param_{number}": number for number in range(568)})
mlflow.log_text("hello", "notes/hello.txt")
mlflow.log_dict({"a": 1}, "config.json")
figure, axes = plt.subplots()
axes.plot([1, 2])
mlflow.log_figure(figure, "curve.png")
(folder / "checkpoint").mkdir()
(folder / "checkpoint" / "weights.bin").write_bytes(b"w" * 3_000_000)
(folder / "checkpoint" / "empty.txt").write_text("")
mlflow.log_artifacts(str(folder / "checkpoint"), "checkpoint-1")
artifact_paths = {item.path for item in mlflow.artifacts.list_artifacts(run_id=run.info.run_id)}
assert artifact_paths == {"notes", "config.json", "curve.png", "checkpoint-1"}, artifact_paths
checkpoint_files = {
    (item.path, item.file_size) for item in mlflow.MlflowClient().list_artifacts(run.info.run_id, "checkpoint-1")
}
assert checkpoint_files == {("checkpoint-1/weights.bin", 3_000_000), ("checkpoint-1/empty.txt", 0)}, checkpoint_files
assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/notes/hello.txt") == "hello"
copy = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="checkpoint-1", dst_path=str(folder))
assert (Path(copy) / "weights.bin").stat().st_size == 3_000_000

dataset = from_pandas(pd.DataFrame({"a": [1, 2]}), name="prompts")
mlflow.log_input(dataset, context="training")
model = mlflow.initialize_logged_model(name="policy")
mlflow.log_model_params({"size": "7b"}, model_id=model.model_id)
mlflow.finalize_logged_model(model.model_id, "READY")

assert "scripts" in [item.name for item in mlflow.search_experiments()]
matching_runs = mlflow.search_runs(
    search_all_experiments=True, filter_string=f"run_id = '{run.info.run_id}'", output_format="list"
)
assert [item.info.run_id for item in matching_runs] == [run.info.run_id]

location = folder / "location"
experiment_id = mlflow.create_experiment("own location", artifact_location=location.as_uri())
with mlflow.start_run(experiment_id=experiment_id, nested=True):
    mlflow.log_text("here", "a.txt")
assert [file.name for file in location.rglob("a.txt")] == ["a.txt"]
mlflow.set_tag("slurm_job_id", "4711")
accelerator.end_training()
print(run.info.run_id)

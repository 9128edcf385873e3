"""The benchmark scripts: what they write, and that nothing which failed is hidden. Nothing here is timed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """harness and report, imported as the scripts import them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import harness
    import report

    return Namespace(harness=harness, report=report)


def run_script(name: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--device", "cpu", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--out", str(out), *options], capture_output=True, text=True, env=environment
    )


def lines_of(out: Path, op: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (path,) = out.glob(f"*/{op}-quick.jsonl")
    head, *cells = (json.loads(line) for line in path.read_text().splitlines())
    return head, cells


def test_sources_hash_with_and_without_git(modules: Namespace, tmp_path: Path) -> None:
    for folder in ("csrc", "vegas_ops"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    (tmp_path / "csrc" / "built.so").write_bytes(b"not a source")
    without_git = modules.report.sources_hash(tmp_path)
    (tmp_path / "csrc" / "verify" / "cpu.cpp").write_text("changed")
    assert modules.report.sources_hash(tmp_path) != without_git
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = (
        "git ls-files csrc vegas_ops/ops.py CMakeLists.txt | LC_ALL=C sort "
        "| xargs -d '\\n' cat | sha256sum | cut -c1-16"
    )
    by_hand = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert modules.report.sources_hash() == by_hand
    untracked = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "csrc"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    if not untracked:
        assert without_git == by_hand


@pytest.mark.parametrize("script, op", (("verify", "verify"), ("sparse", "sparse"), ("selection", "select")))
def test_spent_budget_lists_every_cell(tmp_path: Path, script: str, op: str) -> None:
    done = run_script(script, tmp_path, "--seconds", "0")
    assert done.returncode == 0, done.stderr
    head, cells = lines_of(tmp_path, op)
    for key in ("sources", "gpu", "driver", "torch", "cuda", "date", "read_ceiling_gbs", "peers"):
        assert key in head
    assert head["read_ceiling_gbs"] > 0 and head["gpu"] is None
    assert cells and all("budget" in cell["skipped"] and cell["op"] == op for cell in cells)
    assert f"not measured: {len(cells)} cells" in done.stdout


def test_selection_measures_and_plots(tmp_path: Path) -> None:
    done = run_script("selection", tmp_path, "--seconds", "600")
    assert done.returncode == 0, done.stderr
    head, cells = lines_of(tmp_path, "select")
    for cell in cells:
        assert cell["us"] > 0 and cell["bytes"] == 4 * cell["case"]["batch"] * cell["case"]["context"]
        assert cell["floor_us"] == pytest.approx(cell["bytes"] / head["read_ceiling_gbs"] / 1e3, rel=0.1)
        assert set(cell["peers"]) >= {"torch.topk", "torch, same output"}
    assert list(tmp_path.glob("*/select-quick.png"))


def run_cells(modules: Namespace, tmp_path: Path, build: Callable[[Any], Any]) -> tuple[int, dict[str, Any]]:
    """One cell made of `build`, measured without the read ceiling of a real run."""
    harness = modules.harness
    bench = object.__new__(harness.Bench)
    bench.device, bench.quick, bench.seconds, bench.started = torch.device("cpu"), True, 1e9, 0.0
    bench.ceiling_gbs, bench.ceiling_method, bench.plain_read = 10.0, "given", None
    ticks = iter(range(10**9))
    bench.clock = lambda: next(ticks) * 1e-3
    cell = harness.Cell("verify", {"batch": 1, "context": 1024}, 1000, "regime", "panel", build)
    arguments = Namespace(out=tmp_path, cpu_time=False)
    status = harness.run("verify", arguments, bench, [cell], {})
    _, (record,) = lines_of(tmp_path, "verify")
    return status, record


def test_failed_cell_stays_and_sets_the_status(
    modules: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(bench: Any) -> Any:
        raise RuntimeError("the kernel refused")

    status, record = run_cells(modules, tmp_path, build)
    assert status == 1
    assert record["error"] == "RuntimeError: the kernel refused"
    assert "FAILED verify" in capsys.readouterr().out


def test_wrong_result_is_not_timed(modules: Namespace, tmp_path: Path) -> None:
    contender = modules.harness.Contender

    def build(bench: Any) -> Any:
        ours, peer = contender([int], lambda: torch.ones(4)), contender([int], lambda: torch.ones(4) * 1.1)
        return modules.harness.Setup(ours, {"peer": lambda: peer})

    status, record = run_cells(modules, tmp_path, build)
    assert status == 1 and "us" not in record
    assert "ours and peer differ" in record["error"]


def test_failing_peer_takes_nothing_with_it(modules: Namespace, tmp_path: Path) -> None:
    contender = modules.harness.Contender

    def absent() -> Any:
        raise RuntimeError("not built for this GPU")

    def build(bench: Any) -> Any:
        peers = {"absent": absent, "present": lambda: contender([int])}
        return modules.harness.Setup(contender([int]), peers)

    status, record = run_cells(modules, tmp_path, build)
    assert status == 0 and record["us"] > 0
    assert set(record["peers"]) == {"present"}
    assert record["peer_errors"] == {"absent": "RuntimeError: not built for this GPU"}


def test_median_ratio_has_a_95_percent_interval(modules: Namespace) -> None:
    timing = modules.harness.Timing
    noise = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        ratios = 1.03 * torch.randn(31, generator=noise).mul(0.05).exp()
        pair = modules.harness.median_ratio(timing(tuple(ratios.tolist())), timing((1.0,) * 31))
        assert pair["low"] <= pair["ratio"] <= pair["high"] and pair["pairs"] == 31
        covered += pair["low"] <= 1.03 <= pair["high"]
    # 95 % of 400 are 380; 4 standard deviations below.
    assert covered >= 362

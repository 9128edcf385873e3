"""A few cases of the fuzzer and of the soak, which `tools/` runs by the thousand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_draws import RandomDraw
from op_faults import check_refusal
from op_fuzz import SUBJECTS, Surroundings, check_on_the_cpu, check_on_two_streams, check_replays, fuzz_case

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.parametrize("kind", SUBJECTS)
def test_cases_of_every_kind(device: torch.device, kind: str) -> None:
    around = Surroundings(device)
    for seed in range(12):
        draw = RandomDraw(seed)
        subject = SUBJECTS[kind](draw, device)
        if device.type == "cpu":
            check_on_the_cpu(subject, draw, 2)
        else:
            check_on_two_streams(subject, around, draw)
            check_replays(subject, around, draw, 2)


def test_refusals(device: torch.device) -> None:
    around = Surroundings(device)
    for seed in range(150):
        check_refusal(RandomDraw(seed), device, around.workspaces)


def test_a_seed_repeats_its_case(device: torch.device) -> None:
    around = Surroundings(device)
    assert fuzz_case(5, around) == fuzz_case(5, around)


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, TOOLS / name, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )


def test_the_tool(device: torch.device) -> None:
    done = run_tool("fuzz.py", "--device", device.type, "--cases", "12", "--seed", "3", "--processes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 cases" in done.stdout and "seed 3" in done.stdout and "0 failed" in done.stdout
    assert run_tool("fuzz.py", "--device", device.type, "--case", "4").returncode == 0


@pytest.mark.parametrize("arguments", (["--device", "tpu"], ["--seconds", "0"], ["--cases", "-1"]))
def test_the_tool_refuses(arguments: list[str]) -> None:
    assert run_tool("fuzz.py", *arguments).returncode == 2


@pytest.mark.parametrize("options", ([], ["--padded"]), ids=("tight", "padded"))
def test_requests_by_the_hundred(device: torch.device, options: list[str]) -> None:
    """They join, leave, are aborted and preempted: no leak, all pages returned, the text of each."""
    if device.type == "cuda" and options:
        pytest.skip("on a GPU all batches are padded")
    count = "400" if device.type == "cpu" else "80"  # there, nearly every step meets a new shape
    done = run_tool("soak.py", "--device", device.type, "--requests", count, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} requests ended" in done.stdout and "preempted" in done.stdout

"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import os
import random

# Read when torch loads OpenMP: threads that spin at barriers make small tests crawl on a machine
# that has anything else to run.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

from vegas_ops import _C

_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", max_examples=150, deadline=None, print_blob=True, suppress_health_check=_HEALTH
)
settings.register_profile(
    "thorough", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=_HEALTH
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Every run draws new cases, from a seed that is printed and can be given back."""
    config.addinivalue_line("markers", "gpu: runs on a GPU, where there is one")
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a GPU machine runs: `-m gpu`."""
    for item in items:
        fixtures, call = getattr(item, "fixturenames", ()), getattr(item, "callspec", None)
        if "cuda" in fixtures or (call is not None and call.params.get("device") == "cuda"):
            item.add_marker("gpu")


def pytest_report_header(config: pytest.Config) -> str:
    return f"hypothesis: --hypothesis-seed={config.option.hypothesis_seed} repeats this run's cases"


def has_cuda() -> bool:
    """Whether this build has CUDA kernels and this machine a GPU for them."""
    return bool(_C.cuda_architectures()) and torch.cuda.is_available()


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that this build and machine serve."""
    if request.param == "cuda" and not has_cuda():
        pytest.skip("needs a build with CUDA kernels and a GPU")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    if not has_cuda():
        pytest.skip("needs a build with CUDA kernels and a GPU")
    return torch.device("cuda")

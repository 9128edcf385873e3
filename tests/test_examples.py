"""The programs of examples/ and the code of the README run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vegas_ops

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_runs(path: Path) -> None:
    for package_name in ("transformers", "vllm"):
        if path.stem.startswith(package_name):
            pytest.importorskip(package_name)
    package = Path(vegas_ops.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    if path.stem in ("loop", "transformers_generate"):
        assert "identical: True" in result.stdout


def readme_blocks(*words: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if any(word in block for word in words)]


def test_readme_ops_run() -> None:
    blocks = readme_blocks("vegas_ops.flash", "vegas_ops.topk", "vegas_ops.sparse")
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (2, 8, 64)
    assert torch.isfinite(names["out"]).all()
    assert names["length"].tolist() == [32, 32]


def test_readme_driver_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = readme_blocks("SpeculativeDecoder")
    exec(compile(block, "README.md", "exec"), {})
    found = re.search(r"([\d.]+) tokens per verification", capsys.readouterr().out)
    assert found and float(found[1]) > 1


def test_readme_transformers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (block,) = readme_blocks("integrations.transformers")
    exec(compile(block, "README.md", "exec"), {})
    assert "return" in capsys.readouterr().out


def test_documents_link_to_files_that_exist() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_integrators_guide_runs() -> None:
    pytest.importorskip("transformers")
    text = (ROOT / "docs" / "integrating.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "integrating.md", "exec"), names)
    assert names["output"].tolist() == names["same"].tolist()
    assert len(names["first"].output) == len(names["second"].output) == 30
    assert len(names["request"].output) == 20
    assert names["length"].tolist() == [32, 32]

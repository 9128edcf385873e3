"""Every public report has a test of its number, and none is expected to fail."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def reports() -> Path | None:
    folders = [Path(os.environ["VEGAS_OPS_SHARED"])] if "VEGAS_OPS_SHARED" in os.environ else []
    folders += [folder / "shared" for folder in HERE.parents]
    return next((f for folder in folders if (f := folder / "cases" / "public_reports.md").is_file()), None)


def test_every_report_has_a_test() -> None:
    path = reports()
    if path is None:
        pytest.skip("needs the collection of reports in a folder `shared` beside the repository")
    reported = {int(number) for number in re.findall(r"^### (\d+)\.", path.read_text(), re.M)}
    tests = "\n".join(file.read_text() for file in HERE.glob("test_*_cases.py"))
    tested = {int(number) for number in re.findall(r"^def test_case_(\d{3})_", tests, re.M)}
    assert reported and not reported - tested
    assert not re.search(r"\bxfail\b", tests)

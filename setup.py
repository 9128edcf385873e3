"""Drives CMake: builds libvegas.so, libvegas_torch.so and _C, and puts them into the package.

Environment variables: VEGAS_CUDA (AUTO, ON, OFF), VEGAS_CUDA_ARCHITECTURES ("80;90"), VEGAS_CUTLASS_DIR,
VEGAS_TORCH_DIR, MAX_JOBS, VEGAS_CMAKE_ARGS.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
OLDEST_TORCH = (2, 10)
CUTLASS_VERSION = "4.2.0.0"
CUTLASS_SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"  # of its wheel
GIB = 1 << 30
JOB_BYTES = 2 * GIB  # the largest compile job stays below
RESERVE_BYTES = 1 * GIB  # left to everything else on the machine


def package_folder(name: str) -> Path | None:
    """Folder of an installed package, found without importing it.

    Also from inside pip's build isolation, which hides site-packages from sys.path but not from sysconfig.
    """
    spec = importlib.util.find_spec(name)
    if spec and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    for key in ("platlib", "purelib"):
        folder = Path(sysconfig.get_path(key)) / name
        if folder.is_dir():
            return folder
    return None


def find_torch() -> Path:
    folder = os.environ.get("VEGAS_TORCH_DIR")
    torch = Path(folder) if folder else package_folder("torch")
    if torch is None or not (torch / "version.py").is_file():
        raise SystemExit(
            "vegas_ops: no torch found in this environment. Install it first (CPU-only or CUDA, 2.10 or "
            "newer), then install vegas_ops again; with uv add --no-build-isolation. "
            "VEGAS_TORCH_DIR overrides the search."
        )
    match = re.search(r"__version__ = '(\d+)\.(\d+)", (torch / "version.py").read_text())
    if not match or (int(match[1]), int(match[2])) < OLDEST_TORCH:
        found = f"{match[1]}.{match[2]}" if match else "an unreadable version"
        raise SystemExit(f"vegas_ops: torch must be 2.10 or newer, got {found} in {torch}")
    return torch


def torch_cuda(torch: Path) -> re.Match[str] | None:
    """Major and minor CUDA version that torch was built for; None for a CPU-only build."""
    text = (torch / "version.py").read_text()
    return re.search(r"^cuda(?:: [^=]*)? = '(\d+)\.(\d+)", text, re.MULTILINE)


def check_cuda_versions(nvcc: str, torch: Path) -> None:
    """A torch for another major CUDA version is refused early; minor differences are fine."""
    release = re.search(
        r"release (\d+)\.(\d+)",
        subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout,
    )
    built = torch_cuda(torch)
    if release and built and release[1] != built[1]:
        raise SystemExit(
            f"vegas_ops: nvcc is CUDA {release[1]}.{release[2]}, "
            f"but torch was built for CUDA {built[1]}.{built[2]}. "
            f"Put nvcc {built[1]}.x on PATH or set CUDACXX, or build without CUDA kernels: VEGAS_CUDA=OFF"
        )


def find_cutlass(download_to: Path) -> Path | None:
    """CUTLASS's include folder: named, installed (nvidia-cutlass), or fetched into the build folder."""
    for variable in ("VEGAS_CUTLASS_DIR", "CUTLASS_PATH"):
        if folder := os.environ.get(variable):
            nested = Path(folder) / "include"
            return nested if nested.is_dir() else Path(folder)
    if installed := package_folder("cutlass_library"):
        return installed / "source" / "include"
    unpacked = download_to / "cutlass_library" / "source" / "include"
    if not unpacked.is_dir():
        download_to.mkdir(parents=True, exist_ok=True)
        # pip's build isolation hides pip itself as well; its folder can be run.
        fetch = [sys.executable, str(package_folder("pip")), "download", "--quiet", "--no-deps"]
        fetch += ["--dest", str(download_to), f"nvidia-cutlass=={CUTLASS_VERSION}"]
        if subprocess.run(fetch).returncode != 0:
            return None
        for archive in download_to.glob("nvidia_cutlass-*.whl"):
            if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != CUTLASS_SHA256:
                archive.unlink()
                raise SystemExit(
                    f"vegas_ops: {archive.name} must have the sha256 {CUTLASS_SHA256}, got {found}"
                )
            zipfile.ZipFile(archive).extractall(download_to)
    return unpacked


CGROUP_LIMITS = [
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]


def memory_limit(cgroup_limits: list[Path] = CGROUP_LIMITS) -> int:
    """Bytes this process may use: the machine's free memory, or the container's limit where that is lower."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (free := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        limit = int(free[1]) * 1024
    for file in cgroup_limits:
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limit = min(limit, int(text))
    return limit


def job_count(memory: int, cores: int, max_jobs: str | None) -> int:
    """Parallel compile jobs: MAX_JOBS where set, else what cores and memory allow."""
    if max_jobs:
        return max(1, int(max_jobs))
    return max(1, min(cores, (memory - RESERVE_BYTES) // JOB_BYTES))


def run(command: list[str]) -> None:
    """Runs a build step; a failure ends with the first compiler error and a hint."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        sys.stdout.write(line)
        lines.append(line.rstrip())
    if process.wait() == 0:
        return
    text = "\n".join(lines)
    symptom = re.compile(r"\berror\b|undefined reference|Killed", re.IGNORECASE)
    at = next((i for i, line in enumerate(lines) if symptom.search(line)), len(lines) - 1)
    first = lines[at].strip() if lines else "no output"
    if first.startswith("CMake Error"):  # its explanation follows, indented
        explanation = itertools.takewhile(lambda line: not line or line[0] == " ", lines[at + 1 :])
        first = " ".join([first, *(line.strip() for line in explanation if line)])
    hint = ""
    if "Killed" in text or "cannot allocate memory" in text.lower() or "out of memory" in text.lower():
        hint = " Memory ran out: set MAX_JOBS=1."
    elif "No such file or directory" in first or "No such file" in first:
        hint = " A header is missing: check the compiler, torch and CUTLASS installations."
    elif "CMAKE_CXX_COMPILER" in text and "No CMAKE_CXX_COMPILER" in text:
        hint = " No C++ compiler: install g++ 11 or newer (or clang++) or set CXX."
    raise SystemExit(f"vegas_ops: the build failed at: {first.rstrip('.')}.{hint}")


class CMakeBuild(build_ext):
    def run(self) -> None:
        import pybind11

        torch = find_torch()
        build = Path(self.build_temp).resolve()
        if self.editable_mode:
            # Setuptools builds in a temporary folder: every change would compile everything anew.
            build = ROOT / "build" / f"editable-{sys.implementation.cache_tag}"
        build.mkdir(parents=True, exist_ok=True)
        cuda = os.environ.get("VEGAS_CUDA", "AUTO").upper()
        if cuda not in ("AUTO", "ON", "OFF"):
            raise SystemExit(f"vegas_ops: `VEGAS_CUDA` must be AUTO, ON or OFF, got {cuda}")
        nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
        if cuda == "AUTO" and not torch_cuda(torch):
            print("vegas_ops: no CUDA kernels, since torch is a CPU-only build; VEGAS_CUDA=ON builds them")
            cuda = "OFF"
        arguments = [
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}",
            f"-DCMAKE_INSTALL_PREFIX={ROOT if self.inplace else Path(self.build_lib).resolve()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DVEGAS_TORCH_DIR={torch}",
            f"-DVEGAS_CUDA={cuda}",
        ]
        if cuda != "OFF" and nvcc:
            check_cuda_versions(nvcc, torch)
            if cutlass := find_cutlass(build / "cutlass"):
                arguments.append(f"-DVEGAS_CUTLASS_DIR={cutlass}")
            name = "VEGAS_CUDA_ARCHITECTURES"
            # Unset, it means the default, not what an earlier build in the same folder was told.
            arguments.append(f"-D{name}={os.environ[name]}" if os.environ.get(name) else f"-U{name}")
        arguments += shlex.split(os.environ.get("VEGAS_CMAKE_ARGS", ""))
        jobs = job_count(memory_limit(), len(os.sched_getaffinity(0)), os.environ.get("MAX_JOBS"))
        run(["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build), *arguments])
        run(["cmake", "--build", str(build), "--parallel", str(jobs)])
        run(["cmake", "--install", str(build)])

    def get_outputs(self) -> list[str]:
        return []


if __name__ == "__main__":
    setup(ext_modules=[Extension("vegas_ops._C", [])], cmdclass={"build_ext": CMakeBuild})

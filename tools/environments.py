#!/usr/bin/env python3
"""Builds and tests this commit in fresh environments, and prints a table of what came of it.

usage: tools/environments.py [--folder DIR] [--tests ARGUMENT ...] [NAME ...]

NAME is one of the environments below, default: all. Those that this machine lacks an interpreter or compiler
for are listed as such, and fail only where they were named. An environment is a folder of DIR, in
build/environments by default, with a copy of the commit, a virtual environment and logs, made anew each time.

  py3.10-torch2.10 ...  a virtual environment: build against its torch, install, the whole test suite (or what
                        --tests says) and a wheel that is imported from elsewhere
  gcc-13, clang ...     the CPU kernels and the torch ops by that compiler, the native tests and the C example
  arm64                 the CPU kernels cross-compiled, and the native tests under qemu-user

Interpreters and compilers are looked for on PATH; those of another distribution are best run in a root of it.
With uv on PATH environments are filled by uv, else by pip. TORCH_2_13=torch==2.13.0+cpu in the environment
names another package for torch 2.13. CUDA kernels are left out: .ci/run compiles them for every architecture.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_REQUIREMENTS = ["setuptools>=77", "cmake>=3.24", "ninja", "pybind11>=2.12"]
PYTHONS = {"3.10": "2.10", "3.11": "2.13", "3.12": "2.11", "3.13": "2.14"}  # torch of each
COMPILERS = {f"gcc-{n}": (f"g++-{n}", f"gcc-{n}") for n in (11, 12, 13, 14)} | {"clang": ("clang++", "clang")}
ARM64 = "aarch64-linux-gnu"
FACTS = "import torch, vegas_ops; print(f'torch {torch.__version__}, CUDA {torch.version.cuda}')"


class Lacking(Exception):
    """What this machine does not have."""


class Failed(Exception):
    """A step that did not succeed; the message names its log."""


@dataclass
class Folder:
    """The folder of one environment."""

    path: Path
    environment: dict[str, str]
    steps: int = 0

    @property
    def source(self) -> Path:
        return self.path / "source"

    def run(self, name: str, command: Sequence[str | Path], cwd: Path | None = None) -> str:
        """What the command printed; Failed with the last lines where it failed."""
        self.steps += 1
        log = self.path / f"{self.steps}-{name}.log"
        with log.open("w") as output:
            done = subprocess.run(
                list(map(str, command)), cwd=cwd or self.source, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        text = log.read_text(errors="replace").strip()
        if done.returncode != 0:
            end = "\n".join(text.splitlines()[-15:])
            raise Failed(f"{name}: exit status {done.returncode}, {log}\n{end}")
        return text


def find_python(version: str) -> Path:
    """The first interpreter of that version on PATH that runs; version managers leave some that do not."""
    for entry in os.get_exec_path():
        found = Path(entry) / f"python{version}"
        if found.is_file() and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    raise Lacking(f"python{version}")


def find_program(name: str) -> str:
    if found := shutil.which(name):
        return found
    raise Lacking(name)


def make_venv(folder: Folder, python: str | Path) -> Path:
    """A virtual environment first on the folder's PATH; returns its interpreter."""
    venv = folder.path / "venv"
    folder.run("venv", [python, "-m", "venv", venv])
    folder.environment["PATH"] = f"{venv / 'bin'}{os.pathsep}{folder.environment['PATH']}"
    return venv / "bin" / "python"


def install(folder: Folder, python: Path, *arguments: str) -> None:
    uv = shutil.which("uv")
    tool = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    folder.run("install", [*tool, "--quiet", *arguments])


def python_environment(version: str, torch: str, tests: list[str]) -> Callable[[Folder], str]:
    def build_and_test(folder: Folder) -> str:
        python = make_venv(folder, find_python(version))
        install(folder, python, os.environ.get(f"TORCH_{torch.replace('.', '_')}", f"torch=={torch}.*"))
        install(folder, python, *BUILD_REQUIREMENTS)
        # Not isolated: what is built against is what is tested beside.
        install(folder, python, "--no-build-isolation", "--editable", ".[test]")
        found = folder.run("import", [python, "-c", FACTS], folder.path).splitlines()[-1]
        suite = folder.run("test", [python, "-m", "pytest", "-q", *tests]).splitlines()[-1].strip("= ")
        wheel = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
        folder.run("wheel", [python, *wheel, folder.path / "wheels", "."])
        built = next((folder.path / "wheels").glob("vegas_ops-*.whl"))
        again = "--reinstall" if shutil.which("uv") else "--force-reinstall"
        install(folder, python, again, "--no-deps", str(built))
        folder.run("demo", [folder.path / "venv/bin/vegas-ops", "demo", "--context", "2048"], folder.path)
        return f"{found}; {suite}; wheel installed, demo ran"

    return build_and_test


def cmake(folder: Folder, *arguments: str) -> Path:
    """Builds the libraries for the CPU, warnings being errors; returns libvegas.so."""
    build = folder.path / "build"
    common = ["-DVEGAS_CUDA=OFF", "-DVEGAS_PYTHON=OFF", "-DCMAKE_CXX_FLAGS=-Werror"]
    folder.run("configure", ["cmake", "-G", "Ninja", "-S", ".", "-B", build, *common, *arguments])
    folder.run("build", ["cmake", "--build", build])
    return build / "libvegas.so"


def native_tests(folder: Folder, library: Path, runner: Sequence[str] = ()) -> str:
    """Runs the native tests and the C example against a library."""
    program, example = folder.path / "ops_test", folder.path / "round"
    folder.run("native-build", ["tests/native/build.sh", library, program])
    tested = folder.run("native", [*runner, program, "--device", "cpu"]).splitlines()[-1]
    # Not -O2: there GCC 12 for arm64 itself fails on the example, in its vectoriser.
    flags = ["-std=c11", "-O1", "-Icsrc/include", f"-Wl,-rpath,{library.parent}", "-o", example]
    folder.run("c-build", [folder.environment["CC"], *flags, "examples/c/round.c", library, "-lm"])
    folder.run("c-example", [*runner, example])
    return f"native tests: {tested}; the C example ran"


def compiler_environment(cxx_name: str, c_name: str) -> Callable[[Folder], str]:
    def build_and_test(folder: Folder) -> str:
        cxx = find_program(cxx_name)
        folder.environment |= {"CXX": cxx, "CC": find_program(c_name)}
        python = make_venv(folder, sys.executable)
        install(folder, python, os.environ.get("TORCH_2_13", "torch==2.13.*"), *BUILD_REQUIREMENTS)
        where = "import torch; print(torch.__path__[0])"
        torch = folder.run("torch", [python, "-c", where]).splitlines()[-1]
        library = cmake(folder, f"-DVEGAS_TORCH_DIR={torch}")
        version = folder.run("version", [cxx, "-dumpfullversion", "-dumpversion"])
        return f"{cxx_name} {version}, -Werror; {native_tests(folder, library)}"

    return build_and_test


def arm64_environment(folder: Folder) -> str:
    """Only libvegas.so: a torch for another processor cannot be linked here."""
    cxx, qemu = find_program(f"{ARM64}-g++"), find_program("qemu-aarch64")
    folder.environment |= {"CXX": cxx, "CC": find_program(f"{ARM64}-gcc")}
    python = make_venv(folder, sys.executable)
    install(folder, python, *BUILD_REQUIREMENTS)
    library = cmake(folder, "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
    version = folder.run("version", [cxx, "-dumpfullversion"])
    tests = native_tests(folder, library, [qemu, "-L", f"/usr/{ARM64}"])
    return f"{ARM64}-g++ {version}, -Werror; {tests} (qemu-user)"


def environments(tests: list[str]) -> dict[str, Callable[[Folder], str]]:
    found = {f"py{p}-torch{t}": python_environment(p, t, tests) for p, t in PYTHONS.items()}
    found |= {name: compiler_environment(*names) for name, names in COMPILERS.items()}
    return found | {"arm64": arm64_environment}


def run_one(path: Path, build_and_test: Callable[[Folder], str]) -> tuple[str, str]:
    """Outcome and what there is to say about it."""
    shutil.rmtree(path, ignore_errors=True)
    folder = Folder(path, {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")})
    folder.environment["VEGAS_CUDA"] = "OFF"
    folder.source.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", folder.source], input=archive.stdout, check=True)
    try:
        return "passed", build_and_test(folder)
    except Lacking as lacking:
        return "not here", f"no {lacking} on PATH"
    except Failed as failed:
        return "failed", str(failed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "environments")
    parser.add_argument("--tests", nargs="+", default=[], help="arguments of pytest")
    options = parser.parse_args(argv)
    known = environments(options.tests)
    for name in options.names:
        if name not in known:
            parser.error(f"`NAME` must be one of {', '.join(known)}, got {name!r}")
    rows, passed = [], True
    for name in options.names or known:
        start = time.monotonic()
        outcome, detail = run_one(options.folder.resolve() / name, known[name])
        minutes = (time.monotonic() - start) / 60
        print(f"{name}: {outcome} ({minutes:.1f} minutes): {detail}", flush=True)
        rows.append(f"| {name} | {outcome} | {detail.splitlines()[0]} |")
        passed &= outcome == "passed" or (outcome == "not here" and not options.names)
    print("\n| environment | outcome | |\n|---|---|---|\n" + "\n".join(rows))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

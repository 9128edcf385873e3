#!/usr/bin/env python3
"""Builds the wheel of this commit twice, compares, checks it, and describes it in a bill of materials.

usage: tools/release.py [--output DIR]

Needs git, readelf, and in this Python's environment torch, setuptools, cmake, ninja and pybind11. The bill,
in CycloneDX's format, comes to lie beside the wheel. Environment variables of setup.py count: VEGAS_CUDA=ON
for a release.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CUDA_SOURCE = Path("/tmp/vegas_ops-release")
MAX_BYTES = 50 << 20
# The newest symbol versions that a library may need: of Debian 12, Ubuntu 22.04 and what came after.
NEWEST = {
    "GLIBC": (2, 35),
    "GLIBCXX": (3, 4, 30),
    "CXXABI": (1, 3, 13),
    "GOMP": (4, 5),
    "OMP": (4, 5),
    "GCC": (12, 0),
}
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2",
          "ld-linux-aarch64.so.1"}  # fmt: skip
# Libraries of the wheel: what each may need beside the system's, and what it exports.
LIBRARIES = {
    "libvegas.so": ({"libgomp.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1"}, r"vegas_\w+"),
    "libvegas_torch.so": ({"libvegas.so", "libtorch.so", "libtorch_cpu.so"}, None),
    "_C": ({"libvegas.so"}, r"PyInit__C|_ZT[IS]St\w+"),  # and type names of the standard library
}
# torch's C++ interface, which changes with every version; the stable one is `aoti_torch_*` and `torch_*`.
UNSTABLE = re.compile(r"_ZN?K?(St)?\d*(2at|3c10|5torch)")


class Refused(Exception):
    """What is wrong with the wheel."""


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(
            f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def build_wheel(source: Path, wheels: Path, epoch: str) -> Path:
    """From a copy of the commit in `source`, into `wheels`."""
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    bin_first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "PATH": bin_first, "PYTHONHASHSEED": "0"}
    # nvcc puts its process id into names: of what is local to a file, whose path tells it apart as well,
    # and of temporary files, among the symbols that only debuggers read.
    environment["NVCC_APPEND_FLAGS"] = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -frandom-seed=vegas_ops"
    strip = "-DCMAKE_SHARED_LINKER_FLAGS=-Wl,--strip-all"
    environment["VEGAS_CMAKE_ARGS"] = f"{os.environ.get('VEGAS_CMAKE_ARGS', '')} {strip}"
    run(*pip, "--wheel-dir", wheels, ".", cwd=source, env=environment)
    return next(wheels.glob("vegas_ops-*.whl"))


def differences(one: Path, other: Path) -> list[str]:
    """Names of the files in which two wheels differ; the whole archive, where they differ in no file."""
    if one.read_bytes() == other.read_bytes():
        return []
    with zipfile.ZipFile(one) as a, zipfile.ZipFile(other) as b:
        names = sorted({*a.namelist(), *b.namelist()})
        both = set(a.namelist()) & set(b.namelist())
        return [n for n in names if n not in both or a.read(n) != b.read(n)] or [one.name]


def check_library(path: Path, needs: set[str], exports: str | None) -> None:
    """Raises Refused where it would not load elsewhere, or shows more than it should."""
    dynamic = run("readelf", "--dynamic", "--wide", path)
    foreign = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) - SYSTEM - needs
    if foreign:
        raise Refused(
            f"{path.name} must need no library of the machine it was built on, got {sorted(foreign)}"
        )
    for folder in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        if folder != "$ORIGIN":
            raise Refused(f"{path.name} must look for libraries in its own folder, got {folder}")
    if "RWE" in re.findall(r"GNU_STACK.*?(R[W ]?E?)\s", run("readelf", "--segments", "--wide", path)):
        raise Refused(f"{path.name} must not have an executable stack")
    for name, version in set(re.findall(r"Name: (\w+?)_([\d.]+)", run("readelf", "--version-info", path))):
        if tuple(map(int, version.split("."))) > NEWEST.get(name, (0,)):
            limit = ".".join(map(str, NEWEST.get(name, ())))
            raise Refused(f"{path.name} must need {name} {limit or 'not at all'}, got {version}")
    symbols = [line.split() for line in run("readelf", "--dyn-syms", "--wide", path).splitlines()]
    named = [(s[6], s[4], re.sub("@.*", "", s[7])) for s in symbols if len(s) >= 8 and s[0][:-1].isdigit()]
    unstable = [n for index, _, n in named if index == "UND" and UNSTABLE.match(n)]
    if unstable:
        raise Refused(f"{path.name} must use torch's stable interface alone, got {unstable[0]}")
    shown = [n for index, bind, n in named if index not in ("UND", "ABS") and bind == "GLOBAL"]
    extra = [n for n in shown if exports is not None and not re.fullmatch(exports, n)]
    if extra or (not shown and exports):
        raise Refused(f"{path.name} must export {exports} alone, got {extra or 'nothing'}")


def check_wheel(wheel: Path) -> None:
    if wheel.stat().st_size > MAX_BYTES:
        raise Refused(f"{wheel.name} must be at most {MAX_BYTES} bytes, got {wheel.stat().st_size}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = [n for n in archive.namelist() if ".dist-info/" not in n]
        if stray := [n for n in names if not n.startswith("vegas_ops/") or n.endswith((".pyc", ".o"))]:
            raise Refused(f"{wheel.name} must hold the package alone, got {stray[0]}")
        libraries = {Path(n).name.split(".cpython")[0]: n for n in names if n.endswith(".so")}
        if set(libraries) != set(LIBRARIES):
            raise Refused(f"{wheel.name} must hold {sorted(LIBRARIES)}, got {sorted(libraries)}")
        for name, member in libraries.items():
            check_library(Path(archive.extract(member, folder)), *LIBRARIES[name])


def versions(source: Path) -> Iterable[dict[str, Any]]:
    """Components: what is compiled in, and what it was built with or runs beside."""
    setup, project = (source / "setup.py").read_text(), (source / "pyproject.toml").read_text()
    cutlass = re.search(r'CUTLASS_VERSION = "([\d.]+)"', setup)
    assert cutlass is not None
    for name, license_id in (("pybind11", "BSD-3-Clause"), ("torch", "BSD-3-Clause")):
        yield component(name, metadata.version(name), license_id, "headers of it are compiled in")
    if os.environ.get("VEGAS_CUDA", "AUTO").upper() == "ON":
        nvcc = run(os.environ.get("CUDACXX") or "nvcc", "--version")
        release = re.search(r"release [\d.]+, V([\d.]+)", nvcc)
        assert release is not None
        yield component("nvidia-cutlass", cutlass[1], "BSD-3-Clause", "headers of it are compiled in")
        eula = "LicenseRef-NVIDIA-CUDA-EULA"
        yield component("nvidia-cuda-runtime", release[1], eula, "linked statically, compiled by its nvcc")
    for requirement in json.loads(re.search(r"^dependencies = (\[.*\])", project, re.MULTILINE)[1]):  # type: ignore[index]
        name = re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]
        if name != "torch":
            yield component(name, requirement[len(name) :], None, "needed when it runs")


def component(name: str, version: str, license_id: str | None, role: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "library", "name": name, "description": role}
    if version[:1].isdigit():
        found |= {"version": version, "purl": f"pkg:pypi/{name}@{version}", "bom-ref": f"{name}@{version}"}
    else:
        found |= {"bom-ref": name, "purl": f"pkg:pypi/{name}"}
        found |= (
            {"versionRange": f"vers:pypi/{version}", "isExternal": True} if version else {"isExternal": True}
        )
    if license_id:
        key = "name" if license_id.startswith("LicenseRef") else "id"
        found["licenses"] = [{"license": {key: license_id}}]
    return found


def bill_of_materials(wheel: Path, epoch: str) -> dict[str, Any]:
    """CycloneDX 1.7; the same for the same wheel."""
    name, version = wheel.name.split("-")[:2]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        files = [
            {"type": "file", "name": n, "hashes": [{"alg": "SHA-256", "content": sha256(archive.read(n))}]}
            for n in sorted(archive.namelist())
            if n.endswith((".so", ".safetensors"))
        ]
    commit = run("git", "-C", ROOT, "rev-parse", "HEAD").strip()
    compiler = run(os.environ.get("CXX", "c++"), "--version").splitlines()[0]
    parts = list(versions(ROOT))
    main = component(name, version, "Apache-2.0", "this wheel") | {
        "hashes": [{"alg": "SHA-256", "content": digest}], "components": files,
        "properties": [{"name": "commit", "value": commit}, {"name": "compiler", "value": compiler},
                       {"name": "wheel", "value": wheel.name}],
    }  # fmt: skip
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(int(epoch), timezone.utc).isoformat(),
            "component": main,
        },
        "components": parts,
        "dependencies": [{"ref": main["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    output = parser.parse_args().output
    epoch = run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory() as folder:
        # The host's compilers are told to leave paths out, so other paths make no difference. nvcc names what
        # is local to a file by its path, so kernels are always built in one place.
        cuda = os.environ.get("VEGAS_CUDA", "AUTO").upper() != "OFF"
        places = [CUDA_SOURCE] * 2 if cuda else [Path(folder) / name for name in ("one", "the-other")]
        one, other = (build_wheel(p, Path(folder) / f"wheels{i}", epoch) for i, p in enumerate(places))
        if differing := differences(one, other):
            raise Refused(f"two builds must give the same wheel, got differences in {differing}")
        check_wheel(one)
        output.mkdir(parents=True, exist_ok=True)
        wheel = output / one.name
        wheel.write_bytes(one.read_bytes())
    bill = output / f"{wheel.name.removesuffix('.whl')}.cdx.json"
    bill.write_text(json.dumps(bill_of_materials(wheel, epoch), indent=1) + "\n")
    size = wheel.stat().st_size / 2**20
    print(f"{wheel}\n{size:.1f} MiB, two builds alike, sha256 {sha256(wheel.read_bytes())}\n{bill}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as refused:
        sys.exit(f"release: {refused}")

"""Reported faults of building and importing, by their numbers in the list of public reports."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

import vegas_ops

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(vegas_ops.__file__).parent
GIB = 1 << 30
OPS = ("flash_attn_with_logit_dump", "topk_aggregate_logits", "sparse_paged_decode")


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vegas_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def build_tools_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def fake_torch(folder: Path, version: str, cuda: str | None = None) -> Path:
    (folder / "torch").mkdir(parents=True)
    lines = [f"__version__ = '{version}'", f"cuda: str | None = {cuda!r}"]
    (folder / "torch" / "version.py").write_text("\n".join(lines) + "\n")
    return folder / "torch"


def fake_nvcc(folder: Path, release: str) -> str:
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def test_case_045_no_launch_goes_unasked() -> None:
    """Every CUDA call of the host has its result used; kernels that `<<<` launches leave theirs to
    cudaGetLastError, which their file asks after the last of them."""
    launching = 0
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cuh", ".cu", ".cpp"):
            continue
        text = re.sub(r"//.*", "", path.read_text())
        called = re.findall(r"[;{})]\s*((?:cuda[A-Z]|cu[A-Z]|launch_dependent)\w*)\s*(?:<[^;{}]*>)?\(", text)
        # On the device; and what clears an error that was seen.
        on_device = {"cudaGridDependencySynchronize", "cudaTriggerProgrammaticLaunchCompletion"}
        assert set(called) <= on_device | {"cudaGetLastError"}, path
        if "<<<" in text:
            launching += 1
            assert re.search(r"(=|return) cudaGetLastError\(\)", text[text.rindex("<<<") :]), path
    assert launching >= 4


def test_case_097_import_needs_no_prior_torch() -> None:
    result = run_python("import vegas_ops, sys; assert 'torch' in sys.modules; print(vegas_ops.__version__)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == vegas_ops.__version__


def import_without_binaries(folder: Path) -> list[str]:
    """What importing the package's sources in a folder says, which has no binaries of ours, line by line."""
    ignore = shutil.ignore_patterns("*.so", "data", "__pycache__")
    shutil.copytree(PACKAGE, folder / "vegas_ops", ignore=ignore, dirs_exist_ok=True)
    result = subprocess.run(
        [sys.executable, "-c", "import vegas_ops"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
    )
    assert result.returncode != 0
    return result.stderr.strip().splitlines()


def test_case_097_binary_that_does_not_load_names_both_versions(tmp_path: Path) -> None:
    (tmp_path / "vegas_ops").mkdir()
    (tmp_path / "vegas_ops" / "libvegas_torch.so").write_bytes(b"not a library")
    last = import_without_binaries(tmp_path)[-1]
    assert f"torch {torch.__version__}" in last and "2.10 or newer" in last


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("missing", ("symbol", "library"))
def test_case_097_binary_for_another_torch_names_both_versions(tmp_path: Path, missing: str) -> None:
    """It lacks a symbol, as of another torch's C++ interface, or a library."""
    folder = tmp_path / "vegas_ops"
    folder.mkdir()
    calls = "extern void _ZN3c105ErrorC1Ev(void); void f(void) { _ZN3c105ErrorC1Ev(); }"
    build = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o"]
    if missing == "symbol":
        subprocess.run([*build, folder / "libvegas_torch.so"], input=calls, text=True, check=True)
    else:
        subprocess.run([*build, tmp_path / "libgone.so"], input="void g(void) {}", text=True, check=True)
        needs = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-lgone"]
        subprocess.run([*build, folder / "libvegas_torch.so", *needs], input="", text=True, check=True)
        (tmp_path / "libgone.so").unlink()
    said = import_without_binaries(tmp_path)
    assert f"torch {torch.__version__}" in said[-1] and "2.10 or newer" in said[-1]
    assert ("_ZN3c105ErrorC1Ev" if missing == "symbol" else "libgone.so") in "\n".join(said)


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_case_097_binary_uses_the_stable_interface_alone() -> None:
    """Of torch only C functions, which other versions have as well: no C++ symbol of its namespaces."""
    library = PACKAGE / "libvegas_torch.so"
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
    assert any(name.startswith("aoti_torch_") for name in names)
    assert not [name for name in names if re.match(r"_Z\w*?\d(at|c10|torch|caffe2)\d?\w*", name)]


def test_sources_that_were_not_built_say_what_to_do(tmp_path: Path) -> None:
    last = import_without_binaries(tmp_path)[-1]
    assert f"{tmp_path / 'vegas_ops'} has no libvegas_torch.so" in last
    assert "`pip install --editable .`" in last and "start Python in another folder" in last


def test_case_097_torch_too_old_is_refused_before_compiling(
    setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VEGAS_TORCH_DIR", str(fake_torch(tmp_path, "2.9.1")))
    with pytest.raises(SystemExit, match=r"torch must be 2\.10 or newer, got 2\.9"):
        setup_py.find_torch()


def test_case_098_isolated_build_finds_the_environments_torch(setup_py: ModuleType) -> None:
    # pip's build isolation hides site-packages from sys.path, so find_spec sees nothing there.
    folder = Path(sysconfig.get_path("platlib")) / "torch"
    if not folder.is_dir():
        pytest.skip("torch is not installed in this environment's own site-packages")
    code = (
        "import sys, importlib.util; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        f"spec = importlib.util.spec_from_file_location('s', {str(ROOT / 'setup.py')!r})\n"
        "sys.modules['setuptools'] = type(sys)('setuptools'); sys.modules['setuptools'].Extension = None\n"
        "sys.modules['setuptools'].setup = None\n"
        "c = type(sys)('c'); c.build_ext = object; sys.modules['setuptools.command'] = c\n"
        "sys.modules['setuptools.command.build_ext'] = c\n"
        "m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m); print(m.find_torch())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == folder


@pytest.mark.parametrize(
    ("release", "torch_cuda", "refused"),
    [("12.9", "11.8", True), ("12.9", "12.4", False), ("12.9", "13.0", True), ("13.0", "13.2", False)],
)
def test_case_098_nvcc_and_torch_versions(
    setup_py: ModuleType, tmp_path: Path, release: str, torch_cuda: str, refused: bool
) -> None:
    nvcc = fake_nvcc(tmp_path, release)
    torch_folder = fake_torch(tmp_path, "2.11.0", torch_cuda)
    if refused:
        with pytest.raises(
            SystemExit, match=f"nvcc is CUDA {release}.*built for CUDA {torch_cuda}.*VEGAS_CUDA=OFF"
        ):
            setup_py.check_cuda_versions(nvcc, torch_folder)
    else:
        setup_py.check_cuda_versions(nvcc, torch_folder)


@pytest.mark.parametrize(("cuda", "found"), [("13.0", "13"), (None, None)])
def test_case_098_torch_without_cuda_is_told_apart(
    setup_py: ModuleType, tmp_path: Path, cuda: str | None, found: str | None
) -> None:
    match = setup_py.torch_cuda(fake_torch(tmp_path, "2.11.0", cuda))
    assert (match[1] if match else None) == found


def test_case_098_cpu_torch_accepts_any_nvcc(setup_py: ModuleType, tmp_path: Path) -> None:
    setup_py.check_cuda_versions(fake_nvcc(tmp_path, "12.9"), fake_torch(tmp_path, "2.13.0+cpu", None))


@pytest.mark.parametrize(
    ("memory", "cores", "max_jobs", "expected"),
    [
        (8 * GIB, 2, None, 2),
        (8 * GIB, 64, None, 3),  # many cores, little memory: 2 GiB a job and a reserve
        (GIB // 2, 8, None, 1),
        (256 * GIB, 16, None, 16),
        (8 * GIB, 2, "5", 5),
        (8 * GIB, 2, "0", 1),
    ],
)
def test_case_100_jobs_respect_memory(
    setup_py: ModuleType, memory: int, cores: int, max_jobs: str | None, expected: int
) -> None:
    assert setup_py.job_count(memory, cores, max_jobs) == expected


def test_case_100_container_limit_counts(setup_py: ModuleType, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{3 * GIB}\n")
    assert setup_py.memory_limit([limit]) <= 3 * GIB
    limit.write_text("max\n")
    assert setup_py.memory_limit([limit]) > 0


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("architectures", ["90", "80;89", None])
def test_case_101_and_106_builds_for_cuda_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architectures: str | None
) -> None:
    """For the architectures that are named, or all of them: nobody asks for the GPU of this machine. Without
    sm_90 among them nothing of the Hopper kernels is compiled or called."""
    asked = tmp_path / "asked"
    for tool in ("nvidia-smi", "__nvcc_device_query", "nvidia-detector"):
        (tmp_path / tool).write_text(f"#!/bin/sh\ntouch {asked}\nexit 9\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cutlass = tmp_path / "cutlass"
    (cutlass / "cutlass").mkdir(parents=True)
    (cutlass / "cutlass" / "cutlass.h").touch()
    build = tmp_path / "build"
    command = [
        "cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build), "-DVEGAS_CUDA=ON", "-DVEGAS_PYTHON=OFF",
        f"-DVEGAS_CUTLASS_DIR={cutlass}",
    ]  # fmt: skip
    if architectures:
        command.append(f"-DVEGAS_CUDA_ARCHITECTURES={architectures}")
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    default = re.search(r'VEGAS_CUDA_ARCHITECTURES "([\d;]+)"', (ROOT / "CMakeLists.txt").read_text())
    assert default and {"80", "86", "89"} <= set(default[1].split(";"))
    named = set((architectures or default[1]).split(";"))
    hopper = {"90a"} if "90" in named else set()
    files = json.loads((build / "compile_commands.json").read_text())
    for one in files:
        built_for = set(re.findall(r"sm_(\w+)", one["command"]))
        if one["file"].endswith(".cu"):
            is_hopper = Path(one["file"]).name.startswith("hopper")
            assert built_for == (hopper if is_hopper else named), one["file"]
        assert "-DVEGAS_WITH_CUDA" not in one["command"] or ("-DVEGAS_WITH_HOPPER" in one["command"]) == bool(
            hopper
        )
    names = {Path(one["file"]).name for one in files}
    assert ("hopper_bf16.cu" in names) == bool(hopper) and "portable_bf16.cu" in names
    if architectures is None:
        objects = [
            os.path.relpath(build / one["output"], build)
            for one in files
            if one["file"].endswith("hopper_device.cu")
        ]
        made = subprocess.run(
            ["cmake", "--build", str(build), "--target", *objects], capture_output=True, text=True
        )
        assert made.returncode == 0, made.stdout + made.stderr
    assert not asked.exists()


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_case_101_library_loads_without_a_driver() -> None:
    """It needs no library of CUDA: the runtime is part of it, and finds the driver where there is one."""
    listed = subprocess.run(
        ["readelf", "-dW", PACKAGE / "libvegas.so"], capture_output=True, text=True, check=True
    )
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listed.stdout)
    assert needed and not [name for name in needed if re.match(r"lib(cu|nv)", name)]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("a.cpp:4:10: fatal error: cuda.h: No such file or directory\nninja: stopped", "cuda.h.*header is"),
        ("[1/9] c++ a.cpp\nc++: fatal error: Killed signal terminated program cc1plus", "Killed.*MAX_JOBS=1"),
        ("ld: a.o: undefined reference to `f'\ncollect2: error: ld returned 1", "undefined reference to `f'"),
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "No C\\+\\+ compiler"),
        ("CMake Error at b:1 (message):\n  no\n  headers\nCall Stack", "b:1 \\(message\\): no headers\\."),
    ],
)  # fmt: skip
def test_case_104_first_error_and_a_hint(setup_py: ModuleType, output: str, expected: str) -> None:
    with pytest.raises(SystemExit, match=f"(?s)the build failed at.*{expected}"):
        setup_py.run([sys.executable, "-c", f"print({output!r}); raise SystemExit(1)"])


def test_case_104_failed_build_is_not_taken_for_good(setup_py: ModuleType, tmp_path: Path) -> None:
    # CMake writes outputs only after a successful step: a second build fails again.
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(p LANGUAGES CXX)\nadd_library(a SHARED a.cpp)\n"
    )
    (tmp_path / "a.cpp").write_text("#include <no_such_header.h>\n")
    setup_py.run(["cmake", "-G", "Ninja", "-S", str(tmp_path), "-B", str(tmp_path / "b")])
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"no_such_header\.h"):
            setup_py.run(["cmake", "--build", str(tmp_path / "b")])


def test_case_105_info_needs_no_compiler() -> None:
    result = run_python(
        "import sys; from vegas_ops.cli import main; sys.exit(main(['info']))",
        PATH="/nonexistent",
        CUDACXX="",
    )
    assert result.returncode == 0, result.stderr
    assert vegas_ops.__version__ in result.stdout
    for op in OPS:
        assert op in result.stdout


def cuda_kernels(**environment: str) -> list[str]:
    """What `vegas-ops info` says that the three ops run on with CUDA."""
    result = run_python("import sys; from vegas_ops.cli import main; sys.exit(main(['info']))", **environment)
    assert result.returncode == 0, result.stderr
    rows = {words[0]: words[-1] for line in result.stdout.splitlines() if (words := line.split())}
    return [rows[op] for op in OPS]


def test_case_106_older_gpus_get_portable_kernels() -> None:
    from vegas_ops import _C

    architectures = _C.cuda_architectures().split()
    if not architectures:
        pytest.skip("this build has no CUDA kernels")
    # Hopper GPUs have kernels of their own for verification and selection, unless told otherwise.
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    own = "hopper" if on_hopper and "90" in architectures else "portable"
    assert cuda_kernels(VEGAS_OPS_KERNELS="") == [own, own, "portable"]
    assert cuda_kernels(VEGAS_OPS_KERNELS="", CUDA_VISIBLE_DEVICES="") == ["portable"] * 3
    assert cuda_kernels(VEGAS_OPS_KERNELS="portable") == ["portable"] * 3


DISPATCH = r"""
#include <cstdio>
#include <cstdlib>
#include "common/backends.h"
namespace vegas_ops {
static bool hopper = false;
template <class T> T only_there(T value) { if (!hopper) std::abort(); return value; }
bool on_hopper() { return hopper; }
bool verify_hopper_takes(const VegasVerifyParams&) { return only_there(true); }
int verify_hopper(const VegasVerifyParams&, void*) { return only_there(90); }
size_t verify_hopper_workspace(const VegasBounds&) { return only_there(size_t{64}); }
size_t verify_hopper_ring_bytes() { return only_there(size_t{8}); }
bool select_hopper_takes(const VegasSelectParams&) { return only_there(true); }
int select_hopper(const VegasSelectParams&, void*) { return only_there(90); }
int verify_portable(const VegasVerifyParams&, size_t kept, void*) { return 80 + static_cast<int>(kept); }
size_t verify_portable_workspace(const VegasBounds&) { return 16; }
int select_portable(const VegasSelectParams&, void*) { return 80; }
}
int main() {
  using namespace vegas_ops;
  for (int i = 0; i < 2; ++i, hopper = true) {
    std::printf("%d %d %zu\n", verify_cuda({}, nullptr), select_cuda({}, nullptr), verify_cuda_workspace({}));
  }
}
"""


@pytest.mark.parametrize("with_hopper", (False, True))
def test_case_106_hopper_kernels_run_on_hopper_gpus_alone(tmp_path: Path, with_hopper: bool) -> None:
    """The choice between the kernels, linked with a GPU that is none of Hopper's, then one that is."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "main.cpp").write_text(DISPATCH)
    csrc, program = ROOT / "csrc", tmp_path / "dispatch"
    command = [compiler, "-std=c++17", f"-I{csrc}", f"-I{csrc / 'include'}", "-DVEGAS_WITH_CUDA"]
    command += ["-DVEGAS_WITH_HOPPER"] * with_hopper
    files = [tmp_path / "main.cpp", csrc / "verify" / "cuda.cpp", csrc / "select" / "cuda.cpp"]
    subprocess.run([*command, *files, "-o", program], check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0
    portable, hopper = "80 80 16", "90 90 64" if with_hopper else "80 80 16"
    assert ran.stdout.splitlines() == [portable, hopper]


def test_continuous_integration_pins_what_it_installs() -> None:
    """By version and hash, all that pyproject.toml names but torch, which setup.py finds."""
    project = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:requires|dependencies|transformers|test) = \[(.*)\]", project, re.MULTILINE)
    names = {re.split(r"[^\w-]", r)[0] for text in lists for r in re.findall(r'"([^"]+)"', text)} - {"torch"}
    assert {"cmake", "numpy", "pytest", "transformers"} <= names
    pins = re.findall(r"^([\w-]+)==\S+.*((?:\n +--hash=sha256:[0-9a-f]{64}.*)+)$",
                      (ROOT / ".ci" / "requirements.txt").read_text(), re.MULTILINE)  # fmt: skip
    assert names <= {name for name, _ in pins}


def test_cutlass_is_what_it_was(
    setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another wheel under its name is refused, and not kept."""
    for variable in ("VEGAS_CUTLASS_DIR", "CUTLASS_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(setup_py, "package_folder", lambda name: None)
    wheel = tmp_path / f"nvidia_cutlass-{setup_py.CUTLASS_VERSION}-py3-none-any.whl"

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        wheel.write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(setup_py.subprocess, "run", download)
    with pytest.raises(SystemExit, match=f"{wheel.name} must have the sha256 {setup_py.CUTLASS_SHA256}, got"):
        setup_py.find_cutlass(tmp_path)
    assert not wheel.exists()

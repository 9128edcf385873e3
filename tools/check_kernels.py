"""Lists registers and shared memory of every compiled CUDA kernel; fails on spills or a missing architecture.

usage: python tools/check_kernels.py LIBVEGAS.so [--architectures 80 86 ...]

Where 90 is one of the architectures, the Hopper kernels must be there for sm_90a, and nowhere else.

Reads the binary with cuobjdump (from the CUDA toolkit, or `pip install nvidia-cuda-cuobjdump`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

HOPPER = "90a"
# Their roles have registers of their own, and the compiler puts a few of the rarely used ones on the stack.
WARP_SPECIALISED = re.compile(r"6hopper\d+verify_kernelI")
WARP_SPECIALISED_STACK = 128  # bytes, at most


def find_cuobjdump() -> str:
    bundled = Path(sysconfig.get_path("platlib")) / "nvidia/cu13/bin/cuobjdump"
    found = str(bundled) if bundled.is_file() else shutil.which("cuobjdump")
    if not found:
        raise SystemExit("check_kernels: cuobjdump not found; pip install nvidia-cuda-cuobjdump")
    return found


def read_kernels(library: Path) -> list[dict[str, str]]:
    """One dict per kernel and architecture: name, sm, and the resource usage cuobjdump prints."""
    text = subprocess.run(
        [find_cuobjdump(), "-res-usage", str(library)], capture_output=True, text=True, check=True
    ).stdout
    kernels, architecture, name = [], "", ""
    for line in text.splitlines():
        if match := re.search(r"arch = sm_(\w+)", line):
            architecture = match[1]
        elif match := re.search(r"Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            usage = dict(re.findall(r"(\w+(?:\[\d\])?):(\d+)", line))
            kernels.append({"name": name, "sm": architecture, **usage})
    return kernels


def demangle(names: list[str]) -> list[str]:
    if not (tool := shutil.which("c++filt")):
        return names
    text = subprocess.run([tool, "-p"], input="\n".join(names), capture_output=True, text=True).stdout
    return text.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("library", type=Path)
    parser.add_argument("--architectures", nargs="+", default=["80", "86", "89", "90", "100", "120"])
    arguments = parser.parse_args()
    kernels = read_kernels(arguments.library)
    by_name: dict[str, list[dict[str, str]]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel["name"]].append(kernel)
    print(f"{'registers':>12} {'static shared':>14} {'stack':>6}  kernel (range over architectures)")
    for (_, entries), shown in zip(by_name.items(), demangle(list(by_name)), strict=True):

        def span(key: str, entries: list[dict[str, str]] = entries) -> str:
            values = sorted({int(entry.get(key, 0)) for entry in entries})
            return f"{values[0]}-{values[-1]}" if len(values) > 1 else str(values[0])

        print(f"{span('REG'):>12} {span('SHARED'):>14} {span('STACK'):>6}  {shown[:100]}")
    spilled, on_stack = [], []
    for kernel in kernels:
        stack = int(kernel.get("STACK", 0)) + int(kernel.get("LOCAL", 0))
        if stack and WARP_SPECIALISED.search(kernel["name"]) and stack <= WARP_SPECIALISED_STACK:
            on_stack.append(stack)
        elif stack:
            spilled.append(kernel)
    expected = {*arguments.architectures, *([HOPPER] if "90" in arguments.architectures else [])}
    missing = expected - {kernel["sm"] for kernel in kernels}
    misplaced = [k for k in kernels if ("6hopper" in k["name"]) != (k["sm"] == HOPPER)]
    for kernel in spilled:
        print(f"spills: {kernel['name']} on sm_{kernel['sm']}: {kernel}", file=sys.stderr)
    for kernel in misplaced:
        print(f"not where it belongs: {kernel['name']} on sm_{kernel['sm']}", file=sys.stderr)
    if missing:
        print(f"no kernels for sm_{', sm_'.join(sorted(missing))}", file=sys.stderr)
    print(f"{len(by_name)} kernels, {len(kernels)} binaries, {len(spilled)} with spills")
    if on_stack:
        print(
            f"{len(on_stack)} warp-specialised kernels keep up to {max(on_stack)} bytes on the stack, of "
            f"{WARP_SPECIALISED_STACK} allowed"
        )
    return int(bool(spilled or missing or misplaced or not kernels))


if __name__ == "__main__":
    raise SystemExit(main())

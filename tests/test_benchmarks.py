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
    """The scripts' modules, imported as the scripts import them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import harness
    import peers
    import report
    import verify

    return Namespace(harness=harness, peers=peers, report=report, verify=verify)


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


def test_a_record_is_written_when_asked_for_alone(tmp_path: Path) -> None:
    refused = run_script("sparse", tmp_path, "--record")
    assert refused.returncode == 2 and "`--record` must go without --quick" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_sources_hash_with_and_without_git(modules: Namespace, tmp_path: Path) -> None:
    for folder in ("csrc", "vegas_ops"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    (tmp_path / "csrc" / "built.so").write_bytes(b"not a source")
    without_git = modules.report.sources_hash(tmp_path)
    (tmp_path / "csrc" / "verify" / "cpu.cpp").write_text("changed")
    assert modules.report.sources_hash(tmp_path) != without_git
    kernels = [file for file in (ROOT / "vegas_ops").rglob("*.py") if "@triton.jit" in file.read_text()]
    assert kernels and {file.relative_to(ROOT).as_posix() for file in kernels} <= {*modules.report.SOURCES}
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = (
        f"git ls-files -co --exclude-standard {' '.join(modules.report.SOURCES)} | LC_ALL=C sort "
        "| xargs -d '\\n' cat | sha256sum | cut -c1-16"
    )
    by_hand = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert modules.report.sources_hash() == by_hand
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
    (path,) = tmp_path.glob("*/select-quick.jsonl")
    report = [sys.executable, str(ROOT / "benchmarks" / "report.py"), str(path)]
    printed = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    _, title, regimes = printed.partition("by regime")
    assert title and regimes in done.stdout


def test_verify_measures_pairs_windows_and_mixed_lengths(tmp_path: Path) -> None:
    groups = ("dumps", "fp8", "invariant", "features", "mixed", "bound")
    done = run_script("verify", tmp_path, "--seconds", "600", "--pool-gb", "0.2", "--cells", *groups)
    assert done.returncode == 0, done.stdout + done.stderr
    _, cells = lines_of(tmp_path, "verify")
    variants = {name for cell in cells for name in cell.get("variants", {})}
    assert variants >= {
        "dump token_weight",
        "dump rows",
        "fp32 cache",
        "batch_invariant",
        "softcap",
        "all three",
    }
    for cell in cells:
        assert cell["us"] > 0
        for pair in cell.get("variants", {}).values():
            assert pair["pairs"] >= 31 and pair["low"] <= pair["ratio"] <= pair["high"]
    (window,) = (cell for cell in cells if cell["case"]["window"] and "variants" not in cell)
    keys = window["case"]["window"] + window["case"]["rows"] - 1
    assert window["bytes"] == 2 * keys * 2 * 64 * 4
    lengths = {cell["case"]["lengths"]: cell["bytes"] for cell in cells if cell["case"]["lengths"]}
    assert lengths["one long"] == 2 * 8192 * (1 + 7 / 32) * 2 * 64 * 4
    assert lengths["spread, a quarter empty"] < lengths["spread"]


def test_unknown_group_of_cells_is_refused(tmp_path: Path) -> None:
    done = run_script("verify", tmp_path, "--cells", "everything")
    assert done.returncode == 2 and "invalid choice: 'everything'" in done.stderr


def test_gpu_groups_hold_every_shape_and_no_cell_twice(modules: Namespace) -> None:
    verify = modules.verify
    groups = {name: list(cells) for name, cells in verify._cuda_groups(verify.Peers()).items()}
    assert tuple(groups) == verify.GROUPS and all(groups.values())
    for cells in groups.values():
        keys = [repr((cell.regime, cell.case)) for cell in cells]
        assert len(set(keys)) == len(keys)
        # K and V of every cell fit the pool, fp8 in half of it.
        assert all(cell.bytes <= modules.harness.CUDA_POOL_BYTES for cell in cells)
    grid = {repr((cell.regime, cell.case)) for cell in groups["grid"]}
    assert len(grid) == 3 * 4 * 3 * 4
    assert {repr((cell.regime, cell.case)) for cell in groups["core"]} < grid


class PlannedAttention:
    """The wrapper of FlashInfer as its documentation has it, in fp32: pages by indptr, causal where asked."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD" and options["backend"] == "fa2"
        self.decode = "use_tensor_cores" in options

    def plan(self, *arguments: Any, q_data_type: torch.dtype, kv_data_type: torch.dtype, **rest: Any) -> None:
        if self.decode:
            arguments = (torch.arange(arguments[0].numel()), *arguments)
        assert self.decode or rest["causal"]
        self.first_rows, self.indptr, self.indices, self.last, *shape = arguments
        self.page_size = shape[3]

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        from peers import dense_attention

        for b in range(self.indptr.numel() - 1):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            tokens = (pages.numel() - 1) * self.page_size + int(self.last[b])
            rows = slice(int(self.first_rows[b]), int(self.first_rows[b + 1]))
            keys, values = (cache[pages].flatten(0, 1)[:tokens] for cache in caches)
            out[rows] = dense_attention(q[rows], keys, values)


@pytest.mark.parametrize("rows, lengths", ((1, None), (3, None), (3, "spread")))
def test_flashinfer_is_told_the_same_pages(
    modules: Namespace, monkeypatch: pytest.MonkeyPatch, rows: int, lengths: str | None
) -> None:
    library = Namespace(
        __version__="0",
        BatchDecodeWithPagedKVCacheWrapper=PlannedAttention,
        BatchPrefillWithPagedKVCacheWrapper=PlannedAttention,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    verify, harness = modules.verify, modules.harness
    case = verify.Case(4, 2, 64, batch=3, context=100, rows=rows, dtype="fp32", lengths=lengths)
    bench = Namespace(device=torch.device("cpu"), pool=harness.Pool(torch.device("cpu"), 2e8))
    problem = verify._Problem(case, bench)
    ours = problem.ours()
    ours.launches[0]()
    flashinfer = modules.peers.FlashInfer()
    peer = flashinfer.attend(problem.q, problem.caches, problem.peer_table, case.seqlens, rows)
    peer.launches[0]()
    torch.testing.assert_close(peer.result(), ours.result(), rtol=1e-4, atol=1e-4)


def test_regimes_compare_with_the_best_peer(modules: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    case = {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 64, "batch": 1, "context": 1024, "rows": 1}
    shapes = (case, {**case, "head_dim": 128})
    times = ((10.0, {"a": 20.0, "b": 15.0}), (10.0, {"a": 12.0, "b": 40.0}))
    cells = [
        {
            "op": "verify",
            "case": shape,
            "regime": "one",
            "us": us,
            "us_min": us,
            "floor_us": 5.0,
            "read_us": 8.0,
        }
        | {"peers": peers, "peers_min": peers}
        for shape, (us, peers) in zip(shapes, times, strict=True)
    ]
    modules.report.print_tables({"gpu": "G", "cpu": "C", "read_ceiling_gbs": 1.0}, cells)
    printed = capsys.readouterr().out
    (together,) = (line for line in printed.splitlines() if line.startswith("│ one "))
    # The best peers are 15 and 12 against 10: their geometric mean, the worst, the best.
    assert "1.34 (1.20 to 1.50)" in together and "0.80 (0.80 to 0.80)" in together
    (alone,) = (
        line for line in printed.splitlines() if "  8/2/128" in line and "1.20 (1.20 to 1.20)" in line
    )
    assert "4.00 (4.00 to 4.00)" in alone


def run_cells(modules: Namespace, tmp_path: Path, build: Callable[[Any], Any]) -> tuple[int, dict[str, Any]]:
    """One cell made of `build`, measured without the read ceiling of a real run."""
    harness = modules.harness
    bench = object.__new__(harness.Bench)
    bench.device, bench.quick, bench.seconds, bench.started = torch.device("cpu"), True, 1e9, 0.0
    bench.ceiling_gbs, bench.ceiling_method, bench.plain_read = 10.0, "given", None
    ticks = iter(range(10**9))
    bench.clock = lambda: next(ticks) * 1e-3
    cell = harness.Cell("verify", {"batch": 1, "context": 1024}, 1000, "regime", "panel", build)
    arguments = Namespace(out=tmp_path, cpu_time=False, record=False)
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


def test_failing_peer_takes_nothing_with_it(
    modules: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    told = "peer absent failed in 1 cells, first 1 x 1K: RuntimeError: not built for this GPU"
    assert told in capsys.readouterr().out


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


def test_prompts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import loop_workload as loop

    ids = list(range(10))
    assert loop.cut_prompts(ids, 1, 4) == [[6, 7, 8, 9]]
    assert loop.cut_prompts(ids, 5, 4)[0] == [8, 9, 0, 1]  # the text begins anew
    assert loop.cut_prompts(ids, 2, 23) == [[2, 3, 4, *ids[5:], *ids, *ids[:5]], [7, 8, 9, *ids, *ids]]


def test_loop(tmp_path: Path) -> None:
    """On the CPU in fp32, drafts change no output."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "code.txt").write_text((ROOT / "vegas_ops" / "demo.py").read_text())
    command = [sys.executable, str(ROOT / "benchmarks" / "loop.py"), "--device", "cpu", "--batch", "1", "3"]
    options = ["--texts", str(tmp_path / "texts"), "--context", "400", "--new-tokens", "10", "--gamma", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options, "--out", str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("*/loop.jsonl")), "that name is the kept record's"
    (path,) = tmp_path.glob("*/loop-quick.jsonl")
    head, *cells = (json.loads(line) for line in path.read_text().splitlines())
    assert head["model"] == "qwen3-6m-longctx" and head["sources"]
    policies = ["plain", "vegas", "vegas-lookahead"]
    assert [(c["case"]["batch"], c["case"]["policy"]) for c in cells] == [
        (b, p) for b in (1, 3) for p in policies
    ]
    for cell in cells:
        assert cell["identical"] == cell["case"]["batch"] and cell["unexplained"] == 0
        assert cell["us"] > 0 and cell["accepted"] <= cell["drafted"]
        assert (cell["drafted"] > 0) == (cell["case"]["policy"] != "plain")


def test_where_the_time_of_replays_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    # One that waits for its predecessor, one that both cover, a pause; and again after a long one.
    replay = [(0.0, 10.0, "a"), (8.0, 14.0, "b"), (9.0, 12.0, "c"), (16.0, 20.0, "a")]
    spans = [(begin + at, end + at, name) for at in (0.0, 1000.0) for begin, end, name in replay]
    account = launches.account_of(spans, 2)
    assert account == {"kernels": {"a": [2.0, 14.0], "b": [1.0, 4.0], "c": [1.0, 0.0]}, "idle_us": 2.0}
    assert launches.account_of([], 2) == {"kernels": {}, "idle_us": 0.0}


def test_prompts_of_json_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import loop_workload

    from vegas_ops.models import Tokenizer
    from vegas_ops.session import DEMO_MODEL

    text = loop_workload.record_text
    assert text("a") == text({"prompt": "a", "id": 3}) == text({"problem": "a", "answer": "b"}) == "a"
    assert text({"messages": [{"role": "system", "content": "a"}, {"content": "b"}]}) == "a\n\nb"
    assert text({"question": "b", "context": "a", "choice_B": "d", "choice_A": "c"}) == "a\n\nb\n\nc\n\nd"
    path, tokenizer = tmp_path / "prompts.jsonl", Tokenizer(DEMO_MODEL)
    path.write_text('"one two three four five"\n\n' + json.dumps({"prompt": "def f():"}) + "\n")
    first, second = loop_workload.jsonl_prompts(path, tokenizer, 3)
    assert first == tokenizer.encode("one two three four five")[-3:]
    assert second == tokenizer.encode("def f():")[-3:]
    for line, message in (
        ("{", ":1: "),
        ("3", ":1: must be"),
        ('{"x": 1}', ":1: must hold"),
        ("", "at least one"),
    ):
        path.write_text(line)
        with pytest.raises(ValueError, match=message):
            loop_workload.jsonl_prompts(path, tokenizer, 3)


def test_replayed_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights whose drafts are accepted at the rate asked for; the text is plain decoding's."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import loop_workload

    from vegas_ops.models import Qwen3Config
    from vegas_ops.speculative.tuning import decode_together

    config = Qwen3Config(1100, 32, 32, 2, 2, 1, 16, 2048, dtype=torch.float32)
    monkeypatch.setitem(loop_workload.SHAPES, "tiny", loop_workload.Shape(config))
    session = loop_workload.RandomSession("tiny", 2048, torch.device("cpu"))
    decoder = session.decoder(8 * 1500)
    held = [loop_workload.hold_random(decoder, 300, seed) for seed in range(8)]
    assert len({tuple(prompt.prompt) for prompt in held}) == 8
    plain = decode_together(decoder, held, 700, gamma=0)
    for wanted in (6.24, 3.0):
        session.model.replay(wanted, 6)
        drafted = decode_together(decoder, held, 700, gamma=6, ratio=0.07, min_tokens=16)
        assert [r.output for r in drafted.requests] == [r.output for r in plain.requests]
        tokens = sum(r.statistics.tokens for r in drafted.requests)
        mean = tokens / sum(r.statistics.iterations for r in drafted.requests)
        assert abs(mean - wanted) < 0.15, "5,600 tokens: four standard deviations and more"


def test_a_stack_of_windows_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other layer drafts with its window, experts are left out, and the bound counts both."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import loop
    import loop_workload

    from vegas_ops.models import Qwen3Config
    from vegas_ops.speculative.tuning import decode_together

    config = Qwen3Config(1100, 32, 32, 4, 2, 1, 16, 2048, dtype=torch.float32)
    shape = loop_workload.Shape(config, window=20, sinks=True, experts=True)
    monkeypatch.setitem(loop_workload.SHAPES, "tiny", shape)
    session = loop_workload.RandomSession("tiny", 2048, torch.device("cpu"))
    model = session.model
    assert [layer.window for layer in model.layer_attention] == [20, None, 20, None]
    heads = 32 * (2 + 2 * 1) * 16 + 32 * 2 * 16
    assert loop_workload.weight_bytes(model) == 4 * (4 * heads + 1100 * 32)
    decoder = session.decoder(3000)
    held = [loop_workload.hold_random(decoder, 300, seed) for seed in range(2)]
    plain = decode_together(decoder, held, 30, gamma=0)
    drafted = decode_together(decoder, held, 30, gamma=4, ratio=0.1, min_tokens=16)
    assert [r.output for r in drafted.requests] == [r.output for r in plain.requests]
    read = drafted.requests[0].statistics
    token = decoder.cache.bytes_per_token
    # Two of four layers read windows, the others a tenth of the keys and what is newer.
    assert read.draft_bytes / read.drafted < token * (0.5 * 20 + 0.5 * (0.1 * 330 + 8) + 1)
    bound = loop.Bound(weights=100, keys=1000.0, windows=50.0, gbs=1e-3)
    assert (bound.plain_us, bound.draft_us(0.1)) == pytest.approx((1150.0, 250.0))
    assert bound.speed_up(5.0, 4, 0.1) == pytest.approx(5 * 1150 / (1150 + 4 * 250))

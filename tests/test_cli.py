"""The command line on a tiny model, and what it says about mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from vegas_ops import cli, demo, tune
from vegas_ops.models import Qwen3Model, Tokenizer
from vegas_ops.plots import acceptance_by_position, plot_run, selection_histogram
from vegas_ops.session import DEMO_MODEL, Session, common_prefix, printable
from vegas_ops.speculative import POLICIES, Request, Tuning
from vegas_ops.version import __version__

PROMPT = "def add(a, b):\n    return a + b\n\n\n" * 60


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_demo_compares_and_plots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prompt_file: Path
) -> None:
    picture = tmp_path / "picture.png"
    status, out, _ = run(
        capsys, "demo", "--device", "cpu", "--prompt", prompt_file, "--context", 700,
        "--max-new-tokens", 24, "--plot", picture,
    )  # fmt: skip
    assert status == 0
    assert "700 tokens" in out
    assert "output: identical, all 24 tokens" in out
    for row in ("tokens/s", "tokens per verification", "drafts accepted", "KV cache read per token"):
        assert row in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_is_plain_decoding_under_every_policy(
    capsys: pytest.CaptureFixture[str], prompt_file: Path, policy: str
) -> None:
    common = ("generate", "--device", "cpu", "--model", DEMO_MODEL, "--prompt", prompt_file)
    common += ("--max-new-tokens", 30)
    _, plain, _ = run(capsys, *common, "--gamma", 0)
    status, text, figures = run(capsys, *common, "--policy", policy, "--gamma", 3, "--ratio", 0.1)
    assert status == 0
    assert text == plain and text.strip()
    assert "30 tokens (length)" in figures and "tokens per verification" in figures


def test_sampling_repeats_with_its_seed(capsys: pytest.CaptureFixture[str], prompt_file: Path) -> None:
    def sampled(seed: int) -> str:
        return run(
            capsys, "generate", "--device", "cpu", "--model", DEMO_MODEL, "--prompt", prompt_file,
            "--max-new-tokens", 30, "--temperature", 1.5, "--top-p", 0.99, "--top-k", 500, "--min-p", 0.001,
            "--seed", seed,
        )[1]  # fmt: skip

    assert sampled(1) == sampled(1) != sampled(2)


def test_standard_input_is_a_prompt() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "vegas_ops", "generate", "--model", DEMO_MODEL, "--prompt", "-",
         "--max-new-tokens", "5", "--device", "cpu"],
        input=PROMPT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_a_context_that_leaves_no_room_is_refused(
    capsys: pytest.CaptureFixture[str], prompt_file: Path
) -> None:
    status, out, err = run(capsys, "demo", "--device", "cpu", "--prompt", prompt_file, "--context", 32_700)
    assert status == 2 and out == ""
    assert "`context` must be at most 32512" in err and err.count("\n") == 1
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    assert f"default: {demo.DEMO_CONTEXT}" in " ".join(capsys.readouterr().out.split())
    assert all(name in cli._POLICY_HELP for name in POLICIES)


def test_tune_writes_what_generate_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prompt_file: Path
) -> None:
    common = ("--device", "cpu", "--prompt", prompt_file)
    files = ("--out", tmp_path / "tuned.json", "--plot", tmp_path / "tuned.png")
    status, out, _ = run(
        capsys, "tune", *common, *files, "--policy", "vegas-lookahead", "--context", 600, "--new-tokens", 8,
        "--gammas", 1, 3, "--ratios", 0.1, 0.3,
    )  # fmt: skip
    assert status == 0 and "fastest: " in out
    assert "ratios 0.1, 0.3: all the same 256 tokens at this context, tried as 0.3\n" in out
    for row in ("plain decoding", "1: accepted by ratio", "2: speed by γ", "3: speed by ratio"):
        assert row in out
    assert (tmp_path / "tuned.png").read_bytes().startswith(b"\x89PNG")
    tuned = Tuning.load(tmp_path / "tuned.json")
    assert tuned.policy == "vegas-lookahead" and tuned.gamma in (0, 1, 3) and tuned.ratio == 0.3
    for repeats, spread in ((1, "one run"), (3, " %")):
        column = tune._table(tuned, repeats).columns[6]
        assert all(cell.endswith(spread) for cell in column.cells), repeats
    options = ("--max-new-tokens", 12, "--tuned", tmp_path / "tuned.json")
    plain = run(capsys, "generate", *common, "--max-new-tokens", 12, "--gamma", 0)[1]
    assert run(capsys, "generate", *common, *options)[1] == plain
    args = cli._parser().parse_args(["generate", "--prompt", "-", "--tuned", str(tmp_path / "tuned.json")])
    assert cli._speculation(args) == (POLICIES["vegas-lookahead"], tuned.gamma, tuned.ratio)
    args.gamma, args.policy = 4, "full"
    assert cli._speculation(args) == (POLICIES["full"], 4, tuned.ratio)
    good = json.loads((tmp_path / "tuned.json").read_text())
    for content, message in (
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ("[]", "a tuning must be an object, got []"),
        (json.dumps({**good, "trials": 3}), "`trials` must be a list, got 3"),
        (json.dumps({**good, "trials": [7]}), "a trial must be an object, got 7"),
        (json.dumps({**good, "trials": [{}]}), "a trial must have `step`"),
        (json.dumps({**good, "gamma": "4"}), "`gamma` must be int, got '4'"),
        (json.dumps({**good, "gamma": True}), "`gamma` must be int, got True"),
        (json.dumps({**good, "ratio": None}), "`ratio` must be float, got None"),
        (json.dumps({**good, "ratio": 7}), "`ratio` must be in [0, 1], got 7"),
        (json.dumps({**good, "policy": ["x"]}), "`policy` must be str, got ['x']"),
        (json.dumps({**good, "policy": "x"}), "`policy` must be one of"),
        (json.dumps({k: v for k, v in good.items() if k != "batch"}), "a tuning must have `batch`"),
    ):
        (tmp_path / "bad.json").write_text(content)
        status, _, err = run(capsys, "generate", *common, "--tuned", tmp_path / "bad.json")
        assert status == 2 and "`tuned` must be what `vegas-ops tune` wrote" in err and message in err, err
    status, _, err = run(capsys, "tune", *common, "--out", tmp_path / "no" / "folder.json")
    assert status == 2 and "`out` must be a .json file in an existing folder" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gammas", 10**9), "`gammas` must hold at least one, all in [1, 1024), got [1000000000]"),
        (("--gammas", 4, 0), "`gammas` must"),
        (("--ratios", 0.1, "nan"), "`ratios` must"),
        (("--new-tokens", 1), "`new_tokens` must be at least 2"),
        (("--policy", "best"), "`policy` must be one of"),
        (("--top-p", 2), "`top_p` must"),
        (("--top-p", 0.9), "`temperature` must be above 0 for --top-p to have an effect, got 0"),
    ],
)
def test_tune_checks_everything_before_it_loads_a_model(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[Any, ...],
    message: str,
) -> None:
    monkeypatch.setattr("vegas_ops.tune.Session", None)  # to call it would be another error
    status, _, err = run(capsys, "tune", "--device", "cpu", *options)
    assert status == 2 and message in err, err


def test_info_names_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert __version__ in out and torch.__version__ in out
    for op in ("flash_attn_with_logit_dump", "topk_aggregate_logits", "sparse_paged_decode"):
        assert op in out
    for architectures, told in (("80 90", "built"), ("80 100", "not built: 90 is not among"), ("", "")):
        monkeypatch.setattr("vegas_ops._C.cuda_architectures", lambda names=architectures: names)
        _, out, _ = run(capsys, "info")
        line = next((x for x in out.splitlines() if x.startswith("Hopper kernels")), "")
        assert line.removeprefix("Hopper kernels").strip().startswith(told) and bool(line) == bool(told)


def test_bench_runs_what_the_repository_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "benchmarks"
    monkeypatch.setattr(cli, "_BENCHMARKS", folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("verify", "selection", "acceptance"):
        monkeypatch.setitem(sys.modules, name, sys)  # forgotten in the end, as what replaces it
    status, _, err = run(capsys, "bench")
    assert status == 2 and "clone it" in err
    folder.mkdir()
    (folder / "helper_of_benchmarks.py").write_text("WORD = 'measured'\n")
    for name in ("verify", "selection", "acceptance"):
        (folder / f"{name}.py").write_text(
            f"import helper_of_benchmarks\n\ndef main(argv):\n"
            f"    print('{name}', helper_of_benchmarks.WORD, argv)\n    return 3 if argv else 0\n"
        )
    # Without a name those of the ops alone: others cannot do without arguments.
    assert run(capsys, "bench")[:2] == (0, "verify measured []\nselection measured []\n")
    status, out, _ = run(capsys, "bench", "select", "--quick", "--help")
    assert (status, out) == (3, "selection measured ['--quick', '--help']\n")
    assert run(capsys, "bench", "--quick")[1].count("['--quick']") == 2
    assert run(capsys, "bench", "acceptance", "--all")[1] == "acceptance measured ['--all']\n"
    status, _, err = run(capsys, "bench", "nothing")
    assert status == 2 and "`name` must be one of acceptance, selection, verify" in err


def test_the_demo_says_when_others_use_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that spin for each other made a demo of half a minute take twenty."""
    from vegas_ops import demo

    assert 0 <= demo._others(0.05) <= 1
    monkeypatch.setattr(demo.Path, "read_text", lambda self: "cpu 1 2")
    assert demo._others(0.0) == 0


def test_every_benchmark_explains_itself_without_what_it_compares_with() -> None:
    program = """
import sys
from vegas_ops import cli
sys.modules.update(dict.fromkeys(("vllm", "flashinfer", "transformers")))  # as if not installed
for name in cli._benchmark_names():
    try:
        cli.main(["bench", name, "--help"])
    except SystemExit as end:
        assert end.code == 0
assert cli.main(["bench", "vllm"]) == 2
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("usage: ") == len(cli._benchmark_names())
    assert "vLLM must be installed in this environment" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "best"), "`policy` must be one of vegas,"),
        (("--device", "abacus"), "`device` must be cpu, cuda or cuda:N"),
        (("--device", "cuda:99"), "`device` must be present, got 'cuda:99'"),
        (("--gamma", "-1"), "`gamma` must be at least 0, got -1"),
        (("--ratio", "1.5"), "`ratio` must be in [0, 1], got 1.5"),
        (("--temperature", "-1"), "`temperature` must be"),
        (("--top-k", "5", "--seed", "1"), "`temperature` must be above 0 for --top-k, --seed"),
        (("--policy", "random", "--seed", "1", "--min-p", "0.1"), "must be above 0 for --min-p to have"),
        (("--prompt", "no such file"), "no such file"),
        (("--model", "no such folder"), "`model` must be a folder, got 'no such folder'"),
        (("--max-new-tokens", "40000"), "`max_new_tokens` must be at most"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], prompt_file: Path, arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(
        capsys, "generate", "--model", DEMO_MODEL, "--prompt", prompt_file, "--device", "cpu", *arguments
    )
    assert status == 2 and out == ""
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("plot", ["no such folder/a.png", "a.foo"])
def test_a_picture_that_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str], prompt_file: Path, plot: str
) -> None:
    status, out, err = run(capsys, "demo", "--device", "cpu", "--prompt", prompt_file, "--plot", plot)
    assert status == 2 and out == ""
    assert "`plot` must be a .png file in an existing folder" in err and err.count("\n") == 1


def test_a_drawn_seed_is_told(capsys: pytest.CaptureFixture[str], prompt_file: Path) -> None:
    options = ("--device", "cpu", "--prompt", prompt_file, "--temperature", "1", "--max-new-tokens", "8")
    status, first, err = run(capsys, "generate", *options)
    assert status == 0
    seed = err.rsplit("seed ", 1)[1].strip()
    assert run(capsys, "generate", *options, "--seed", seed)[1] == first


def test_a_build_without_cuda_kernels_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("vegas_ops._C.cuda_architectures", lambda: "")
    assert cli._device(None) == "cpu"
    with pytest.raises(ValueError, match="`device` must be cpu: this build has no CUDA kernels, got 'cuda'"):
        cli._device("cuda")
    monkeypatch.setattr("vegas_ops._C.cuda_architectures", lambda: "80 90")
    assert cli._device(None) == cli._device("cuda") == "cuda"


def test_prompts_must_be_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for content, message in ((b"", "`prompt` must hold text"), (b"\xff\xfe", "must be UTF-8 text")):
        (tmp_path / "prompt").write_bytes(content)
        status, _, err = run(capsys, "demo", "--device", "cpu", "--prompt", tmp_path / "prompt")
        assert status == 2 and message in err


def test_wrong_options_exit_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["demo", "--context", "0"], ["demo", "--nonsense"], ["dance"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert "usage: vegas-ops" in capsys.readouterr().err


def test_default_prompt_is_long_and_the_same_each_time() -> None:
    text = demo.standard_library_text()
    assert text == demo.standard_library_text()
    assert len(Tokenizer(DEMO_MODEL).encode(text)) >= demo.DEMO_CONTEXT
    with pytest.raises(ValueError, match="no standard-library sources"):
        demo.standard_library_text(("sys", "no_such_module"))


def test_a_difference_is_shown_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs that part far from a tie are called wrong, with the two tokens."""
    session = Session(DEMO_MODEL)
    ids = session.encode(PROMPT, 20)
    decoder = session.decoder(len(ids) + 2000)
    prompt = decoder.hold_prompt(ids)
    plain = Request(ids, max_new_tokens=12, gamma=0, share_prefix_with=prompt)
    session.run(decoder, plain)
    wrong = Request(ids, max_new_tokens=12, gamma=3, share_prefix_with=prompt)
    session.run(decoder, wrong)
    assert plain.output == wrong.output
    wrong.tokens[-4] += 1
    console = Console(width=300)
    assert demo.print_identity(session, decoder, [(plain, plain), (plain, wrong)], 3, console) == 1
    out = capsys.readouterr().out
    assert "identical, all 12 tokens" in out
    assert "differs from token 9 on" in out and "at 12 places" in out
    assert "more than rounding explains" in out
    expected = [session.tokenizer.decode([request.output[8]]) for request in (plain, wrong)]
    assert "{!r} and {!r} are".format(*map(printable, expected)) in out


def test_an_output_that_ends_early_is_no_tie(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(DEMO_MODEL)
    plain, short = (Request([1, 2], max_new_tokens=4) for _ in range(2))
    plain.tokens += [3, 4]
    short.tokens += [3]
    assert demo.print_identity(session, session.decoder(64), [(plain, short)], 2, Console(width=300)) == 1
    assert "from token 2 on, where one output ends" in capsys.readouterr().out


def test_a_tie_is_judged_by_how_far_margins_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where verification's logits are off by a known error, that is the move that is found."""
    session = Session(DEMO_MODEL)
    ids = session.encode(PROMPT, 20)
    decoder = session.decoder(len(ids) + 2000)
    plain = Request(ids, max_new_tokens=12, gamma=0, share_prefix_with=decoder.hold_prompt(ids))
    session.run(decoder, plain)
    other = (plain.output[7] + 1) % 1000
    ((gap, exact, places),) = demo.moves_of_margins(decoder, [(plain, 7, other)], 3)
    assert places == 12 and exact < 1e-3 < gap
    compute = session.model.compute_logits

    def off(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        if hidden.shape[0] > 1:  # a verification
            logits[:, plain.output[7]] -= 0.25
        return logits

    monkeypatch.setattr(session.model, "compute_logits", off)
    ((_, moved, _),) = demo.moves_of_margins(decoder, [(plain, 7, other)], 3)
    assert moved == pytest.approx(0.25, abs=1e-3)
    monkeypatch.setattr(session.model, "compute_logits", lambda hidden: compute(hidden) * torch.nan)
    ((gap, _, _),) = demo.moves_of_margins(decoder, [(plain, 7, other)], 3)
    assert gap == torch.inf


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mé\r\n\tz\x07\x9b") == "a[31mé\n\tz"
    assert printable("漢字 🙂") == "漢字 🙂"


def test_common_prefix() -> None:
    assert [common_prefix(*pair) for pair in (([], [1]), ([1, 2], [1, 3]), ([1, 2], [1, 2, 3]))] == [0, 1, 2]


def test_acceptance_is_conditional_on_the_drafts_before() -> None:
    # 10 rounds of 3 drafts, 4 more of 1 draft: 14 first drafts, 12 of them accepted ...
    assert acceptance_by_position([14, 10, 10], [12, 9, 3]) == [12 / 14, 9 / 10, 3 / 9]
    assert acceptance_by_position([], []) == []
    assert acceptance_by_position([5, 5], [0, 0]) == [0.0, 0.0]


def test_selection_histogram_counts_shares() -> None:
    first = torch.tensor([[0, 1, 2, 3, -1], [9, -1, -1, -1, -1]])
    second = torch.tensor([[0, 1, 2, 4, 5], [-1, -1, -1, -1, -1]])
    share = selection_histogram([first, second], context=10, bins=5)
    expected = torch.tensor([[2 / 2, 3 / 4, 2 / 4, 0, 0], [0, 0, 0, 0, 1 / 4]])
    torch.testing.assert_close(share, expected)
    heads = torch.tensor([[[0, 1], [0, 3]]])
    torch.testing.assert_close(
        selection_histogram([heads], context=4, bins=2), torch.tensor([[3 / 4, 1 / 4]])
    )
    # 7 positions in 3 bins: 3, 2 and 2 of them.
    every = torch.arange(7)[None]
    torch.testing.assert_close(selection_histogram([every], context=7, bins=3), torch.ones(1, 3))


def test_plot_without_a_selection(tmp_path: Path) -> None:
    arguments = {"title": "t", "context": 10, "drafted_at": [], "accepted_at": []}
    plot_run(tmp_path / "none.png", selections=[], **arguments)
    assert (tmp_path / "none.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="`plot` must be a file"):
        plot_run(tmp_path / "no" / "folder.png", selections=[], **arguments)


def test_demo_model_is_complete() -> None:
    model = Qwen3Model.from_pretrained(DEMO_MODEL)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert model.max_position == config["max_position_embeddings"] >= demo.DEMO_CONTEXT
    readme = (DEMO_MODEL / "README.md").read_text()
    assert "PSF-2.0" in readme and "public domain" in readme


@pytest.mark.parametrize(
    ("option", "value", "name"), [("--gamma", 0, "gamma"), ("--max-new-tokens", 1, "max_new")]
)
def test_a_demo_without_drafts_is_refused(
    capsys: pytest.CaptureFixture[str], prompt_file: Path, option: str, value: int, name: str
) -> None:
    status, _, err = run(capsys, "demo", "--device", "cpu", "--prompt", prompt_file, option, value)
    assert status == 2 and f"`{name}" in err and "must be at least" in err

"""The command line: `vegas-ops demo | generate | tune | info | bench`."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vegas_ops.version import __version__

DEMO_GAMMA = 6
DEMO_RATIO = 0.05
DEMO_POLICY = "vegas-lookahead"
DEMO_NEW_TOKENS = 256
POLICY, GAMMA, RATIO = "vegas", 6, 0.07  # the paper's

_BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
_POLICY_HELP = (
    "what drafts attend to: vegas, vegas-lookahead, streaming, snapkv, quest, specextend, pillar, "
    "topk-oracle, random or full"
)
_TEMPERATURE_HELP = "0 is greedy (%(default)s)"
_TOP_P_HELP = "share of the probability that is drawn from, the likeliest tokens' (%(default)s)"
_PNG_HELP = "PNG to write (%(default)s)"
_OP_BENCHMARKS = ("verify", "selection", "sparse")  # need no arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Errors of the user are one line, status 2."""
    parser = _parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What follows `bench` belongs to the benchmarks, but for a lone request for help.
    rest = arguments[1:] if arguments[:1] == ["bench"] and arguments[1:] not in (["-h"], ["--help"]) else []
    args = parser.parse_args(arguments[: len(arguments) - len(rest)])
    args.rest = rest
    try:
        return int(args.run(args))
    except (ValueError, OSError, ImportError) as error:
        print(f"vegas-ops {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vegas-ops", description="Verification-guided self-speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"vegas-ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="plain decoding against Vegas on a real model and a long text",
        description="Continues a long text twice, by plain decoding and with Vegas, and compares.",
    )
    _add_model_options(demo)
    demo.add_argument("--prompt", type=Path, help="UTF-8 text (default: Python's own library sources)")
    _add_context_option(demo)
    _add_speculation_options(demo, DEMO_GAMMA, DEMO_RATIO, DEMO_POLICY)
    demo.add_argument(
        "--max-new-tokens", type=_count, default=DEMO_NEW_TOKENS, help="to decode (%(default)s)"
    )
    demo.add_argument("--plot", type=Path, default=Path("vegas-demo.png"), help=_PNG_HELP)
    demo.set_defaults(run=_demo)

    generate = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continues a text; the text goes to standard output, figures to standard error.",
    )
    _add_model_options(generate)
    generate.add_argument("--prompt", type=Path, required=True, help="UTF-8 text, or - for standard input")
    _add_speculation_options(generate, GAMMA, RATIO, POLICY)
    generate.add_argument("--max-new-tokens", type=_count, default=256, help="at most (%(default)s)")
    generate.add_argument("--temperature", type=float, default=0.0, help=_TEMPERATURE_HELP)
    generate.add_argument("--top-p", type=float, default=1.0, help=_TOP_P_HELP)
    generate.add_argument("--top-k", type=int, default=0, help="of the k likeliest tokens (0: of all)")
    generate.add_argument(
        "--min-p", type=float, default=0.0, help="least probability, as a share of the highest (%(default)s)"
    )
    generate.add_argument("--seed", type=int, help="default: a random one")
    generate.set_defaults(run=_generate)

    tune = commands.add_parser(
        "tune",
        help="find the fastest gamma and ratio for a model and prompts",
        description="Decodes the prompts as one batch: the smallest ratio where acceptance saturates, then "
        "the fastest gamma, then the fastest ratio. `generate --tuned` and `demo --tuned` read the result.",
    )
    _add_model_options(tune)
    tune.add_argument(
        "--prompt", type=Path, nargs="+", default=[], help="UTF-8 texts (default: Python's own sources)"
    )
    _add_context_option(tune)
    tune.add_argument("--policy", default=POLICY, help=f"{_POLICY_HELP} (default: {POLICY})")
    gammas, ratios = [2, 3, 4, 5, 6, 7, 8, 10], [0.02, 0.03, 0.05, 0.07, 0.1, 0.15]
    tune.add_argument("--gammas", type=int, nargs="+", default=gammas, help="to try (%(default)s)")
    tune.add_argument("--ratios", type=float, nargs="+", default=ratios, help="to try (%(default)s)")
    tune.add_argument(
        "--new-tokens", type=_count, default=64, help="of every prompt and setting (%(default)s)"
    )
    tune.add_argument(
        "--repeats", type=_count, default=3, help="runs of a setting; the median counts (%(default)s)"
    )
    tune.add_argument("--temperature", type=float, default=0.0, help=_TEMPERATURE_HELP)
    tune.add_argument("--top-p", type=float, default=1.0, help=_TOP_P_HELP)
    tune.add_argument(
        "--out", type=Path, default=Path("vegas-tuned.json"), help="JSON to write (%(default)s)"
    )
    tune.add_argument("--plot", type=Path, default=Path("vegas-tuned.png"), help=_PNG_HELP)
    tune.set_defaults(run=_tune)

    info = commands.add_parser("info", help="version, build, devices, and which kernel serves which op")
    info.set_defaults(run=_info)

    bench = commands.add_parser(
        "bench",
        help="run the benchmarks of the repository",
        usage="vegas-ops bench [NAME] [options of the benchmark]",
        description="Runs benchmarks/NAME.py (the beginning of a name will do), or those of the three ops. "
        "Names: " + (", ".join(_benchmark_names()) or "none in this installation"),
    )
    bench.set_defaults(run=_bench)
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, help="Hugging Face Qwen3 folder (default: the packaged 6M-parameter model)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda where there is one)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32 on the CPU, the checkpoint's on a GPU",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="make linear layers independent of the number of rows where that costs time (GPU)",
    )


def _add_context_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context",
        type=_count,
        help="tokens of a text to keep, its last ones (default: 24576, or what the model holds)",
    )


def _add_speculation_options(parser: argparse.ArgumentParser, gamma: int, ratio: float, policy: str) -> None:
    parser.add_argument("--policy", help=f"{_POLICY_HELP} (default: {policy})")
    parser.add_argument("--gamma", type=int, help=f"drafts per verification ({gamma})")
    parser.add_argument(
        "--ratio", type=float, help=f"share of the context that drafts read, at least 256 tokens ({ratio})"
    )
    parser.add_argument("--tuned", type=Path, help="JSON of `vegas-ops tune`: other defaults for these three")
    parser.set_defaults(defaults=(policy, gamma, ratio))


def _speculation(args: argparse.Namespace) -> tuple[Any, int, float]:
    """Policy, gamma and ratio: as given, else as tuned, else the command's own."""
    from vegas_ops.speculative import POLICIES, Tuning

    policy, gamma, ratio = args.defaults
    if args.tuned is not None:
        tuned = Tuning.load(args.tuned)
        policy, gamma, ratio = tuned.policy, tuned.gamma, tuned.ratio
    return (
        POLICIES[policy if args.policy is None else args.policy],
        gamma if args.gamma is None else args.gamma,
        ratio if args.ratio is None else args.ratio,
    )


def _check_sampled(args: argparse.Namespace, **off: Any) -> None:
    """Refuses options of sampling, by the values that turn them off, where decoding is greedy."""
    given = [name for name, value in off.items() if getattr(args, name) != value]
    if given and args.temperature == 0:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(
            f"`temperature` must be above 0 for {options} to have an effect, got {args.temperature:g}"
        )


def _model(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise ValueError(
            f"`model` must be a folder, got {str(folder)!r}; `hf download` fetches one from the hub"
        )
    return folder


def _device(name: str | None) -> str:
    import torch

    from vegas_ops import _C
    from vegas_ops.devices import present

    has_kernels = bool(_C.cuda_architectures())
    if name is None:
        return "cuda" if has_kernels and torch.cuda.is_available() else "cpu"
    device = present(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not has_kernels:
        raise ValueError(f"`device` must be cpu: this build has no CUDA kernels, got {name!r}")
    return name


def _demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from vegas_ops.demo import DemoOptions, run_demo
    from vegas_ops.session import DEMO_MODEL, DTYPES

    policy, gamma, ratio = _speculation(args)
    options = DemoOptions(
        model=_model(args.model) or DEMO_MODEL,
        prompt=args.prompt,
        context=args.context,
        max_new_tokens=args.max_new_tokens,
        gamma=gamma,
        ratio=ratio,
        policy=policy,
        device=_device(args.device),
        dtype=DTYPES[args.dtype] if args.dtype else None,
        batch_invariant=args.batch_invariant,
        plot=args.plot,
    )
    return run_demo(options, Console())


def _generate(args: argparse.Namespace) -> int:
    from vegas_ops.session import DEMO_MODEL, DTYPES, Session, printable, read_text
    from vegas_ops.speculative import Request, SamplingParams

    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    (policy, gamma, ratio), device = _speculation(args), _device(args.device)
    # A random selection of tokens takes a seed, too.
    seed = args.seed if policy.name == "random" else None
    _check_sampled(args, top_p=1.0, top_k=0, min_p=0.0, seed=seed)
    text = sys.stdin.read() if str(args.prompt) == "-" else read_text(args.prompt)
    session = Session(
        _model(args.model) or DEMO_MODEL,
        device=device,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        batch_invariant=args.batch_invariant,
    )
    request = Request(
        session.encode(text, args.max_new_tokens),
        sampling,
        max_new_tokens=args.max_new_tokens,
        stop_token_ids=session.model.config.eos_token_ids,
        gamma=gamma,
        policy=policy,
        ratio=ratio,
    )

    room = args.max_new_tokens + min(gamma, args.max_new_tokens) + 1
    decoder = session.decoder(len(request.prompt) + room)
    with _PromptBar(len(request.prompt)) as bar:
        decoder.on_prompt = bar.update

        def show(piece: str) -> None:
            bar.close()
            sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
            sys.stdout.flush()

        run = session.run(decoder, request, show)
    print(flush=True)
    statistics = request.statistics
    seed = f", seed {request.seed}" if args.temperature > 0 else ""
    print(
        f"{len(request.output)} tokens ({request.finish_reason}), {run.tokens_per_second:.1f} tokens/s, "
        f"{statistics.tokens_per_iteration:.2f} tokens per verification, "
        f"{run.bytes_per_token / 1e6:.2f} MB of KV cache read per token{seed}",
        file=sys.stderr,
    )
    return 0


def _tune(args: argparse.Namespace) -> int:
    from rich.console import Console

    from vegas_ops.session import DEMO_MODEL, DTYPES
    from vegas_ops.speculative import POLICIES, SamplingParams
    from vegas_ops.tune import TuneOptions, run_tune

    sampling = SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=0)
    _check_sampled(args, top_p=1.0)
    options = TuneOptions(
        model=_model(args.model) or DEMO_MODEL,
        prompts=args.prompt,
        context=args.context,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        gammas=args.gammas,
        ratios=args.ratios,
        policy=POLICIES[args.policy],
        sampling=sampling,
        device=_device(args.device),
        dtype=DTYPES[args.dtype] if args.dtype else None,
        batch_invariant=args.batch_invariant,
        out=args.out,
        plot=args.plot,
    )
    return run_tune(options, Console())


class _PromptBar:
    """A progress bar on standard error that disappears when the first text comes."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("reading the prompt", total=total)
        self._closed = False

    def __enter__(self) -> _PromptBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, request: Any, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if not self._closed:  # rich ends each stop with a line where it may not overwrite one
            self._progress.stop()
        self._closed = True


def _info(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console
    from rich.table import Table

    from vegas_ops import _C

    console = Console(highlight=False)
    facts = Table(box=None, show_header=False, pad_edge=False)
    architectures = _C.cuda_architectures()
    facts.add_row("vegas_ops", f"{__version__}, library {_C.version()}")
    facts.add_row("CUDA architectures", architectures or "none: a CPU build")
    if architectures:
        hopper = re.search(r"\b90a?\b", architectures)
        facts.add_row("Hopper kernels", "built" if hopper else "not built: 90 is not among the architectures")
    facts.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    facts.add_row("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    facts.add_row("CPU", f"{_C.cpu_isa()} kernels, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        facts.add_row(
            f"GPU {index}",
            f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB",
        )
    if not torch.cuda.device_count():
        facts.add_row("GPU", "none")
    console.print(facts)
    console.print()
    kernels = Table("op", "CPU", "CUDA", box=None, pad_edge=False, header_style="bold")
    for op, name in enumerate(("flash_attn_with_logit_dump", "topk_aggregate_logits", "sparse_paged_decode")):
        kernels.add_row(name, *(str(_C.kernel_name(op, cuda) or "none") for cuda in (False, True)))
    console.print(kernels)
    return 0


def _benchmark_names() -> list[str]:
    """Scripts of the repository that define `main`."""
    scripts = sorted(_BENCHMARKS.glob("*.py"))
    return [path.stem for path in scripts if "\ndef main(" in path.read_text(encoding="utf-8")]


def _bench(args: argparse.Namespace) -> int:
    names = _benchmark_names()
    if not names:
        raise ValueError(
            "the benchmarks are part of the repository, not of the installed package: clone it, "
            "install with `pip install --editable .` and run `vegas-ops bench` again"
        )
    options = list(args.rest)
    if not options or options[0].startswith("-"):
        names = [name for name in _OP_BENCHMARKS if name in names]
    else:
        wanted = options.pop(0)
        names = [wanted] if wanted in names else [name for name in names if name.startswith(wanted)]
        if len(names) != 1:
            several = f", which begins {' and '.join(names)}" if names else ""
            raise ValueError(
                f"`name` must be one of {', '.join(_benchmark_names())}, or its beginning, "
                f"got {wanted!r}{several}"
            )
    return max(int(_benchmark(name)(options) or 0) for name in names)


def _benchmark(name: str) -> Callable[[Sequence[str]], int | None]:
    """`main` of benchmarks/NAME.py."""
    sys.path.insert(0, str(_BENCHMARKS))  # scripts may share modules
    spec = importlib.util.spec_from_file_location(name, _BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    run = getattr(module, "main", None)
    if run is None:
        raise ValueError(f"benchmarks/{name}.py must define main(argv), got none")
    return run

"""Tables (Markdown) and a plot of what acceptance.py measured.

usage: python benchmarks/acceptance_report.py FORCED.jsonl [--free FREE.jsonl] [--other CPU.jsonl]
       [--plot FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from acceptance import Record, by_configuration, interval

from vegas_ops.speculative import Vegas
from vegas_ops.speculative.policies import ROWS, SCORES

Cells = dict[tuple[str, int, float], dict[str, float]]
KINDS = {  # by how a text's name begins; other texts are of a kind of their own
    "book": "prose", "docs": "documentation", "code": "code", "copy": "copying", "copycode": "copying",
    "recall": "recall",
}  # fmt: skip
SHOWN = (
    "random",
    "streaming",
    "vegas",
    "vegas-weight-collect-2",
    "vegas-weight-collect-all",
    "vegas-group-collect-2",
    "vegas-group-stale-collect-2",
    "vegas-logit-collect-2-ahead-1",
    "vegas-weight-collect-2-ahead-1",
    "vegas-group-collect-2-ahead-1",
    "vegas-lookahead",
    "vegas-group-stale-last-ahead-1",
    "vegas-group-collect-all-ahead-1",
    "topk-oracle",
)


def shown(values: Iterable[float], digits: int = 2) -> str:
    mean, half = interval(list(values))
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def by_gamma(cells: Cells, gammas: Sequence[int], ratio: float) -> str:
    rows = [
        [n, *(shown(cells[n, g, ratio].values()) for g in gammas)]
        for n in SHOWN
        if (n, gammas[0], ratio) in cells
    ]
    return table(["selection", *(f"γ = {g}" for g in gammas)], rows)


def by_ratio(cells: Cells, gamma: int, ratios: Sequence[float]) -> str:
    rows = [
        [n, *(shown(cells[n, gamma, r].values()) for r in ratios)]
        for n in SHOWN
        if all((n, gamma, r) in cells for r in ratios)
    ]
    return table(["selection", *(f"ratio {r:.2f}" for r in ratios)], rows)


def by_text(cells: Cells, gamma: int, ratio: float) -> str:
    texts = sorted(cells["vegas", gamma, ratio])
    rows = [
        [n, *(f"{cells[n, gamma, ratio][t]:.1f}" for t in texts)] for n in SHOWN if (n, gamma, ratio) in cells
    ]
    return table(["selection", *texts], rows)


def by_kind(records: Iterable[Record], gamma: int, ratio: float) -> str:
    """Tokens per iteration, mean ± the 95 % interval over the iterations of all texts of a kind, and over
    texts at last. Only of records that say how many drafts were accepted at each position."""
    kinds: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    means: dict[str, list[float]] = defaultdict(list)
    for r in records:
        if (r["gamma"], r["ratio"]) != (gamma, ratio) or "accepted_at" not in r:
            continue
        # Accepted drafts come before refused ones: of every iteration, all up to some position.
        at_least = [r["iterations"], *r["accepted_at"], 0]
        tokens = [n for n in range(1, len(at_least)) for _ in range(at_least[n - 1] - at_least[n])]
        start = re.split("[^a-z]", r["text"], maxsplit=1)[0]
        kinds[r["policy"]][KINDS.get(start, r["text"])] += tokens
        means[r["policy"]].append(sum(tokens) / len(tokens))
    found_kinds = {kind for texts in kinds.values() for kind in texts}
    columns = [kind for kind in dict.fromkeys([*KINDS.values(), *sorted(found_kinds)]) if kind in found_kinds]
    rows = []
    for name, texts in kinds.items():
        found = [texts[kind] for kind in columns]
        cells = [f"{mean(x):.2f} ± {1.96 * stdev(x) / len(x) ** 0.5:.2f}" if x else "" for x in found]
        rows.append([name, *cells, shown(means[name])])
    return table(["selection", *columns, "all texts"], rows)


def grid(cells: Cells, gamma: int, ratio: float) -> str:
    def cell(policy: Vegas) -> str:
        values = cells.get((policy.name, gamma, ratio), {})
        return f"{interval(list(values.values()))[0]:.2f}" if values else ""

    columns = list(itertools.product((False, True), (0, 1, 2)))
    header = ["score", "rows"]
    header += [
        f"{'per KV head' if kv else 'per layer'}, {('no look-ahead', 'γ', '2γ')[a]}" for kv, a in columns
    ]
    return table(
        header,
        (
            [score, rows, *(cell(Vegas(score, rows, a, kv)) for kv, a in columns)]
            for score, rows in itertools.product(SCORES, ROWS)
        ),
    )


def paired(cells: Cells, a: str, b: str, gamma: int, ratio: float) -> str:
    """a minus b, text by text."""
    first, second = cells[a, gamma, ratio], cells[b, gamma, ratio]
    return shown([first[text] - second[text] for text in first])


def plot(records: Sequence[Record], gamma: int, ratio: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    cells = by_configuration(records)
    ratios = sorted({r["ratio"] for r in records})
    names = ("topk-oracle", "vegas-lookahead", "vegas-weight-collect-2", "vegas", "streaming", "random")
    for name in names:
        means = [interval(list(cells[name, gamma, r].values())) for r in ratios]
        left.errorbar(
            [100 * r for r in ratios],
            [m for m, _ in means],
            [h for _, h in means],
            marker="o",
            capsize=3,
            label=name,
        )
        accepted: dict[int, int] = defaultdict(int)
        drafted: dict[int, int] = defaultdict(int)
        for r in records:
            if (r["policy"], r["gamma"], r["ratio"]) == (name, gamma, ratio):
                for position, (a, d) in enumerate(zip(r["accepted_at"], r["drafted_at"], strict=True), 1):
                    accepted[position] += a
                    drafted[position] += d
        right.plot(list(drafted), [accepted[p] / drafted[p] for p in drafted], marker="o", label=name)
    left.set(xlabel="% of the cache read by a draft", ylabel=f"accepted drafts of {gamma}", ylim=(0, gamma))
    right.set(xlabel="draft position", ylabel=f"accepted, ratio {ratio}", ylim=(0, 1))
    left.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def read(paths: Iterable[Path]) -> list[Record]:
    lines = itertools.chain.from_iterable(path.read_text().splitlines() for path in paths)
    return [record for record in map(json.loads, lines) if "policy" in record]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="vegas-ops bench acceptance_report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("forced", type=Path, nargs="+")
    parser.add_argument("--free", type=Path, help="of a sampled free run")
    parser.add_argument("--other", type=Path, help="the same forced run elsewhere, to compare with")
    parser.add_argument("--gamma", type=int, default=6)
    parser.add_argument("--ratio", type=float, default=0.07)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(argv)
    records = read(arguments.forced)
    cells, gamma, ratio = by_configuration(records), arguments.gamma, arguments.ratio
    gammas, ratios = sorted({r["gamma"] for r in records}), sorted({r["ratio"] for r in records})
    texts = sorted({r["text"] for r in records})
    print(f"{len(records)} runs over {len(texts)} texts: {', '.join(texts)}\n")
    print(f"### By γ, ratio {ratio}\n\n{by_gamma(cells, gammas, ratio)}\n")
    print(f"### By ratio, γ = {gamma}\n\n{by_ratio(cells, gamma, ratios)}\n")
    print(f"### By text, γ = {gamma}, ratio {ratio}\n\n{by_text(cells, gamma, ratio)}\n")
    print(f"### Tokens per iteration by kind of text, γ = {gamma}, ratio {ratio}\n")
    print(f"{by_kind(records, gamma, ratio)}\n")
    print(f"### Every combination, γ = {gamma}, ratio {ratio}\n\n{grid(cells, gamma, ratio)}\n")
    pairs = (
        ("vegas-weight-collect-2", "vegas"),
        ("vegas-group-collect-2", "vegas-weight-collect-2"),
        ("vegas-group-stale-collect-2", "vegas-group-collect-2"),
        ("vegas-lookahead", "vegas-group-collect-2-ahead-1"),
        ("vegas-lookahead", "vegas-group-stale-collect-2"),
        ("vegas-lookahead", "vegas"),
        ("vegas-group-collect-2-ahead-1-kv", "vegas-group-collect-2-ahead-1"),
        ("vegas-group-stale-collect-2-ahead-2", "vegas-lookahead"),
        ("vegas-group-collect-all-ahead-1", "vegas-group-collect-2-ahead-1"),
        ("topk-oracle", "vegas-lookahead"),
    )
    print(f"### Differences, text by text, γ = {gamma}, ratio {ratio}\n")
    print(
        table(
            ["selection", "minus", "accepted drafts"],
            [
                [a, b, paired(cells, a, b, gamma, ratio)]
                for a, b in pairs
                if (a, gamma, ratio) in cells and (b, gamma, ratio) in cells
            ],
        )
    )
    if arguments.free:
        free = by_configuration(read([arguments.free]))
        print("\n### Free running, sampled\n")
        print(table(["selection", "accepted"], [[n, shown(v.values())] for (n, _, _), v in free.items()]))
    if arguments.other:
        other = by_configuration(read([arguments.other]))
        print("\n### Elsewhere\n")
        rows = [
            [
                n,
                shown(v.values()),
                shown(cells[n, g, r][t] for t in v),
                shown(v[t] - cells[n, g, r][t] for t in v),
            ]
            for (n, g, r), v in other.items()
        ]
        print(table(["selection", "other", "this", "difference by text"], rows))
    if arguments.plot:
        plot(records, gamma, ratio, arguments.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The GPU engine's kernels by themselves: time, bandwidth and error of each at the sizes of real decode steps.

A case is captured in a CUDA graph, as the engine does, and the median time of its replays is taken, the L2 cache being
cleared before each; small kernels are captured ten times in a row, as their inputs come out of the cache in the engine
too. Bytes are the fewest the case must move: every input read once, every output written once, a shared prompt counted
once. The share is of 4.3 TB/s, what a large copy reaches on an H200. Errors are against plain torch in fp32 or fp64 on
the same inputs, the norm of the difference over the norm (for sampling: the largest difference of a log-prob, and
infinite where tokens differ). A case that fails says so in its row, and the others go on.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS_DIR, Record, versions

COPY_BYTES_PER_S = 4.3e12
PAGE = 16
ROWS_CHECKED = 24
GROUP, PROMPT = 16, 128
MAX_CONTEXT = 16384
PACKAGES = ("torch", "triton", "numpy")
Settings = dict[str, int]
"""A kernel's tile, by the names of its fields."""


@dataclass(frozen=True)
class Shape:
    name: str
    H: int
    K: int
    D: int
    C: int
    F: int
    V: int


SHAPES = (
    Shape("1.5B", H=12, K=2, D=128, C=1536, F=8960, V=151936),
    Shape("135M", H=9, K=3, D=64, C=576, F=1536, V=49152),
)


@dataclass(frozen=True)
class Case:
    """Something to time, once `prepare` has made its inputs; `repeat` times in a row when it is small."""

    name: str
    shape: str
    rows: int
    prepare: Callable[[], "Work"]
    repeat: int = 1


@dataclass(frozen=True)
class Work:
    run: Callable[[], Any]
    error: Callable[[Any], float]
    num_bytes: float = 0.0
    num_operations: float = 0.0


@dataclass
class Figures:
    name: str
    shape: str
    rows: int
    microseconds: float = float("nan")
    gb_per_s: float = float("nan")
    share: float = float("nan")
    tflops: float = float("nan")
    error: float = float("nan")
    failure: str = ""


def relative(actual: Any, expected: Any) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def context_lengths(mix: str, rows: int) -> Any:
    """even: a prompt and 0 to 512 tokens, 384 in the mean. tail: log-normal with a mean near 2,000, up to 16k."""
    generator = np.random.default_rng(rows)
    if mix == "even":
        return generator.integers(PROMPT + 1, PROMPT + 513, rows)
    return np.clip(generator.lognormal(7.1, 1.0, rows), PROMPT + 1, MAX_CONTEXT).astype(np.int64)


def norm(shape: Shape, rows: int) -> Work:
    import torch

    from headway.engine.embedded.kernels import add_rms_norm

    x, residual = (torch.randn(rows, shape.C, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(shape.C, device="cuda", dtype=torch.bfloat16)

    def error(out: Any) -> float:
        total = (x + residual).double()
        expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
        return max(relative(out[0], expected), relative(out[1], total))

    return Work(lambda: add_rms_norm(x, residual, weight, 1e-6), error, num_bytes=4 * x.nbytes)


def rope(shape: Shape, rows: int) -> Work:
    import torch

    from headway.engine.embedded.kernels import rope_and_write

    H, K, D = shape.H, shape.K, shape.D
    qkv = torch.randn(rows, (H + 2 * K) * D, device="cuda", dtype=torch.bfloat16)
    angles = torch.outer(torch.arange(4096.0), 1e6 ** -(torch.arange(0, D, 2) / D)).repeat(1, 2).cuda()
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 4096, (rows,), device="cuda")
    slots = torch.randperm(4 * rows, device="cuda")[:rows]
    k_cache, v_cache = (torch.zeros(rows // 4, PAGE, K, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def turned(x: Any) -> Any:
        first, second = x.double().chunk(2, -1)
        return x.double() * cos[positions][:, None] + torch.cat((-second, first), -1) * sin[positions][:, None]

    def error(out: Any) -> float:
        q, k, v = qkv.view(rows, -1, D).split([H, K, K], 1)
        wrong = relative(v_cache.view(-1, K, D)[slots], v)
        return max(relative(out, turned(q)), relative(k_cache.view(-1, K, D)[slots], turned(k)), wrong)

    run = partial(rope_and_write, qkv, positions, cos, sin, slots, k_cache, v_cache, H, K)
    return Work(run, error, num_bytes=2 * qkv.nbytes + rows * (2 * D * 4 + 16))


def activation(shape: Shape, rows: int) -> Work:
    import torch

    from headway.engine.embedded.kernels import gated_activation

    gate_up = torch.randn(rows, 2 * shape.F, device="cuda", dtype=torch.bfloat16)

    def error(out: Any) -> float:
        gate, up = gate_up.double().chunk(2, -1)
        return relative(out, torch.nn.functional.silu(gate) * up)

    return Work(lambda: gated_activation(gate_up, "silu"), error, num_bytes=1.5 * gate_up.nbytes)


def sampling(shape: Shape, rows: int) -> Work:
    import torch

    from headway.engine.embedded.kernels import sample
    from headway.engine.embedded.sampler import uniforms

    logits = 2 * torch.randn(rows, shape.V, device="cuda")
    inverse = torch.ones(rows, device="cuda")
    greedy = torch.zeros(rows, dtype=torch.bool, device="cuda")
    numbers = np.random.default_rng(0).integers(0, 2**64, rows, dtype=np.uint64)
    counters = torch.from_numpy(numbers.view(np.int64)).cuda()
    draws = torch.arange(rows, device="cuda")

    def error(out: Any) -> float:
        logprobs = logits[:ROWS_CHECKED].double().log_softmax(-1)
        uniform = uniforms(numbers[:ROWS_CHECKED], np.arange(min(rows, ROWS_CHECKED), dtype=np.uint64))
        edges = logprobs.exp().cumsum(-1)
        tokens = torch.searchsorted(edges, torch.from_numpy(uniform).cuda()[:, None] * edges[:, -1:], right=True)
        if not torch.equal(tokens[:, 0], out[0][:ROWS_CHECKED]):
            return float("inf")
        return float((logprobs.gather(-1, tokens)[:, 0] - out[1][:ROWS_CHECKED]).abs().max())

    return Work(lambda: sample(logits, inverse, greedy, counters, draws), error, num_bytes=logits.nbytes)


@dataclass
class Cache:
    """Rows of the given lengths in shuffled pages; rows of a group share the pages of their prompt when asked to."""

    k: Any
    v: Any
    table: Any
    lengths: Any

    @classmethod
    def random(cls, shape: Shape, lengths: Any, share: bool = False) -> "Cache":
        import torch

        counts = -(-lengths // PAGE)
        pages = torch.randperm(int(counts.sum()), dtype=torch.int32)
        table = torch.zeros(len(lengths), MAX_CONTEXT // PAGE, dtype=torch.int32)
        for row, own in enumerate(pages.split(counts.tolist())):
            table[row, : len(own)] = own
            if share:
                table[row, : PROMPT // PAGE] = table[row - row % GROUP, : PROMPT // PAGE]
        size = (len(pages), PAGE, shape.K, shape.D)
        k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return cls(k, v, table.cuda(), torch.from_numpy(lengths).to("cuda", torch.int32))

    def of_row(self, row: int, length: int) -> tuple[Any, Any]:
        pages = self.table[row, : -(-length // PAGE)].long()
        return self.k[pages].flatten(0, 1)[:length].float(), self.v[pages].flatten(0, 1)[:length].float()


def attended(q_THD: Any, keys: Any, values: Any) -> Any:
    """Causal attention in fp32; the last query is at the last key."""
    import torch

    ratio = q_THD.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(ratio, 1) for x in (keys, values))
    score = torch.einsum("thd,shd->hts", q_THD.float(), keys) * q_THD.shape[2] ** -0.5
    hidden = torch.ones(score.shape[1:], dtype=torch.bool, device="cuda").triu(len(keys) - len(q_THD) + 1)
    return torch.einsum("hts,shd->thd", score.masked_fill(hidden, float("-inf")).softmax(-1), values)


def decode(shape: Shape, rows: int, mix: str, share: bool = False, tile: Settings | None = None) -> Work:
    import torch

    from headway.engine.embedded.decode_plan import SharedPrefix, plan_decode
    from headway.engine.embedded.paged_attention import Tile, decode_attention

    lengths = context_lengths(mix, rows)
    cache = Cache.random(shape, lengths, share)
    q = torch.randn(rows, shape.H, shape.D, device="cuda", dtype=torch.bfloat16)
    prefix = None
    if share:
        num_groups = rows // GROUP
        sizes = torch.tensor([[GROUP], [PROMPT]], dtype=torch.int32, device="cuda").repeat(1, num_groups)
        first = torch.arange(0, rows, GROUP, dtype=torch.int32, device="cuda")
        start = torch.full((rows,), PROMPT, dtype=torch.int32, device="cuda")
        prefix = SharedPrefix(first, sizes[0], sizes[1], start, GROUP)
    plan = plan_decode(cache.lengths, shape.K, prefix=prefix)  # once for all layers, so outside of what is timed
    chosen = Tile(**tile) if tile else None

    def run() -> Any:
        return decode_attention(
            q, cache.k, cache.v, cache.table, cache.lengths, shape.D**-0.5, prefix=prefix, plan=plan, tile=chosen
        )

    def error(out: Any) -> float:
        checked = {int(lengths.argmax()), int(lengths.argmin()), *range(0, rows, max(1, rows // ROWS_CHECKED))}
        expected = [attended(q[row, None], *cache.of_row(row, int(lengths[row]))) for row in sorted(checked)]
        return relative(out[sorted(checked)], torch.cat(expected).flatten(1))

    num_keys = int(lengths.sum()) - (PROMPT * (rows - rows // GROUP) if share else 0)
    return Work(run, error, num_bytes=num_keys * shape.K * shape.D * 4 + 2 * q.nbytes)


def plan(shape: Shape, rows: int) -> Work:
    import torch

    from headway.engine.embedded.decode_plan import plan_decode

    lengths = torch.from_numpy(context_lengths("tail", rows)).to("cuda", torch.int32)

    def error(out: Any) -> float:
        items = out.items_W4[out.items_W4[:, 0] >= 0].long()
        covered = torch.zeros(rows, dtype=torch.int64, device="cuda").index_add_(
            0, items[:, 0], items[:, 2] - items[:, 1]
        )
        return relative(covered, lengths)

    return Work(lambda: plan_decode(lengths, shape.K), error, num_bytes=lengths.nbytes)


def prefill(shape: Shape, lengths: list[int], starts: list[int], tile: Settings | None = None) -> Work:
    import torch

    from headway.engine.embedded.paged_attention import Tile, prefill_attention

    ends = np.asarray(starts) + np.asarray(lengths)
    cache = Cache.random(shape, ends)
    cu = np.cumsum([0, *lengths])
    q = torch.randn(int(cu[-1]), shape.H, shape.D, device="cuda", dtype=torch.bfloat16)
    starts_N, lengths_N, cu_T = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (starts, lengths, cu))
    chosen = Tile(**tile) if tile else None

    def run() -> Any:
        return prefill_attention(
            q, cache.k, cache.v, cache.table, starts_N, lengths_N, cu_T, max(lengths), shape.D**-0.5, tile=chosen
        )

    def error(out: Any) -> float:
        wrong = 0.0
        for chunk in {0, len(lengths) - 1}:
            last = slice(int(cu[chunk + 1]) - min(256, lengths[chunk]), int(cu[chunk + 1]))
            expected = attended(q[last], *cache.of_row(chunk, int(ends[chunk])))
            wrong = max(wrong, relative(out[last], expected))
        return wrong

    pairs = sum(n * s + n * (n + 1) / 2 for n, s in zip(lengths, starts, strict=True))
    return Work(run, error, num_operations=4 * pairs * shape.H * shape.D)


def all_cases() -> Iterator[Case]:
    for shape in SHAPES:
        for rows in (64, 256, 1024):
            sizes = (shape.name, rows)
            yield Case("norm", *sizes, partial(norm, shape, rows), repeat=10)
            yield Case("rope and write", *sizes, partial(rope, shape, rows), repeat=10)
            yield Case("activation", *sizes, partial(activation, shape, rows), repeat=10)
            yield Case("sample", *sizes, partial(sampling, shape, rows))
            yield Case("plan", *sizes, partial(plan, shape, rows), repeat=10)
            yield Case("decode, even", *sizes, partial(decode, shape, rows, "even"))
            yield Case("decode, tail", *sizes, partial(decode, shape, rows, "tail"))
            yield Case("decode, shared prompts", *sizes, partial(decode, shape, rows, "even", share=True))
        for name, lengths, starts in (
            ("prefill 32×256", [256] * 32, [0] * 32),
            ("prefill 1×8192", [8192], [0]),
            ("prefill 4×2048 after 6144", [2048] * 4, [6144] * 4),
        ):
            yield Case(name, shape.name, sum(lengths), partial(prefill, shape, lengths, starts))


def sweep_cases() -> Iterator[Case]:
    """The same attention, cut in other ways; what the heuristics of the kernels should choose comes from here."""
    shape = SHAPES[0]
    for keys, num_warps, num_stages in (
        *((32, 4, 3), (32, 4, 5), (32, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 5), (64, 8, 3), (64, 2, 3)),
        *((128, 4, 2), (128, 4, 3), (128, 8, 3)),
    ):
        tile = {"keys": keys, "num_warps": num_warps, "num_stages": num_stages}
        for rows, mix in ((1024, "even"), (256, "tail"), (64, "even")):
            make = partial(decode, shape, rows, mix, tile=tile)
            yield Case(f"decode, {mix}, {keys} keys, {num_warps} warps, {num_stages} stages", shape.name, rows, make)
    for queries, keys, num_warps, num_stages in (
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)),
        *((128, 64, 8, 5), (128, 128, 8, 2), (128, 128, 8, 3)),
    ):
        tile = {"keys": keys, "num_warps": num_warps, "num_stages": num_stages, "queries": queries}
        make_prefill = partial(prefill, shape, [2048] * 4, [0] * 4, tile=tile)
        name = f"prefill 4×2048, {queries}×{keys}, {num_warps} warps, {num_stages} stages"
        yield Case(name, shape.name, 8192, make_prefill)


def measured(case: Case) -> Figures:
    import torch
    from triton.testing import do_bench

    figures = Figures(case.name, case.shape, case.rows)
    torch.manual_seed(0)
    work = case.prepare()
    work.run()  # compiles, which capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(case.repeat):
            out = work.run()
    graph.replay()
    figures.error = work.error(out)
    figures.microseconds = 1000 * do_bench(graph.replay, warmup=5, rep=20, return_mode="median") / case.repeat
    if work.num_bytes:
        figures.gb_per_s = work.num_bytes / figures.microseconds / 1000
        figures.share = figures.gb_per_s * 1e9 / COPY_BYTES_PER_S
    if work.num_operations:
        figures.tflops = work.num_operations / figures.microseconds / 1e6
    return figures


def print_table(results: list[Figures]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("kernel", "shape", "rows", "µs", "GB/s", "of 4.3 TB/s", "TFLOP/s", "error"):
        table.add_column(name, justify="left" if name in ("kernel", "shape") else "right")
    for row in results:
        numbers = (f"{row.microseconds:.1f}", f"{row.gb_per_s:,.0f}", f"{row.share:.0%}", f"{row.tflops:.0f}")
        cells = ["" if number.startswith("nan") else number for number in numbers]
        table.add_row(row.name, row.shape, str(row.rows), *cells, row.failure or f"{row.error:.1e}")
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "kernels.json", help="where the JSON goes")
    parser.add_argument("--sweep", action="store_true", help="try the attention kernels' tiles instead")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("bench/kernels.py needs a CUDA device, and torch sees none; run it on a machine with a GPU")
    record = Record("kernels", sys.argv[1:])
    record.fields["hardware"]["gpu"] = torch.cuda.get_device_name()
    started_s = time.monotonic()
    results = []
    for case in sweep_cases() if options.sweep else all_cases():
        if options.only in case.name:
            try:
                results.append(measured(case))
            except Exception as problem:  # one broken kernel must not hide what the others do
                failure = f"{type(problem).__name__}: {problem}".strip().splitlines()[0]
                results.append(Figures(case.name, case.shape, case.rows, failure=failure[:200]))
            torch.cuda.empty_cache()
    print_table(results)
    record.write(options.out, versions=versions(*PACKAGES), cases=[asdict(figures) for figures in results])
    num_failed = sum(bool(figures.failure) for figures in results)
    print(
        f"{len(results)} cases in {time.monotonic() - started_s:.0f} s, {num_failed} failed; figures in {options.out}"
    )


if __name__ == "__main__":
    main()

"""`raykv demo`: engines on different Ray nodes of this machine answer questions about the same documents."""

import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import raykv
from raykv.bench.testbed import local_cluster, local_pool, on_node, undisturbed
from raykv.config import MIB
from raykv.system.extras import to_install

POOL = "demo"
DOCUMENT_TOKENS = 2000
ANSWER_TOKENS = 8
BOS = 256  # the beginning-of-sequence token; all other tokens are bytes of text
QUESTIONS = (
    "What is this file for?",
    "Which function would you call first?",
    "Name one error that it raises.",
    "What does it import, and why?",
    "Is there a class in it? Describe it.",
)
HEADER = "  #  engine  prompt  from pool  of node       TTFT  class"
CLASSES = ("cold", "pool-local", "pool-remote")


@dataclass(frozen=True)
class Answer:
    """An engine's figures for one request. ttft_ms: milliseconds to the first token."""

    tokens: list[int]
    tokens_without_pool: list[int]
    pool_tokens: int
    nodes: tuple[str, ...]
    ttft_ms: float
    ttft_without_pool_ms: float


@dataclass(frozen=True)
class Row:
    """One request, as it is printed."""

    engine: int
    kind: str  # one of CLASSES
    document: str
    prompt_tokens: int
    pool_tokens: int
    from_node: int | None
    ttft_ms: float
    without_pool_ms: float
    tokens_equal: bool


class Engine:
    """A Llama that uses the pool. Its 50M random weights are equal in every engine."""

    def __init__(self, seed: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from raykv.integrations.transformers import model_cache

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=BOS + 1,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            initializer_range=0.04,
        )
        self.model = LlamaForCausalLM(config).eval()
        with torch.no_grad():  # random attention is too uniform for one wrong block to change the answer
            for layer in self.model.model.layers:
                layer.self_attn.q_proj.weight *= 3
        self.cache = model_cache(raykv.attach(POOL), self.model, name=f"demo-llama-{seed}")

    def warm_up(self) -> None:
        """Pay the costs of first calls (kernels, threads, mappings), so that no request includes them."""
        for _ in range(2):
            self.answer([BOS, *b"warm " * 100])

    def answer(self, prompt: list[int]) -> Answer:
        """Answer with the pool, then once more without it."""
        from raykv.integrations.transformers import prefill

        begin = time.perf_counter()
        start = prefill(self.model, self.cache, prompt)
        first = int(start.logits.argmax())
        ttft = time.perf_counter() - begin
        tokens = self._go_on(first, start.past_key_values)
        begin = time.perf_counter()
        logits, past = self._step(prompt, None)
        first = int(logits.argmax())
        plain_ttft = time.perf_counter() - begin
        plain = self._go_on(first, past)
        return Answer(tokens, plain, start.pool_tokens, start.nodes, ttft * 1e3, plain_ttft * 1e3)

    def _go_on(self, token: int, past: Any) -> list[int]:
        """Generate ANSWER_TOKENS tokens greedily. token: the first token."""
        tokens = [token]
        while len(tokens) < ANSWER_TOKENS:
            logits, past = self._step(tokens[-1:], past)
            tokens.append(int(logits.argmax()))
        return tokens

    def _step(self, tokens: list[int], past: Any) -> tuple[Any, Any]:
        import torch

        with torch.no_grad():
            out = self.model(torch.tensor([tokens]), past_key_values=past, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1], out.past_key_values


def run(requests: int, nodes: int, seed: int, as_json: bool) -> bool:
    """Run the demo. Returns whether every generated token is the same without the pool.

    Prints to stdout. With `as_json`, prints text to stderr and one JSON object to stdout.
    """
    if not all(find_spec(name) for name in ("torch", "transformers")):
        raise ImportError(f"the demo needs torch and transformers: {to_install('transformers')}")
    console = Console(stderr=as_json)
    with _bar(console) as bar:
        task = bar.add_task("starting Ray nodes, pool and engines", total=requests)
        with local_cluster(nodes) as ids, local_pool(POOL, 1024 * MIB), _engines(ids, seed) as engines:
            index = {node: number for number, node in enumerate(ids)}
            rows = []
            bar.console.print(HEADER)
            for number, (name, prompt) in enumerate(_prompts(requests, nodes, seed)):
                bar.update(task, description=f"engine {number % nodes} reads {name}")
                rows.append(_ask(engines, index, number, name, prompt))
                bar.console.print(_line(number, rows[-1]))
                bar.advance(task)
            bar.update(task, description="stopping")
    equal = all(row.tokens_equal for row in rows)
    medians = {kind: _median([row.ttft_ms for row in rows if row.kind == kind]) for kind in CLASSES}
    plain = _median([row.without_pool_ms for row in rows])
    console.print(_summary(rows, medians, plain))
    console.print(
        f"[green]All {len(rows) * ANSWER_TOKENS} generated tokens equal those without the pool.[/]"
        if equal
        else "[red]Generated tokens differ from those without the pool.[/]"
    )
    if as_json:
        figures = {kind.replace("-", "_") + "_ms": medians[kind] for kind in CLASSES}
        result = {**figures, "without_pool_ms": plain, "tokens_equal": equal, "requests": [asdict(row) for row in rows]}
        print(json.dumps(result), flush=True)
    return equal


def _ask(engines: list[Any], index: dict[str, int], number: int, name: str, prompt: list[int]) -> Row:
    engine = number % len(engines)
    answer: Answer = ray.get(engines[engine].answer.remote(prompt))
    sources = [index[node] for node in answer.nodes]
    kind = CLASSES[0 if not answer.pool_tokens else 1 if sources == [engine] else 2]
    return Row(
        engine=engine,
        kind=kind,
        document=name,
        prompt_tokens=len(prompt),
        pool_tokens=answer.pool_tokens,
        from_node=sources[0] if sources else None,
        ttft_ms=round(answer.ttft_ms, 1),
        without_pool_ms=round(answer.ttft_without_pool_ms, 1),
        tokens_equal=answer.tokens == answer.tokens_without_pool,
    )


def _prompts(requests: int, nodes: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Yield document and tokens of each request. Each document has nodes + 1 requests in a row, on successive nodes."""
    order = random.Random(seed)
    files = sorted(path for path in Path(os.__file__).parent.glob("*.py") if path.stat().st_size > DOCUMENT_TOKENS)
    order.shuffle(files)
    for number in range(requests):
        path = files[number // (nodes + 1) % len(files)]
        document = f"{path.name}:\n".encode() + path.read_bytes()  # the name comes first, since some files begin alike
        question = f"\n\nQuestion {number}: {QUESTIONS[number % len(QUESTIONS)]}\nAnswer:"
        yield path.name, [BOS, *document[: DOCUMENT_TOKENS - 1], *question.encode()]


@contextmanager
def _engines(nodes: list[str], seed: int) -> Iterator[list[Any]]:
    """Start an engine on every node, and warm it up."""
    engines: list[Any] = []
    try:
        for node in nodes:
            engines.append(on_node(Engine, node, seed))
        for engine in engines:  # one after another, since the engines share the processor
            ray.get(engine.warm_up.remote())
        yield engines
    finally:
        with undisturbed():
            for engine in engines:
                ray.kill(engine)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _line(number: int, row: Row) -> str:
    node = "-" if row.from_node is None else row.from_node
    end = "" if row.tokens_equal else "  [red]tokens differ[/]"
    return (
        f"{number:>3}  {row.engine:>6}  {row.prompt_tokens:>6}  {row.pool_tokens:>9}  {node:>7}"
        f"  {row.ttft_ms:>6,.0f} ms  {row.kind}{end}"
    )


def _summary(rows: list[Row], medians: dict[str, float | None], plain: float | None) -> Table:
    table = Table("", "requests", "median TTFT", "of cold", title="Time to first token")
    for column in table.columns[1:]:
        column.justify = "right"
    cold = medians["cold"]
    counts = {kind: sum(row.kind == kind for row in rows) for kind in CLASSES}
    for kind, median in {**medians, "without the pool": plain}.items():
        share = f"{median / cold:.2f}" if median is not None and cold else "-"
        text = f"{median:,.0f} ms" if median is not None else "-"
        table.add_row(kind, str(counts.get(kind, len(rows))), text, share)
    return table


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 1) if values else None

"""Draws `docs/images/ui-*.png`: the page of `raykv ui` in Chromium, while the pool is in use and some actors are lost.

    PYTHONPATH=tests python -m docs.draw_ui

Four Ray nodes of this machine share prefixes for a few minutes. A store and the directory are killed meanwhile.
"""

import math
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
from helpers.faces.browser import Browser
from helpers.pools import MIB, Worker, kill, other_node, read, store, tokens, worker
from PIL import Image
from ray.cluster_utils import Cluster

import raykv
from raykv.cli import ui

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs/images"
NODES, LOAD_S = 4, 150.0
PROMPTS, PROMPT_BLOCKS, QUESTION_BLOCKS = 12, 24, 6  # number of prompts; blocks of a prompt; blocks of a question
WIDTHS, SCHEMES = (1440, 390), ("light", "dark")
COLORS = 256  # number of colors of a picture; full color would double the file size
DRAWN_S = 6.0  # seconds until an opened page is complete


class Engine(Worker):
    """Answers questions that begin with one of a few prompts."""

    def answer(self, seconds: float, seed: int) -> int:
        """Answer questions for `seconds` seconds. Returns the number of answered questions."""
        random, cache, begin, n = np.random.default_rng(seed), self.cache(), time.monotonic(), 0
        while (now := time.monotonic() - begin) < seconds:
            prompt = tokens(int(random.zipf(1.4)) % PROMPTS, PROMPT_BLOCKS)
            question = random.integers(0, 50_000, 16 * int(random.integers(1, QUESTION_BLOCKS)))
            keys = cache.keys(np.concatenate([prompt, question]))
            store(cache, keys, start=read(cache, keys).read)
            time.sleep(0.15 + 0.1 * math.sin(now / 6))
            n += 1
        return n


def main() -> int:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    node = {"num_cpus": 1, "object_store_memory": 128 * MIB}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(wait=True, **node)
        ray.init(address=cluster.address, log_to_driver=False)
        with tempfile.TemporaryDirectory() as folder:
            draw(f"file://{folder}?capacity=192MiB")
    finally:
        ray.shutdown()
        cluster.shutdown()
    return 0


def draw(external: str) -> None:
    """Start a pool, use it, and take the pictures. external: the URL of the pool's tier."""
    pool = raykv.start(raykv.PoolConfig("llama", cpu_memory=64 * MIB, external=external, secret=b"of a picture" * 3))
    with Browser() as browser:
        url, _ = ui.serve(pool.name, None, 0)
        browser.open(url)  # `raykv ui` asks the pool more often while a page is open
        engines = [worker(pool, str(node["NodeID"]), Engine) for node in ray.nodes()]
        answers = [engine.answer.remote(LOAD_S, seed) for seed, engine in enumerate(engines)]
        time.sleep(LOAD_S / 4)
        kill(pool, other_node(pool))
        time.sleep(LOAD_S / 4)
        kill(pool, "directory")
        time.sleep(LOAD_S / 8)
        take(url, browser)
        print(sum(ray.get(answers, timeout=4 * LOAD_S)), "questions answered")
    pool.stop()


def take(url: str, browser: Browser) -> None:
    """Take a picture of the page at every width, in light and dark."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            browser.look(width, scheme)
            browser.open(url)
            time.sleep(DRAWN_S)
            picture = PICTURES / f"ui-{width}-{scheme}.png"
            browser.picture(picture)
            Image.open(picture).convert("RGB").quantize(COLORS).save(picture, optimize=True)


if __name__ == "__main__":
    sys.exit(main())

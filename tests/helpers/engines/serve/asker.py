"""Asks examples/serve_transformers.py a prompt many times at once: `python asker.py HOST TIMES`. Needs no raykv."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

PROMPT = "What is known of this? " * 60


def answer(host: str) -> dict[str, Any]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 4}).encode()
    with urlopen(Request(f"http://{host}:8000/", body, {"Content-Type": "application/json"})) as lines:
        found, *rest = map(json.loads, lines)
    return {**found, "prompt_tokens": len(PROMPT), "tokens": [line["token"] for line in rest]}


if __name__ == "__main__":
    host, times = sys.argv[1], int(sys.argv[2])
    with ThreadPoolExecutor(times) as threads:
        print(json.dumps(list(threads.map(answer, [host] * times))))

"""A directory that serves has all of its machine code: nobody's first call waits for a compiler."""

import re
import subprocess
import sys
from pathlib import Path

import raykv

SCRIPT = """
import raykv.actors.directory as actor
from raykv.directory.kernels import {modules}
actor._warm_up()
print(*(name for name, kernel in {kernels}.items() if not kernel.signatures))
"""


def test_every_kernel_that_the_directory_calls_is_compiled_before_the_first_call() -> None:
    folder = Path(raykv.__file__).parent / "directory"
    sources = "".join(path.read_text() for path in folder.rglob("*.py"))
    modules = sorted(path.stem for path in (folder / "kernels").glob("*.py") if "@kernel" in path.read_text())
    kernels = sorted(set(re.findall(rf"\b((?:{'|'.join(modules)})\.\w+)\(\s*(?:self\.(?:_\w+\.)?)?_?c\b", sources)))
    assert len(kernels) > 15
    table = "{" + ", ".join(f"{name!r}: {name}" for name in kernels) + "}"
    script = SCRIPT.format(modules=", ".join(modules), kernels=table)
    cold = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not cold

"""The decorator of every numba kernel, the list of kernels that Python calls, and the folder of their machine code."""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast, overload

import numba

from raykv.system import owners

log = logging.getLogger("raykv")
F = TypeVar("F", bound=Callable[..., Any])
_entries: list[tuple[Any, tuple[Any, ...]]] = []  # kernels that Python calls, and the types of their arguments
Progress = Callable[[int, int], object]
KERNELS_PER_PROCESS = 4  # minimum number of kernels per process, as a process takes a second to start
OTHERS_S = 2.0  # maximum seconds to wait for each kernel that another process compiles
OTHERS_AGAIN_S = 0.05  # seconds between two checks whether another process has compiled its kernels
_complete: set[str] = set()  # packages whose kernels this process has loaded
_compiling = threading.Lock()  # guards _complete, and the loading of kernels' code


def _kernel_sources() -> list[Path]:
    """Return the files that define kernels, and the raykv files that they import: their constants are compiled in."""
    package = Path(__file__).parent.parent
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    found = [path for path, text in texts.items() if "@kernel" in text]
    for path in found:  # the loop appends to `found`
        for module, names in re.findall(r"^from (raykv[\w.]*) import \(?([\w, ]*)", texts[path], re.MULTILINE):
            at = package.parent / module.replace(".", "/")
            for imported in (at.with_suffix(".py"), *(at / f"{name.strip()}.py" for name in names.split(","))):
                if imported in texts and imported not in found:
                    found.append(imported)
    return sorted(found)


@functools.cache
def cache_folder() -> tuple[str, list[str]]:
    """Return (folder of machine code, preferred folders that are unusable).

    A folder is unusable if other users can write to it, or this user can't. If both preferred folders are unusable,
    each process compiles into its own folder. The folder's name contains a hash of all kernels' sources. numba itself
    checks only the date of a kernel's own file, not the files of other kernels that the kernel calls. The hash includes
    raykv's path, and the versions of numba and Python: one version of numba would overwrite the files of another. The
    folder is private to this user, as numba unpickles the files in it.
    """
    sources = hashlib.sha256(f"{Path(__file__)} {numba.__version__} {sys.implementation.cache_tag}".encode())
    for path in _kernel_sources():
        sources.update(path.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = f"raykv-{sources.hexdigest()[:16]}"
    folder = os.path.join(os.path.realpath(base), name)  # a link in the path could change after the check
    if os.path.isabs(base) and _is_private(folder):  # not absolute if this user has no home for "~"
        return folder, []
    shared = os.path.join(os.path.realpath(tempfile.gettempdir()), f"raykv-kernels-{os.getuid()}")
    if _is_private(shared) and _is_private(instead := os.path.join(shared, name)):
        log.warning("%s is not writable by this user alone: kernels are kept in %s", folder, instead)
        return instead, [folder]
    own = tempfile.mkdtemp(prefix="raykv-kernels-")
    log.warning("neither %s nor %s is writable by this user alone: kernels are compiled into %s", folder, shared, own)
    return own, [folder, shared]


def _is_private(folder: str) -> bool:
    """Create the folder if needed.

    Returns whether the folder belongs to this user, nobody else can write to it, and this process can.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        info = os.lstat(folder)
        return (
            stat.S_ISDIR(info.st_mode)
            and owners.is_private(info)
            and os.access(folder, os.W_OK)
            and all(map(_keeps_its_names, Path(os.path.realpath(folder)).parents))
        )
    except OSError:
        return False


def _keeps_its_names(folder: Path) -> bool:
    """Whether no other user can replace a folder inside this folder."""
    info = folder.stat()
    is_sticky = bool(info.st_mode & stat.S_ISVTX)
    return info.st_uid in (0, os.getuid()) and (is_sticky or not owners.others_write(info))


@overload
def kernel(function: F, /) -> F: ...


@overload
def kernel(*types: Any) -> Callable[[F], F]: ...


def kernel(*types: Any) -> Any:
    """Compile a function that runs without the GIL. Keep its machine code for later processes.

    `@kernel(C, ROWS)` is for a kernel that Python calls. `compile_all` needs the numba types of the kernel's arguments.
    `@kernel` is for a kernel that only other kernels can call. Such a kernel is inlined into its callers, since a real
    call would pass every array as seven words or more.

    Kernels create no arrays, so numba's reference counts are off. Each use of an array in a tuple, such as `c.rows`,
    would cost one or two atomic operations. Without reference counts, a touch of blocks takes a third of the time.
    """
    if len(types) == 1 and isinstance(types[0], FunctionType):
        return _jitted(types[0], inline=True)

    def decorate(function: F) -> F:
        compiled = _jitted(function, inline=False)
        _entries.append((compiled, types))
        return compiled

    return decorate


def _jitted(function: F, inline: bool) -> F:
    others = numba.config.CACHE_DIR  # restored below, as numba also reads CACHE_DIR for functions of other libraries
    numba.config.CACHE_DIR = cache_folder()[0]
    try:
        made = numba.njit(
            cache=True,
            nogil=True,
            forceinline=inline,
            _nrt=False,
            no_cpython_wrapper=inline,  # two wrappers are never called: omitting them saves a third of the work
            no_cfunc_wrapper=True,
        )
        return cast(F, made(function))
    finally:
        numba.config.CACHE_DIR = others


def entries(package: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the kernels that Python calls in a package's imported modules, and the types of their arguments."""
    return [(function, types) for function, types in _entries if function.py_func.__module__.startswith(f"{package}.")]


def is_compiled(package: str) -> bool:
    """Whether an earlier process of this user has compiled the kernels of a package."""
    return os.path.exists(_mark(package))


def _mark(package: str) -> str:
    return os.path.join(cache_folder()[0], f"{package}.compiled")


def _load(function: Any, types: tuple[Any, ...]) -> bool:
    """Load a kernel's machine code from numba's cache. Returns whether the cache had the code.

    Does the same as the dispatcher's `compile`, but without importing numba's compiler. That import takes longer than
    loading the code of all kernels. If there is something to compile, numba imports its compiler by itself.
    """
    context = function.targetctx
    context.refresh = lambda: None
    try:
        found = function._cache.load_overload(types, context)
    finally:
        del context.refresh
    if found is not None:
        context.insert_user_function(found.entry_point, found.fndesc, [found.library])
        function.add_overload(found)
    return found is not None


def compile_all(package: str, on_progress: Progress = lambda done, kernels: None) -> None:
    """Load the machine code of all kernels of a package that Python calls. Compile missing code on all cores.

    Afterwards, a call with other types raises TypeError instead of starting the compiler and making the caller wait.
    on_progress: called with (kernels done, kernels to compile) after each kernel that was compiled.
    """
    with _compiling:
        if package not in _complete:
            _compile_entries(package, on_progress)
            _complete.add(package)


def _compile_entries(package: str, on_progress: Progress) -> None:
    kernels = entries(package)
    if missing := _missing(kernels):
        with _alone(package, OTHERS_S * len(missing)):
            missing = _missing(kernels)
            _compile_in_processes([_name(function) for function, _ in missing], on_progress)
            for function, types in missing:
                if not _loaded(function, types):
                    function.compile(types)
    for function, _ in kernels:  # after all compiling, as compiling a kernel may also compile the kernels that it calls
        function.disable_compile()
    Path(_mark(package)).touch()


@contextlib.contextmanager
def _alone(package: str, seconds: float) -> Iterator[None]:
    """Let only one process of this user at a time compile a package. The stores of a machine start together, and each
    store would compile the package.

    Waits at most `seconds` for other processes, and not at all where the file system has no locks.
    """
    with open(f"{_mark(package)}.lock", "w", encoding="utf-8") as lock:
        try:
            _wait_for(lock.fileno(), time.monotonic() + seconds)
        except OSError as error:
            log.info("kernels are compiled without a lock: %r", error)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing may not unlock: a forked child keeps the file open


def _wait_for(lock: int, end: float) -> None:
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(OTHERS_AGAIN_S)


def _missing(kernels: list[tuple[Any, tuple[Any, ...]]]) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(function, types) for function, types in kernels if not _loaded(function, types)]


def _name(function: Any) -> str:
    return f"{function.py_func.__module__}:{function.py_func.__name__}"


def _loaded(function: Any, types: tuple[Any, ...]) -> bool:
    return types in function.overloads or _load(function, types)


def _compile_in_processes(names: list[str], on_progress: Progress) -> None:
    """Compile kernels into numba's cache by several processes. Each process compiles a share of the kernels.

    If a process fails, its share stays uncompiled. For few kernels, no process is started, and nothing is compiled.
    names: see `_name`.
    """
    processes = min(os.cpu_count() or 1, len(names) // KERNELS_PER_PROCESS)
    if processes < 2:
        return
    report, said = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # -P: the working folder may have another raykv
    command = [sys.executable, "-P", "-c", "import sys; from raykv.system import jit; jit.compile_some(sys.argv[1:])"]
    with contextlib.ExitStack() as running:
        lines = running.enter_context(open(report, encoding="utf-8"))
        with open(said, encoding="utf-8") as output:
            for share in range(processes):
                process = subprocess.Popen([*command, *names[share::processes]], stdout=output, env=environment)
                running.callback(process.wait)
                running.callback(process.kill)  # called before `wait`; without an error, the process is done by then
        for done, _ in enumerate(lines, 1):  # ends when all processes have closed the pipe
            on_progress(done, len(names))


def compile_some(names: list[str]) -> None:
    """The main function of a compiling process: compile these kernels into the cache, and print a line for each."""
    for name in names:
        module, _, function = name.partition(":")
        kernel = getattr(importlib.import_module(module), function)
        kernel.compile(next(types for entry, types in _entries if entry is kernel))
        print(name, flush=True)

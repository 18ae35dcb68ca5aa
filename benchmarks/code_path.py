"""How much code a newcomer has to read: from `localllm run` to its first token, and in the whole product.

    code_path.py [--files]

Prints the product's files and lines, without tests, benchmarks and what the wheel leaves out; import cycles between its
files and between its folders; and, traced in a child process, the files and the lines of all functions that
`localllm run builtin` executes until the sampler returns its first token, and how often the submitting and the engine's
thread switch from file to file after `Engine.submit` begins. --files lists the traced files with their lines.
"""

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("localllm", "gguf_io", "cpu_kernels", "gpu_offload", "tui", "models")
NOT_SHIPPED = ROOT / "benchmarks" / "training"
SUBMIT, FIRST_TOKEN = "Engine.submit", "Sampler.sample"
REPORT_VARIABLE = "CODE_PATH_REPORT"


def product_files() -> list[Path]:
    """Every Python file of the wheel."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in files if NOT_SHIPPED not in path.parents)


def module_of(path: Path) -> str:
    """A file's name as Python imports it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, known: set[str]) -> set[str]:
    """The product's modules that a file imports anywhere, including in functions and for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in known else node.module for name in inner)
    return found & known - {module_of(path)}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (strongly connected components of more than one node)."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for target in graph[stack.pop()]:
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        return seen

    reach = {node: reachable(node) for node in graph}
    groups = {tuple(sorted(other for other in reach[node] if node in reach[other])) for node in graph}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def import_circles() -> tuple[list[list[str]], list[list[str]]]:
    """Import cycles between files, and between folders that share a parent."""
    files = {module_of(path): path for path in product_files()}
    graph = {name: imports_of(path, set(files)) for name, path in files.items()}
    folders: dict[str, set[str]] = defaultdict(set)
    for importer, targets in graph.items():
        for target in targets:
            for source, goal in _sibling_folders(importer, target, files):
                folders[source].add(goal)
                folders.setdefault(goal, set())
    return circles(graph), circles(folders)


def _sibling_folders(importer: str, target: str, files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    left, right = _folder(importer, files), _folder(target, files)
    for depth, (one, other) in enumerate(zip(left, right, strict=False), start=1):
        if one != other:
            yield ".".join(left[:depth]), ".".join(right[:depth])
            return


def _folder(module: str, files: dict[str, Path]) -> list[str]:
    return list(files[module].relative_to(ROOT).parts[:-1])


class Tracer:
    """Records the product's functions as they are called, in all threads, until the first token is sampled."""

    def __init__(self) -> None:
        self._prefixes = tuple(str(ROOT / package) + os.sep for package in PACKAGES)
        self._codes: set[CodeType] = set()
        self._last: dict[int, str] = {}
        self._submitted = False
        self._done = False
        self.switches = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._done or not code.co_filename.startswith(self._prefixes):
            return
        if event == "return" and code.co_qualname == FIRST_TOKEN:
            self._done = True
            self._write()
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:  # bodies of modules and classes
            return
        self._codes.add(code)
        self._submitted |= code.co_qualname == SUBMIT
        if self._submitted:
            thread = threading.get_ident()
            self.switches += self._last.get(thread, code.co_filename) != code.co_filename
            self._last[thread] = code.co_filename

    def _write(self) -> None:
        lines: dict[str, set[int]] = defaultdict(set)
        for code in list(self._codes):
            numbers = [line for _, _, line in code.co_lines() if line]
            lines[os.path.relpath(code.co_filename, ROOT)].update(range(code.co_firstlineno, max(numbers) + 1))
        report = {"files": {name: len(found) for name, found in lines.items()}, "switches": self.switches}
        Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(report), "utf-8")


def trace_run() -> dict[str, object]:
    """Trace `localllm run builtin` in a child process."""
    report = ROOT / ".cache" / "code_path.json"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    environment = {**os.environ, REPORT_VARIABLE: str(report)}
    command = [sys.executable, "-m", "benchmarks.code_path", "--child"]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True)
    found: dict[str, object] = json.loads(report.read_text("utf-8"))
    return found


def child() -> None:
    """Run the program under the tracer."""
    from tui.main import main as program

    tracer = Tracer()
    sys.argv = ["localllm", "run", "builtin", "Hello", "--max-tokens", "2"]
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    program()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the traced files")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return
    sizes = {path: len(path.read_text("utf-8").splitlines()) for path in product_files()}
    between_files, between_folders = import_circles()
    traced = trace_run()
    files = dict(sorted(traced["files"].items(), key=lambda item: -item[1]))  # type: ignore[attr-defined]
    write = sys.stdout.write
    write(f"product: {len(sizes)} files, {sum(sizes.values()):,} lines; ")
    write(f"{sum(size < 60 for size in sizes.values())} files under 60 lines, ")
    write(f"{sum(size > 400 for size in sizes.values())} over 400\n")
    write(f"import circles: {len(between_files)} between files, {len(between_folders)} between folders\n")
    for circle in (*between_files, *between_folders):
        write(f"  {', '.join(circle)}\n")
    write(f"localllm run to its first token: {len(files)} files, {sum(files.values()):,} lines of functions\n")
    write(f"submit to the first token: {traced['switches']} switches between files\n")
    if arguments.files:
        write("".join(f"  {lines:5} {name}\n" for name, lines in files.items()))


if __name__ == "__main__":
    main()

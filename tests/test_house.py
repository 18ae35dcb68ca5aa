"""Rules for the repository as a whole."""

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.settings import MEANINGS, OTHER_VARIABLES, PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("localllm", "gguf_io", "cpu_kernels", "models", "gpu_offload", "tui")
CODE = sorted(path for folder in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"])

# Code and documents describe the product: no unfinished work, no tracker numbers, no paths of one machine.
UNWANTED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|\bissues? ?#?\d|(?<![\w.])/(?:work|root|home/\w+)/")

WORD = re.compile(r"\w+")

HEAVY = ("numba", "llvmlite", "textual", "fastapi", "llama_cpp", "torch", "tokenizers", "jinja2", "numpy")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def found_in(paths: Iterable[Path], pattern: re.Pattern[str]) -> dict[str, str]:
    """What a pattern finds first in each file that has it, by the file's name."""
    found = {relative(path): pattern.search(path.read_text(encoding="utf-8")) for path in paths}
    return {name: match[0] for name, match in found.items() if match}


def test_files_speak_of_the_product() -> None:
    others = [path for path in (*CODE, *DOCUMENTS) if path != Path(__file__)]
    assert found_in(others, UNWANTED) == {}


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_unwanted_words_are_recognised() -> None:
    for text in ("# TODO: later", "see issue 12", "issue #3", "open('/work/shared/x')"):
        assert UNWANTED.search(text), text
    for text in ("the issue with floats", "work/life", "https://host/work/page"):
        assert not UNWANTED.search(text), text


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["show", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import json, sys\n"
        "from localllm.cli.main import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n    main()\n"
        "finally:\n    sys.stderr.write(json.dumps(sorted(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.partition(".")[0] for name in json.loads(result.stderr)}
    assert result.stdout
    assert loaded.isdisjoint(HEAVY), loaded & set(HEAVY)


def test_packages_of_the_same_names_on_the_path_do_no_harm(tmp_path: Path) -> None:
    for name in ("models", "tui", "cpu_kernels", "gguf_io", "gpu_offload"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('somebody else')", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    program = "from localllm.__main__ import main; main()"
    for call in (["-c", program, "show", "builtin"], ["-m", "localllm", "--version"]):
        result = subprocess.run(
            [sys.executable, *call], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        assert "localllm" in result.stdout


def test_looking_at_a_path_never_raises() -> None:
    """Path.is_file and the like raise PermissionError in Python 3.11 to 3.13; see localllm/files.py."""
    raising = re.compile(r"\.(is_file|is_dir|exists)\(\)|(?<!_ROOT)\.r?glob\(")
    paths = [path for path in CODE if relative(path).startswith(("localllm/", "tui/"))]
    assert found_in(paths, raising) == {}, "use os.path, or listed"


def test_readme_names_real_make_targets() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", "docs/benchmarks.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        named = set(re.findall(r"^    make ([a-z0-9-]+)|`make ([a-z0-9-]+)", text, re.MULTILINE))
        assert {first or second for first, second in named} <= targets, document
    assert {"run", "test", "check", "bench", "clean", "install"} <= targets


def test_continuous_integration_runs_the_readme_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "make test"
    assert "    make test " in (ROOT / "README.md").read_text(encoding="utf-8")


def test_documents_link_to_files_that_exist() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{relative(document)} links to {target}"


def test_tables_of_documents_have_a_line_for_each_row() -> None:
    """Wrapping a page's lines would turn its tables into text."""
    assert not [path for path in DOCUMENTS if "| |---" in path.read_text(encoding="utf-8")]


def test_architecture_page_names_real_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in set(re.findall(rf"`((?:{'|'.join(PACKAGES)}|tests|benchmarks)/[\w/.-]+)`", text)):
        assert (ROOT / name).exists(), name


def test_every_environment_variable_is_a_setting_or_declared() -> None:
    known = {f"{PREFIX}{field.name.upper()}" for field in fields(Settings)} | OTHER_VARIABLES
    for path in CODE:
        if path.parts[len(ROOT.parts)] in PACKAGES:
            assert set(re.findall(rf"\b{PREFIX}[A-Z_]+", path.read_text(encoding="utf-8"))) <= known, relative(path)


def test_settings_page_names_every_setting() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    missing = [field.name for field in fields(Settings) if f"`{field.name}`" not in text]
    assert missing == [], "run `make docs`"


def test_every_setting_has_a_meaning_and_is_read() -> None:
    names = {field.name for field in fields(Settings)}
    assert set(MEANINGS) == names
    product = [path for path in CODE if path.parts[len(ROOT.parts)] in PACKAGES]
    declared = {"settings.py", "sampling.py", "options.py"}
    words = {word for path in product if path.name not in declared for word in WORD.findall(path.read_text("utf-8"))}
    assert names - words == set(), "nothing reads these settings"


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    names = {normal(re.match(r"[\w.-]+", item).group()) for item in wanted}  # type: ignore[union-attr]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert names <= {normal(line.partition("==")[0]) for line in pins if "==" in line}


@pytest.mark.parametrize("library", ["glibc", "musl", ""])
def test_only_glibc_is_installed_on(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """musl is told by its name or not at all, depending on the version of Python."""
    called: list[bool] = []
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.libc_ver", lambda: (library, "2.36"))
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=lambda: called.append(True)))
    with nullcontext() if library == "glibc" else pytest.raises(SystemExit, match="localllm needs glibc"):
        runpy.run_path(str(ROOT / "setup.py"))
    assert called == [True] * (library == "glibc")


def normal(name: str) -> str:
    """Normalise a package name according to PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()

"""localllm doctor: is this machine ready?"""

import json
import textwrap
from dataclasses import asdict

import typer

from localllm.cli.exit_code import ExitCode
from localllm.cli.options import AsJson, Debug
from localllm.cli.terminal import answer

MARKS = {"good": "  ok  ", "advice": " note ", "bad": " FAIL "}


def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Check this machine and say what to do. Processor, memory, GPU, folders, disk, models, network.

    Exits with 2 where something will fail.
    """
    from localllm.doctor import State, examine
    from localllm.settings import load_settings

    checks = []
    for check in examine(load_settings({})):
        checks.append(check)
        if not as_json:
            answer(f"[{MARKS[check.state]}] {check.what}: {check.found}\n")
            answer(textwrap.indent(f"{check.advice}\n", " " * 9) if check.advice else "")
    if as_json:
        answer(json.dumps([asdict(check) for check in checks], ensure_ascii=False) + "\n")
    if any(check.state is State.BAD for check in checks):
        raise typer.Exit(ExitCode.REFUSED)

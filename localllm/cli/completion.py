"""localllm completion: prints scripts with which shells complete commands, options and model names.

The shell runs `localllm` with the variable _LOCALLLM_COMPLETE set, and typer answers with the completions.
"""

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined] # importable from here in all versions

from localllm.front.options import COMPLETION_VARIABLE, PROGRAM
from localllm.front.terminal import answer

# Bash splits words at colons, which model names contain, and replaces only the text after the last one; typer's own
# script does not handle that. This one passes the whole line, which typer splits itself. Index -1 completes the last
# word; if the line ends with a space, the index is past the end, so a new word is completed.
BASH = r"""_localllm_completion() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" index=-1
    local word="${line##*[[:space:]]}"
    [[ -n $word ]] || index=$COMP_POINT
    COMPREPLY=( $( env COMP_WORDS="$line" COMP_CWORD=$index _LOCALLLM_COMPLETE=complete_bash "$1" 2>/dev/null ) )
    COMPREPLY=( "${COMPREPLY[@]// /\\ }" )
    if [[ $word == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=( "${COMPREPLY[@]#"${word%"${word##*:}"}"}" )
    fi
}
complete -o default -F _localllm_completion localllm"""


class Shell(StrEnum):
    """Shells with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


def completion(
    shell: Annotated[Shell, typer.Argument(help="bash, zsh, fish or powershell.", show_default=False)],
) -> None:
    """Print a shell completion script. It completes commands, options and model names.

    For bash, put this into ~/.bashrc: eval "$(localllm completion bash)". For zsh the same, after compinit, into
    ~/.zshrc. For fish, write the output to ~/.config/fish/completions/localllm.fish; for PowerShell, into $PROFILE.
    """
    script = BASH
    if shell is not Shell.BASH:
        script = get_completion_script(prog_name=PROGRAM, complete_var=COMPLETION_VARIABLE, shell=shell)
    answer(script + "\n")

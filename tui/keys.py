"""The user's own keys: keys.toml in the configuration folder, with a line such as `new = "f9"` for each action."""

import difflib
import tomllib
from pathlib import Path

import platformdirs

from localllm.errors import SettingsError
from localllm.text import shortened


def keys_path() -> Path:
    """Where the file is looked for, e.g. ~/.config/localllm/keys.toml. It need not exist."""
    return Path(platformdirs.user_config_dir("localllm", appauthor=False)) / "keys.toml"


def actions() -> list[str]:
    """Names of everything that has a key. A prefix with a dot says where the key works."""
    from textual.binding import Binding

    from tui.app import ChatApp
    from tui.screens.chat import ChatScreen
    from tui.screens.inspector import InspectorScreen
    from tui.screens.models import ModelsScreen
    from tui.screens.parameters import ParametersScreen
    from tui.screens.sessions import SessionsScreen
    from tui.widgets.find import FindBar
    from tui.widgets.messages import MessageView
    from tui.widgets.prompt import Prompt

    panels = (SessionsScreen, ModelsScreen, ParametersScreen, InspectorScreen)
    owners = (ChatApp, ChatScreen, Prompt, FindBar, MessageView, *panels)
    bindings = [binding for owner in owners for binding in owner.BINDINGS]
    return sorted({binding.id for binding in bindings if isinstance(binding, Binding) and binding.id})


def load_keys(file: Path) -> dict[str, str]:
    """Read which action has which keys, several separated by commas. Raises SettingsError for an unknown action."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}. Check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{file}: is not valid TOML: {error}.") from error
    known = actions()
    for name, key in content.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Choose from: {', '.join(known)}."
            raise SettingsError(f"{file}: there is no action {shortened(name)!r}. {hint}")
        if not isinstance(key, str) or not key:
            raise SettingsError(f'{file}: {name} must be a key such as "f9" or "ctrl+k" (got {key!r}).')
    return content

"""What stands where no message is yet."""

from textual.app import ComposeResult
from textual.containers import Center, Vertical
from textual.content import Content
from textual.widgets import Static

LOGO = """\
 _                 _ _ _
| | ___   ___ __ _| | | |_ __ ___
| |/ _ \\ / __/ _` | | | | '_ ` _ \\
| | (_) | (_| (_| | | | | | | | | |
|_|\\___/ \\___\\__,_|_|_|_|_| |_| |_|"""

MUTED = "$foreground 60%"
_KEYS = (("/", "commands"), ("@", "files"), ("F1", "help"), ("Ctrl+P", "everything"))


class Welcome(Vertical):
    """The name, and where to begin."""

    def __init__(self) -> None:
        super().__init__()
        self._notice = Static("", classes="notice", markup=False)
        self._notice.display = False

    def compose(self) -> ComposeResult:
        """Logo and hints, centred."""
        yield Center(Static(LOGO, markup=False, classes="logo"))
        yield Static("Models on the machine in front of you", classes="motto")
        yield Static(
            Content.assemble(
                *(piece for key, what in _KEYS for piece in ((f"  {key}", "bold $accent"), (f" {what} ", MUTED)))
            )
        )
        yield self._notice

    def tell(self, text: str) -> None:
        """Say below the hints what is to be known of the model."""
        self._notice.update(text)
        self._notice.display = True

"""The line that tells what the machine does."""

from textual.widgets import Static

from tui.status import Status


class StatusLine(Static):
    """Shows a Status in one line."""

    def __init__(self) -> None:
        super().__init__("", id="status", markup=False)
        self.facts = Status()

    def on_resize(self) -> None:
        """Fit the line into the new width."""
        self.redraw()

    def redraw(self) -> None:
        """Show the facts as they are now."""
        self.update(self.facts.line(self.size.width))

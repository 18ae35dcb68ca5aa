"""The approval dialog for a tool call. It shows the whole action; only the user can approve it."""

import threading
from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.actions.action import Action
from localllm.actions.approvals import Decision, question_of, rule_for
from localllm.text import counted, harmless
from tui.status import MUTED
from tui.widgets.frame import KeyBar, preview

POLL_S = 0.1
_WITH_REASON = "reason"


class ApprovalScreen(ModalScreen[tuple[Decision, str]]):
    """Returns the decision and, for a refusal, the reason for the model, "" for none.

    Typed text goes to the prompt behind the dialog, unless the field for the reason is open. No option is highlighted
    at first, so that an Enter meant for the prompt approves nothing.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "refuse", "Refuse", id="approval.refuse", priority=True),
        Binding("down", "options", "Choose", id="approval.choose", show=True),
        Binding("pageup", "scroll(-1)", "Back", id="approval.up", show=False, priority=True),
        Binding("pagedown", "scroll(1)", "More", id="approval.down", priority=True),
    ]

    def __init__(
        self, action: Action, stop: threading.Event, typed: Callable[[str], object], of_model: bool = True
    ) -> None:
        """stop: setting it refuses. typed: called with each typed character. of_model: a model wants the action."""
        super().__init__()
        self._action, self._stop, self._typed, self._of_model = action, stop, typed, of_model
        self._reason = Input(placeholder="What should the model do instead? Enter sends it, Esc goes back", id="reason")
        self._reason.display = False
        self._preview = VerticalScroll(
            Static(preview(action.preview, is_diff=action.change is not None), markup=False), id="preview"
        )
        self._options = OptionList(*self._choices(), id="choices", markup=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel approval"):
            question = question_of(self._action)
            hint = f"  {counted(len(self._action.preview.splitlines()), 'line')} · ↓ and Enter choose"
            yield Static(Content.assemble(question, (hint, MUTED)), classes="heading")
            yield self._preview
            yield self._options
            yield self._reason
            yield KeyBar(palette=False)

    def on_mount(self) -> None:
        self._options.highlighted = None
        self._options.focus()
        self.set_interval(POLL_S, self._look)
        self.call_after_refresh(self.refresh_bindings)

    def _choices(self) -> list[Option]:
        rule = rule_for(self._action)
        found = [Option("Allow once", Decision.ONCE)]
        if rule is not None:
            found.append(Option(f"Allow in this chat: {harmless(rule)}", Decision.CHAT))
            found.append(Option(f"Always allow in this folder: {harmless(rule)}", Decision.ALWAYS))
        found.append(Option("Refuse", Decision.REFUSE))
        if self._of_model:
            found.append(Option("Refuse, and tell the model why", _WITH_REASON))
        return found

    def _look(self) -> None:
        if self._stop.is_set() and self.is_current:
            self.dismiss((Decision.REFUSE, ""))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer scrolling only if the preview overflows."""
        return self._preview.max_scroll_y > 0 if action == "scroll" else True

    def on_key(self, event: Key) -> None:
        """Forward printable keys to the prompt."""
        if event.is_printable and event.character and not self._reason.display:
            event.stop()
            self._typed(event.character)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_id == _WITH_REASON:
            self._ask_reason(True)
        else:
            self.dismiss((Decision(str(event.option_id)), ""))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss((Decision.REFUSE, event.value.strip()))

    def action_refuse(self) -> None:
        """Refuse; close the field for the reason first."""
        if self._reason.display:
            self._ask_reason(False)
        else:
            self.dismiss((Decision.REFUSE, ""))

    def _ask_reason(self, wanted: bool) -> None:
        self._reason.display, self._options.display = wanted, not wanted
        (self._reason if wanted else self._options).focus()

    def action_options(self) -> None:
        self._options.focus()

    def action_scroll(self, pages: int) -> None:
        if pages < 0:
            self._preview.scroll_page_up(animate=False)
        else:
            self._preview.scroll_page_down(animate=False)

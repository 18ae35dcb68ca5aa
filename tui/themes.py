"""The chat's own themes; Textual's can be chosen too."""

from textual.theme import Theme

THEMES = (
    Theme(
        name="localllm",
        primary="#8fb8ff",
        secondary="#b9a4ff",
        accent="#ffb86b",
        warning="#f2c063",
        error="#ff7a85",
        success="#7fd6a4",
        foreground="#d9dee8",
        background="#11141b",
        surface="#181c26",
        panel="#212735",
        dark=True,
        variables={"footer-key-foreground": "#ffb86b", "footer-background": "#11141b", "border": "#3b4660"},
    ),
    Theme(
        name="localllm-light",
        primary="#2457b3",
        secondary="#6b47b8",
        accent="#b3560b",
        warning="#946200",
        error="#b3202e",
        success="#1d7a46",
        foreground="#22262e",
        background="#fbfaf7",
        surface="#f1efe9",
        panel="#e4e1d8",
        dark=False,
        variables={"footer-key-foreground": "#b3560b", "footer-background": "#fbfaf7", "border": "#bdb8aa"},
    ),
)

"""Tags as the user writes them."""

import re

from localllm.errors import RequestError
from localllm.text import shortened
from tui.sessions.store import SessionStore

_TAG = re.compile(r"[\w.+-]{1,32}")


def tag_of(word: str) -> str:
    """The tag that a word stands for, with or without its sign. Raises RequestError if it cannot be one."""
    name = word.removeprefix("#").casefold()
    if not _TAG.fullmatch(name) or name.startswith("-"):
        raise RequestError(f"{shortened(word)} cannot be a tag: letters, digits and _ . + - make one, 32 at most.")
    return name


def change_tags(store: SessionStore, session_id: int, text: str) -> None:
    """Give a session the tags that a text lists, and take away those with a minus before them. Raises RequestError."""
    words = [(word.startswith("-"), tag_of(word.removeprefix("-"))) for word in text.replace(",", " ").split()]
    has = store.summary(session_id).tags
    for removed, name in words:
        if removed and name not in has:
            raise RequestError(f"This chat has no tag {name}. It has: {', '.join(has) or 'none'}.")
        (store.untag if removed else store.tag)(session_id, name)


def split_search(text: str) -> tuple[str, list[str]]:
    """What a search looks for, and the tags that it names by words such as #work."""
    words = text.split()
    tags = [word[1:].casefold() for word in words if len(word) > 1 and word.startswith("#")]
    return (" ".join(word for word in words if not word.startswith("#")), tags) if "#" in text else (text, [])

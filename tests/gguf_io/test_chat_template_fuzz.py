"""Any JSON as messages is rendered or refused with TemplateError, and the messages are not modified."""

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_io.chat_template import ChatTemplate
from gguf_io.errors import TemplateError

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
names = st.sampled_from(["look", "list"]) | anything
parts = st.lists(st.fixed_dictionaries({"type": st.just("text") | anything, "text": st.text(max_size=5) | anything}))
calls = st.lists(
    st.fixed_dictionaries(
        {},
        optional={"id": names, "function": st.fixed_dictionaries({}, optional={"name": names, "arguments": anything})},
    )
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
message = st.fixed_dictionaries(
    {"role": roles | anything},
    optional={
        "content": st.text(max_size=5) | parts | anything,
        "tool_calls": calls | anything,
        "tool_call_id": names,
        "name": names,
        "tool_name": names,
        "thinking": anything,
    },
)

TEMPLATES = {
    "takes everything": "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "takes text of two roles": "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('role') }}{% endif %}{{ m.role + ': ' + m.content }}{% endfor %}",
    "takes parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}",
}


@pytest.fixture(scope="module", params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[request.param])


@given(messages=st.lists(message | anything, max_size=4))
@settings(max_examples=300)
def test_any_messages_render_or_are_refused(template: ChatTemplate, messages: list[Any]) -> None:
    before = repr(copy.deepcopy(messages))
    with contextlib.suppress(TemplateError):
        assert isinstance(template.render(messages), str)
    assert repr(messages) == before

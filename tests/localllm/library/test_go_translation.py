"""Go templates as Jinja: they write what Ollama's documentation says."""

import pytest

from gguf_io.chat_template import ChatTemplate
from localllm.library.errors import LibraryError
from localllm.library.go_translation import translated

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
YO = {"role": "assistant", "content": "Yo"}
GO = {"role": "user", "content": "Go"}

TURNS = (
    "{{ if .System }}<s>{{ .System }}</s>\n{{ end }}"
    "{{ if .Prompt }}<u>{{ .Prompt }}</u>\n{{ end }}<a>{{ .Response }}</a>\n"
)
MESSAGES = (
    "{{- range $i, $_ := .Messages }}\n{{- $last := eq (len (slice $.Messages $i)) 1 }}<{{ .Role }}>\n"
    "{{ .Content }}{{ if not $last }};{{ else }}.{{ end }}\n{{- end }}<assistant>"
)
CHOICES = (
    '{{- if or .System .Tools }}S {{ .System }}{{ end }}{{ range $m := .Messages }}{{ if eq $m.Role "user" "tool" }}'
    'U:{{ .Content }}{{ else if and (eq .Role "assistant") (ne .Content "") }}A:{{ .Content }}{{ end }}{{ end }}A:'
)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        ("{{ .Prompt }}", [HI], "Hi"),
        ("{{ .Prompt }}", [HI, YO, GO], "HiYoGo"),
        (TURNS, [HI], "<u>Hi</u>\n<a>"),
        (TURNS, [SYSTEM, HI], "<s>Be brief.</s>\n<u>Hi</u>\n<a>"),
        (TURNS, [SYSTEM, HI, YO, GO], "<s>Be brief.</s>\n<u>Hi</u>\n<a>Yo</a>\n<u>Go</u>\n<a>"),
        ("{{ .Prompt }} {{ if .Response }}{{ .Response }}<e>{{ end }}", [HI], "Hi "),
        ("{{ .Prompt }} {{ if .Response }}{{ .Response }}<e>{{ end }}", [HI, YO, GO], "Hi Yo<e>Go "),
        (MESSAGES, [SYSTEM, HI], "<system>\nBe brief.;<user>\nHi.<assistant>"),
        (CHOICES, [SYSTEM, HI, YO, GO], "S Be brief.U:HiA:YoU:GoA:"),
        ("  {{- /* a note */ -}}  {{ .Prompt }}{%", [HI], "Hi{%"),
        ('{{ "<\\u00e9\\"\\n>" }}{{ `{{ raw }}` }}{{ .Prompt | json }}', [HI], '<é"\n>{{ raw }}"Hi"'),
        ("{{ (index .Messages 0).Content }}{{ $x := 3 }}{{ if gt $x 2 }}{{ $x }}{{ end }}", [HI], "Hi3"),
        ("{{ range .Messages }}{{ .Content }}{{ else }}none{{ end }}", [HI, YO, GO], "HiYoGo"),
    ],
)
def test_what_is_written(template: str, messages: list[dict[str, str]], expected: str) -> None:
    assert ChatTemplate(translated(template)).render(messages) == expected


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ .Foo }}", "reads .Foo"),
        ("{{ range .Messages }}{{ .Bar }}{{ end }}", "reads .Bar"),
        ("{{ currentDate }}", "calls currentDate with 0 arguments"),
        ('{{ template "x" }}', "calls template"),
        ("{{ with .Prompt }}x{{ end }}", "calls with"),
        ("{{ if .Prompt }}x", "without its {{ end }}"),
        ("x{{ end }}", "outside of a block"),
        ("{{ .Prompt ", "without its }}"),
        ("{{ .Prompt ) }}", "is not supported"),
        ("{{ range $a, $b, $c := .Messages }}{{ end }}", "is not supported"),
        ("{{ if .Prompt }}" * 60, "nested deeper"),
        ("{{ " + "(" * 60 + " }}", "is not supported"),
        ("x" * 70_000, "at most"),
    ],
)
def test_what_is_refused(template: str, said: str) -> None:
    with pytest.raises(LibraryError) as refused:
        translated(template)
    assert said in str(refused.value)

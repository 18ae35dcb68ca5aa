from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io.chat_template import ChatTemplate
from localllm.chats.parameters import Parameters
from localllm.engine.request import SamplingParams
from localllm.library.behaviour import Behaviour, behaviour_of
from localllm.library.create import create
from localllm.library.errors import LibraryError
from localllm.library.go_templates import jinja_of
from localllm.library.lookup import built_in_model, find
from localllm.library.modelfile import Modelfile, parse_modelfile
from localllm.library.names import ModelName
from localllm.library.own_store import OwnStore
from localllm.library.places import own_store
from localllm.sampling import CommonSampling
from localllm.settings import Settings, load_settings, parse_lora
from tests.gguf_files import finish
from tests.gpu_offload import lora_files
from tests.localllm.library.conftest import write_file, write_ollama_model

SETTINGS = Settings()
RECIPE = '''# a pirate
from ./tiny.gguf
PARAMETER temperature 0.3
parameter num_ctx 4096
PARAMETER stop "<end>"
PARAMETER stop """a
b"""
SYSTEM """You are a pirate.
# not a comment
Speak like one."""
MESSAGE user Who are you?
MESSAGE assistant """Arr."""
LICENSE MIT
REQUIRES 0.5.0
'''


def test_a_recipe_is_read() -> None:
    recipe = parse_modelfile(RECIPE)
    assert recipe.source == "./tiny.gguf"
    assert recipe.parameters == {"temperature": 0.3, "num_ctx": 4096, "stop": ["<end>", "a\nb"]}
    assert recipe.system == "You are a pirate.\n# not a comment\nSpeak like one."
    assert recipe.messages == [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "Arr."}]
    assert recipe.licenses == ["MIT"]


def test_only_newlines_end_a_line() -> None:
    recipe = parse_modelfile("FROM a\r\nSYSTEM Be\u2028kind,\x0cand\x85brief.\r\nMESSAGE user Hi\x1e!")
    assert recipe.source == "a" and recipe.system == "Be\u2028kind,\x0cand\x85brief."
    assert recipe.messages == [{"role": "user", "content": "Hi\x1e!"}]


@pytest.mark.parametrize("quotes", ["", '"', '"""'])
def test_every_value_may_be_between_quotation_marks(quotes: str) -> None:
    def quoted(text: str) -> str:
        return f"{quotes}{text}{quotes}"

    recipe = parse_modelfile(
        f"from {quoted('./my models/a b.gguf')}\nADAPTER\t{quoted('my lora.gguf')}\nLICENSE {quoted('MIT, see it')}\n"
        f"SYSTEM {quoted('Be kind.')}\nTEMPLATE {quoted('{{ .Prompt }}')}\nMESSAGE  user   {quoted('Hi there')}\n"
        f"PARAMETER\tstop\t{quoted('a b')}\nPARAMETER top_k {quoted('5')}\nPARAMETER repetition_penalty 1.5"
    )
    assert (recipe.source, recipe.adapters) == ("./my models/a b.gguf", ["my lora.gguf"])
    assert (recipe.licenses, recipe.system, recipe.template) == (["MIT, see it"], "Be kind.", "{{ .Prompt }}")
    assert recipe.messages == [{"role": "user", "content": "Hi there"}]
    assert recipe.parameters == {"stop": ["a b"], "top_k": 5, "repeat_penalty": 1.5}


@pytest.mark.parametrize(
    ("system", "meant"),
    [
        ('"one\ntwo"', "one\ntwo"),
        ('"""one\n"two"\n"""', 'one\n"two"\n'),
        ('"Hi" she said.', '"Hi" she said.'),
        ('He said "Hi"', 'He said "Hi"'),
        ('"', '"'),
        ('""', ""),
    ],
)
def test_quotation_marks_may_span_lines(system: str, meant: str) -> None:
    recipe = parse_modelfile(f'FROM a\nSYSTEM {system}\nPARAMETER stop "x"')
    assert (recipe.system, recipe.parameters) == (meant, {"stop": ["x"]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SYSTEM hello", "has no FROM"),
        ("FROM a\nFORM b", "line 2: there is no instruction FORM"),
        ("FROM a\nFROM b", "line 2: there can be one FROM"),
        ("FROM a\n\nPARAMETER temprature 1", "line 3: there is no parameter 'temprature'. Did you mean temperature"),
        ("FROM a\nPARAMETER top_k many", "line 2: top_k must be a number"),
        ('FROM a\nSYSTEM """never closed', "line 2: the triple quotes are not closed"),
        ("FROM a\nMESSAGE robot hi", "line 2: 'robot' is not a role"),
        ("FROM a\nPARAMETER temperature true", "line 2: temperature must be a number"),
        ("FROM a\nPARAMETER min_p 2", "line 2: min_p is 2.0; it must be between 0 and 1"),
        ("FROM a\nPARAMETER temperature nan", "line 2: temperature is nan; it must be between 0 and 100"),
        ("FROM a\nPARAMETER mirostat 3", "line 2: mirostat is 3"),
        ("FROM a\nPARAMETER use_mmap maybe", "line 2: use_mmap must be true or false, not 'maybe'"),
        ("FROM", "line 1: 'FROM' is not an instruction and a value"),
        ("FROM a\n" + "x" * (1 << 20), "characters, more than"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_said_with_its_line(text: str, words: str) -> None:
    with pytest.raises(LibraryError) as told:
        parse_modelfile(text)
    assert words in str(told.value)


def test_a_projector_of_another_program_is_linked_to(home: Path, tiny_gguf: bytes, command: Callable[..., int]) -> None:
    layers = {"model": tiny_gguf, "projector": b"eyes", "system": b"Look."}
    write_ollama_model(home / ".ollama/models", "registry.ollama.ai/library/seer/latest", layers)
    for name, base in (("mine", "seer"), ("again", "mine")):
        write_file(home / "Modelfile", f"FROM {base}\nPARAMETER temperature 0.1".encode())
        assert command("create", name) == 0
        made = find(name, SETTINGS)
        assert behaviour_of(made).settings["mmproj"] == str(made.defaults().projectors[0])
        assert [path.read_bytes() for path in made.defaults().projectors] == [b"eyes"]
        assert (made.defaults().system, made.path.read_bytes()) == ("Look.", tiny_gguf)
    store = home / "localllm/models/blobs"
    assert b"eyes" not in [path.read_bytes() for path in store.iterdir()]  # nothing was copied


def test_every_parameter_of_the_sampler_is_followed(
    home: Path, tiny_gguf: bytes, command: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    given = {
        name: value / 2 + 0.25 if isinstance(value, float) else (value or 0) + 1
        for name, value in asdict(CommonSampling()).items()
    } | {"mirostat": 2}
    write_file(home / "tiny.gguf", tiny_gguf)
    lines = [f"PARAMETER {name} {value}" for name, value in given.items()]
    write_file(home / "Modelfile", "\n".join(["FROM ./tiny.gguf", *lines, "PARAMETER num_keep 24"]).encode())
    assert command("create", "mine") == 0
    behaviour = behaviour_of(find("mine", SETTINGS))
    assert SamplingParams.of(load_settings({}, {}, model=behaviour.settings)) == SamplingParams(**given)
    assert Parameters.from_settings(load_settings({}, {}, model=behaviour.settings)).sampling() == (
        SamplingParams(**given)
    )
    assert (behaviour.keep, behaviour.parameters) == (24, given | {"num_keep": 24})
    # the user's settings take precedence
    assert load_settings({"mirostat": 0}, {}, model=behaviour.settings).mirostat == 0
    assert not caplog.text


def test_ollama_parameters_without_a_counterpart_are_reported(
    home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(home / "tiny.gguf", tiny_gguf)
    write_file(home / "Modelfile", b"FROM ./tiny.gguf\nPARAMETER num_gpu 20\nPARAMETER top_k 9\nPARAMETER use_mmap no")
    assert command("create", "mine") == 0
    assert behaviour_of(find("mine", SETTINGS)).settings == {"top_k": 9}
    assert "unsupported parameters are ignored: num_gpu, use_mmap" in capsys.readouterr().err


def test_numbers_that_leave_the_choice_to_us(home: Path, tiny_gguf: bytes, command: Callable[..., int]) -> None:
    write_file(home / "tiny.gguf", tiny_gguf)
    lines = [f"PARAMETER {line}" for line in ("num_ctx 0", "num_thread 0", "num_predict -2", "seed -1", "top_k 0")]
    write_file(home / "Modelfile", "\n".join(["FROM ./tiny.gguf", *lines]).encode())
    assert command("create", "mine") == 0
    behaviour = behaviour_of(find("mine", SETTINGS))
    assert behaviour.settings == {"top_k": 0}
    assert load_settings({}, {}, model=behaviour.settings).ctx is None


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Modelfile(licenses=[str(n) for n in range(100_000)]), "licences, more than 32"),
        (Modelfile(system="x" * (1 << 20) + "x"), "The system has 1048577 bytes"),
        (Modelfile(messages=[{"role": "user", "content": "x"}] * 50_000), "The messages has"),
        (Modelfile(template="{{ .Prompt }}" * 100_000), "The template has"),
        (Modelfile(system="\ud800"), "The system is not valid Unicode text"),
        (Modelfile(parameters={"stop": 5}), "'stop' must be text, not '5'"),
        (Modelfile(parameters={"top_k": 1.5}), "'top_k' must be a whole number"),
        (Modelfile(parameters={"temperature": float("nan")}), "'temperature' is out of range"),
        (Modelfile(parameters={"seed": 10**30}), "'seed' is out of range"),
        (Modelfile(parameters={"strange": {"a": [[]]}}), "'strange' must be a number"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(home: Path, recipe: Modelfile, words: str) -> None:
    store = OwnStore(own_store(SETTINGS))
    with pytest.raises(LibraryError, match=words):
        create(store, ModelName("mine"), recipe, built_in_model())
    assert not (home / "localllm").exists()


def test_the_largest_that_is_taken_is_read_back(home: Path) -> None:
    recipe = Modelfile(
        system="x" * (1 << 20),
        licenses=[str(n) for n in range(32)],
        parameters={"stop": ["a", "b"], "temperature": 1, "num_gpu": 3},
        messages=[{"role": "user", "content": "x" * 1_000_000}],
    )
    create(OwnStore(own_store(SETTINGS)), ModelName("mine"), recipe, built_in_model())
    defaults = find("mine", SETTINGS).defaults()
    assert (defaults.system, defaults.parameters) == (recipe.system, recipe.parameters)
    assert (list(defaults.messages), list(defaults.licenses)) == (recipe.messages, recipe.licenses)
    again = Modelfile(licenses=["one more"])
    with pytest.raises(LibraryError, match="33 licences"):
        create(OwnStore(own_store(SETTINGS)), ModelName("again"), again, find("mine", SETTINGS))


def test_a_created_model_behaves_as_its_recipe_says(
    home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(home / "recipes/tiny.gguf", tiny_gguf)
    write_file(home / "recipes/Modelfile", RECIPE.encode())
    assert command("create", "pirate", "-f", "recipes/Modelfile") == 0
    model = find("pirate", SETTINGS)
    assert model.path == home / "recipes/tiny.gguf"  # not copied
    assert behaviour_of(model) == Behaviour(
        system="You are a pirate.\n# not a comment\nSpeak like one.",
        settings={"temperature": 0.3, "ctx": 4096},
        stop=("<end>", "a\nb"),
        messages=({"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "Arr."}),
    )
    capsys.readouterr()
    assert command("show", "pirate") == 0
    assert "\nMessages\n  user       Who are you?\n  assistant  Arr.\n" in capsys.readouterr().out
    write_file(home / "recipes/Modelfile2", b"FROM pirate\nPARAMETER temperature 0\nSYSTEM You are a parrot.")
    assert command("create", "parrot", "-f", "recipes/Modelfile2") == 0
    parrot = behaviour_of(find("parrot", SETTINGS))
    assert (parrot.system, parrot.settings) == ("You are a parrot.", {"temperature": 0.0, "ctx": 4096})
    assert parrot.messages
    (home / "recipes/tiny.gguf").unlink()
    assert command("show", "pirate") == 2
    assert str(Path("recipes", "tiny.gguf")) in capsys.readouterr().err


def test_an_adapter_is_kept_with_the_model(
    home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_file(home / "recipes/tiny.gguf", tiny_gguf)
    adapter = lora_files.write(home / "recipes/lora.gguf", lora_files.factors(model, 1, targets=("attn_k",)))
    content = adapter.read_bytes()
    write_file(home / "recipes/Modelfile", b"FROM tiny.gguf\nADAPTER lora.gguf")
    assert command("create", "tuned", "-f", "recipes/Modelfile") == 0
    adapter.unlink()
    write_file(home / "recipes/Again", b"FROM tuned\nSYSTEM Be kind.")
    assert command("create", "again", "-f", "recipes/Again") == 0
    for name in ("tuned", "again"):
        ((kept, weight),) = parse_lora(str(behaviour_of(find(name, SETTINGS)).settings["lora"]))
        assert (kept.read_bytes(), weight) == (content, 1.0)
    lora_files.write(adapter, {}, "another")
    assert command("create", "wrong", "-f", "recipes/Modelfile") == 2
    kept.unlink()
    assert command("create", "third", "-f", "recipes/Again") == 2
    said = capsys.readouterr().err
    assert f"{kept}: cannot be read: " in said and "Pull the model again." in said


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("FROM tiny.gguf\nADAPTER lora.gguf", "there is no such file"),
        ("FROM tiny.gguf\nADAPTER tiny.gguf", "not a LoRA adapter"),
        ("FROM tiny.gguf\nTEMPLATE {{ .Prompt }} <|strange|>", "not of a known family"),
        ("FROM text.gguf", "not a GGUF file"),
        ("FROM missing.gguf", "cannot be opened"),
        ("FROM ./folder", "folder has no config.json"),
    ],
)
def test_what_cannot_be_created(
    home: Path,
    tiny_gguf: bytes,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    words: str,
) -> None:
    write_file(home / "tiny.gguf", tiny_gguf)
    write_file(home / "folder" / "notes.txt", b"no model")
    write_file(home / "text.gguf", b"only some text, much longer than a header")
    write_file(home / "Modelfile", recipe.encode())
    assert command("create", "x") == 2
    assert words in capsys.readouterr().err
    assert command("show", "x") == 2


# Go templates of the families, in the two styles of Ollama's library, and the expected text of one turn from the
# models' own documentation.
CHATML = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ if .Prompt }}<|im_start|>user\n"
    "{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"
)
LLAMA3 = (
    "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>\n{{- end }}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = "<start_of_turn>user\n{{ .Prompt }}<end_of_turn>\n<start_of_turn>model\n{{ .Response }}<end_of_turn>\n"
PHI3 = "{{ if .System }}<|system|>\n{{ .System }}<|end|>\n{{ end }}<|user|>\n{{ .Prompt }}<|end|>\n<|assistant|>\n"
MISTRAL = "[INST] {{ if .System }}{{ .System }} {{ end }}{{ .Prompt }}[/INST] {{ .Response }}</s>"
TURNS = [
    (CHATML, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    (
        LLAMA3,
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (GEMMA, "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
    (PHI3, "<|user|>\nHi<|end|>\n<|assistant|>\n"),
    (MISTRAL, "[INST] Hi [/INST]"),
]


@pytest.mark.parametrize(("go", "text"), TURNS)
def test_go_templates_of_known_families_write_the_same_in_jinja(go: str, text: str) -> None:
    source = jinja_of(go, None)
    assert source is not None
    assert ChatTemplate(source).render([{"role": "user", "content": "Hi"}]) == text


def test_richer_templates_fall_to_the_files_own_of_the_same_family() -> None:
    richer = CHATML + "{{ if .Tools }}# Tools\nYou may call functions.{{ end }}"
    own = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    assert jinja_of(richer, own) == own
    with pytest.raises(LibraryError, match="family chatml"):
        jinja_of(richer, None)
    with pytest.raises(LibraryError, match="family chatml"):
        jinja_of(richer, "{% for m in messages %}[INST]{{ m.content }}{% endfor %}")


def test_templates_without_text_and_in_jinja_stay() -> None:
    assert jinja_of("{{ .Prompt }}", None) is None
    assert jinja_of("{{ .Prompt }}", "{% own %}") == "{% own %}"
    assert jinja_of("{% for m in messages %}x{% endfor %}", None) == "{% for m in messages %}x{% endfor %}"


def test_llama_2_marks_are_of_no_known_family() -> None:
    with pytest.raises(LibraryError, match="family instruct"):
        jinja_of("[INST] <<SYS>>{{ .System }}<</SYS>>\n{{ .Prompt }} [/INST]", None)


def write_with_template(path: Path, template: str | None) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    if template:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    finish(writer)
    return path.read_bytes()


def test_ollamas_layers_make_the_behaviour(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = home / ".ollama/models"
    plain = write_with_template(home / "plain.gguf", None)
    own = write_with_template(home / "own.gguf", "{% own %}")
    params = b'{"stop": ["<|im_end|>"], "num_ctx": 99, "num_predict": -1, "seed": -1, "mirostat": 1, "top_k": 7}'
    base = "registry.ollama.ai/library"
    write_ollama_model(store, f"{base}/a/1", {"model": plain, "template": CHATML.encode(), "params": params})
    write_ollama_model(store, f"{base}/b/1", {"model": plain, "template": b"<|odd|>{{ .Prompt }}"})
    write_ollama_model(store, f"{base}/c/1", {"model": own, "template": b"<|odd|>{{ .Prompt }}"})
    write_ollama_model(store, f"{base}/d/1", {"model": own, "adapter": b"lora"})
    a = behaviour_of(find("a:1", SETTINGS))
    assert "<|im_start|>" in str(a.template)
    assert (a.settings, a.stop) == ({"ctx": 99, "top_k": 7, "mirostat": 2}, ("<|im_end|>",))
    assert "mirostat 1 is not supported" in caplog.text
    with pytest.raises(LibraryError, match=r"b:1: .*not of a known family"):
        behaviour_of(find("b:1", SETTINGS))
    assert behaviour_of(find("c:1", SETTINGS)).template is None
    assert "the model file's own chat template is used" in caplog.text
    (adapter,) = parse_lora(str(behaviour_of(find("d:1", SETTINGS)).settings["lora"]))
    assert (adapter[0].read_bytes(), adapter[1]) == (b"lora", 1.0)

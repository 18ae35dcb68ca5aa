import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_io.system import can_name_file
from localllm.library.errors import LibraryError
from localllm.library.lookup import name_of_url
from localllm.library.names import (
    PREFERRED_QUANTIZATIONS,
    ModelName,
    is_projector_name,
    looks_like_path,
    preference,
    quantization_of,
)

# Names, and the full host/namespace/model:tag according to Ollama's documentation.
WHOLE = [
    ("qwen3", "registry.ollama.ai/library/qwen3:latest", "qwen3:latest"),
    ("qwen3:0.6b", "registry.ollama.ai/library/qwen3:0.6b", "qwen3:0.6b"),
    ("Mario/Nice-Model", "registry.ollama.ai/mario/nice-model:latest", "Mario/Nice-Model:latest"),
    ("hf.co/user/repo:Q4_K_M", "hf.co/user/repo:q4_k_m", "hf.co/user/repo:Q4_K_M"),
    ("huggingface.co/user/repo", "hf.co/user/repo:latest", "hf.co/user/repo:latest"),
    ("localhost:5000/a/b:c", "localhost:5000/a/b:c", "localhost:5000/a/b:c"),
]
WRONG = [
    "",
    ":",
    "a:",
    "/a",
    "a/",
    "../a",
    "a/../b",
    "a/b/c/d",
    "a..b",
    ".a",
    "a:b:c",
    "a b",
    "a\0",
    "-a",
    "a:../x",
    "h/n/m:t/x",
    "a" * 129,
]


@pytest.mark.parametrize(("text", "key", "shown"), WHOLE)
def test_names_are_filled_in(text: str, key: str, shown: str) -> None:
    name = ModelName.parse(text)
    assert (name.key, str(name)) == (key, shown)
    assert ModelName.parse(str(name)) == name


@pytest.mark.parametrize("text", WRONG)
def test_invalid_names_are_refused(text: str) -> None:
    with pytest.raises(LibraryError):
        ModelName.parse(text)


@pytest.mark.parametrize(
    "host",
    ["", "a..b", "..", "ho st", "-a.com", ".com", "a.com:", "a.com:port", "a.com:123456", "me@a.com", "a/b", "a" * 254],
)
def test_invalid_hosts_are_refused(host: str) -> None:
    with pytest.raises(LibraryError, match="is not the name of a host"):
        ModelName("model", host=host)
    with pytest.raises(LibraryError):
        ModelName.parse(f"{host}/namespace/model")


@given(st.text(max_size=60) | st.text(alphabet="ab./:-_\\%", max_size=20))
def test_no_name_leaves_its_folder(text: str) -> None:
    try:
        folders = ModelName.parse(text).folders
    except LibraryError:
        return
    for part in folders:
        assert part not in ("", ".", "..")
        assert not set(part) & set("/\\\0")


@pytest.mark.parametrize(
    ("stem", "quantization"),
    [
        ("Qwen3-0.6B-Q8_0", "Q8_0"),
        ("qwen2.5-0.5b-instruct-q4_k_m", "Q4_K_M"),
        ("Meta-Llama-3.1-8B-Instruct-IQ2_XXS", "IQ2_XXS"),
        ("gpt-oss-20b-MXFP4", "MXFP4"),
        ("Qwen3-8B-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("tinyllama-1.1b-chat-v1.0.Q4_K_M", "Q4_K_M"),
        ("big-BF16-00001-of-00002", "BF16"),
        ("Llama-3-8B", ""),
        ("phi-2", ""),
    ],
)
def test_quantisation_of_a_file_name(stem: str, quantization: str) -> None:
    assert quantization_of(stem) == quantization


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://huggingface.co/user/repo/resolve/main/Repo-Q8_0.gguf", "hf.co/user/repo:Repo-Q8_0"),
        ("https://huggingface.co/user/repo/blob/main/Repo-Q8_0.gguf?download=true", "hf.co/user/repo:Repo-Q8_0"),
        ("https://huggingface.co/user/repo", "hf.co/user/repo:latest"),
        ("https://www.huggingface.co/user/repo", "hf.co/user/repo:latest"),
        ("https://example.org:8000/models/tiny.gguf", "example.org:8000/web/tiny:latest"),
    ],
)
def test_urls_have_names(url: str, shown: str) -> None:
    assert str(name_of_url(url)) == shown


@pytest.mark.parametrize(
    "url", ["ftp://a/b.gguf", "https://a/b.bin", "https:///b.gguf", "https://a/..gguf", "https://a/x%2f..%2fy.gguf"]
)
def test_urls_that_name_no_model_are_refused(url: str) -> None:
    with pytest.raises(LibraryError):
        name_of_url(url)


@pytest.mark.parametrize("colon", [":", "%3A"])
def test_folders_lead_back_to_the_name(colon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.library.names._COLON", colon)  # as on Windows, whose file names have no colons
    name = ModelName.parse("localhost:5000/team/model.v2:Q4_K_M")
    assert name.folders == (f"localhost{colon}5000", "team", "model.v2", "Q4_K_M")
    assert ModelName.from_folders(*name.folders) == name


@pytest.mark.parametrize("text", ["nul", "con:latest", "team/aux:1b", "model:com1", "prn.7/model", "end.:latest"])
def test_names_that_windows_reserves_are_refused_there(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.library.names.can_name_file", lambda part: can_name_file(part, on_windows=True))
    with pytest.raises(LibraryError, match="Windows"):
        ModelName.parse(text)


@pytest.mark.parametrize("text", ["/models/a.gguf", "./a.gguf", "../a", "~/a.gguf", ".hidden"])
@pytest.mark.parametrize("on_windows", [False, True])
def test_texts_that_begin_like_paths_are_paths_on_every_system(text: str, on_windows: bool) -> None:
    assert looks_like_path(text, on_windows)


@pytest.mark.parametrize("text", ["C:/models/a.gguf", "d:/a", r"models\a.gguf", r"\\server\share\a.gguf"])
def test_drives_and_backslashes_make_paths_on_windows_alone(text: str) -> None:
    assert looks_like_path(text, on_windows=True)
    assert not looks_like_path(text, on_windows=False)


@pytest.mark.parametrize("text", ["qwen3", "qwen3:0.6b", "hf.co/user/repo:Q4_K_M", "localhost:5000/a/b:c", "ab:/c"])
@pytest.mark.parametrize("on_windows", [False, True])
def test_names_are_not_paths(text: str, on_windows: bool) -> None:
    assert not looks_like_path(text, on_windows)


def test_projectors_are_recognised_by_their_names() -> None:
    assert all(map(is_projector_name, ["mmproj-F16.gguf", "gemma-3-4b.MMPROJ-q8_0.gguf", "model-mmproj"]))
    assert not any(map(is_projector_name, ["gemma-3-4b-Q4_K_M.gguf", "projector.gguf", ""]))


def test_quantisations_rank_as_preferred_in_any_case_and_unknown_ones_last() -> None:
    ranks = [preference(quantization.lower()) for quantization in (*PREFERRED_QUANTIZATIONS, "Q2_K", "")]
    known = len(PREFERRED_QUANTIZATIONS)
    assert ranks == [*range(known), known, known]
    assert (preference("f16", ["BF16", "F16"]), preference("Q4_K_M", ["BF16", "F16"])) == (1, 2)

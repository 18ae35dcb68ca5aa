"""mistral.rs or OpenVINO GenAI on a GGUF file, run by an interpreter that has them, for benchmarks.compare_peers.

    peer_process.py mistral.rs|openvino MODEL.gguf THREADS

Reads lines `TEXT_WORDS TOKENS` from standard input. For each it answers a prompt of so many words greedily with so many
tokens, and prints a line of JSON: prompt and tokens (counts), prompt_s and tokens_s (seconds of each). Imports nothing
of this project, since the interpreter is another one.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

WORD = "river "
Generate = Callable[[str, int], dict[str, Any]]


def mistral_rs(model: str, threads: int) -> Generate:
    """mistral.rs; its usage counts seconds."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    from mistralrs import CompletionRequest, Runner, Which  # type: ignore[import-not-found,unused-ignore]

    folder, name = os.path.split(model)
    runner = Runner(which=Which.GGUF(quantized_model_id=folder, quantized_filename=name), prefix_cache_n=0)

    def generate(prompt: str, tokens: int) -> dict[str, Any]:
        request = CompletionRequest(model="default", prompt=prompt, max_tokens=tokens, temperature=0.0)
        usage = runner.send_completion_request(request).usage
        counts = {"prompt": usage.prompt_tokens, "tokens": usage.completion_tokens}
        return counts | {"prompt_s": usage.total_prompt_time_sec, "tokens_s": usage.total_completion_time_sec}

    return generate


def openvino(model: str, threads: int) -> Generate:
    """OpenVINO GenAI; its metrics are milliseconds to the first token and between tokens."""
    import openvino_genai  # type: ignore[import-not-found,unused-ignore]

    pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(prompt: str, tokens: int) -> dict[str, Any]:
        options = {"ignore_eos": True, "do_sample": False, "apply_chat_template": False}
        found = pipeline.generate([prompt], max_new_tokens=tokens, **options).perf_metrics
        counts = {"prompt": found.get_num_input_tokens(), "tokens": found.get_num_generated_tokens() - 1}
        seconds = {"prompt_s": found.get_ttft().mean / 1_000, "tokens_s": found.get_tpot().mean / 1_000}
        return counts | seconds | {"tokens_s": seconds["tokens_s"] * counts["tokens"]}

    return generate


def main() -> None:
    """Load the model and answer lines until standard input ends."""
    # Libraries write to standard output, too: only lines of this duplicate count.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, model, threads = sys.argv[1:]
    generate = {"mistral.rs": mistral_rs, "openvino": openvino}[name](model, int(threads))
    out.write(json.dumps({"ready": True}) + "\n")
    out.flush()
    for turn, line in enumerate(sys.stdin):
        words, tokens = map(int, line.split())
        # Another beginning each time, since OpenVINO keeps prefixes.
        out.write(json.dumps(generate(f"{turn} {WORD * words}", tokens)) + "\n")
        out.flush()


if __name__ == "__main__":
    main()

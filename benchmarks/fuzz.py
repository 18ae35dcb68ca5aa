"""Runs damaged and hostile model files on the native engine: each must compute or be refused with a reason.

    fuzz.py [MODEL.gguf ...] [--files 5000] [--seed 1] [--processes 2] [--first 0] [--keep FOLDER]

Small models of every architecture that the engine supports, and the given models, are mutated: values, tensor
descriptions and bytes of the header, numbers in the tensors, the length of the file, tensors and metadata that another
architecture would need. Each file is opened, planned, loaded and runs a few tokens, many files in each child process. A
child that dies is replaced, and its signal is attributed to the current file. Shows all outcomes; the exit status is 1
if a file ended a child, hung, or raised anything but an error that says what is wrong. Warnings count as errors.
"""

import argparse
import json
import os
import random
import resource
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.engine_tools import table
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.errors import LocalLLMError
from localllm.placement.loaded_model import load_model
from localllm.settings import Settings
from models.registry import ARCHITECTURES
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, write

ROOT = Path(__file__).resolve().parents[1]
# A file may need kernels that are not compiled yet; a child that is silent for this long hangs.
PATIENCE_S = 300.0
ADDRESS_SPACE = 16 << 30
PROMPT_TOKENS, ANSWER_TOKENS = 20, 4
COMPUTED, REFUSED = "computed", "refused"
# Integers and floats at the limits of what readers and kernels handle.
INTEGERS = [0, 1, 2, 3, 7, 8, 16, 31, 32, 33, 63, 64, 65, 128, 255, 256, 320, 2**15, 2**16, 2**20]
INTEGERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 1e30, 3.4e38, float("inf"), -float("inf"), float("nan")]
_SMALL = {"embedding": 256, "feed_forward": 256, "vocabulary": 320}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a file. kind: COMPUTED, REFUSED, or what went wrong."""

    index: int
    base: str
    mutation: str
    kind: str
    detail: str = ""

    @property
    def faulty(self) -> bool:
        """Whether the file revealed a defect."""
        return self.kind not in (COMPUTED, REFUSED)


@dataclass(frozen=True, slots=True)
class Base:
    """A valid file to mutate. spots: (offset, bytes, whether a float) of the values in its header.

    infos: the same for the tensors' dimensions, types and offsets. data: offset of the tensor data.
    """

    name: str
    content: bytes
    spots: tuple[tuple[int, int, bool], ...]
    infos: tuple[tuple[int, int, bool], ...]
    data: int

    @classmethod
    def read(cls, name: str, path: Path) -> "Base":
        """Read a file and find the values that can be changed in it."""
        reader = gguf.GGUFReader(path)
        spots, infos = [], []
        for field in reader.fields.values():
            if not field.name.startswith("GGUF."):
                chosen = set(field.data if len(field.data) < 100 else field.data[:10])
                for number, (at, part) in enumerate(_parts(field)):
                    if number in chosen and part.nbytes <= 8:
                        spots.append((at, part.nbytes, part.dtype.kind == "f"))
        for tensor in reader.tensors:
            (_, _), _, _, (dims, part), (kind, _), (offset, _) = _parts(tensor.field)
            infos += [(dims + 8 * axis, 8, False) for axis in range(part.nbytes // 8)]
            infos += [(kind, 4, False), (offset, 8, False)]
        return cls(name, path.read_bytes(), tuple(spots), tuple(infos), int(reader.data_offset))


def _parts(field: Any) -> Iterator[tuple[int, Any]]:
    """The parts of a reader's field with their offsets in the file."""
    at = field.offset
    for part in field.parts:
        yield at, part
        at += part.nbytes


class Fuzzer:
    """Makes mutated files, the same for the same seed and index. folder: where to write them."""

    def __init__(self, folder: Path, models: Sequence[Path], seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._bases: dict[str, Base] = {}
        self.sources: dict[str, Synthetic | Path] = {}
        for name, model in MODELS.items():
            large = model.embedding > _SMALL["embedding"] or model.layers > 8
            self.sources[name] = model if large else replace(model, layers=min(model.layers, 4))
        self.sources |= {path.stem: path for path in models}

    def make(self, index: int) -> tuple[Path, str, str]:
        """Write file `index`. Returns its path, the model it comes from and how it was mutated."""
        rng = random.Random(f"{self._seed}.{index}")
        names = list(self.sources)
        name = names[index % len(names)]
        source = self.sources[name]
        if isinstance(source, Synthetic) and rng.random() < 0.15:
            path = self._folder / "structure.gguf"
            # The writer rejects some combinations: sizes that no tensor of the model has.
            with suppress(KeyError, ValueError, TypeError), np.errstate(all="ignore"):
                write(_restructured(source, rng), path, tokens=_vocabulary(source))
                return path, name, "structure"
        base = self._base(name)
        kind, content = _mutated(base, rng)
        path = self._folder / "mutated.gguf"
        path.write_bytes(content)
        return path, name, kind

    def _base(self, name: str) -> Base:
        if name not in self._bases:
            source = self.sources[name]
            if isinstance(source, Synthetic):
                path = write(source, self._folder / "base.gguf", tokens=_vocabulary(source))
                self._bases[name] = Base.read(name, path)
                path.unlink()
            else:
                self._bases[name] = Base.read(name, source)
        return self._bases[name]


def _vocabulary(model: Synthetic) -> list[str]:
    return [f"t{index}" for index in range(model.vocabulary)]


def _restructured(model: Synthetic, rng: random.Random) -> Synthetic:
    """The model with tensors and metadata of another architecture, or of none."""
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        if kind == 0:
            model = replace(model, architecture=rng.choice([*ARCHITECTURES]))
        elif kind == 1:
            flag = rng.choice([field.name for field in fields(model) if isinstance(getattr(model, field.name), bool)])
            flipped: dict[str, Any] = {flag: not getattr(model, flag)}
            model = replace(model, **flipped)
        elif kind == 2 and model.extra:
            gone = rng.choice([*model.extra])
            model = replace(model, extra={key: value for key, value in model.extra.items() if key != gone})
        elif kind == 3:
            other = rng.choice([*MODELS.values()])
            model = replace(model, extra={**model.extra, **other.extra})
        elif kind == 4:
            other = rng.choice([*MODELS.values()])
            model = replace(model, added={**model.added, **other.added})
        else:
            names = ["attn_q.weight", "attn_k.weight", "attn_norm.weight", "ffn_norm.weight", "attn_q_norm.weight"]
            names += ["attn_k_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight", "attn_q.bias"]
            model = replace(model, dropped=(*model.dropped, rng.choice([*names, *model.added])))
    return model


def _mutated(base: Base, rng: random.Random) -> tuple[str, bytes]:
    """How a file was mutated, and its bytes."""
    content = bytearray(base.content)
    kind = rng.choice(["values", "values", "tensors", "tensors", "bytes", "data", "data", "length"])
    if kind == "length":
        end = rng.choice([rng.randrange(len(content)), rng.randrange(base.data), len(content) - rng.randrange(1, 64)])
        return kind, bytes(content[:end])
    for _ in range(rng.randint(1, 3)):
        if kind in ("values", "tensors"):
            at, size, is_float = rng.choice(base.spots if kind == "values" else base.infos)
            content[at : at + size] = _other(bytes(content[at : at + size]), is_float, rng)
        elif kind == "bytes":
            at = rng.randrange(4, base.data)
            change = rng.choice([rng.randbytes(1), rng.randbytes(4), bytes(8), b"\xff" * 8])
            content[at : at + len(change)] = change
        else:
            at = rng.randrange(base.data, len(content) - 256) & ~3
            edges = [rng.choice(FLOATS) for _ in range(64)]
            finite = [rng.gauss(0, 10 ** rng.randrange(-3, 9)) for _ in range(64)]
            numbers = struct.pack("<64f", *rng.choice([edges, finite, finite]))
            content[at : at + 256] = rng.choice([numbers, numbers, rng.randbytes(256), b"\x7b" * 256])
    return kind, bytes(content)


def _other(value: bytes, is_float: bool, rng: random.Random) -> bytes:
    """Another value of the same size: one at a limit, or a neighbour."""
    size = len(value)
    if is_float:
        return struct.pack("<f" if size == 4 else "<d", rng.choice(FLOATS))
    number = int.from_bytes(value, "little")
    near = [number + 1, number - 1, number * 2, number // 2, number ^ 1 << rng.randrange(8 * size)]
    number = rng.choice([*near, rng.choice(INTEGERS), rng.randrange(64)])
    return (number % (1 << 8 * size)).to_bytes(size, "little")


def try_file(path: Path) -> tuple[str, str]:
    """Open, plan, load and run a file. Returns an Outcome's kind and detail."""
    settings = Settings(backend="native", kv_mib=8, threads=2, disk_cache=False, ctx=256)
    try:
        with load_model(path, settings) as model:
            tokens = tuple(index % model.engine.runner.info.vocab_size for index in range(PROMPT_TOKENS))
            request = GenerationRequest(tokens, sampling=SamplingParams(seed=1), max_tokens=ANSWER_TOKENS)
            last = model.engine.submit(request).collect().last
            model.engine.check_integrity()
    except LocalLLMError as error:
        return REFUSED, str(error)
    except Exception as error:  # any other exception is a defect
        return "foreign exception", f"{type(error).__name__}: {error}"
    if last.finish_reason is FinishReason.ERROR:
        kind = REFUSED if isinstance(last.cause, LocalLLMError) else "foreign exception"
        return kind, f"{type(last.cause).__name__}: {last.error}"
    return COMPUTED, ""


def work(options: argparse.Namespace, folder: Path) -> None:
    """A child's work: write which file is next, and its outcome, one line each."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    fuzzer = Fuzzer(folder, options.models, options.seed)
    for index in range(options.first, options.first + options.files, options.step):
        path, base, mutation = fuzzer.make(index)
        _say(json.dumps([index, base, mutation]))
        _say(json.dumps(try_file(path)))


def outcomes(options: argparse.Namespace, lane: int) -> Iterator[Outcome]:
    """Outcomes of every `processes`th file from the `lane`th on, in one child after another."""
    first, last = options.first + lane, options.first + options.files
    while first < last:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            command = [
                sys.executable,
                "-W",
                "error",
                "-m",
                "benchmarks.fuzz",
                *map(str, options.models),
                "--work",
                folder,
            ]
            command += ["--seed", str(options.seed), "--first", str(first), "--files", str(last - first)]
            child = subprocess.Popen(
                [*command, "--step", str(options.processes)], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            with child:
                for outcome in outcomes_of(child):
                    if outcome.faulty and options.keep:
                        _keep(Path(folder), outcome, options.keep)
                    yield outcome
                    first = outcome.index + options.processes


def outcomes_of(child: "subprocess.Popen[str]") -> Iterator[Outcome]:
    """A child's outcomes; the last one is its death if it did not end normally."""
    assert child.stdout
    at: tuple[int, str, str] | None = None
    while True:
        hangs = not select.select([child.stdout], [], [], PATIENCE_S)[0]
        if hangs:
            child.kill()
        line = child.stdout.readline()
        if not line or hangs:
            status = child.wait()
            if at:
                yield Outcome(*at, "hung" if hangs else f"status {status}")
            elif status:
                raise RuntimeError("a child ended between two files; its last words are above")
            return
        found = json.loads(line)
        if at:
            yield Outcome(*at, *found)
        at = None if at else tuple(found)


def _keep(folder: Path, outcome: Outcome, target: Path) -> None:
    """Move the file of an outcome to the folder of kept files."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.gguf"):
        os.replace(path, target / f"{outcome.index}-{path.name}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", type=Path, help="models with other types of weights, say")
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder for the files that met a defect")
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options, options.work)
        return
    began = time.monotonic()
    with ThreadPoolExecutor(options.processes) as lanes:
        shown = lanes.map(lambda lane: list(_shown(options, lane)), range(options.processes))
        found = [each for lane in shown for each in lane]
    counts = Counter((each.mutation, each.kind) for each in found)
    kinds = sorted({kind for _, kind in counts})
    rows = [[mutation, *(str(counts[mutation, kind]) for kind in kinds)] for mutation in sorted({m for m, _ in counts})]
    table(["mutation", *kinds], rows)
    architectures = len({each.base for each in found})
    faults = sum(each.faulty for each in found)
    _say(f"{len(found):,} files of {architectures} models, {faults} defects, {time.monotonic() - began:.0f} s")
    sys.exit(1 if faults else 0)


def _shown(options: argparse.Namespace, lane: int) -> Iterator[Outcome]:
    """A lane's outcomes; defects are shown at once."""
    for outcome in outcomes(options, lane):
        if outcome.faulty:
            _say(str(outcome))
        yield outcome


if __name__ == "__main__":
    main()

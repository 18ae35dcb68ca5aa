"""Plans llama.cpp's share: how much of a model goes to which GPU, before anything is loaded."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gguf_io.model_file import ModelFile
from gpu_offload.devices import Device
from gpu_offload.dry_run import MAIN, dry_run
from gpu_offload.errors import DeviceRequestError
from gpu_offload.estimate import Estimate
from gpu_offload.loading import output_rows
from gpu_offload.memory import FileSizes
from gpu_offload.options import COPIES_SHARE, LlamaOptions, Use
from localllm.placement.placement import Placement

DEFAULT_RESERVE = 2**30  # bytes of each GPU for the desktop, the driver's context and other programs
_CONTEXTS = (32768, 16384, 8192, 4096)
_CHAT = 8192  # tokens of context; KV in q8_0 is chosen only where f16 would give fewer
_DRY_RUNS = 6  # at most, 10 to 100 ms each; one or two are usual


@dataclass(frozen=True, slots=True)
class LlamaRequest:
    """What the caller requests. None leaves the choice to the planner."""

    reason: str = ""  # why llama.cpp computes the model
    context_tokens: int | None = None  # cells for all sequences together
    spare: bool = False  # plan twice as many cells if they fit, for other cached prefixes
    kv_types: tuple[str | None, str | None] = (None, None)  # ggml types; if only one is given, the other is f16
    gpu_layers: int | None = None  # as in LlamaOptions
    n_cpu_moe: int | None = None  # LlamaOptions.cpu_expert_layers
    about_gpus: tuple[str, ...] = ()  # names of settings that need a GPU
    reserve_bytes: int = DEFAULT_RESERVE  # left free on every GPU
    draft: Placement | None = None  # of a draft model: its bytes are taken in each place
    projector_bytes: int = 0  # of an image projector, which goes to the main GPU, if there is one
    copies: bool = True  # whether cached prefixes may move to copies in main memory
    dry_run: bool = False  # use the sizes that llama.cpp reports, if any; only for devices of this machine
    base: LlamaOptions = field(default_factory=LlamaOptions)  # everything else


def plan(model: ModelFile, gpus: Sequence[Device], main_memory: int, request: LlamaRequest | None = None) -> Placement:
    """Choose the context, the KV type and the layers for each GPU.

    main_memory: free bytes of main memory. The longest context (up to 32768 tokens) with which the whole model fits on
    the GPUs wins; KV in q8_0 is chosen only if f16 would allow less than 8192. If the whole model never fits, the plan
    is for 4096 tokens and as many layers as fit; a mixture of experts moves its experts to main memory first. Without
    GPUs everything goes to main memory. An explicit request that does not fit is planned anyway; its `fits` is then
    False. Raises ValueError for a KV type that the model's heads do not fit, ModelFileError for incomplete metadata,
    DeviceRequestError for requests about missing GPUs.
    """
    request = request or LlamaRequest()
    _check_devices(request, gpus)
    planner = _Planner(FileSizes(model), gpus, main_memory, request)
    made = planner.plan()
    return planner.corrected(made) if request.dry_run else made


def _check_devices(request: LlamaRequest, gpus: Sequence[Device]) -> None:
    if not gpus and (request.gpu_layers or request.about_gpus):
        layers = f"gpu_layers is {request.gpu_layers}, but " if request.gpu_layers else ""
        others = f"{', '.join(request.about_gpus)} set, but " if request.about_gpus and not layers else ""
        raise DeviceRequestError(
            f"{layers}{others}llama.cpp sees no GPU. "
            "Leave it out, or install llama.cpp for the GPU: `localllm doctor` prints the command."
        )
    if gpus and not 0 <= request.base.main_gpu < len(gpus):
        names = ", ".join(f"{number}: {gpu.label}" for number, gpu in enumerate(gpus))
        raise DeviceRequestError(f"main_gpu is {request.base.main_gpu}; there are {names}.")


class _Planner:
    """One planning run. Units are the repeating layers and, last, the output layer; counts are units per GPU."""

    def __init__(self, sizes: FileSizes, gpus: Sequence[Device], main_memory: int, request: LlamaRequest) -> None:
        self.sizes = sizes
        self.request = request
        self.gpus = list(gpus)
        self.memory = main_memory
        self.units = sizes.layer_count + 1
        self.mixes = any(layer.experts for layer in sizes.layers)
        self.by_room = sorted(range(len(self.gpus)), key=lambda index: -self.gpus[index].free_bytes)
        self.main = self.by_room[0] if gpus and request.base.split_mode == "layer" else request.base.main_gpu
        self.other = self._other()  # per place
        self.errors = [0] * (len(self.gpus) + 1)  # bytes by which estimates are too small, per place

    def plan(self) -> Placement:
        """Decide by estimates and their known errors."""
        candidates = list(self._candidates())
        chooses = bool(self.gpus) and self.request.gpu_layers is None
        units = self.units if chooses else min(self.request.gpu_layers or 0, self.units) if self.gpus else 0
        for options in candidates:
            uses = self._uses(options, units)
            if all(use.fits for use in uses):
                break
        else:
            if chooses:
                return self._partly(candidates[-1])
        return self._result(options, units, uses)

    def corrected(self, made: Placement) -> Placement:
        """Have llama.cpp report the sizes of a plan, correct the estimates, and plan again until the plan is stable.

        Returns the last plan that fits by llama.cpp's sizes, or the first one; the estimate if there are no sizes.
        """
        best = None
        for _ in range(_DRY_RUNS):
            sizes = dry_run(self.sizes.model, made.options)
            found = [sizes.get(name, Use()) for name in (MAIN, *(gpu.name for gpu in self.gpus))]
            if any(guess.weights and not one.weights for one, guess in zip(found, made.uses, strict=True)):
                break  # no sizes, or those of other devices
            units = made.options.gpu_layers or 0
            uses = [self._use(place, one, units) for place, one in enumerate(found)]
            for place, (exact, guess) in enumerate(zip(uses, made.uses, strict=True)):
                self.errors[place] += exact.needed - guess.needed
            notes = tuple(self._notes(made.options, units, uses, measured=True))
            measured = replace(made, uses=tuple(uses), notes=notes, measured=True)
            best = measured if measured.fits or best is None else best
            made = self.plan()
            if made.options == measured.options:
                break
        return best or made

    def _candidates(self) -> Iterator[LlamaOptions]:
        """Contexts and KV types in order of preference."""
        asked, longest = self.request, self.sizes.trained_context
        contexts = [context for context in _CONTEXTS if context <= longest] or [longest]
        if asked.context_tokens:
            contexts = [2 * asked.context_tokens, asked.context_tokens] if asked.spare else [asked.context_tokens]
        types = asked.kv_types[0] or "f16", asked.kv_types[1] or "f16"
        choices = [(context, types) for context in contexts]
        heads = {length for cache in self.sizes.caches for length in (cache.key_length, cache.value_length)}
        if not any(asked.kv_types) and all(n % 32 == 0 for n in heads):
            long = sum(context >= _CHAT for context in contexts) or 1
            choices[long:long] = [(context, ("q8_0", "q8_0")) for context in contexts]
        experts = min(asked.n_cpu_moe or 0, self.sizes.layer_count if self.mixes else 0)
        for context, (type_k, type_v) in choices:
            yield replace(asked.base, context_tokens=context, type_k=type_k, type_v=type_v, cpu_expert_layers=experts)

    def _partly(self, options: LlamaOptions) -> Placement:
        """Move experts, then layers, off the GPUs until the rest fits; KV in q8_0 would save too little to matter."""
        if not any(self.request.kv_types):
            options = replace(options, type_k="f16", type_v="f16")
        if self.request.n_cpu_moe is None and self.mixes:
            for kept in range(1, self.sizes.layer_count + 1):
                options = replace(options, cpu_expert_layers=kept)
                uses = self._uses(options, self.units)
                if all(use.fits for use in uses[1:]):
                    return self._result(options, self.units, uses)
        for units in range(self.units - 1, -1, -1):
            uses = self._uses(options, units)
            if all(use.fits for use in uses[1:]):
                break
        return self._result(options, units, uses)

    def _uses(self, options: LlamaOptions, units: int) -> list[Use]:
        """Estimated use of every place with the last `units` units on GPUs."""
        counts = self._counts(options, units)
        estimate = Estimate(self.sizes, options, counts)
        sizes, start = [estimate.in_main_memory()], estimate.first
        for count, share in zip(counts, self._shares(), strict=True):
            by_rows = options.split_mode == "row"
            sizes.append(estimate.on_gpu_by_rows(share) if by_rows else estimate.on_gpu(start, start + count))
            start += count
        return [
            self._use(place, replace(one, compute=one.compute + self.errors[place]) if one.needed else one, units)
            for place, one in enumerate(sizes)
        ]

    def _use(self, place: int, sizes: Use, units: int) -> Use:
        """Use of main memory (place 0) or a GPU, of which model and context take `sizes`."""
        other = self.other[place]
        if place:
            gpu, reserve = self.gpus[place - 1], self.request.reserve_bytes
            return replace(sizes, place=gpu.label, other=other, reserve=reserve, available=gpu.free_bytes)
        results = output_rows(self.request.base) * self.sizes.vocabulary * 4
        if self.request.copies and not units and not any(cache.state_bytes for cache in self.sizes.caches):
            other += sizes.kv // COPIES_SHARE
        compute = sizes.compute + results
        return replace(sizes, place="main memory", compute=compute, other=other, available=self.memory)

    def _counts(self, options: LlamaOptions, units: int) -> tuple[int, ...]:
        """Use the fewest GPUs that hold the units, those with most memory first; what does not fit goes to the last."""
        if options.split_mode != "layer" or len(self.gpus) <= 1:
            return tuple(units if index == self.main else 0 for index in range(len(self.gpus)))
        for many in range(1, len(self.gpus) + 1):
            counts, start = [0] * len(self.gpus), self.units - units
            for index in sorted(self.by_room[:many]):  # one after another, in llama.cpp's order
                counts[index] = self._fitting(options, units, start, index)
                start += counts[index]
            if start == self.units:
                return tuple(counts)
        counts[-1] += self.units - start
        return tuple(counts)

    def _fitting(self, options: LlamaOptions, units: int, start: int, index: int) -> int:
        """How many of the units from `start` on fit on a GPU."""
        room = self.gpus[index].free_bytes - self.request.reserve_bytes - self.errors[index + 1]
        room -= self.other[index + 1]
        # Assume two GPUs, for the size of the compute buffer; a model on one GPU needs no more.
        estimate = Estimate(self.sizes, options, (max(units - 1, 0), min(units, 1)))
        fitting = (stop - start for stop in range(self.units, start, -1) if estimate.on_gpu(start, stop).needed <= room)
        return next(fitting, 0)

    def _shares(self) -> list[float]:
        """The share of every matrix on each GPU if matrices are split by rows."""
        free = [max(gpu.free_bytes - self.request.reserve_bytes, 0) for gpu in self.gpus]
        return [size / (sum(free) or 1) for size in free]

    def _other(self) -> list[int]:
        """Bytes of the draft model, the projector and the adapters, in main memory and on each GPU."""
        found = [0] * (len(self.gpus) + 1)
        for place, use in enumerate(self.request.draft.uses if self.request.draft else ()):
            found[place] = use.needed
        beside = self.request.projector_bytes + sum(path.stat().st_size for path in self.request.base.lora)
        found[self.main + 1 if self.gpus else 0] += beside
        return found

    def _result(self, options: LlamaOptions, units: int, uses: list[Use]) -> Placement:
        counts = self._counts(options, units)
        split: tuple[float, ...] = ()
        if options.split_mode == "row" and len(self.gpus) > 1 and units:
            split = tuple(self._shares())
        elif sum(1 for count in counts if count) > 1:
            split = tuple(map(float, counts))
        else:  # otherwise llama.cpp would open the other GPUs too, which takes some hundred MiB on each
            options = replace(options, split_mode="none")
        options = replace(options, gpu_layers=units, tensor_split=split, main_gpu=self.main)
        notes = tuple(self._notes(options, units, uses, measured=False))
        return Placement(
            "llama",
            self.request.reason,
            tuple(uses),
            options,
            layers=self.units,
            notes=notes,
            tokens=options.context_tokens,
            draft=self.request.draft,
        )

    def _notes(self, options: LlamaOptions, units: int, uses: list[Use], *, measured: bool) -> Iterator[str]:
        if units:
            names = ", ".join(use.place for use in uses[1:] if use.weights)
            yield f"{units} of {self.units} layers (the output is one) on {names}"
        else:
            why = "none fits on a GPU" if self.request.gpu_layers is None else "gpu_layers is 0"
            yield f"all layers in main memory: {why if self.gpus else 'there is no GPU'}"
        tokens = f"{options.context_tokens} tokens of context"
        if self.request.spare and options.context_tokens != self.request.context_tokens:
            tokens = f"{self.request.context_tokens} tokens of context, and as many for other prefixes,"
        yield f"{tokens} with {options.type_k} keys and {options.type_v} values"
        if options.cpu_expert_layers:
            yield f"the experts of the first {options.cpu_expert_layers} layers stay in main memory"
        elif self.request.n_cpu_moe:
            yield "n_cpu_moe changes nothing: the model has no experts"
        yield "sizes reported by llama.cpp" if measured else "sizes estimated from the file's header"
        for use in uses:
            if not use.fits:
                missing = math.ceil((use.needed + use.reserve - use.available) / 2**20)
                yield f"{use.place} lacks {missing:,} MiB: choose a shorter context or a smaller model"
